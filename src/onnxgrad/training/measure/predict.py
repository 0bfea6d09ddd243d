"""Predictions of a model for rows of data."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, OnnxGradError, UnknownName
from onnxgrad.ir.graph import required_inputs
from onnxgrad.ir.match import not_none
from onnxgrad.ir.names import described
from onnxgrad.keywords import check_keywords
from onnxgrad.model_io import AnyModel
from onnxgrad.model_io.read import as_given
from onnxgrad.runtime import Options, Session
from onnxgrad.settings import read_recipes, takes
from onnxgrad.training.data import Data, Field
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.recipe import PreparationRecipe
from onnxgrad.training.data.sources import source_name
from onnxgrad.training.detection.predict import Detector
from onnxgrad.training.graph.row_axis import row_axis
from onnxgrad.training.graph.training_mode import exported_in_training
from onnxgrad.training.language.limits import scores_of
from onnxgrad.training.language.recipe import TaskRecipe
from onnxgrad.training.language.task import IGNORED, Language, prepared
from onnxgrad.training.measure.detections import pictures_at, predict_boxes
from onnxgrad.training.metadata import DETECTOR
from onnxgrad.training.metrics.registry import surprise
from onnxgrad.wording import tensor_text

if TYPE_CHECKING:
    from onnxgrad.training.data.keywords import MeasuringKeywords

#: The columns with the paths of picture files, and their sizes where these differ.
FILE, SIZE = "file", ("height", "width")


def fields_of(model: ir.Model) -> list[Field]:
    """The fields that data must feed: the inputs of `model` without values of their own."""
    return [Field.of(v) for v in required_inputs(model.graph)]


def open_rows(
    model: ir.Model,
    data: Any,
    preparation: PreparationRecipe = PreparationRecipe(),
    task: TaskRecipe = TaskRecipe(),
) -> Data:
    """`data` as rows for the inputs of `model`, prepared as it was trained unless `preparation` differs."""
    source = source_name(data)
    data, arguments = prepared(data, task, preparation, Preprocessing.of(model), model)
    return Data(data, fields_of(model), source, **arguments)


def document_rows(model: ir.Model, data: Any, source: str, arguments: dict[str, Any], labels: str = "labels") -> Data:
    """Rows of documents that `prepared` returned with `arguments`; `labels` are the tokens to predict."""
    label = Field(labels, np.dtype(np.int64), (None,), label=True, ignored=IGNORED, indices=True)
    return Data(data, [*fields_of(model), label], source, **arguments)


def chosen_outputs(model: ir.Model, outputs: Sequence[str] | None) -> list[str]:
    """The names of the `outputs`, by default of all with rows, if any. Raises UnknownName for an unknown one."""
    names = [v.name or "" for v in model.graph.outputs]
    if "" in names:
        raise BadInput(f"output {names.index('')} of the model has no name, so ONNX Runtime does not load it")
    for name in outputs or ():
        if name not in names:
            raise UnknownName(name, names, "output")
    with_rows = [v.name or "" for v in model.graph.outputs if v.shape is None or len(v.shape)]
    return list(outputs or with_rows or names)


def batches_of(
    model: ir.Model, data: Data, outputs: Sequence[str], batch_size: int, options: Options | None = None
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Batches in order, as (feeds, `outputs` for its rows); a last batch short of a fixed size is padded.

    Outputs with their rows along another axis than the first, as [time, rows, classes], are turned to have them first.
    """
    if trains := next((n for n in model.graph if exported_in_training(n)), None):
        warnings.warn(
            f"{described(trains)} runs in training mode, so what is predicted for a row depends on its batch, or on "
            "chance\n  hint: export the model in inference mode; a model that onnxgrad has trained is saved so",
            stacklevel=2,
        )
    session, size = Session(model, options), data.fixed or batch_size
    axes: dict[str, int] | None = None
    for batch in data.batches(size):
        rows, feeds = data.count(batch), {n: batch[n] for n in session.inputs if n in batch}
        if data.fixed and rows < size:
            feeds = {n: a if n in data.whole else np.resize(a, (size, *a.shape[1:])) for n, a in feeds.items()}
        found = session.run(feeds, list(outputs))
        fed = len(next(a for n, a in feeds.items() if n not in data.whole))
        if axes is None:
            axes = _row_axes(model, session, feeds, data, found, fed)
        for name, array in found.items():
            if not isinstance(array, np.ndarray):
                raise BadInput(
                    f"the output {name!r} is no tensor, so it has no entry per row\n"
                    "  hint: --output names the outputs to predict"
                )
            if array.ndim <= axes[name] or array.shape[axes[name]] != fed:
                raise BadInput(
                    f"the output {name!r} is {tensor_text(array.dtype, array.shape)} for {fed} rows: "
                    "not one entry per row\n"
                    "  hint: --output names the outputs to predict"
                )
        yield batch, {name: np.moveaxis(array, axes[name], 0)[:rows] for name, array in found.items()}


def _row_axes(
    model: ir.Model,
    session: Session,
    feeds: Mapping[str, np.ndarray],
    data: Data,
    found: Mapping[str, np.ndarray],
    rows: int,
) -> dict[str, int]:
    """The axis of rows in each output, by name.

    If sizes do not identify the axis, the model runs on two rows and on three: the axis that grows has the rows.
    """
    axes = dict.fromkeys(found, 0)
    arrays = {n: a for n, a in found.items() if isinstance(a, np.ndarray)}
    unsure = [n for n, a in arrays.items() if a.ndim > 1 and (len(a) != rows or rows in a.shape[1:])]
    if not unsure:
        return axes
    if data.fixed:
        return axes | {v.name or "": row_axis(model, v) for v in model.graph.outputs if v.name in unsure}
    cut = [{n: a if n in data.whole else np.resize(a, (k, *a.shape[1:])) for n, a in feeds.items()} for k in (2, 3)]
    try:
        few, more = (session.run(part, unsure) for part in cut)
    except OnnxGradError:  # a model that takes no batch of another size
        return axes
    for name in unsure:
        grown = [axis for axis, sizes in enumerate(zip(few[name].shape, more[name].shape)) if sizes == (2, 3)]
        if few[name].ndim == more[name].ndim and len(grown) == 1:
            axes[name] = grown[0]
    return axes


@check_keywords
@takes(PreparationRecipe, TaskRecipe)
def predict(
    model: AnyModel,
    data: Any,
    *,
    outputs: Sequence[str] | None = None,
    batch_size: int = 256,
    options: Options | None = None,
    **settings: Unpack[MeasuringKeywords],
) -> dict[str, np.ndarray]:
    """Run `model` on every row of `data`.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        data: arrays by name, rows that are dicts, or a path (see `onnxgrad.training.data.sources`). Arrays that the
            model does not read are left alone. A model with one input takes the array itself.
        outputs: which outputs. Default: all but single numbers, such as a loss.
        batch_size: rows that run at once; a model with a fixed batch size takes that one.
        options: how ONNX Runtime runs the model.
        settings:

    Data are prepared like those of the training, which the model's metadata describe, unless a setting differs.

    Returns:
        Arrays [rows, …] by the names of the outputs, in the order of the data. Of picture files, ``file`` has their
        paths, unless an output has this name. Pictures that differ in size are padded at the bottom and on the right;
        ``height`` and ``width`` are their own. A detector that was trained here has a row for each box: ``file``,
        ``class``, ``score``, ``x1``, ``y1``, ``x2``, ``y2``. For a task of language models, not the scores of all
        tokens, but ``tokens``, ``log_loss``, ``perplexity`` and ``accuracy`` of each document.

    Raises:
        BadInput: data that do not fit, or an output without an entry per row.
        UnknownName: there is no such output.
    """
    opened = as_given(model)
    preparation, task = read_recipes("predict", (PreparationRecipe, TaskRecipe), settings)
    detects = DETECTOR in opened.metadata_props and outputs is None and not task.name
    if detects and isinstance(data, (str, os.PathLike)) and (pictures := pictures_at(Path(data))):
        return predict_boxes(Detector(opened, preparation, options=options), pictures, min(batch_size, 16))
    wanted = chosen_outputs(opened, outputs)
    trained = Preprocessing.of(opened)
    source = source_name(data)
    data, arguments = prepared(data, replace(task, pack=False), preparation, trained, opened)
    if isinstance(language := arguments["text"], Language):
        rows = document_rows(opened, data, source, arguments)
        return _predict_documents(opened, rows, language, outputs, batch_size, options)
    rows = Data(data, fields_of(opened), source, **arguments)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    for _, given in batches_of(opened, rows, wanted, batch_size, options):
        for name in wanted:
            parts[name].append(given[name])
    sizes = rows.picture_sizes
    found = {name: _join_batches(name, arrays, len(rows), sizes is not None) for name, arrays in parts.items()}
    about = {} if rows.files is None else {FILE: rows.files}
    about |= {} if sizes is None else dict(zip(SIZE, sizes.T))
    return {**about, **found}


def _predict_documents(
    model: ir.Model,
    rows: Data,
    language: Language,
    outputs: Sequence[str] | None,
    batch_size: int,
    options: Options | None,
) -> dict[str, np.ndarray]:
    """For each document its tokens that count, and over these the mean loss, the perplexity and the accuracy."""
    name = not_none(scores_of(model, outputs[0] if outputs else None)).name or ""
    sums: np.ndarray = np.zeros((3, int(language.index.max()) + 1))
    begin = 0
    for batch, found in batches_of(model, rows, [name], language.batch_size(batch_size, rows), options):
        labels = batch["labels"]
        counts = labels != IGNORED
        owners = np.broadcast_to(language.index[begin : begin + len(labels), None], labels.shape)[counts]
        own, true = found[name][counts].astype(np.float64), labels[counts]
        for total, values in zip(sums, (np.ones(len(true)), surprise(own, true), own.argmax(1) == true)):
            np.add.at(total, owners, values)
        begin += len(labels)
    tokens, losses, right = sums
    with np.errstate(invalid="ignore", divide="ignore"):
        loss, accuracy = losses / tokens, right / tokens
    return {"tokens": tokens.astype(np.int64), "log_loss": loss, "perplexity": np.exp(loss), "accuracy": accuracy}


def _join_batches(name: str, arrays: list[np.ndarray], rows: int, pads: bool) -> np.ndarray:
    """All rows of the output `name`; with `pads`, batches of smaller rows get zeros at the ends of their axes."""
    shapes = {a.shape[1:] for a in arrays}
    if len(shapes) > 1:
        if not pads or len({*map(len, shapes)}) > 1:
            raise BadInput(
                f"the output {name!r} has other sizes in other batches\n"
                f"  hint: --batch-size {rows} (in Python batch_size=) runs all rows at once, padded alike"
            )
        largest = np.max(list(shapes), axis=0)
        arrays = [np.pad(a, [(0, 0), *((0, n) for n in largest - a.shape[1:])]) for a in arrays]
    return np.concatenate(arrays)
