"""A model trained on data in one call."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.match import holds_floats
from onnxgrad.model_io.read import as_given
from onnxgrad.settings import takes
from onnxgrad.training.data import open_data
from onnxgrad.training.data.by_position import with_labels
from onnxgrad.training.data.class_weights import balanced_weights, labels_in
from onnxgrad.training.data.columns import Column, Columns, single_array
from onnxgrad.training.data.dropped_rows import DroppedRows
from onnxgrad.training.data.items import example_rows, is_stream
from onnxgrad.training.data.labels import class_column
from onnxgrad.training.data.split import divided
from onnxgrad.training.data.wide import complete_rows
from onnxgrad.training.detection.recipe import DetectionRecipe
from onnxgrad.training.detection.task import open_task
from onnxgrad.training.graph.class_labels import class_names
from onnxgrad.training.language.recipe import DETECTION, TaskRecipe
from onnxgrad.training.loop.listeners import shows_progress
from onnxgrad.training.loop.own_losses import has_own, with_examples
from onnxgrad.training.loop.recipe import FIT, TRAINER, Recipe
from onnxgrad.training.loop.sparse_update import sparse_update
from onnxgrad.training.loop.trained import AnyData
from onnxgrad.training.loop.trainer import Trainer
from onnxgrad.training.loop.unpaired import WarnUnpaired
from onnxgrad.training.loss.class_axis import with_class_axis
from onnxgrad.training.loss.config import Loss, as_list

if TYPE_CHECKING:
    from onnxgrad.training.loop.keywords import TrainKeywords


@takes(*TRAINER, *FIT, others=True)
def train(
    model: Any,
    data: AnyData,
    y: Any = None,
    *,
    recipe: Recipe | None = None,
    output: str | os.PathLike | None = None,
    **settings: Unpack[TrainKeywords],
) -> Trainer:
    """Train `model` on `data`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` (see `Trainer`).
        data: arrays by name, rows that are dicts, or a path; or arrays by position (see `Trainer.fit`).
        y: labels for arrays by position.
        recipe: all settings as one value, in place of the keywords.
        output: where to save the trained model, a plain ``.onnx`` file. Default: nowhere; `Trainer.save` does it later.
        settings:

    Further settings of `attach`, such as ``betas``, are arguments as well.

    Returns:
        The trainer, at the end of its run: ``.history``, ``.predict(…)``, ``.evaluate(…)``, ``.save(…)``.

    Raises:
        BadInput: as `Trainer` and `Trainer.fit`; or an argument that neither of them has.
    """
    data = with_labels(data, y)
    recipe = Recipe.of("train", settings, (*TRAINER, *FIT), ["model", "data", "y", "output"], recipe)
    notes: list[str] = []
    if recipe.task.name == DETECTION:
        model, data, recipe, notes = with_detector(model, data, recipe)
    trainer = trainer_for(model, data, recipe)
    if trainer.strategy.ranks.is_first and shows_progress(recipe.log):
        for note in notes:
            print(note, file=sys.stderr)
    trainer.fit(data, recipe=recipe)
    if output is not None:
        trainer.save(output)
    return trainer


def with_detector(model: Any, data: Any, recipe: Recipe) -> tuple[ir.Model, Columns, Recipe, list[str]]:
    """The detector that the task learns, its columns, the recipe with its loss in place of the task, and notes.

    Args:
        model: a detector.
        data: pictures with boxes: a path, or opened data.
        recipe: of the task detection.

    Raises:
        BadInput: as `open_task`, or a loss is given.
    """
    if recipe.loss.loss is not None:
        raise BadInput("the task detection chooses the loss by the head of the model; drop loss")
    task, columns, held_out = open_task(model, data, recipe.data.validation, recipe.detection, recipe.data)
    loss = replace(recipe.loss, loss=[task.loss])
    changed = replace(
        recipe,
        loss=loss,
        task=TaskRecipe(),
        detection=DetectionRecipe(),
        data=replace(recipe.data, validation=held_out),
        log=replace(recipe.log, callbacks=[*recipe.log.callbacks, WarnUnpaired()]),
    )
    return task.model, Columns(columns, str(data)), changed, task.notes


def trainer_for(model: Any, data: AnyData, recipe: Recipe) -> Trainer:
    """The trainer that `train` runs over `data`; class weights that a loss asks for are counted in them."""
    loss = recipe.loss
    if _asks_for_balance(loss.loss):
        if is_stream(data) or recipe.data.is_streamed:
            raise BadInput(
                "balanced weights count all rows, and the data are a stream\n  hint: give numbers, weight=1/3/5"
            )
        columns = _columns(data, recipe)
        weighted = balance_loss(loss.loss, as_given(model), columns, loss.labels, recipe.held_out)
        recipe = replace(recipe, loss=replace(loss, loss=weighted))
    if has_own(loss.loss):
        rows = example_rows(data) if is_stream(data) or recipe.data.is_streamed else data
        columns = {} if rows is None else _columns(rows, recipe)
        shown = with_examples(loss.loss, as_given(model), columns, loss.labels)
        recipe = replace(recipe, loss=replace(recipe.loss, loss=shown))
    if recipe.weights.update is not None:
        recipe = sparse_update(model, data, recipe)
    planned = recipe.step.memory is not None or recipe.step.peak is not None
    return Trainer(model, recipe=recipe, batch_size=recipe.loop.batch_size if planned else None)


def _columns(data: AnyData, recipe: Recipe) -> Mapping[str, Column]:
    """The columns of `data`, at least the labels of data by position."""
    named = {recipe.loss.labels or "labels": data[-1]} if isinstance(data, tuple) else data
    if recipe.data.missing:
        labels, drop = [recipe.loss.labels or "labels"], DroppedRows(recipe.data.missing)
        return complete_rows(open_data(named), recipe.data.inputs, labels, drop)
    return open_data(named, inputs=None if recipe.data.tables is not None else recipe.data.inputs)


def _asks_for_balance(loss: Any) -> bool:
    return any(
        "weight=balanced" in term if isinstance(term, str) else getattr(term, "options", {}).get("weight") == "balanced"
        for term in as_list(loss)
    )


def balance_loss(
    loss: Any,
    model: ir.Model,
    columns: Mapping[str, Column],
    labels: str | None = None,
    held_out: tuple[float, int] | None = None,
) -> Any:
    """`loss` with class weights in place of each ``weight="balanced"``, which compensate class frequencies.

    Args:
        loss: one or several, as `attach` takes them.
        model: tells how many classes there are.
        columns: hold the labels.
        labels: under which name.
        held_out: the share of the rows that do not count, and the seed that chooses them.

    Raises:
        BadInput: the number of classes is not known, or the labels are no classes.
    """
    if not _asks_for_balance(loss):
        return loss
    terms = [Loss.of(t) if isinstance(t, str) else t for t in as_list(loss)]
    split = None
    if held_out is not None:
        names = {getattr(t, "labels", None) or labels for t in terms}
        arrays = [single_array(class_column(c)) for n, c in columns.items() if n in names]
        split = (*held_out, sum(a is not None and a.dtype.kind in "iub" for a in arrays) < 2)
    return [_balance_loss(t, model, columns, labels, split) for t in terms]


def _balance_loss(
    term: Any,
    model: ir.Model,
    columns: Mapping[str, Column],
    labels: str | None,
    held_out: tuple[float, int, bool] | None,
) -> Any:
    if not isinstance(term, Loss) or term.options.get("weight") != "balanced":
        return term
    floats = [v for v in model.graph.outputs if holds_floats(v)]
    prediction = next((v for v in floats if term.output in (None, v.name)), None)
    shape = None if prediction is None else prediction.shape
    axis = 1
    if prediction is not None:
        axis = with_class_axis({"axis": term.options.get("axis")}, prediction)["axis"]
    classes = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
    if not isinstance(classes, int):
        raise BadInput("balanced weights need the number of classes, which the model does not declare; give numbers")
    names = class_names(model, (prediction.name or "",) if prediction is not None else (), classes)
    numbers = labels_in(columns, term.labels or labels, names)
    if held_out is not None:
        share, seed, stratified = held_out
        of_rows = numbers.ravel() if stratified and numbers.size == len(numbers) else None
        numbers = numbers[divided(len(numbers), of_rows, share, seed)[0]]
    weights = balanced_weights(numbers, classes, term.options.get("ignore_index"))
    return term.with_loss(term.loss, weight=weights)
