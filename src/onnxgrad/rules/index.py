"""Operators that select elements of a tensor; the cotangent is scattered back to their places.

Where the same element may be picked twice, the sum is left to ScatterElements(add): ScatterND(add)
races on repeated indices in ONNX Runtime. A selection along axes that is known while the graph is
written needs no indices: its transpose is a Pad with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var, reshape_to
from onnxgrad.ir.constants import slice_indices, window_slices
from onnxgrad.ir.operators import Kind
from onnxgrad.ir.shapes import same_dim
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear, rule
from onnxgrad.rules.rule import Result, Symbolic, Tangents

_ENDLESS = 2**31 - 1


def numbered(op: Op, x: Var) -> Var:
    """An int64 tensor 0, 1, 2, … in row-major order, in the shape of `x`."""
    shape = op.shape_of(x)
    count = op.Size(x) if shape.const is None else op.const(int(shape.const.prod()))
    return reshape_to(op.Range(op.const(0), count, op.const(1)), x)


def scatter(op: Op | Builder, g: Var, index: Var, x: Var, axis: int, unique: bool = False) -> Var:
    """Zeros in the shape of `x`, with `g` added at `index` along `axis` (in float32 for half types)."""
    axis %= x.rank
    if g.shape is not None and 0 in g.shape:  # ONNX Runtime takes an Expand of the index to no elements away
        return op.zeros_like(x)
    if unique:
        return op.ScatterElements(op.zeros_like(x), index, g, axis=axis)
    g = op.widen(g)  # ONNX Runtime adds no halves, and a long sum should not be rounded at each step
    zeros = op.Expand(op.const(0.0, g.dtype), op.shape_of(x)) if x.rank else op.const(0.0, g.dtype)
    return op.cast_like(op.ScatterElements(zeros, index, g, axis=axis, reduction="add"), x)


def put_back(op: Op, g: Var, picked: Any, x: Var, unique: bool = False) -> Var:
    """Σ of `g` at the places of `x` whose row-major numbers are `picked`, in the shape of `x`."""
    flat = op.Reshape(x, [-1])
    return reshape_to(scatter(op, op.Reshape(g, [-1]), op.Reshape(picked, [-1]), flat, 0, unique), x)


def put_rows(op: Op | Builder, g: Var, index: Var, x: Var, axis: int, unique: bool = False) -> Var:
    """Σ of `g` at the rows `index` (a vector) of `x` along `axis`; g has one row per index."""
    row = [1] * x.rank
    row[axis] = -1
    spread = op.Expand(op.Reshape(index, row), op.shape_of(g)) if x.rank > 1 else index
    return scatter(op, g, spread, x, axis, unique)


# --- Slice -------------------------------------------------------------------------------------


def _cuts(x: Var, starts: Any, ends: Any, axes: Any, steps: Any) -> Any:
    """(axis, start, end, step) per sliced axis, or None where one is computed or may count from an unknown end.

    A computed end is None: the start and the size of a slice determine the rest.
    """
    known = [None if v is None else v.const for v in (starts, axes, steps)]
    if x.shape is None or any(v is not None and k is None for v, k in zip((starts, axes, steps), known)):
        return None
    first, along, stride = known
    assert first is not None
    along = np.arange(len(first)) if along is None else along
    stride = np.ones_like(first) if stride is None else stride
    if ends.const is None:
        whole = first.min() >= 0 and (stride == 1).all()
        return [(int(a) % x.rank, int(s), None, 1) for a, s in zip(along, first)] if whole else None
    return [(int(a) % x.rank, int(s), int(e), int(d)) for a, s, e, d in zip(along, first, ends.const, stride)]


def _margins(op: Op, g: Var, x: Var, axis: int, start: Any, end: Any) -> Any:
    """The numbers of elements that x[start:end] leaves out before and after, as lists or vectors of one.

    If the end is computed (None), the size of `g` is the length.
    """
    size = x.dims[axis]
    if end is None and start == 0 and same_dim(g.dims[axis], size):
        return [0], [0]
    if isinstance(size, int) and end is not None:
        taken = range(*slice(start, end).indices(size))
        return [taken.start], [size - taken.start - len(taken)]
    along = op.shape_of(x, axis, axis + 1)
    before = [0] if start == 0 else op.Min(along, [start]) if start > 0 else op.Max(along + start, [0])
    if end is not None and end >= _ENDLESS:
        return before, [0]
    taken = op.Shape(g, start=axis, end=axis + 1)  # not the declared size: that often assumes start and end in range
    return before, along - taken - (op.join(before) if start else 0)


def _unstride(op: Op, g: Var, x: Var, axis: int, start: Any, end: Any, step: int) -> tuple[Var, int, int]:
    """The cotangent of x[start:end:step] as that of a slice with step 1: (g between zeros, start, end)."""
    size = x.dims[axis]
    assert isinstance(size, int)
    taken = slice_indices(size, start, end, step)
    if not len(taken):
        return g, 0, 0
    if step < 0:
        g = op.Slice(g, [-1], [-(2**63)], [axis], [-1])
        taken = taken[::-1]
    gap = abs(step) - 1
    if gap and len(taken) > 1:
        apart = op.Pad(op.Unsqueeze(g, [axis + 1]), [0, gap], None, [axis + 1])
        joined = op.join(op.shape_of(g, 0, axis), [len(taken) * (gap + 1)], op.shape_of(g, axis + 1))
        g = op.Slice(op.reshape(apart, joined), [0], [-gap], [axis])
    return g, taken.start, taken[-1] + 1


@linear("Slice")
def slice_(op: Op, g: Var, x: Var, starts: Var, ends: Var, axes: Var, steps: Var) -> Result:
    """y = x[start:end:step]: g at these places, 0 elsewhere"""
    cuts = _cuts(x, starts, ends, axes, steps)
    if cuts is None or any(d != 1 and not isinstance(x.dims[a], int) for a, _, _, d in cuts):
        return put_back(op, g, op.replay(numbered(op, x), starts, ends, axes, steps), x, unique=True)
    return _unslice(op, g, x, cuts)


def _unslice(op: Op, g: Var, x: Var, cuts: Sequence[tuple[int, Any, Any, int]]) -> Var:
    """`g` at the slices `cuts` (axis, start, end, step) of zeros in the shape of `x`."""
    befores, afters, along = [], [], []
    for axis, start, end, step in cuts:
        if step != 1:
            g, start, end = _unstride(op, g, x, axis, start, end, step)
        before, after = _margins(op, g, x, axis, start, end)
        if before != [0] or after != [0]:
            befores.append(before)
            afters.append(after)
            along.append(axis)
    return op.Pad(g, op.join(*befores, *afters), None, along) if along else g


# --- Gather and its kin ------------------------------------------------------------------------


@dataclass(frozen=True)
class Scattered(Symbolic):
    """Σ of `g` at the slices `index` of `x` along `axis`, 0 for slices that were not picked."""

    g: Var
    index: Var
    x: Var
    axis: int

    def write(self) -> Var:
        """Emit the sum."""
        o, g, index = self.g.builder, self.g, self.index
        if index.rank != 1:
            g = o.reshape(g, o.join(o.shape_of(self.x, 0, self.axis), [-1], o.shape_of(self.x, self.axis + 1)))
            index = o.Reshape(index, [-1])
        dx = put_rows(o, g, index, self.x, self.axis)
        if self.axis == 0:
            o.named("GatherGrad", [dx], of=[self.g, self.index, self.x])
        return dx


@linear("Gather")
def gather(op: Op, g: Var, x: Var, index: Var) -> Result:
    """y = x[…, i, …] along an axis: Σ over repeated i of g, 0 for rows that were not picked"""
    axis = op.attr("axis") % x.rank
    if index.rank == 0 and index.const is not None:
        i = int(index.const)
        rows = op.Unsqueeze(g, [axis])
        before, after = _margins(op, rows, x, axis, i, i + 1 or _ENDLESS)
        return op.Pad(rows, op.join(before, after), None, [axis])
    windows = None if x.shape is None or index.const is None else window_slices(x.dims[axis], index.const)
    if windows is not None:
        along, slices = windows
        rows = op.Split(g, [1] * len(slices), outputs=len(slices), axis=axis + along) if len(slices) > 1 else [g]
        parts = [_unslice(op, op.Squeeze(r, [axis + along]), x, [(axis, *cut)]) for r, cut in zip(rows, slices)]
        return functools.reduce(op.Add, parts)
    return Scattered(g, index, x, axis)


@linear("GatherElements")
def gather_elements(op: Op, g: Var, x: Var, index: Var) -> Result:
    """y[…, j, …] = x[…, i[…, j, …], …]: Σ over repeated i of g"""
    return scatter(op, g, index, x, op.attr("axis"))


@linear("GatherND")
def gather_nd(op: Op, g: Var, x: Var, index: Var) -> Result:
    """y[j] = x[i[j]], with several indices at once: Σ over repeated i of g"""
    depth = None if index.shape is None or x.shape is None or op.attr("batch_dims") else index.shape[-1]
    if depth == 1:
        return Scattered(g, op.Squeeze(index, [-1]), x, 0)
    if not isinstance(depth, int) or depth == x.rank:
        return put_back(op, g, op.replay(numbered(op, x), index), x)
    rows = op.reshape(x, op.join([-1], op.shape_of(x, depth)))
    places = op.Reshape(op.places_along(rows, 0), op.shape_of(x, 0, depth))
    return reshape_to(Scattered(g, op.GatherND(places, index), rows, 0).write(), x)


@linear("Compress")
def compress(op: Op, g: Var, x: Var, condition: Var) -> Result:
    """y = the slices of x where c holds: g at these, 0 elsewhere"""
    axis = op.attr("axis")
    if axis is None:
        return put_back(op, g, op.replay(numbered(op, x), condition), x, unique=True)
    axis %= x.rank
    size = op.size_of(x, axis)
    rows = op.Compress(op.Range(op.const(0), size, op.const(1)), condition, axis=0)
    return put_rows(op, g, rows, x, axis, unique=True)


def _top_k_jvp(op: Op, tangents: Tangents) -> Result:
    axis = op.attr("axis") % tangents[0].rank
    return op.GatherElements(tangents[0], op.output(1), axis=axis), None


@rule("TopK", wrt=(0,), jvp=_top_k_jvp, kind=Kind.ALONG_AXIS, piecewise_linear=True)
def top_k(op: Op, g: Var, x: Var) -> Result:
    """y = the k largest or smallest x along an axis, at i: g at i, 0 elsewhere"""
    return scatter(op, g, op.output(1), x, op.attr("axis"), unique=True)


def _unique_jvp(op: Op, tangents: Tangents, x: Var) -> Result:
    axis = op.attr("axis")
    t = op.Reshape(tangents[0], [-1]) if axis is None else tangents[0]
    return op.Gather(t, op.output(1), axis=axis or 0)


@rule("Unique", wrt=(0,), jvp=_unique_jvp)
def unique(op: Op, g: Var, x: Var) -> Result:
    """y = the distinct elements of x, or slices along an axis: g at the first occurrence of each, 0 elsewhere"""
    axis = op.attr("axis")
    if axis is None:
        return put_back(op, g, op.output(1), x, unique=True)
    return put_rows(op, g, op.output(1), x, axis % x.rank, unique=True)


@linear("OneHot", wrt=(2,))
def one_hot(op: Op, g: Var, index: Var, depth: Var, values: Var) -> Result:
    """y = v₁ where hot, else v₀: (Σ g where cold, Σ g where hot)"""
    hot = op.Cast(op.replay(index, depth, op.const([0, 1], values.dtype)), to=int(ir.DataType.BOOL))
    sums = [op.ReduceSum(op.Where(hot, *parts), None, keepdims=0) for parts in ((0.0, g), (g, 0.0))]
    return None, None, op.Concat(*[op.Reshape(s, [1]) for s in sums], axis=0)
