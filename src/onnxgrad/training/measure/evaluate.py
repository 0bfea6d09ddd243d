"""A model measured on labelled data: which task it is, and its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.runtime import Options, Session
from onnxgrad.training.data import Data, Field, Images, open_data
from onnxgrad.training.data.columns import Column
from onnxgrad.training.data.fields import LABELS
from onnxgrad.training.data.labels import class_column
from onnxgrad.training.graph.bounds import bounds
from onnxgrad.training.measure.metrics import DEFAULTS, METRICS, counts, per_class
from onnxgrad.training.measure.predict import AnyModel, as_given, batches_of, chosen_outputs, fields_of, source_name
from onnxgrad.training.metadata import class_names


@dataclass
class Evaluated:
    """What was measured.

    Attributes:
        task: "classes", "binary" or "numbers" (see `onnxgrad.training.measure.metrics`).
        metrics: by name.
        rows: how many labels were compared.
        labels: the array that they came from.
        prediction: the output that they were compared with.
        confusion: the confusion matrix [actual, predicted], of classes.
        classes: precision, recall, f1 and rows of each class, by its name or number.
    """

    task: str
    metrics: dict[str, float]
    rows: int
    labels: str
    prediction: str
    confusion: np.ndarray | None = None
    classes: dict[str, dict[str, float]] | None = None


def evaluate(
    model: AnyModel,
    data: Any,
    *,
    metrics: Sequence[str] | None = None,
    labels: str | None = None,
    prediction: str | None = None,
    inputs: Mapping[str, str] | None = None,
    images: Images | None = None,
    ignore_index: int | None = None,
    batch_size: int = 256,
    options: Options | None = None,
) -> Evaluated:
    """Compare what `model` predicts for the rows of `data` with their labels.

    Labels that are class numbers or names, and predictions with an axis of classes beside those of the labels, are a
    task of classes; labels of 0 and 1 for predictions of the same shape, which may be log-odds or probabilities, are
    binary where the metrics asked for are those of classes; everything else compares numbers.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        data: see `predict`.
        metrics: names of `METRICS`. Default: those usual for the task.
        labels: the array of labels. Default: the one that is called like labels are.
        prediction: the output that is compared. Default: the only one, or the first of floats.
        inputs: which columns feed which input.
        images: how pictures become arrays.
        ignore_index: the label that does not count.
        batch_size: rows that run at once.
        options: how ONNX Runtime runs the model.

    Raises:
        BadInput: data that do not fit, no labels, or a metric that is not defined for the task.
        UnknownName: there is no such metric, array or output.
    """
    for name in metrics or ():
        if name not in METRICS:
            raise UnknownName(name, METRICS, "metric")
    opened = as_given(model)
    output = _prediction(opened, prediction)
    columns = open_data(data, images, inputs)
    called = _labels(columns, labels, source_name(data), {f.name for f in fields_of(opened)})
    columns[called] = class_column(columns[called])
    first = columns[called].take(np.arange(1), Field(called, np.dtype(np.int64), ()))
    own = Field(called, np.asarray(first).dtype, (None,) * (np.asarray(first).ndim - 1), label=True)
    names = class_names(opened)
    rows = Data(columns, [*fields_of(opened), own], source_name(data), classes=names)
    given, truth = [], []
    for batch, found in batches_of(Session(opened, options), rows, [output.name or ""], batch_size):
        given.append(found[output.name or ""])
        truth.append(batch[called])
    y, t = np.concatenate(given), np.concatenate(truth)
    task, scores, labelled = _task(y, t, bounds(output), metrics, ignore_index, called)
    wanted = metrics or DEFAULTS[task]
    for name in wanted:
        if task not in METRICS[name].tasks:
            fitting = ", ".join(n for n, m in METRICS.items() if task in m.tasks)
            raise BadInput(f"{name} is no metric for a task of {task}; those are {fitting}")
    result = Evaluated(
        task,
        {name: METRICS[name].tasks[task](scores, labelled) for name in wanted},
        len(labelled),
        called,
        output.name or "",
    )
    if task == "classes" and scores.shape[1] <= 1000:
        result.confusion = counts(scores, labelled)
        table = per_class(scores, labelled)
        known = rows.classes or names or [str(c) for c in range(scores.shape[1])]
        result.classes = {
            str(known[c] if c < len(known) else c): {k: float(v[c]) for k, v in table.items()}
            for c in np.flatnonzero(table["rows"])
        }
    return result


def _prediction(model: ir.Model, name: str | None) -> ir.Value:
    if name is not None:
        (name,) = chosen_outputs(model, [name])
        return next(v for v in model.graph.outputs if v.name == name)
    floats = [v for v in model.graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
    if not floats:
        raise BadInput("the model has no output of floats to compare with labels; name one with --prediction")
    return floats[0]


def _labels(columns: Mapping[str, Column], name: str | None, source: str, fed: set[str]) -> str:
    if name is not None:
        if name not in columns:
            raise UnknownName(name, columns, f"array in {source}")
        return name
    found = [n for n in columns if n.lower() in LABELS and n not in fed]
    if len(found) == 1:
        return found[0]
    held = ", ".join(map(repr, columns))
    raise BadInput(f"which array of {source} holds the labels? Say so with --labels; it holds {held}")


def _task(
    y: np.ndarray,
    t: np.ndarray,
    within: tuple[float, float],
    metrics: Sequence[str] | None,
    ignored: int | None,
    called: str,
) -> tuple[str, np.ndarray, np.ndarray]:
    """The task, its scores and its labels, as `onnxgrad.training.measure.metrics` wants them."""
    probabilities = within[0] >= 0 and within[1] <= 1
    if t.ndim and t.shape[-1:] == (1,) and t.ndim == y.ndim and y.shape[-1] > 1:
        t = t[..., 0]
    if y.ndim == t.ndim + 1 and y.shape[-1] != 1 and (t.dtype.kind in "iub" or (t == np.trunc(t)).all()):
        axis = 1 if y.shape[2:] == t.shape[1:] else y.ndim - 1
        scores = np.moveaxis(y, axis, -1)
        if scores.shape[:-1] != t.shape:
            raise BadInput(f"the labels {called!r} are {list(t.shape)} and the predictions {list(y.shape)}")
        scores, labels = scores.reshape(-1, scores.shape[-1]).astype(np.float64), t.ravel().astype(np.int64)
        kept = np.ones(labels.shape, bool) if ignored is None else labels != ignored
        scores, labels = scores[kept], labels[kept]
        bad = (labels < 0) | (labels >= scores.shape[1])
        if bad.any():
            raise BadInput(
                f"the label {labels[bad][0]} of {called!r} is none of the {scores.shape[1]} classes of the model"
            )
        if not len(labels):
            raise BadInput(f"{called!r} has no label that counts")
        return "classes", _log_probabilities(scores, probabilities), labels
    if y.ndim == t.ndim + 1 and y.shape[-1] == 1:
        y = y[..., 0]
    if y.ndim == t.ndim - 1 and t.shape[-1] == 1:
        t = t[..., 0]
    if y.shape != t.shape:
        raise BadInput(f"the labels {called!r} are {list(t.shape)} and the predictions {list(y.shape)}")
    asked = [m for m in metrics or () if "numbers" not in METRICS[m].tasks]
    if np.isin(t, (0, 1)).all() and (asked or (not metrics and t.dtype.kind in "iub")):
        scores, labels = y.ravel().astype(np.float64), t.ravel().astype(np.int64)
        if probabilities:
            with np.errstate(divide="ignore"):
                scores = np.log(scores) - np.log1p(-scores)
        return "binary", scores, labels
    return "numbers", y.reshape(len(y), -1).astype(np.float64), t.reshape(len(t), -1).astype(np.float64)


def _log_probabilities(scores: np.ndarray, probabilities: bool) -> np.ndarray:
    if probabilities:
        with np.errstate(divide="ignore"):
            return np.log(scores)
    top = scores.max(1, keepdims=True)
    return scores - top - np.log(np.exp(scores - top).sum(1, keepdims=True))


def as_json(found: Evaluated) -> str:
    """`found` as a line of JSON; numbers that are not defined are null."""

    def plain(x: float) -> float | None:
        return float(x) if np.isfinite(x) else None

    table = (found.classes or {}).items()
    classes = {name: {k: plain(v) for k, v in row.items()} for name, row in table} or None
    return json.dumps(
        {
            "task": found.task,
            "metrics": {k: plain(v) for k, v in found.metrics.items()},
            "rows": found.rows,
            "labels": found.labels,
            "prediction": found.prediction,
            "classes": classes,
            "confusion": None if found.confusion is None else found.confusion.tolist(),
        },
        ensure_ascii=False,
    )
