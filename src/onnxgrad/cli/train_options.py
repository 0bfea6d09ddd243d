"""Steps that commands which train have in common: from flags to a training model and data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import onnx
import onnx_ir as ir

from onnxgrad.cli import panels
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.model_io import files_of, load_model, training_info
from onnxgrad.settings import changed_settings, settings_of
from onnxgrad.training.build.attach import attached
from onnxgrad.training.build.heads import placed_head
from onnxgrad.training.data import Images, open_data
from onnxgrad.training.data.columns import Column, Columns, Features
from onnxgrad.training.loop.recipe import FIT, TRAINER, DataRecipe, Recipe
from onnxgrad.training.loss.config import Loss
from onnxgrad.training.optim.optimizers import OPTIMIZERS, SECOND_ORDER

Head = Annotated[
    str | None,
    panels.model(
        "--head",
        help="Put a new linear head on the model: 10 (its outputs), in the place of the last linear layer, or "
        "10:pooled (on the value pooled).",
    ),
]


def files(losses: Iterable[str]) -> list[Path]:
    """The files that losses spelled like this read: losses that are graphs, and teachers."""
    terms = [Loss.of(text) for text in losses]
    named = [p for t in terms for p in (t.loss if t.loss.endswith(".onnx") else None, t.teacher) if p]
    return [file for p in named for file in files_of(load_model(p), Path(p))]


def headed(source: ir.Model, text: str) -> tuple[ir.Model, str]:
    """`source` with the head that `text` asks for, as ``10`` or ``10:pooled``, and in words where it went."""
    count, _, of = text.partition(":")
    try:
        outputs = int(count)
    except ValueError as error:
        raise BadInput(f"--head takes a number of outputs, and perhaps :VALUE, not {text!r}") from error
    return placed_head(source, outputs, of=of or None)


def opened(
    data: Path, recipe: DataRecipe, images: Images | None, labels: str | None, trained: Mapping[str, Features]
) -> tuple[dict[str, Column], tuple[dict[str, Column], str] | None]:
    """The arrays of `data`, which hold `labels`, and those of the validation data with their name in messages.

    `trained`: the columns that fed the inputs when the model was trained before.

    Raises:
        BadInput: a file cannot be read.
        UnknownName: `data` have no such labels.
    """
    inputs = recipe.inputs or {}
    arrays = Columns(open_data(data, images, inputs, trained), str(data))
    held_out = None
    if recipe.validation is not None:  # the same columns as in training, by name
        same = {n: c.features for n, c in arrays.items() if c.features is not None}
        found = open_data(recipe.validation, images, inputs, {**trained, **same})
        held_out = Columns(found, str(recipe.validation)), str(recipe.validation)
    if labels is not None and labels not in arrays:
        raise UnknownName(labels, arrays, f"array in {data}")
    return arrays, held_out


def other_spelling(name: str) -> str:
    """The command's spelling of the Python argument `name`; empty if both are the same."""
    instead = settings_of(*TRAINER, *FIT).get(name)
    if instead is not None and instead.instead:
        return instead.instead
    settings = {**{n: rule.settings for n, rule in OPTIMIZERS.items()}, **SECOND_ORDER}
    owner = next((n for n, known in settings.items() if name in known), None)
    if owner is None:
        return ""
    return f"settings of an optimizer are written behind its name: --optimizer {owner}:{name}=…"


def with_training(
    source: ir.Model, path: Path, recipe: Recipe, parts: int, schedule: str | None = None
) -> onnx.ModelProto | ir.Model:
    """`source` as it is if it carries training information, else with that of the `recipe` attached.

    Args:
        source: the model.
        path: its file.
        recipe: the settings of the command.
        parts: into how many a batch is cut.
        schedule: to be a part of the graph.
    """
    algorithm = recipe.algorithm()
    if training_info(source):
        asked = changed_settings(recipe.loss, recipe.optimizer, recipe.weights, recipe.adapter)
        if asked:
            given = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
            raise BadInput(f"{path} carries training information, which is used as it is; drop {given}")
        return source
    if "loss" not in algorithm:
        raise BadInput(f"{path} carries no training information; say which loss to use with --loss")
    return attached(source, accumulate=parts > 1, schedule=schedule, **algorithm).model
