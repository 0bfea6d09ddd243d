"""Classification losses over integer targets.

Both losses are ℓᵢ = -wᵢ·log pᵢ with pᵢ the probability of the target of row i and wᵢ the weight of its class
(1 without weights, 0 where the target is `ignore_index`), summed, averaged (Σℓ/Σw) or left as they are.
With kᵢ = ∂L/∂ℓᵢ·wᵢ, all that is left is to write to the targets. A row that is ignored gets 0, even
where a mean over ignored rows only is 0/0 = NaN.

One class per row makes the indices of GatherElements and ScatterElements unique along the class axis, so
nothing has to be added up there; a OneHot times a tensor is twice as slow.
"""

from __future__ import annotations

import math
from typing import Any

from onnxgrad.ir import Var, expand_to
from onnxgrad.ir.match import not_none
from onnxgrad.rules.index import scatter
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import rule
from onnxgrad.rules.rule import Cotangents, Result


class _Targets:
    """The targets of a loss: the class index of each row, its weight, and the share of the cotangent."""

    def __init__(self, op: Op, g: Var, labels: Var, weights: Var | None, like: Var) -> None:
        ignore = op.attr("ignore_index")
        self.op, self.weights, self.like = op, weights, like
        self.mean = op.attr("reduction") == "mean"
        self.ignored = None
        if ignore is not None:
            self.ignored = op.Equal(labels, op.const(ignore, labels.dtype))
            labels = op.Where(self.ignored, op.const(0, labels.dtype), labels)
        self.labels = labels
        self.weight = None if weights is None else self.counted(op.Gather(weights, labels, axis=0))
        self.share = g * self._reciprocal_size() if self.mean else g  # ∂L/∂ℓ, a scalar or one number per row
        reduction = ("none", "sum", "mean").index(op.attr("reduction"))
        self.settings = {"ignores": int(ignore is not None), "ignored": ignore or 0, "reduction": reduction}

    def counted(self, z: Var) -> Any:
        """`z` where a row counts, 0 where its target is ignored."""
        return z if self.ignored is None else self.op.Where(self.ignored, 0.0, z)

    def _reciprocal_size(self) -> Any:
        """1/Σ w, the factor of a mean."""
        op, dtype = self.op, self.like.dtype
        if self.weight is not None:
            return op.Reciprocal(op.ReduceSum(self.weight, keepdims=0))
        if self.ignored is not None:
            count = op.ReduceSum(op.Cast(op.Not(self.ignored), to=int(dtype or 0)), keepdims=0)
            return op.Reciprocal(count)
        dims = self.labels.shape or ()
        known = [d for d in dims if isinstance(d, int)]
        if self.labels.shape is not None and len(known) == len(dims):
            return 1 / max(1.0, float(math.prod(known)))
        return op.Reciprocal(op.Cast(op.Size(self.labels), to=int(dtype or 0)))

    @property
    def at(self) -> Var:
        """The class of each row as an index along axis 1."""
        return self.op.Unsqueeze(self.labels, [1])

    def scale(self) -> Var:
        """k = ∂L/∂ℓ·w per row, with an axis of size 1 for the class."""
        op = self.op
        k = self.share if self.weights is None else self.share * op.Gather(self.weights, self.labels, axis=0)
        return op.Unsqueeze(expand_to(self.counted(k), self.labels), [1])

    def to_weights(self, log_prob: Var, loss: Var) -> Var:
        """∂L/∂w: Σ over the rows of a class of -g·log p, and for a mean of (-log p - L)·g/Σw."""
        op = self.op
        row = -op.Squeeze(op.GatherElements(log_prob, self.at, axis=1), [1])
        row = self.counted((row - loss if self.mean else row) * self.share)
        return scatter(op, op.reshape(row, [-1]), op.reshape(self.labels, [-1]), not_none(self.weights), 0)


@rule("NegativeLogLikelihoodLoss", wrt=(0, 2))
def negative_log_likelihood_loss(op: Op, g: Var, log_prob: Var, labels: Var, weights: Var | None, loss: Var) -> Result:
    """L = -Σᵢ wᵢ·xᵢₜ (/Σ w): -k at the targets and 0 elsewhere; Σ -g·xₜ (or (-xₜ - L)·g/Σw) by class"""
    targets = _Targets(op, g, labels, weights, log_prob)
    to_input = None
    if op.needs[0]:
        to_input = scatter(op, -targets.scale(), targets.at, log_prob, 1, unique=True)
    to_weights = targets.to_weights(log_prob, loss) if op.needs[2] and weights is not None else None
    return to_input, None, to_weights


@rule("SoftmaxCrossEntropyLoss", wrt=(0, 2))
def softmax_cross_entropy_loss(
    op: Op, gs: Cotangents, scores: Var, labels: Var, weights: Var | None, loss: Var
) -> Result:
    """L = -Σᵢ wᵢ·log pᵢₜ (/Σ w) with p = softmax x: k·p, but k·(p - 1) at the targets; weights as above

    log p is the node's own second output, whose cotangent passes through LogSoftmax.
    """
    g, g_log_prob = (*gs, None)[:2]
    log_prob = op.output(1)
    to_scores = to_weights = None
    if g is not None:
        targets = _Targets(op, g, labels, weights, scores)
        if op.needs[0]:
            k = targets.scale()
            hit = op.Exp(op.GatherElements(log_prob, targets.at, axis=1)) - 1
            to_scores = op.ScatterElements(op.Exp(log_prob) * k, targets.at, hit * k, axis=1)
            if g_log_prob is None and not op.needs[2]:
                ends = [op.outputs[0], to_scores]
                op.named("SoftmaxCrossEntropy", ends, of=[scores, labels, weights, targets.share], **targets.settings)
        if op.needs[2] and weights is not None:
            to_weights = targets.to_weights(log_prob, loss)
    if g_log_prob is not None:
        through = g_log_prob - op.Exp(log_prob) * op.ReduceSum(g_log_prob, [1], keepdims=1)
        to_scores = through if to_scores is None else to_scores + through
    return to_scores, None, to_weights
