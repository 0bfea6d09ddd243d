"""Flags of the commands that run a model over data: where the data are, and how they feed it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import onnx_ir as ir

from onnxgrad.cli import panels
from onnxgrad.cli.console import entry, print_lines
from onnxgrad.settings import settings_of
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.recipe import PreparationRecipe

DataPath = Annotated[
    Path,
    panels.data(help=f"Data, arrays by name: {panels.FORMATS}; to predict, also pictures without classes, or one."),
]
BatchSize = Annotated[int, panels.run(min=1, help="Rows that run at once.")]
Threads = Annotated[int | None, panels.run(help="Default: one per physical core.")]


def print_preprocessing(model: ir.Model, given: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing that `model` was trained with; a line on standard error names the parts that are used.

    Args:
        model: as it was loaded.
        given: the settings of the command; those of the preparation take the place of parts.
    """
    asked = PreparationRecipe(**{name: given[name] for name in settings_of(PreparationRecipe) if name in given})
    trained = Preprocessing.of(model)
    used = replace(trained, inputs={n: f for n, f in trained.inputs.items() if n not in (asked.inputs or {})})
    used = replace(used, images=None) if asked.image_mean and asked.image_std else used
    used = replace(used, tokenizer="") if asked.tokenizer is not None else used
    if used:
        print_lines(entry("as trained", used), stream=sys.stderr)
    return trained
