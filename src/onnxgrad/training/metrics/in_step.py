"""Metrics in a step graph: scalars of the same prediction and labels as the loss, without a derivative."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.ir import Builder, Var

FLOAT, INT32, INT64, BOOL = (
    int(t) for t in (ir.DataType.FLOAT, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL)
)


@dataclass(frozen=True)
class InStep:
    """A metric as nodes of a step graph.

    Attributes:
        write: (builder, prediction, labels, options of the loss) → the metric, a scalar.
        of_rows: (builder, scores [rows, classes], labels [rows]) → booleans, whose share of true is the metric; None
            for a metric that is no such share.
    """

    write: Callable[[Builder, Var, Var, Mapping[str, Any]], Var]
    of_rows: Callable[[Builder, Var, Var], Var] | None = None


def share(b: Builder, right: Var, labels: Var, options: Mapping[str, Any]) -> Var:
    """The share of `right`, of the labels that count."""
    ignored = options.get("ignore_index")
    hits = b.Cast(right, to=FLOAT)
    if ignored is None:
        return b.ReduceMean(hits, keepdims=0)
    counts = b.Cast(b.Not(b.Equal(labels, b.const(ignored, labels.dtype))), to=FLOAT)
    return b.ReduceSum(hits * counts, keepdims=0) / b.Max(b.ReduceSum(counts, keepdims=0), 1.0)


def _share_of(is_right: Callable[..., Var]) -> InStep:
    return InStep(
        lambda b, y, labels, options: share(b, is_right(b, y, labels, options["axis"]), labels, options), is_right
    )


def _is_highest(b: Builder, y: Var, labels: Var, axis: int = 1) -> Var:
    return b.Equal(b.ArgMax(y, axis=axis, keepdims=0), b.Cast(labels, to=INT64))


def _is_among_five(b: Builder, y: Var, labels: Var, axis: int = 1) -> Var:
    classes = b.size_of(y, axis % y.rank)
    _, best = b.TopK(y, b.Unsqueeze(b.Min(classes, b.const(5)), [0]), axis=axis, outputs=2)
    hit = b.Equal(best, b.Unsqueeze(b.Cast(labels, to=INT64), [axis]))
    right = b.ReduceMax(b.Cast(hit, to=INT32), [axis], keepdims=0)
    return b.Cast(right, to=BOOL)


def _binary_accuracy(b: Builder, y: Var, labels: Var, options: Mapping[str, Any]) -> Var:
    return b.ReduceMean(b.Cast(b.Equal(y > 0.0, labels > 0.5), to=FLOAT), keepdims=0)


def _mse(b: Builder, y: Var, labels: Var, options: Mapping[str, Any]) -> Var:
    d = y - labels
    return b.ReduceMean(d * d, keepdims=0)


def _mae(b: Builder, y: Var, labels: Var, options: Mapping[str, Any]) -> Var:
    return b.ReduceMean(b.Abs(y - labels), keepdims=0)


ACCURACY, BINARY_ACCURACY, TOP5 = _share_of(_is_highest), InStep(_binary_accuracy), _share_of(_is_among_five)
MSE, MAE = InStep(_mse), InStep(_mae)
