"""Connectionist temporal classification (Graves et al. 2006): -log of the sum over all alignments of a label sequence.

The forward algorithm in the space of logarithms, one Scan over time, all sequences and all states of a batch at once.
A label sequence l₁…l_L becomes the 2L + 1 states  _ l₁ _ l₂ … l_L _  with blanks between; with e_t(s) the
log-probability of state s at time t,

    α_t(s) = e_t(s) + log(exp α_{t-1}(s) + exp α_{t-1}(s-1) + [s may be reached from s-2] exp α_{t-1}(s-2))

(labels allow it, unless the label before is the same; blanks do not), and the result is -log(exp α_T(2L) + exp
α_T(2L-1)). Starting in state 0 *before* the first step saves a special first step. The logarithm of 0 is a large finite
number, so no difference of infinities arises. After each step α is shifted by a whole number, which keeps its best
state near 0, and thereby the precision of differences for any length of sequence; whole numbers have no derivative, and
their sum is subtracted at the end. The derivative is that of the Scan: the backward algorithm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.control_flow.iteration import ScanAxis, scan
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import not_none
from onnxgrad.ir.subgraphs import empty, formal, give

#: Replaces log 0: far below every log-probability, and far from the end of float32.
DEAD = -1e30
#: Metadata of the node that gives the log-probabilities: the name of the labels, the blank, the axis of time.
METADATA = "onnxgrad.ctc"


def ctc_rows(
    b: Builder, y: Var, labels: Var, label_lengths: Var | None, input_lengths: Var | None, blank: int, time: int
) -> tuple[Var, Var]:
    """The loss per sequence [N] (infinite where the input is too short for any alignment), and the label lengths [N].

    Args:
        b: writes.
        y: scores [N, T, C] (`time` 1) or [T, N, C] (`time` 0); their log-softmax is taken.
        labels: [N, S], padded behind; negative numbers and `blank` are padding.
        label_lengths: [N]; default: what is not padding.
        input_lengths: [N]; default: T.
        blank: the class that stands for nothing.
        time: the axis of time.
    """
    y = b.widen(y)
    given, labels = labels, _int64(b, labels)
    padding = b.Or(b.Less(labels, b.const(0)), b.Equal(labels, b.const(blank)))
    if label_lengths is None:
        label_lengths = b.ReduceSum(b.Cast(b.Not(padding), to=int(ir.DataType.INT64)), [1], keepdims=0)
    label_lengths = _int64(b, label_lengths)
    states = _with_blanks(b, b.Where(padding, b.const(blank), labels), blank)
    n, width = _dimensions(b, y, labels, time)
    states.value.shape = ir.Shape([n, width])
    index = b.Expand(b.Unsqueeze(states, [time]), b.join(b.shape_of(y, 0, 2), b.shape_of(states, 1, 2)))
    index.value.shape = ir.Shape([n, y.shape[1], width] if time else [y.shape[0], n, width])  # type: ignore[index]
    likely = b.LogSoftmax(y, axis=-1)
    not_none(likely.value.producer()).metadata_props[METADATA] = f"{given.name} {blank} {time}"
    emitted = b.Max(b.GatherElements(likely, index, axis=2), DEAD)
    before = b.Expand(b.const(np.array([[0.0]]), y.dtype), b.join(b.shape_of(labels, 0, 1), [1]))
    start = b.Pad(before, b.join([0], b.Sub(b.shape_of(states, 1, 2), [1])), b.const(DEAD, y.dtype), [1])
    for value, shape in ((before, [n, 1]), (start, [n, width])):
        value.value.shape = ir.Shape(shape)
    last, moved = _forward(b, start, before, emitted, _jumps(b, states, y), input_lengths, time)
    ends = b.Unsqueeze(b.Mul(label_lengths, 2), [1]) + b.const(np.array([[0, 1]]))
    likelihood = b.ReduceLogSumExp(
        b.GatherElements(b.Pad(last, [1, 0], b.const(DEAD, y.dtype), [1]), ends, axis=1), [1], keepdims=0
    )
    loss = -(likelihood + b.Squeeze(moved, [1]))
    return b.Where(likelihood < DEAD / 1e3, float("inf"), loss), label_lengths


def _int64(b: Builder, x: Var) -> Var:
    return x if x.dtype == ir.DataType.INT64 else b.Cast(x, to=int(ir.DataType.INT64))


def _with_blanks(b: Builder, labels: Var, blank: int) -> Var:
    """_ l₁ _ l₂ … _: [N, S] → [N, 2S + 1]"""
    rows, count = b.shape_of(labels, 0, 1), b.shape_of(labels, 1, 2)
    column = b.Unsqueeze(labels, [2])
    pairs = b.Concat(column, b.Expand(b.const(blank), b.shape_of(column)), axis=2)
    first = b.Expand(b.const(np.array([[blank]])), b.join(rows, [1]))
    return b.Concat(first, b.Reshape(pairs, b.join(rows, b.Mul(count, 2)), allowzero=1), axis=1)


def _dimensions(b: Builder, y: Var, labels: Var, time: int) -> tuple[int | ir.SymbolicDim, int | ir.SymbolicDim]:
    """The numbers of sequences and states; unknown ones get one symbol each for all their occurrences."""
    n = None if y.shape is None else y.shape[1 - time]
    if n is None or (isinstance(n, ir.SymbolicDim) and not n.value):
        n = ir.SymbolicDim(b.names.fresh("sequences"))
    count = None if labels.shape is None else labels.shape[1]
    return n, 2 * count + 1 if isinstance(count, int) else ir.SymbolicDim(b.names.fresh("states"))


def _jumps(b: Builder, states: Var, y: Var) -> Var:
    """0 where a state may be reached from two before it, else log 0: [N, 2S + 1]. A blank equals the one before it."""
    before = b.Pad(states, [2, -2], b.const(-1), [1])
    before.value.shape = states.value.shape
    return b.Where(b.Equal(states, before), b.const(DEAD, y.dtype), b.const(0.0, y.dtype))


def _forward(
    b: Builder, start: Var, zero: Var, emitted: Var, jumps: Var, lengths: Var | None, time: int
) -> tuple[Var, Var]:
    """α after the last step, [N, 2S + 1], and its accumulated shift, [N, 1], which begins as `zero`."""
    inner, body = empty(b, "ctc")
    n, width = start.shape or (None, None)
    like = ir.Value(name="", type=emitted.value.type, shape=ir.Shape([n, width]))
    alpha, moved, now = (
        formal(inner, *of) for of in ((start.value, "alpha"), (zero.value, "moved"), (like, "emitted"))
    )
    dead = inner.const(DEAD, alpha.dtype)
    reached = [alpha, *(inner.Pad(alpha, [by, -by], dead, [1]) for by in (1, 2))]
    for x in reached:
        x.value.shape = start.value.shape
    reached[2] = reached[2] + Var(inner, jumps.value)
    stacked = inner.Concat(*(inner.Unsqueeze(x, [0]) for x in reached), axis=0)
    result = inner.ReduceLogSumExp(stacked, [0], keepdims=0) + now
    scanned: list[tuple[Var, ScanAxis]] = [(emitted, ScanAxis(time))]
    formals = [alpha, moved, now]
    if lengths is not None:  # a sequence that has ended keeps its state
        steps = b.size_of(emitted, time)
        live = b.Unsqueeze(b.Less(b.Unsqueeze(b.Range(0, steps, 1), [1]), _int64(b, lengths)), [2])
        live.value.shape = ir.Shape([emitted.shape[time] if emitted.shape else None, n, 1])
        scanned.append((live, ScanAxis()))
        like = ir.Value(name="", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([n, 1]))
        formals.append(formal(inner, like, "live"))
        result = inner.Where(formals[-1], result, alpha)
    body.inputs.extend([v.value for v in formals])
    up = inner.Max(inner.Floor(inner.ReduceMax(result, [1], keepdims=1)), -1e6)  # whole: without a derivative
    give(inner, [result - up, moved + up])
    for out, first in zip(body.outputs, (start, zero)):
        out.shape = first.value.shape
    last, total = scan(b, body, [start, zero], scanned, [])
    return last, total


__all__: list[Any] = ["DEAD", "ctc_rows"]
