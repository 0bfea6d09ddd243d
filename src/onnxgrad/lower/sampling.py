"""Interpolation at computed points, shared by the lowerings of GridSample, RoiAlign and DeformConv.

Along each axis a point reads a few taps: rows of the tensor with weights that are polynomials in the fraction of its
coordinate. Elements are gathered as whole rows of channels, so that the derivative adds rows; the derivative with
respect to the points comes from the weights. At the edges it equals PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.shapes import move_axis
from onnxgrad.lower.registry import attribute, lowering

#: A dimension: a number, or a scalar that is read at run time.
Size = Any


class Kernel(NamedTuple):
    """The first tap relative to the floor of a coordinate, and per tap the coefficients of 1, f, f², …"""

    first: int
    weights: np.ndarray


_A = -0.75  # the specification gives GridSample no other
NEAREST = Kernel(0, np.array([[1.0]]))
LINEAR = Kernel(0, np.array([[1.0, -1], [0, 1]]))
CUBIC = Kernel(
    -1, np.array([[0, _A, -2 * _A, _A], [1, 0, -_A - 3, _A + 2], [0, -_A, 2 * _A + 3, -_A - 2], [0, 0, _A, -_A]])
)
KERNELS = {"nearest": NEAREST, "linear": LINEAR, "cubic": CUBIC, "bilinear": LINEAR, "bicubic": CUBIC}


@dataclass
class Taps:
    """Indices of rows along one axis and their weights, with the taps as the first axis; None as weights of 1."""

    rows: Var
    weights: Var | None


def size_of(b: Builder, x: Var, axis: int) -> Size:
    """A dimension of `x`."""
    known = None if x.shape is None else x.shape[axis]
    return known if isinstance(known, int) else b.size_of(x, axis)


def real(b: Builder, size: Size, like: Var) -> Size:
    """`size` as a number of the dtype of `like`."""
    return b.cast_like(size, like) if isinstance(size, Var) else float(size)


def clamped(b: Builder, x: Var, high: Size) -> Var:
    """`x` within 0 … high, with derivative 0 from the ends on."""
    return b.Where(x > 0.0, b.Where(x < high, x, b.cast_like(high, x) if isinstance(high, Var) else high), 0.0)


def reflected(b: Builder, x: Var, size: Size, corners: bool) -> Var:
    """`x` reflected at the outermost elements, or at their outer edges, repeatedly if needed."""
    low = 0.0 if corners else -0.5
    span = size - 1.0 if corners else size
    span = b.Where(b.Equal(span, 0.0), 1.0, span) if isinstance(span, Var) else span or 1.0
    away = x - low
    away = away * b.Where(away < 0.0, b.const(-1.0, x.dtype), 1.0)
    flips = b.Floor(away / span)
    rest = away - flips * span
    odd = flips - b.Floor(flips * 0.5) * 2.0
    return b.Where(odd > 0.5, span - rest, rest) + low


def taps(b: Builder, x: Var, size: Size, kernel: Kernel, padding: str = "zeros", corners: bool = False) -> Taps:
    """The taps of the coordinates `x` along an axis of `size` elements."""
    high = real(b, size, x) - 1.0
    single, padded = kernel is not CUBIC, padding != "zeros"
    if kernel is NEAREST:
        x = b.Round(x)
    if padding == "reflection" and single:
        x = reflected(b, x, high + 1.0, corners)
    if padded and single:
        x = clamped(b, x, high)
    base = x if kernel is NEAREST else b.Floor(x)
    count, degree = kernel.weights.shape
    column = (count, *[1] * x.rank)
    at = base + b.const(np.arange(kernel.first, kernel.first + count).reshape(column), x.dtype) if count > 1 else base
    at = b.Unsqueeze(at, [0]) if count == 1 else at
    if padding == "reflection" and not single:
        at = reflected(b, at, high + 1.0, corners)
    bound = high if isinstance(high, Var) else b.const(high, x.dtype)
    # a coordinate that is NaN becomes some row as well: its weights are NaN
    rows = b.Max(b.Cast(b.Clip(at, b.const(0.0, x.dtype), bound), to=int(ir.DataType.INT64)), 0)
    if degree == 1:
        return Taps(rows, None if padded else b.cast_like(b.And(at >= 0.0, at <= high), x))
    fraction = x - base
    weights = b.const(kernel.weights[:, -1].reshape(column), x.dtype)
    for power in range(degree - 2, -1, -1):
        weights = weights * fraction + b.const(kernel.weights[:, power].reshape(column), x.dtype)
    return Taps(rows, weights if padded else b.Where(b.Or(at < 0.0, at > high), 0.0, weights))  # NaN stays


def rows_of(b: Builder, x: Var) -> Var:
    """`x`, [N, C, d₁ … dₖ], as a matrix of N·d₁·…·dₖ rows of channels."""
    return b.reshape(move_axis(x, 1, -1), b.join([-1], b.shape_of(x, 1, 2)))


def first_rows(b: Builder, x: Var, count: Size) -> tuple[Size, list[Size]]:
    """The first row in `rows_of` for each of the first `count` of N, and the strides of the axes after C."""
    strides: list[Size] = [1]
    for axis in range(x.rank - 1, 1, -1):
        strides.insert(0, multiply_sizes(strides[0], size_of(b, x, axis)))
    if isinstance(count, int) and isinstance(strides[0], int):
        return b.const(np.arange(count) * strides[0]), strides[1:]
    return b.Mul(b.Range(0, count, 1), strides[0]), strides[1:]


def multiply_sizes(a: Size, c: Size) -> Size:
    """The product of two sizes."""
    return c * a if isinstance(c, Var) else a * c


def gathered(b: Builder, rows: Var, first: Var, strides: Sequence[Size], along: Sequence[Taps]) -> tuple[Var, Any]:
    """The values of the taps, [t₁ … tₖ, …, C], and their weights, [t₁ … tₖ, …, 1] (None if all are 1).

    The points, and `first`, the row that each counts from, may be laid out over any axes that broadcast.
    """
    index, weights = first, None
    for i, (tap, stride) in enumerate(zip(along, strides)):
        others = [k for k in range(len(along)) if k != i]
        index = index + multiply_sizes(stride, b.Unsqueeze(tap.rows, others) if others else tap.rows)
        if tap.weights is not None:
            spread = b.Unsqueeze(tap.weights, others) if others else tap.weights
            weights = spread if weights is None else weights * spread
    return b.Gather(rows, index, axis=0), None if weights is None else b.Unsqueeze(weights, [-1])


def sampled(b: Builder, rows: Var, first: Var, strides: Sequence[Size], along: Sequence[Taps]) -> Var:
    """The interpolated values, […, C]."""
    values, weights = gathered(b, rows, first, strides, along)
    values = values if weights is None else values * weights
    return b.ReduceSum(values, list(range(len(along))), keepdims=0)


def unnormalized(b: Builder, at: Var, size: Size, corners: bool, plane: bool) -> Var:
    """The coordinate among `size` elements of a point that is `at`, 0 … 2, in the order in which PyTorch rounds.

    In the plane PyTorch's vectorized kernel rounds at·size/2 - ½ once, a fused multiply-add: so does the detour by
    float64, in which both steps are exact. In space it rounds each step.
    """
    if corners:
        return at / 2.0 * (real(b, size, at) - 1.0)
    if plane and at.dtype == ir.DataType.FLOAT:
        wide = b.Cast(at, to=int(ir.DataType.DOUBLE))
        return b.Cast(wide * (real(b, size, wide) * 0.5) - 0.5, to=int(ir.DataType.FLOAT))
    return (at * real(b, size, at) - 1.0) / 2.0


@lowering("GridSample")
def grid_sample(b: Builder, node: ir.Node, image: Var, grid: Var) -> Sequence[Var | None]:
    """y[n, c, o] = Σ w·x[n, c, i] over the taps around the point that the grid holds for o"""
    mode, padding = attribute(b, node, "mode"), attribute(b, node, "padding_mode")
    corners = bool(attribute(b, node, "align_corners"))
    if mode not in KERNELS:
        raise NotDifferentiable(f"the mode {mode!r} is not known")
    x = b.widen(image)
    grid = b.cast_like(grid, x)
    along = []
    for axis in range(2, x.rank):  # the grid names the last axis first
        at = b.Gather(grid, b.const(x.rank - 1 - axis), axis=-1) + 1.0
        size = size_of(b, x, axis)
        point = unnormalized(b, at, size, corners, plane=x.rank == 4)
        along.append(taps(b, point, size, KERNELS[mode], padding, corners))
    first, strides = first_rows(b, x, size_of(b, x, 0))
    first = b.Unsqueeze(first, list(range(1, x.rank - 1)))
    y = sampled(b, rows_of(b, x), first, strides, along)
    return [b.cast_like(move_axis(y, -1, 1), image)]
