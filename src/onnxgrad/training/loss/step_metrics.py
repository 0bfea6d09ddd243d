"""Measures that a step computes beside the loss: scalars of the same prediction and labels, without a derivative."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var, identifier
from onnxgrad.training.loss.loss_function import LossFunction
from onnxgrad.training.loss.score_blocks import OfRows
from onnxgrad.training.option_strings import looked_up

FLOAT = int(ir.DataType.FLOAT)


def accuracy(b: Builder, y: Var, labels: Var, options: Mapping[str, Any], compares: str) -> Var:
    """The share of labels (that count) with the highest score; of binary labels, of logits on the right side of 0."""
    if compares == "binary":
        return b.ReduceMean(b.Cast(b.Equal(y > 0.0, labels > 0.5), to=FLOAT), keepdims=0)
    return _share(b, _is_highest(b, y, labels, options["axis"]), labels, options)


def top5(b: Builder, y: Var, labels: Var, options: Mapping[str, Any], compares: str) -> Var:
    """The share of labels (that count) among the five highest scores"""
    if compares == "binary":
        raise BadInput("top5 needs classes")
    return _share(b, _is_among_five(b, y, labels, options["axis"]), labels, options)


def _is_highest(b: Builder, y: Var, labels: Var, axis: int = 1) -> Var:
    return b.Equal(b.ArgMax(y, axis=axis, keepdims=0), b.Cast(labels, to=int(ir.DataType.INT64)))


def _is_among_five(b: Builder, y: Var, labels: Var, axis: int = 1) -> Var:
    classes = b.Squeeze(b.shape_of(y, axis % y.rank, axis % y.rank + 1), [0])
    _, best = b.TopK(y, b.Unsqueeze(b.Min(classes, b.const(5)), [0]), axis=axis, outputs=2)
    hit = b.Equal(best, b.Unsqueeze(b.Cast(labels, to=int(ir.DataType.INT64)), [axis]))
    right = b.ReduceMax(b.Cast(hit, to=int(ir.DataType.INT32)), [axis], keepdims=0)
    return b.Cast(right, to=int(ir.DataType.BOOL))


#: What says of each row of scores whether its label is right, by the name of the measure: the share of these.
OF_ROWS: dict[str, OfRows] = {"accuracy": _is_highest, "top5": _is_among_five}


def _share(b: Builder, right: Var, labels: Var, options: Mapping[str, Any]) -> Var:
    ignored = options.get("ignore_index")
    hits = b.Cast(right, to=FLOAT)
    if ignored is None:
        return b.ReduceMean(hits, keepdims=0)
    counts = b.Cast(b.Not(b.Equal(labels, b.const(ignored, labels.dtype))), to=FLOAT)
    return b.ReduceSum(hits * counts, keepdims=0) / b.Max(b.ReduceSum(counts, keepdims=0), 1.0)


def mse(b: Builder, y: Var, labels: Var, options: Mapping[str, Any], compares: str) -> Var:
    """The mean of (y - t)²"""
    d = y - labels
    return b.ReduceMean(d * d, keepdims=0)


def mae(b: Builder, y: Var, labels: Var, options: Mapping[str, Any], compares: str) -> Var:
    """The mean of |y - t|"""
    return b.ReduceMean(b.Abs(y - labels), keepdims=0)


MEASURES: dict[str, Callable[..., Var]] = {"accuracy": accuracy, "top5": top5, "mse": mse, "mae": mae}
#: Measures of the gradient, which is known later.
LATER = ("gradient_norm",)


def check_measures(names: Sequence[str]) -> None:
    """Raise BadInput for a measure that there is not."""
    for name in names:
        try:
            looked_up("metric", name, MEASURES | dict.fromkeys(LATER))
        except BadInput as error:
            raise BadInput(f"{error}\n  hint: fit(metrics=…) measures validation data by many more") from None


def measured(
    b: Builder,
    names: Sequence[str],
    kind: tuple[LossFunction, dict[str, Any]] | None,
    operands: tuple[Var, list[Var]] | None,
    rights: Mapping[str, Var],
) -> dict[str, Var]:
    """The measures `names`, by name; `rights` has what `OF_ROWS` says, of measures for which that was computed."""
    found = {}
    for name in dict.fromkeys(names):
        if name in LATER:
            continue
        if kind is None or operands is None:
            raise BadInput(f"the loss is a graph, so {name} cannot be taken; give it a further output")
        loss, options = kind
        if (name in ("accuracy", "top5")) != bool(loss.compares) or len(operands[1]) != 1:
            fit = [n for n in MEASURES if (n in ("accuracy", "top5")) == bool(loss.compares)]
            raise BadInput(f"{name} does not fit the labels of this loss; these do: {', '.join(fit)}")
        y, (labels, *_) = operands
        if name in rights:
            value = _share(b, rights[name], b.Reshape(labels, [-1]), options)
        else:
            value = MEASURES[name](b, y, labels, options, loss.compares)
        value.value.name = b.names.exactly(identifier(name))
        found[name] = value
    return found
