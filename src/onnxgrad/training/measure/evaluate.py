"""Evaluation of a model on labelled data: its task, and its metrics."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.match import holds_floats
from onnxgrad.keywords import check_keywords
from onnxgrad.model_io import AnyModel
from onnxgrad.model_io.read import as_given
from onnxgrad.runtime import Options
from onnxgrad.settings import read_recipes, takes
from onnxgrad.training.data import Data, Field, open_data
from onnxgrad.training.data.columns import Column, Columns, Features, single_array
from onnxgrad.training.data.dropped_rows import DroppedRows
from onnxgrad.training.data.fields import INPUTS, LABELS, check_labels
from onnxgrad.training.data.items import named_source
from onnxgrad.training.data.labels import check_count, class_column, numbered
from onnxgrad.training.data.masks import Masks, choose_classes, mask_field
from onnxgrad.training.data.preprocessing import Preprocessing
from onnxgrad.training.data.recipe import LabelledRowsRecipe, PreparationRecipe
from onnxgrad.training.data.sources import source_name
from onnxgrad.training.data.wide import complete_rows
from onnxgrad.training.detection.predict import Detector
from onnxgrad.training.detection.recipe import DetectionRecipe
from onnxgrad.training.graph.class_labels import class_names, label_output
from onnxgrad.training.language.limits import scores_of
from onnxgrad.training.language.recipe import DETECTION, METRICS_OF_TASKS, TaskRecipe
from onnxgrad.training.language.task import Language, prepared
from onnxgrad.training.measure.comparisons import (
    Classes,
    Comparison,
    Embeddings,
    Maps,
    Meter,
    Sequences,
    companion,
)
from onnxgrad.training.measure.detections import box_metrics, compare_boxes, held_out_boxes
from onnxgrad.training.measure.kinds import alike, are_sequences, choose_comparison, other_outputs
from onnxgrad.training.measure.misses import Misses
from onnxgrad.training.measure.predict import batches_of, chosen_outputs, document_rows, fields_of
from onnxgrad.training.measure.result import Evaluated, metrics_by_class
from onnxgrad.training.measure.texts import compare_texts, complete
from onnxgrad.training.metadata import DETECTOR
from onnxgrad.training.metrics.registry import DEFAULTS, METRICS, counts, is_metric_of, names_of

if TYPE_CHECKING:
    from onnxgrad.training.data.keywords import EvaluationKeywords

#: The label of padding, where no other is named.
PADDING = -100
#: The largest number of classes with a confusion matrix.
MOST_CLASSES = 1000


@check_keywords
@takes(PreparationRecipe, TaskRecipe, LabelledRowsRecipe)
def evaluate(
    model: AnyModel,
    data: Any,
    *,
    metrics: Sequence[str] | str | None = None,
    labels: str | None = None,
    prediction: str | None = None,
    ignore_index: int | None = None,
    blank: int = 0,
    batch_size: int = 256,
    options: Options | None = None,
    worst: int = 0,
    classes: Sequence[str] | str | None = None,
    image_size: int | None = None,
    **settings: Unpack[EvaluationKeywords],
) -> Evaluated:
    """Compare the predictions of `model` for the rows of `data` with their labels.

    Labels that are class numbers or names, and predictions with an axis of classes beside those of the labels, are a
    task of classes; labels of 0 and 1 for predictions of the same shape, which may be log-odds or probabilities, are
    binary if they are whole numbers, the model ends in probabilities, or the metrics asked for are those of classes;
    everything else compares numbers. Symbols over time, read
    by CTC, are compared with sequences of labels where ``exact``, ``cer`` or ``wer`` is asked for. A language model
    completes the prompts of the data where ``exact``, ``bleu``, ``chrf`` or ``rougeL`` is asked for.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        data: see `predict`.
        metrics: names of `METRICS`, in a list or with commas between them. Default: those usual for the task.
        labels: the array of labels. Default: the one that is called like labels are, or the only one that feeds no
            input.
        prediction: the output that is compared. Default: the only one, or the first of floats.
        ignore_index: the label that does not count.
        blank: the symbol that stands for nothing, where sequences are read from scores over time (CTC).
        batch_size: rows that run at once.
        options: how ONNX Runtime runs the model.
        worst: the number of rows with the largest losses to return.
        classes: names of the classes of a detector that does not name them, in their order; or those of the outlines
            of objects that masks are drawn of: the others belong to the background.
        image_size: width and height of pictures, where a detector leaves them open.
        settings:

    Raises:
        BadInput: data that do not fit, no labels, or a metric that is not defined for the task.
        UnknownName: there is no such metric, array or output.
    """
    asked = names_of(metrics)
    opened = as_given(model)
    preparation, task, chosen = read_recipes("evaluate", (PreparationRecipe, TaskRecipe, LabelledRowsRecipe), settings)
    drops = chosen.missing == "drop"
    if drops and (task.name or DETECTOR in opened.metadata_props or Preprocessing.of(opened).task):
        raise BadInput("missing is a setting of labels and columns, which the data of a task do not have")
    if task.name == DETECTION or (not task.name and DETECTOR in opened.metadata_props):
        boxes = DetectionRecipe(classes=classes, image_size=image_size)
        return evaluate_detector(opened, data, asked, preparation, batch_size, options, worst, boxes)
    if image_size is not None:
        raise BadInput("image_size is a setting of the task detection")
    output = prediction_of(opened, prediction)
    trained = Preprocessing.of(opened)
    source, given = source_name(data), data
    if classes is not None:
        data = choose_classes(
            open_data(data, preparation.pictures(trained)), DetectionRecipe(classes=classes).names, source
        )
    data, arguments = prepared(data, task, preparation, trained, opened)
    if isinstance(language := arguments["text"], Language):
        rows = document_rows(opened, data, source, arguments, labels or "labels")
        output, size = scores_of(opened, prediction) or output, language.batch_size(batch_size, rows)
        asked = asked or METRICS_OF_TASKS
        written = [name for name in asked if "texts" in METRICS[name.partition(":")[0]].tasks]
        rest = [name for name in asked if name not in written]
        found = Evaluated("texts", {}, 0, "completion", output.name or "")
        if rest or worst:
            found = evaluate_rows(opened, rows, labels or "labels", output, rest, PADDING, size, options, worst)
        return _with_completions(found, opened, given, written, preparation, options) if written else found
    rows, called, ignore_index = open_labelled(
        opened, data, output, labels, ignore_index, preparation, trained, source, arguments, asked, drops
    )
    return evaluate_rows(
        opened, rows, called, output, asked, ignore_index, batch_size, options, worst, blank, chosen.class_axis
    )


def _with_completions(
    found: Evaluated, model: ir.Model, data: Any, metrics: Sequence[str], preparation: PreparationRecipe,
    options: Options | None,
) -> Evaluated:  # fmt: skip
    """`found` with `metrics` of the texts that the language model writes for the prompts of `data`."""
    texts, answers = complete(model, data, preparation.tokenizer, preparation.max_length, options)
    found.metrics |= compare_texts(texts, answers, metrics)
    found.rows = found.rows or len(answers)
    return found


def evaluate_detector(
    model: ir.Model,
    data: Any,
    asked: Sequence[str] | None = None,
    preparation: PreparationRecipe | None = None,
    batch_size: int = 16,
    options: Options | None = None,
    worst: int = 0,
    boxes: DetectionRecipe = DetectionRecipe(),
) -> Evaluated:
    """Compare the boxes that a detector finds in pictures with labels (see `evaluate`)."""
    detector = Detector(model, preparation, boxes.image_size, options)
    held_out = held_out_boxes(detector, data, boxes.names)
    found = compare_boxes(detector, held_out, box_metrics(detector, held_out, asked), min(batch_size, 16), worst)
    found.prediction = ", ".join(detector.head.values)
    return found


def labelled_rows(
    model: ir.Model, data: Any, output: ir.Value, labels: str | None = None, **settings: Any
) -> tuple[Data, str]:
    """`data` with its labels as rows for `model`, and the name of the labels (see `evaluate`)."""
    trained, source = Preprocessing.of(model), source_name(data)
    preparation = PreparationRecipe(**settings)
    data, arguments = prepared(data, TaskRecipe(), preparation, trained, model)
    return open_labelled(model, data, output, labels, None, preparation, trained, source, arguments)[:2]


def open_labelled(
    opened: ir.Model,
    data: Any,
    output: ir.Value,
    labels: str | None,
    ignore_index: int | None,
    preparation: PreparationRecipe,
    trained: Preprocessing,
    source: str,
    arguments: dict[str, Any],
    asked: Sequence[str] | None = None,
    drops: bool = False,
) -> tuple[Data, str, int | None]:
    """Prepared `data` as rows, the name of their labels, and the label that does not count.

    With `drops`, rows are left out that lack a label, or a value that the model does not fill in.
    """
    data = named_source(data, [*fields_of(opened), Field(labels or "labels", np.dtype(np.int64), (), label=True)])
    if drops:
        data = _complete(data, labels, [f.name for f in fields_of(opened)], preparation, trained, source)
    columns = open_data(data, preparation.pictures(trained), preparation.inputs, trained.inputs, kinds=trained.kinds)
    called = _labels(columns, labels, source, {f.name for f in fields_of(opened)})
    where = f"array {called!r} of {source}"
    if columns[called].problem:
        raise BadInput(f"{where}: {columns[called].problem}")
    names = class_names(opened, [output.name or ""], _scores(output))
    columns[called] = class_column(columns[called], where)
    if names is not None and not isinstance(columns[called], Masks):
        columns[called] = numbered(columns[called], names, source, where, ignore_index)
    first = columns[called].take(np.arange(1), Field(called, np.dtype(np.int64), (), ignored=PADDING))
    shape = (None,) * (np.asarray(first).ndim - 1)
    if ignore_index is None and np.asarray(first).dtype.kind in "iu" and single_array(columns[called]) is None:
        ignore_index = PADDING  # of rows of different lengths
    own = Field(called, np.asarray(first).dtype, shape, label=True, ignored=ignore_index)
    if isinstance(columns[called], Masks):
        of_numbers = bool(asked) and all(is_metric_of(m, "numbers") for m in asked or ())
        are_numbers = of_numbers or int(np.max(first)) > MOST_CLASSES  # depth in 16 bits, 0 where it is not known
        ignore_index = 0 if are_numbers and ignore_index == PADDING else ignore_index
        own = mask_field(called, list(output.shape or ()), ignore_index, are_numbers)
    rows = Data(columns, [*fields_of(opened), own], source, classes=names, **arguments)
    return rows, called, ignore_index


def _complete(
    data: Any,
    labels: str | None,
    fed: Sequence[str],
    preparation: PreparationRecipe,
    trained: Preprocessing,
    source: str,
) -> Columns:
    """The rows of `data` with a label, and with the values that the inputs `fed` need."""
    columns = open_data(data, preparation.pictures(trained), kinds=trained.kinds)
    wanted: dict[str, Features | str] = {
        n: f for n, f in trained.inputs.items() if f.table is None or not f.table.missing
    }
    wanted |= {n: Features((name,), name) for n, (name, _, may_miss) in trained.columns.items() if not may_miss}
    wanted |= preparation.inputs or {}
    own = [n for n in wanted if n not in fed]  # labels of several columns
    if not own:
        used = {c for f in trained.inputs.values() for c in f.names} | {name for name, *_ in trained.columns.values()}
        own = [_labels(columns, labels, source, {*fed, *used})]
    drop = DroppedRows()
    return Columns(complete_rows(columns, wanted, own, drop), source, notes=[*columns.notes, *drop.notes(source)])


def evaluate_rows(
    model: ir.Model,
    rows: Data,
    called: str,
    output: ir.Value,
    asked: Sequence[str] | None = None,
    ignore_index: int | None = None,
    batch_size: int = 256,
    options: Options | None = None,
    worst: int = 0,
    blank: int = 0,
    class_axis: int | None = None,
) -> Evaluated:
    """Evaluate opened data: compare the labels `called` with `output`."""
    names = class_names(model, [output.name or ""], _scores(output))
    shown = output.name or ""
    known = rows.classes or names
    misses = Misses(worst, known)
    meter: Meter | None = None
    margin: Meter | None = None
    table: np.ndarray | None = None
    own, others, lost = _label_output(model, output), 0, 0
    beside = companion(model, output)
    outputs = [shown, *([own] if own else []), *(beside.outputs if beside else [])]
    for batch, found in batches_of(model, rows, outputs, batch_size, options):
        y, t = found[shown], batch[called]
        lost += int((y != y).reshape(len(y), -1).any(1).sum())
        if own and names is not None:
            others += int((np.array(names)[y.argmax(1)] != found[own].astype(str)).sum())
        if meter is None:
            comparison = _comparison_of(model, rows, y, t, output, called, asked, ignore_index, blank, class_axis)
            usual = (*DEFAULTS[comparison.task], *comparison.further)
            asked = None if asked is None else list(asked)
            if beside is not None and beside.fits(comparison):
                of_beside = [m for m in asked or DEFAULTS[beside.task] if is_metric_of(m, beside.task)]
                asked = None if asked is None else [m for m in asked if m not in of_beside]
                margin = Meter(beside, of_beside) if of_beside else None
            meter = Meter(comparison, usual if asked is None else asked, known)
        scores, labelled = meter.add(*alike(y, t))
        if margin is not None and beside is not None:
            margin.add(np.stack([alike(found[name], t)[0] for name in beside.outputs], -1), alike(y, t)[1])
        if worst and meter.comparison.task != "sequences":
            misses.add(scores, labelled, {n: a for n, a in batch.items() if n != called}, len(y))
        if meter.comparison.task == "classes" and scores.shape[1] <= MOST_CLASSES:
            part = counts(scores, labelled)
            table = part if table is None else table + part
    assert meter is not None  # data have a row
    _warn_of_scores(shown, own, others, lost, len(rows))
    if not meter.count:
        raise BadInput(f"{called!r} has no label that counts")
    measured = meter.result() | ({} if margin is None else margin.result())
    result = Evaluated(meter.comparison.task, measured, meter.count, called, shown, table, notes=rows.notes)
    if table is not None:
        result.classes = metrics_by_class(table, known)
    result.worst, result.names = misses.result() if worst else None, known
    return result


def _comparison_of(
    model: ir.Model, rows: Data, y: np.ndarray, t: np.ndarray, output: ir.Value, called: str,
    asked: Sequence[str] | None, ignore_index: int | None, blank: int, class_axis: int | None,
) -> Comparison:  # fmt: skip
    """The comparison for predictions `y` of the first batch, and their labels `t`."""
    if asked is not None and are_sequences(asked, y, t):
        return Sequences(blank)
    if asked and all(is_metric_of(m, "embeddings") for m in asked):
        return Embeddings(other_outputs(model, output.name))
    if Maps.fits(asked):
        return Maps()
    every = rows.arrays.get(called, t)
    if any(f.binary for f in rows.fields if f.name == called):
        every = np.rint(every).astype(np.int64)
    comparison = choose_comparison(model, y, t, every, output, called, asked, ignore_index, class_axis)
    _check_classes(comparison, y, every, rows, called, class_names(model, [output.name or ""], _scores(output)))
    return comparison


def _warn_of_scores(shown: str, own: str | None, others: int, lost: int, rows: int) -> None:
    """Warn of scores that the model turns into other labels, or that are not numbers."""
    if 2 * others > rows:
        warnings.warn(
            f"the model's own labels {own!r} are not those of the largest scores {shown!r} in {others:,} of "
            f"{rows:,} rows: the metrics are of the scores, which the model may turn round",
            stacklevel=4,
        )
    if lost:
        warnings.warn(
            f"the predictions {shown!r} are not numbers (NaN) in {lost:,} of {rows:,} rows, so metrics that only "
            "compare scores have no meaning",
            stacklevel=4,
        )


def prediction_of(model: ir.Model, name: str | None) -> ir.Value:
    """The output `name`; default: the first of floats. Raises UnknownName, or BadInput without float outputs."""
    if name is not None:
        (name,) = chosen_outputs(model, [name])
        return next(v for v in model.graph.outputs if v.name == name)
    floats = [v for v in model.graph.outputs if holds_floats(v)]
    if not floats:
        raise BadInput("the model has no output of floats to compare with labels; name one with --prediction")
    return floats[0]


def _scores(output: ir.Value) -> int | None:
    """The number of classes of an output [N, C], if known and more than one."""
    size = output.shape[1] if output.shape is not None and len(output.shape) == 2 else None
    return size if isinstance(size, int) and size > 1 else None


def _label_output(model: ir.Model, output: ir.Value) -> str | None:
    """The output of `model` with the label of each row, if there is one besides the scores `output`."""
    count = _scores(output)
    name = None if count is None else label_output(model.graph, [output.name or ""], count)
    found = next((v for v in model.graph.outputs if v.name == name), None)
    return name if found is not None and found.shape is not None and len(found.shape) == 1 else None


def _check_classes(
    comparison: Comparison, y: np.ndarray, labels: np.ndarray, rows: Data, called: str, own: Sequence[str] | None
) -> None:
    """Raise BadInput if the number of classes differs from that of the predictions `y`; `own`: the model's names."""
    count = y.shape[comparison.axis] if isinstance(comparison, Classes) else 2
    if rows.classes is not None:
        check_count(rows.classes, count, rows.name, own is not None)
    if isinstance(comparison, Classes):
        field = Field(called, labels.dtype, (), label=True, classes=count, ignored=comparison.ignored)
        whole = labels if labels.dtype.kind in "iu" else labels.astype(np.int64)
        check_labels(whole, field, f"array {called!r} of {rows.name}")


def _labels(columns: Mapping[str, Column], name: str | None, source: str, fed: set[str]) -> str:
    if name is not None:
        if name not in columns:
            raise UnknownName(name, columns, f"array in {source}")
        return name
    found = [n for n in columns if n.lower() in LABELS and n not in fed]
    if len(found) == 1:
        return found[0]
    others = [n for n in columns if n not in fed and n.lower() not in INPUTS]
    if len(others) == 1:
        return others[0]
    if not others:
        raise BadInput(f"{source} has no labels, only what feeds the model: {', '.join(map(repr, columns))}")
    raise BadInput(f"which array of {source} holds the labels? Say so with --labels: {', '.join(map(repr, others))}")
