"""Steps that commands which train have in common: from flags to a training model and data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import onnx_ir as ir

from onnxgrad.cli import panels
from onnxgrad.cli.path_clashes import MODEL
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.model_io import files_of, load_model, training_info
from onnxgrad.settings import changed_settings, settings_of
from onnxgrad.training.build.heads import placed_head
from onnxgrad.training.build.recipe import option_spelling
from onnxgrad.training.data import open_data
from onnxgrad.training.data.columns import Columns
from onnxgrad.training.data.items import is_stream
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.sources import column_kinds
from onnxgrad.training.language.documents import open_documents
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
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


def paths_read(model: Path, source: ir.Model, data: Path | None, recipe: Recipe) -> dict[str, Any]:
    """The files that a command reads, by their flags: `model`, opened as `source`, and what `recipe` names."""
    return {
        MODEL: files_of(source, model),
        "--data": data,
        "--validation": recipe.data.validation,
        "--tokenizer": recipe.data.tokenizer,
        "--loss": files(recipe.loss.loss or ()),
    }


def headed(source: ir.Model, text: str) -> tuple[ir.Model, str]:
    """`source` with the head that `text` asks for, as ``10`` or ``10:pooled``, and in words where it went."""
    count, _, of = text.partition(":")
    try:
        outputs = int(count)
    except ValueError as error:
        raise BadInput(f"--head takes a number of outputs, and perhaps :VALUE, not {text!r}") from error
    return placed_head(source, outputs, of=of or None)


def opened(data: Path, recipe: Recipe, model: ir.Model) -> tuple[Columns | Path, Recipe]:
    """The columns of `data`, or the path of a stream, and the recipe with those of the validation data.

    Raises:
        BadInput: a file cannot be read.
        UnknownName: `data` have no such labels.
    """
    trained, labels = Preprocessing.of(model), recipe.loss.labels
    images, inputs = recipe.data.pictures(trained), recipe.data.inputs or {}
    if recipe.task.name:
        read = partial(open_documents, split=recipe.task.documents, inputs=inputs)
        if recipe.data.validation is not None:
            recipe = replace(recipe, data=replace(recipe.data, validation=read(recipe.data.validation)))
    if recipe.data.is_streamed or is_stream(data):
        return data, recipe
    if recipe.task.name:
        return read(data), recipe
    if recipe.data.tables is not None:  # which the training rows decide
        inputs = {}
    known = {} if trained.written else trained.inputs  # else columns are joined behind the tables of the file
    columns = open_data(data, images, inputs, known, kinds=trained.kinds)
    columns.source = str(data)
    if recipe.data.validation is not None:  # by the names of the columns that are trained on, here in any order
        same = {n: c.features for n, c in columns.items() if c.features is not None}
        kinds = column_kinds(columns) | trained.kinds
        held_out = open_data(recipe.data.validation, images, inputs, {**known, **same}, kinds=kinds)
        held_out.source = str(recipe.data.validation)
        recipe = replace(recipe, data=replace(recipe.data, validation=held_out))
    if labels is not None and labels not in columns and labels not in (recipe.data.inputs or {}):
        if any(c in labels for c in (",", "..", "*")):
            raise BadInput(f"--labels is one array, not {labels}\n  hint: --inputs labels={labels} joins columns")
        raise UnknownName(labels, columns, f"array in {data}")
    return columns, recipe


def other_spelling(name: str) -> str:
    """The command's spelling of the Python argument `name`; empty if both are the same."""
    instead = settings_of(*TRAINER, *FIT).get(name)
    if instead is not None and instead.instead:
        return instead.instead
    settings = {**{n: rule.settings for n, rule in OPTIMIZERS.items()}, **SECOND_ORDER}
    owner = next((n for n in ("adam", *settings) if name in settings[n]), None)
    if owner is None:
        return option_spelling(name, settings_of(*TRAINER, *FIT), command=True)
    return f"settings of an optimizer are written behind its name: --optimizer {owner}:{name}=…"


def check_algorithm(source: ir.Model, path: Path, recipe: Recipe) -> None:
    """Raise BadInput unless exactly one of the `recipe` and the file at `path` has the algorithm."""
    if training_info(source):
        asked = changed_settings(recipe.loss, recipe.optimizer, recipe.weights, recipe.adapter)
        if asked:
            given = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
            raise BadInput(f"{path} carries training information, which is used as it is; drop {given}")
    elif not recipe.loss.loss and not recipe.task.name:
        raise BadInput(f"{path} carries no training information; say which loss to use with --loss")
