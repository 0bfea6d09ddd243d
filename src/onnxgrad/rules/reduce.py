"""Reductions along axes, and the cumulative sum.

`restored` gives a reduced tensor the rank of its operand again, so that it broadcasts. The axes may be absent,
empty or computed in the graph. Axes count from the front: ONNX Runtime returns the shape of the operand for
a reduction of an empty tensor along a negative axis.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Var, expand_to, product, reshape_to
from onnxgrad.ir.constants import MOST_WRITTEN
from onnxgrad.ir.match import HALF
from onnxgrad.ir.operators import Kind
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear, rule
from onnxgrad.rules.rule import Result, Tangents
from onnxgrad.rules.step_functions import lowest

#: From more factors on, products without one of them are computed by a tree.
_FEW_FACTORS = 16
#: Up to so many factors along one axis, each is a tensor.
_FEW_PIECES = 8


def restored(op: Op, z: Var, x: Var, axes: Any) -> Var:
    """`z`, shaped like the output of a reduction of `x` along `axes`, with these axes back as size 1."""
    if op.attr("keepdims") or axes is None or (axes.const is not None and not axes.const.size):
        return z  # kept, or untouched, or a scalar, which broadcasts anyway
    return op.Unsqueeze(z, axes)


def total(op: Op, z: Var, axes: Any) -> Var:
    """Σ z along the axes that `op` reduces, kept as size 1."""
    return op.ReduceSum(z, axes, keepdims=1, noop_with_empty_axes=op.attr("noop_with_empty_axes"))


def reduced_axes(op: Op, x: Var, axes: Any) -> Any:
    """The axes that `op` reduces, sorted and counted from the front; None if the graph computes them."""
    if axes is not None and axes.const is None:
        return None
    if axes is None or not axes.const.size:
        return [] if op.attr("noop_with_empty_axes") else list(range(x.rank))
    return sorted({int(a) % x.rank for a in axes.const.ravel()})


@linear("ReduceSum", kind=Kind.REDUCTION, total=True)
def reduce_sum(op: Op, g: Var, x: Var, axes: Var) -> Result:
    """y = Σ x: g, expanded to the shape of x"""
    return expand_to(restored(op, g, x, axes), x)


@linear("ReduceMean", kind=Kind.REDUCTION, total=True)
def reduce_mean(op: Op, g: Var, x: Var, axes: Var, y: Var) -> Result:
    """y = Σ x/n: g/n, expanded to the shape of x"""
    known = reduced_axes(op, x, axes) if x.shape is not None else None
    dims = [] if known is None else [d for a in known if isinstance(d := x.dims[a], int)]
    if known is not None and len(dims) == len(known):
        share = g * (1 / max(1, math.prod(dims)))
    else:  # the number of elements of x per element of y; an empty y is not divided by
        count = op.Div(op.Size(x), op.Max(op.Size(y), op.const(1, ir.DataType.INT64)))
        share = g / op.Cast(count, to=int(g.dtype or 0))
    return expand_to(restored(op, share, x, axes), x)


@rule("ReduceMax", "ReduceMin", wrt=(0,), kind=Kind.REDUCTION, total=True, piecewise_linear=True)
def reduce_max(op: Op, g: Var, x: Var, axes: Var, y: Var) -> Result:
    """y = max x: g·[x = y]/(number of maxima), so ties share evenly"""
    wide = op.widen(x)  # see `extrema._extremum`
    top = op.replay(wide, axes) if x.dtype in HALF else y
    hit = op.Cast(op.Equal(wide, restored(op, top, x, axes)), to=int(x.dtype or 0))
    return hit * (restored(op, g, x, axes) / total(op, hit, axes))


@rule("ReduceL1", wrt=(0,), kind=Kind.REDUCTION, piecewise_linear=True)
def reduce_l1(op: Op, g: Var, x: Var, axes: Var) -> Result:
    """y = Σ |x|: g·sign x, with 0 at the kink"""
    return op.Sign(x) * restored(op, g, x, axes)


@rule("ReduceL2", wrt=(0,), kind=Kind.REDUCTION)
def reduce_l2(op: Op, g: Var, x: Var, axes: Var, y: Var) -> Result:
    """y = √Σ x²: g·x/y, with 0 where y = 0"""
    zero = op.Equal(y, 0.0)
    scale = op.Where(zero, 0.0, g / op.Where(zero, 1.0, y))
    return x * restored(op, scale, x, axes)


@rule("ReduceSumSquare", wrt=(0,), kind=Kind.REDUCTION, total=True)
def reduce_sum_square(op: Op, g: Var, x: Var, axes: Var) -> Result:
    """y = Σ x²: g·2x"""
    return x * restored(op, g * 2, x, axes)


@rule("ReduceLogSum", wrt=(0,), kind=Kind.REDUCTION)
def reduce_log_sum(op: Op, g: Var, x: Var, axes: Var, y: Var) -> Result:
    """y = log Σ x: g·exp(-y), expanded to the shape of x"""
    return expand_to(restored(op, g * op.Exp(-y), x, axes), x)


@rule("ReduceLogSumExp", wrt=(0,), kind=Kind.REDUCTION)
def reduce_log_sum_exp(op: Op, g: Var, x: Var, axes: Var, y: Var) -> Result:
    """y = log Σ exp x: g·exp(x - y), with 0 where y = -∞"""
    floor = op.Max(y, lowest(y.dtype))  # so that -∞ - y stays -∞
    return op.Exp(x - restored(op, floor, x, axes)) * restored(op, g, x, axes)


@rule("ReduceProd", wrt=(0,), kind=Kind.REDUCTION)
def reduce_prod(op: Op, g: Var, x: Var, axes: Var, y: Var) -> Result:
    """y = Π x: gᵢ·Πⱼ≠ᵢ xⱼ

    The products without one factor are computed directly, so they are right at any number of zeros and to any order,
    where y/x is not: over a copy of the reduced elements for each of them, with a 1 in its place, or by halves.
    """
    known = reduced_axes(op, x, axes)
    if known is None:
        return _others_by_group(op, x, restored(op, y, x, axes)) * restored(op, g, x, axes)
    if not known:
        return g
    last = [a for a in range(x.rank) if a not in known] + known  # the reduced axes to the end, flattened
    moved = x if last == list(range(x.rank)) else op.Transpose(x, perm=last)
    head = x.rank - len(known)
    sizes = [d for a in known if isinstance(d := x.dims[a], int)]
    count = math.prod(sizes) if len(sizes) == len(known) else 0
    if len(known) == 1 < count <= _FEW_PIECES:
        pieces = op.Split(x, [1] * count, axis=known[0], outputs=count)
        return op.Concat(*_others(pieces), axis=known[0]) * restored(op, g, x, axes)
    if count > _FEW_FACTORS:
        factor = op.reshape(_others_by_tree(op, op.Reshape(moved, [-1, count]), count), op.shape_of(moved))
    else:
        shape, rows, diagonal = _rows(op, moved, head)
        factor = op.reshape(op.ReduceProd(op.Where(diagonal, 1.0, rows), [head + 1], keepdims=0), shape)
    back = factor if moved is x else op.Transpose(factor, perm=[last.index(a) for a in range(x.rank)])
    return back * restored(op, g, x, axes)


def _others(x: Sequence[Var]) -> list[Var]:
    """Πⱼ≠ᵢ xⱼ for each of two or more tensors: those within a half, times all of the other half."""
    if len(x) == 2:
        return [x[1], x[0]]
    halves = x[: len(x) // 2], x[len(x) // 2 :]
    wholes = [functools.reduce(operator.mul, half) for half in halves]
    return [
        z
        for half, rest in zip(halves, reversed(wholes))
        for z in ([rest] if len(half) == 1 else [others * rest for others in _others(half)])
    ]


def _others_by_tree(op: Op, x: Var, count: int) -> Var:
    """Πⱼ≠ᵢ xⱼ in each row of `x`, of `count` elements: products of pairs, of pairs of pairs, …, and back down."""
    width = 1 << (count - 1).bit_length()
    level = op.Pad(x, [0, 0, 0, width - count], op.const(1, x.dtype)) if width > count else x
    pairs = []
    while width > 1:
        width //= 2
        pairs.append(op.Split(op.Reshape(level, [-1, width, 2]), [1, 1], axis=2, outputs=2))
        level = pairs[-1][0] * pairs[-1][1]
    others = None
    for left, right in reversed(pairs):
        siblings = op.Concat(right, left, axis=2)
        others = siblings if others is None else siblings * op.Reshape(others, [-1, width, 1])
        width *= 2
    return op.Slice(op.Reshape(others, [-1, width]), [0], [count], [1])


def _others_by_group(op: Op, x: Var, y: Var) -> Var:
    """Πⱼ≠ᵢ xⱼ over the elements that share an element of `y` with xᵢ, where the graph computes the axes.

    No Transpose can then bring them together; a sort of the elements of x by their element of y can.
    """
    zero, one = op.const(0), op.const(1)
    groups, count = op.Size(y), op.Size(x)
    each = op.reshape(op.Range(zero, groups, one), op.shape_of(y))
    group = op.Reshape(op.Expand(each, op.shape_of(x)), [-1])
    _, order = op.TopK(group, op.Reshape(count, [1]), largest=0, outputs=2)
    n = op.Div(count, op.Max(groups, one))
    flat = op.Reshape(x, [-1])
    rows = op.reshape(op.Gather(flat, order), op.join(op.Reshape(groups, [1]), [1], op.Reshape(n, [1])))
    index = op.Range(zero, n, one)
    diagonal = op.Equal(op.Unsqueeze(index, [1]), index)
    others = op.ReduceProd(op.Where(diagonal, 1.0, rows), [2], keepdims=0)
    return op.reshape(op.ScatterElements(op.zeros_like(flat), order, op.Reshape(others, [-1])), op.shape_of(x))


def _rows(op: Op, x: Var, head: int) -> tuple[Var, Var, Var]:
    """The shape of `x`; `x` with its axes from `head` on flattened to […, 1, n]; the diagonal of n·n."""
    shape = op.shape_of(x)
    if shape.const is not None:
        dims = [int(d) for d in shape.const]
        n = math.prod(dims[head:])
        if n * n <= MOST_WRITTEN:
            return shape, op.reshape(x, [*dims[:head], 1, n]), op.const(np.eye(n, dtype=bool))
    n = op.ReduceProd(op.Slice(shape, [head], [x.rank]), keepdims=0)
    rows = op.reshape(x, op.Concat(op.Slice(shape, [0], [head]), [1], op.Unsqueeze(n, [0]), axis=0))
    index = op.Range(op.const(0, ir.DataType.INT64), n, op.const(1, ir.DataType.INT64))
    return shape, rows, op.Equal(op.Unsqueeze(index, [1]), index)


@linear("CumSum", total=True)
def cum_sum(op: Op, g: Var, x: Var, axis: Var) -> Result:
    """yᵢ = Σⱼ≤ᵢ xⱼ: the sum from the other end"""
    return op.CumSum(g, axis, exclusive=op.attr("exclusive"), reverse=1 - op.attr("reverse"))


def _factors(op: Op, x: Var) -> tuple[Var, Var]:
    """The derivative of the cumulative product: dyᵢ = Σⱼ (eⱼ·dxⱼ)·Mⱼᵢ, as a pair (e, M).

    eⱼ is the product of the factors before j, and Mⱼᵢ of those after it, up to i: n² elements for n, but right at any
    number of zeros and to any order, where y/x is not. The axis is the last one here.
    """
    exclusive, reverse = op.attr("exclusive"), op.attr("reverse")
    last = op.const(-1)
    n = x.dims[-1]
    if isinstance(n, int) and n * n <= MOST_WRITTEN:
        i = np.arange(n)
        later = op.const(i < i[:, None] if reverse else i > i[:, None])
        reached = op.const(np.tri(n, k=-exclusive) if reverse else np.tri(n, k=-exclusive).T, x.dtype)
    else:
        i = op.Range(op.const(0), op.Squeeze(op.Shape(x, start=-1), [0]), op.const(1))
        column = op.Unsqueeze(i, [1])
        later = i < column if reverse else i > column
        reached = op.cast_like(later if exclusive else (i <= column if reverse else i >= column), x)
    before = op.CumProd(x, last, exclusive=1, reverse=reverse)
    after = op.CumProd(op.Where(later, op.Unsqueeze(x, [-2]), 1.0), last, exclusive=exclusive, reverse=reverse)
    return before, after * reached


def _swap_with_last(op: Op, x: Var, axis: int) -> Var:
    """`axis` exchanged with the last one."""
    if axis == x.rank - 1:
        return x
    perm = list(range(x.rank))
    perm[axis], perm[-1] = perm[-1], axis
    return op.Transpose(x, perm=perm)


def _resolve_axis(op: Op, x: Var, axis: Var) -> tuple[int, Var | None]:
    """The axis of the product, and the shape to reshape `x` to first.

    For a computed axis, the shape is [before, along, after], and the axis is the middle one.
    """
    if x.rank == 1:
        return 0, None
    if axis.const is not None:
        return int(axis.const) % x.rank, None
    shape = op.shape_of(x)
    at = op.Mod(op.Cast(op.Reshape(axis, [1]), to=int(ir.DataType.INT64)), [x.rank])
    after = op.Slice(shape, op.Add(at, [1]), [x.rank])
    sides = [op.Reshape(op.ReduceProd(part, keepdims=0), [1]) for part in (op.Slice(shape, [0], at), after)]
    return 1, op.Concat(sides[0], op.Gather(shape, at), sides[1], axis=0)


def _cum_prod_jvp(op: Op, tangents: Tangents, x: Var, axis: Var) -> Result:
    at, shape = _resolve_axis(op, x, axis)
    x3, t3 = (v if shape is None else op.reshape(v, shape) for v in (x, tangents[0]))
    before, after = _factors(op, _swap_with_last(op, x3, at))
    moved = op.Unsqueeze(_swap_with_last(op, t3, at) * before, [-2]) @ after
    y = _swap_with_last(op, op.Squeeze(moved, [-2]), at)
    return y if shape is None else reshape_to(y, x)


@rule("CumProd", wrt=(0,), jvp=_cum_prod_jvp)
def cum_prod(op: Op, g: Var, x: Var, axis: Var) -> Result:
    """yᵢ = Πⱼ≤ᵢ xⱼ: gⱼ = (Π of what comes before j)·Σᵢ gᵢ·(Π of what comes after j, up to i)"""
    at, shape = _resolve_axis(op, x, axis)
    x3, g3 = (v if shape is None else op.reshape(v, shape) for v in (x, g))
    before, after = _factors(op, _swap_with_last(op, x3, at))
    pulled = product(after, op.Unsqueeze(_swap_with_last(op, g3, at), [-1]))
    back = _swap_with_last(op, before * op.Squeeze(pulled, [-1]), at)
    return back if shape is None else reshape_to(back, x)
