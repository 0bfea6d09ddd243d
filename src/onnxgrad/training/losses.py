"""Losses, as operators: scalars of a prediction and its labels.

Labels have the type and shape of the prediction, or are class numbers (int64) without its class axis.
Where a model ends in the very activation that a loss contains, the loss is taken of what goes into it:
the value is the same, and nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var

Dims = tuple[int | ir.SymbolicDim, ...]


@dataclass(frozen=True)
class Loss:
    """One loss.

    Attributes:
        write: emits it, given prediction, labels and options.
        options: its options with their defaults.
        classes: whether the labels are class numbers.
        contains: the activation that it contains, which is stripped off the prediction.
    """

    write: Callable[..., Var]
    options: Mapping[str, Any]
    classes: bool = False
    contains: str = ""


LOSSES: dict[str, Loss] = {}


def _loss(name: str, *, classes: bool = False, contains: str = "", **options: Any) -> Callable[[Any], Any]:
    def register(function: Callable[..., Var]) -> Callable[..., Var]:
        LOSSES[name] = Loss(function, {"reduction": "mean", **options}, classes, contains)
        return function

    return register


def _reduce(b: Builder, x: Var, reduction: str) -> Var:
    return (b.ReduceMean if reduction == "mean" else b.ReduceSum)(x, keepdims=0)


def _classes_second(b: Builder, x: Var, axis: int) -> Var:
    """`x` with its class axis second, where the operators expect it."""
    axis %= x.rank
    if axis == 1:
        return x
    others = [a for a in range(x.rank) if a != axis]
    return b.Transpose(x, perm=[others[0], axis, *others[1:]])


def _weight(b: Builder, weight: Any, like: Var) -> Var | None:
    return None if weight is None else b.const(np.asarray(weight, np.float64), like.dtype)


@_loss("cross_entropy", classes=True, contains="Softmax", axis=1, ignore_index=None, weight=None)
def cross_entropy(b, y, labels, reduction, axis, ignore_index, weight):  # type: ignore[no-untyped-def]
    """-log softmax(y)[label], averaged over the labels that count (weighted, if classes have weights)"""
    y, weight = _classes_second(b, y, axis), _weight(b, weight, y)
    return b.SoftmaxCrossEntropyLoss(y, labels, weight, reduction=reduction, ignore_index=ignore_index)


@_loss("nll", classes=True, axis=1, ignore_index=None, weight=None)
def nll(b, y, labels, reduction, axis, ignore_index, weight):  # type: ignore[no-untyped-def]
    """-y[label] for log-probabilities y, averaged over the labels that count"""
    y, weight = _classes_second(b, y, axis), _weight(b, weight, y)
    return b.NegativeLogLikelihoodLoss(y, labels, weight, reduction=reduction, ignore_index=ignore_index)


@_loss("mse")
def mse(b, y, labels, reduction):  # type: ignore[no-untyped-def]
    """(y - t)²"""
    d = y - labels
    return _reduce(b, d * d, reduction)


@_loss("l1")
def l1(b, y, labels, reduction):  # type: ignore[no-untyped-def]
    """|y - t|"""
    return _reduce(b, b.Abs(y - labels), reduction)


@_loss("huber", delta=1.0)
def huber(b, y, labels, reduction, delta):  # type: ignore[no-untyped-def]
    """d²/2 where |d| ≤ δ, else δ(|d| - δ/2), for d = y - t: c·(d - c/2) with c = d clipped to ±δ"""
    if not delta > 0:
        raise BadInput(f"huber: delta must be positive, not {delta}")
    d = y - labels
    c = b.Clip(d, -float(delta), float(delta))
    return _reduce(b, c * (d - b.Mul(c, 0.5)), reduction)


@_loss("bce_with_logits", contains="Sigmoid")
def bce_with_logits(b, y, labels, reduction):  # type: ignore[no-untyped-def]
    """-t·log σ(y) - (1 - t)·log(1 - σ(y)) = softplus(y) - t·y, which no y overflows"""
    return _reduce(b, b.Softplus(y) - labels * y, reduction)


def loss_named(name: str, options: Mapping[str, Any]) -> tuple[Loss, dict[str, Any]]:
    """The loss called `name` and all of its options; BadInput for a name or an option there is not."""
    if name not in LOSSES:
        raise BadInput(f"there is no loss {name!r}; there are: {', '.join(LOSSES)}")
    loss = LOSSES[name]
    for option in options:
        if option not in loss.options:
            raise BadInput(f"the loss {name!r} has no option {option!r}; it has: {', '.join(loss.options)}")
    chosen = {**loss.options, **options}
    if chosen["reduction"] not in ("mean", "sum"):
        raise BadInput(f"reduction must be 'mean' or 'sum' (a loss is a scalar), not {chosen['reduction']!r}")
    return loss, chosen


def prediction(loss: Loss, value: ir.Value, options: Mapping[str, Any]) -> ir.Value:
    """What `loss` is taken of where `value` is given: the argument of the activation that it contains."""
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx") or node.op_type != loss.contains:
        return value
    if loss.classes and value.shape is not None:
        given = node.attributes.get("axis")
        rank = len(value.shape)
        if (-1 if given is None else given.as_int()) % rank != options["axis"] % rank:
            return value
    assert node.inputs[0] is not None
    return node.inputs[0]


def labels_of(loss: Loss, y: ir.Value, options: Mapping[str, Any]) -> tuple[ir.DataType, Dims | None]:
    """Type and shape of the labels that belong to the prediction `y`."""
    dims = None if y.shape is None else tuple(y.shape)
    if not loss.classes:
        return y.dtype or ir.DataType.FLOAT, dims
    if dims is not None:
        if len(dims) < 2:
            raise BadInput(f"{y.name!r} has shape {list(dims)}; classes need an axis beside that of the batch")
        axis = options["axis"] % len(dims)
        dims = dims[:axis] + dims[axis + 1 :]
    return ir.DataType.INT64, dims
