"""Connectionist temporal classification (Graves et al. 2006): -log of the sum over all alignments of a label sequence.

The forward algorithm in the space of logarithms, one Scan over time, all sequences and all states of a batch at once.
A label sequence l₁…l_L becomes the 2L + 1 states  _ l₁ _ l₂ … l_L _  with blanks between; with e_t(s) the
log-probability of state s at time t,

    α_t(s) = e_t(s) + log(exp α_{t-1}(s) + exp α_{t-1}(s-1) + [s may be reached from s-2] exp α_{t-1}(s-2))

(a label may be, unless the label before it is the same; a blank may not), and the result is -log(exp α_T(2L) + exp α_T(2L-1)). Two dead states in front spare the borders, and starting in
state 0 *before* the first step spares the first step. The logarithm of 0 is a large finite number, so no
difference of infinities arises. The derivative is that of the Scan: the backward algorithm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.flow.bodies import empty, formal, give
from onnxgrad.flow.iteration import Slot, scan
from onnxgrad.ir import Builder, Var

#: Stands for log 0: far below every log-probability, and far from the end of float32.
DEAD = -1e30


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
    if y.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        y = b.Cast(y, to=int(ir.DataType.FLOAT))
    labels = _int64(b, labels)
    padding = b.Or(b.Less(labels, b.const(0)), b.Equal(labels, b.const(blank)))
    if label_lengths is None:
        label_lengths = b.ReduceSum(b.Cast(b.Not(padding), to=int(ir.DataType.INT64)), [1], keepdims=0)
    label_lengths = _int64(b, label_lengths)
    states = _with_blanks(b, b.Where(padding, b.const(blank), labels), blank)
    count = b.shape_of(states, 1, 2)
    index = b.Expand(b.Unsqueeze(states, [time]), b.join(b.shape_of(y, 0, 2), count))
    emitted = b.Max(b.GatherElements(b.LogSoftmax(y, axis=-1), index, axis=2), DEAD)
    rows = b.shape_of(labels, 0, 1)
    start = b.Concat(
        b.Expand(b.const(np.array([[DEAD, DEAD, 0.0]]), y.dtype), b.join(rows, [3])),
        b.Expand(b.const(np.array([[DEAD]]), y.dtype), b.join(rows, b.Sub(count, [1]))),
        axis=1,
    )
    last = _forward(b, start, emitted, _jumps(b, states, y), input_lengths, time)
    ends = b.Unsqueeze(b.Mul(label_lengths, 2), [1]) + b.const(np.array([[1, 2]]))
    likelihood = b.ReduceLogSumExp(b.GatherElements(last, ends, axis=1), [1], keepdims=0)
    return b.Where(likelihood < DEAD / 2, float("inf"), -likelihood), label_lengths


def _int64(b: Builder, x: Var) -> Var:
    return x if x.dtype == ir.DataType.INT64 else b.Cast(x, to=int(ir.DataType.INT64))


def _with_blanks(b: Builder, labels: Var, blank: int) -> Var:
    """_ l₁ _ l₂ … _: [N, S] → [N, 2S + 1]"""
    rows, count = b.shape_of(labels, 0, 1), b.shape_of(labels, 1, 2)
    column = b.Unsqueeze(labels, [2])
    pairs = b.Concat(column, b.Expand(b.const(blank), b.shape_of(column)), axis=2)
    first = b.Expand(b.const(np.array([[blank]])), b.join(rows, [1]))
    return b.Concat(first, b.Reshape(pairs, b.join(rows, b.Mul(count, 2)), allowzero=1), axis=1)


def _jumps(b: Builder, states: Var, y: Var) -> Var:
    """0 where a state may be reached from two before it, else log 0: [N, 2S + 1]. A blank equals the one before it."""
    before = b.Concat(
        b.Expand(b.const(np.array([[-1]])), b.join(b.shape_of(states, 0, 1), [2])),
        b.Slice(states, [0], [-2], [1]),
        axis=1,
    )
    # a label's first state has no state two before it but a dead one
    return b.Where(b.Equal(states, before), b.const(DEAD, y.dtype), b.const(0.0, y.dtype))


def _forward(b: Builder, start: Var, emitted: Var, jumps: Var, lengths: Var | None, time: int) -> Var:
    """α after the last step, with two dead states in front: [N, 2S + 3]."""
    inner, body = empty(b, "ctc")
    dims = None if emitted.shape is None else ir.Shape([emitted.shape[1 - time], emitted.shape[2]])
    like = ir.Value(name="", type=emitted.value.type, shape=dims)
    alpha, now = formal(inner, start.value, "alpha"), formal(inner, like, "emitted")
    reached = [
        inner.Slice(alpha, [2], [_END], [1]),
        inner.Slice(alpha, [1], [-1], [1]),
        inner.Slice(alpha, [0], [-2], [1]) + Var(inner, jumps.value),
    ]
    stacked = inner.Concat(*(inner.Unsqueeze(x, [0]) for x in reached), axis=0)
    after = inner.ReduceLogSumExp(stacked, [0], keepdims=0) + now
    dead = inner.Slice(alpha, [0], [2], [1])
    result = inner.Concat(dead, after, axis=1)
    scanned: list[tuple[Var, Slot]] = [(emitted, Slot(time))]
    formals = [alpha, now]
    if lengths is not None:  # a sequence that has ended stays where it is
        steps = b.Squeeze(b.shape_of(emitted, time, time + 1), [0])
        live = b.Less(b.Unsqueeze(b.Range(0, steps, 1), [1]), _int64(b, lengths))
        scanned.append((b.Unsqueeze(live, [2]), Slot()))
        shape = None if dims is None else ir.Shape([dims[0], 1])
        going = formal(inner, ir.Value(name="", type=ir.TensorType(ir.DataType.BOOL), shape=shape), "live")
        formals.append(going)
        result = inner.Where(going, result, alpha)
    body.inputs.extend([v.value for v in formals])
    give(inner, [result])
    for out in body.outputs:
        out.shape = start.value.shape
    (last,) = scan(b, body, [start], scanned, [])
    return last


_END = int(np.iinfo(np.int64).max)

__all__: list[Any] = ["DEAD", "ctc_rows"]
