"""The definition of a loss: its formula, its labels, the denominator of its mean, and its prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import HALF, not_none
from onnxgrad.training.graph.bounds import bounds
from onnxgrad.training.loss.label_inputs import Labels
from onnxgrad.training.loss.logits import Ending, logit, mixed, scores, sums_to_one
from onnxgrad.training.loss.score_blocks import OfRows, ScoreBlocks


@dataclass(frozen=True)
class LossFunction:
    """A loss by name.

    Attributes:
        write: emits it, given prediction, labels and options.
        options: its options with their defaults; the axis of the classes is found out (see `class_axis`).
        labels: returns its label inputs for a prediction and options.
        contains: the activations that it contains, which are stripped off the prediction.
        mean: what its mean is taken over: "elements" of the prediction, "labels" that count, their "weights", or
            "rows" of the batch; "batch" where examples of a batch are compared with each other.
        compares: what accuracy compares: "classes" (scores with class numbers), "binary" (logits with 0 or 1), or "".
        of_rows: for scores of very many classes: what the loss is of each row, given the weights of classes and the
            options; before a mean is taken, or a sum.
    """

    write: Callable[..., Var]
    options: Mapping[str, Any]
    labels: Callable[[ir.Value, Mapping[str, Any]], Labels]
    contains: tuple[str, ...] = ()
    mean: str = "elements"
    compares: str = ""
    of_rows: Callable[[Var | None, Mapping[str, Any]], OfRows] | None = None

    @property
    def takes(self) -> str:
        """The kind of predictions that the loss needs; empty for any numbers."""
        return "logits" if self.contains else "log-probabilities" if self.compares == "classes" else ""

    def compares_rows(self, options: Mapping[str, Any]) -> bool:
        """True if the loss compares the examples of a batch with each other."""
        return self.mean == "batch" or bool(options.get("batch"))

    def count(self, b: Builder, y: Var, labels: list[Var], options: Mapping[str, Any]) -> Var | None:
        """The denominator of the mean of a batch (or a multiple of it), a float scalar.

        None where examples are compared with each other, so that parts of a batch do not add up to it.
        """
        if self.compares_rows(options):
            return None
        if options.get("reduction", "mean") == "sum":
            return b.const(1.0, y.dtype)
        if self.mean in ("labels", "weights"):
            weight = options["weight"] if self.mean == "weights" else None
            return total(b, counted(b, labels[0], y, options["ignore_index"], weight))
        if self.mean == "elements":
            return b.cast_like(b.Size(y), y)
        if self.mean == "rows":
            return b.cast_like(b.size_of(labels[0] if labels else y, 0), y)
        return None

    def by_rows(
        self, b: Builder, y: Var, labels: list[Var], options: Mapping[str, Any], row_weights: Var
    ) -> tuple[Var, Var]:
        """The loss with a weight for each row, and the denominator of its mean: Σ w·l / Σ w·(what counts in the row).

        Raises:
            BadInput: examples are compared with each other, or have no mean of single labels.
        """
        if self.mean not in ("elements", "labels", "weights"):
            raise BadInput("row_weights are for losses of single rows; this loss compares several, or sequences")
        each = self.write(b, y, *labels, **{**options, "reduction": "none"})
        if self.mean == "elements":
            counts = b.full_like(each, 1.0)
        else:
            weight = options["weight"] if self.mean == "weights" else None
            counts = counted(b, labels[0], y, options["ignore_index"], weight)
        shape = b.join(b.Shape(labels[0], end=1), [-1])
        weights = b.Unsqueeze(row_weights, [1])
        summed, count = (total(b, weights * b.cast_like(b.Reshape(x, shape), weights)) for x in (each, counts))
        if options["reduction"] == "sum":
            return summed, b.const(1.0, y.dtype)
        count = b.Max(count, 1e-12)  # rows without weight have the loss 0, also as parts of a batch
        return summed / count, count

    def by_blocks(self, b: Builder, blocks: ScoreBlocks, y: Var, labels: Var, options: Mapping[str, Any],
                  others: Sequence[OfRows] = ()) -> list[Var]:  # fmt: skip
        """The loss of scores of very many classes, then the values of `others` for each row."""
        weights = weight_of(b, options["weight"], y)
        most = options["block_rows"] or blocks.at_a_time
        rows, *found = blocks.write(b, labels, [not_none(self.of_rows)(weights, options), *others], most)
        if y.dtype in HALF:  # sums of many rows, and their number, are too large
            rows = b.Cast(rows, to=int(ir.DataType.FLOAT))
        summed, ignored = total(b, rows), options["ignore_index"]
        if options["reduction"] == "mean" and weights is None and ignored is None:
            summed = summed / b.cast_like(b.Size(labels), rows)
        elif options["reduction"] == "mean":
            summed = summed / total(b, counted(b, labels, rows, ignored, options["weight"]))
        return [b.cast_like(summed, y), *found]


def prediction(
    loss: LossFunction, value: ir.Value, options: Mapping[str, Any], what: str, named: bool = False
) -> Ending:
    """The values that the loss called `what` compares, for `value`: the logits, if it contains the activation.

    Args:
        loss: the loss.
        value: a value of the model.
        options: of the loss.
        what: the name of the loss.
        named: the caller has chosen the value by its name.

    Raises:
        BadInput: the values are probabilities, which the loss does not take, and their logits are not known; or only a
            part of them can be scores, and the value was not `named`.
    """
    found = None
    if loss.contains == ("Sigmoid",):
        found = logit(value)
    elif loss.contains:
        found = scores(value, options["axis"])
    if found is not None:
        return found
    low, high = bounds(value) if loss.takes else (-math.inf, math.inf)
    shares = bool(loss.takes) and options.get("axis") is not None and sums_to_one(value, options["axis"])
    if shares or (low >= 0 and high <= 1):
        axis = "" if options.get("axis") is None else f" along axis {options['axis']}"
        why, hint = "", "cross_entropy finds the logits"
        kind = "shares of a sum" if shares else "numbers between 0 and 1"
        if loss.contains:
            why = f" and is not known to be their {loss.contains[0]}: the activation would be applied twice"
            hint = "name the value before the activation with `output` (--prediction)"
        raise BadInput(
            f"the loss {what!r} takes {loss.takes}{axis}, but {value.name!r} holds {kind}{why}\n  hint: {hint}"
        )
    if loss.takes and not named and (parts := mixed(value)) is not None:
        raise BadInput(
            f"the loss {what!r} takes {loss.takes}, but only a part of {value.name!r} can be scores: it joins "
            f"{parts[0].name!r}, numbers between 0 and 1, and {parts[1].name!r}, which are others (boxes?)\n"
            "  hint: name the value that holds the scores with `output` (--prediction)"
        )
    return Ending((value,), lambda b, get: get(value))


def as_scores(b: Builder, labels: Var, scores: Var) -> Var:
    """`labels` [rows, …], whose shape must be that of `scores` [rows, …, classes]: a flat order would not show it."""
    return b.Expand(labels, b.Shape(scores, end=scores.rank - 1)) if labels.rank > 1 else labels


def total(b: Builder, x: Var) -> Var:
    """The sum of all elements, a scalar."""
    return b.ReduceSum(x, keepdims=0)


def reduce_loss(b: Builder, x: Var, reduction: str) -> Var:
    """The mean or the sum of all elements; with the reduction "none", `x` itself."""
    if reduction == "none":
        return x
    return (b.ReduceMean if reduction == "mean" else b.ReduceSum)(x, keepdims=0)


def weight_of(b: Builder, weight: Any, like: Var) -> Var | None:
    """Weights of classes as a vector of the type of `like`."""
    return None if weight is None else b.const(np.atleast_1d(np.asarray(weight, np.float64)), like.dtype)


def counted(b: Builder, labels: Var, like: Var, ignore_index: Any, weight: Any) -> Var:
    """The weight of each label: that of its class (1 without weights), 0 for an ignored label."""
    ignored = None if ignore_index is None else b.Equal(labels, b.const(ignore_index, labels.dtype))
    if weight is None:
        counts = b.full_like(b.cast_like(labels, like), 1.0)
    else:
        known = labels if ignored is None else b.Where(ignored, b.const(0, labels.dtype), labels)
        counts = b.Gather(weight_of(b, weight, like), known)
    return counts if ignored is None else b.Where(ignored, 0.0, counts)
