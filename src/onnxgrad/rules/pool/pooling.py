"""Pooling: the largest, the mean, or a norm of every window."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onnxgrad.ir import Var, expand_to
from onnxgrad.ir.constants import MOST_WRITTEN
from onnxgrad.ir.lowerings import lowering
from onnxgrad.ir.operators import Kind
from onnxgrad.rules.conv.geometry import size, windows
from onnxgrad.rules.op import Op
from onnxgrad.rules.pool.window_sums import scatter_mean, scatter_sum, tiled, upsample
from onnxgrad.rules.registry import linear, rule
from onnxgrad.rules.rule import Result, Tangents
from onnxgrad.rules.step_functions import is_nonnegative, lowest

_COMPARED = lowering(
    "compared_tiles", "MaxPool in tiles", "a comparison with the result, upsampled", "indices and ScatterElements"
)
_BY_PLANES = lowering(
    "planes_first", "MaxPool in tiles of three axes", "the same for planes, then in depth", "all at once"
)
_REPEATED = lowering("repeated_tiles", "AveragePool in tiles", "Resize", "`band_products`")


def _winners(op: Op, x: Var, y: Var, kernel: list[int]) -> Var:
    """1 where an element of `x` is the first of the largest of its tile, else 0.

    Each largest element gets the number of its place, counted down; the largest number of a tile wins. A steep
    HardSigmoid, clip(αz + 1, 0, 1), is [z ≥ 0] for z ≤ 0, threaded and without a cast. Infinities, whose difference
    would be NaN, are replaced by the largest finite numbers.
    """
    assert x.dtype is not None
    least = lowest(x.dtype)
    signed = not is_nonnegative(x)
    x, y = op.Clip(x, least) if signed else x, op.Clip(y, least if signed else None, -least)
    tile = np.arange(math.prod(kernel), 0, -1).reshape(kernel)
    times = [size(x, a) // k for a, k in enumerate(kernel, start=2)]  # type: ignore[operator]
    written = tile.size * math.prod(times) <= MOST_WRITTEN
    places = op.const(np.tile(tile, times), x.dtype) if written else op.Tile(op.const(tile, x.dtype), times)
    numbers = op.HardSigmoid(x - upsample(op, y, kernel), alpha=3e38, beta=1.0) * places
    best = op.MaxPool(numbers, kernel_shape=kernel, strides=kernel)
    return op.HardSigmoid(numbers - upsample(op, best, kernel), alpha=3e38, beta=1.0)


def _indices(op: Op) -> Var:
    """The index of each window's largest element in the flattened operand, as a vector."""
    if not op.attr("storage_order"):
        return op.reshape(op.output(1), [-1])
    attrs = {a.name: a for a in op.node.attributes.values() if a.name != "storage_order"}
    return op.reshape(op.MaxPool(op.inputs[0], outputs=2, **attrs)[1], [-1])


def _max_pool_jvp(op: Op, tangents: Tangents, x: Var, y: Var) -> Result:
    """The tangent of the element that wins."""
    kernel = tiled(op, x)
    if kernel and math.prod(kernel) <= MOST_WRITTEN:
        mean = op.AveragePool(tangents[0] * _winners(op, x, y, kernel), kernel_shape=kernel, strides=kernel)
        return mean * float(np.prod(kernel))
    return op.reshape(op.GatherElements(op.reshape(tangents[0], [-1]), _indices(op), axis=0), op.shape_of(y))


@rule("MaxPool", wrt=(0,), jvp=_max_pool_jvp, kind=Kind.ROWS, total=True, piecewise_linear=True)
def max_pool(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = max of x over each window: Σ g over the windows in which x is the first of the largest.

    If windows tile x, comparing it with the upsampled y costs half as much as the Indices (1.3 ms against 2.4 for
    32×32×28×28 in tiles of 2×2): MaxPool with Indices is 20 times as slow as MaxPool.
    """
    kernel = tiled(op, x) if _COMPARED.is_enabled else None
    if kernel and math.prod(kernel) <= MOST_WRITTEN:
        sizes = [n for a in range(2, x.rank) if (n := size(x, a))]
        if len(sizes) == len(kernel) == 3 and _BY_PLANES.is_enabled:
            return _to_winners_in_planes(op, g, x, y, kernel, sizes)
        return _to_winners(op, g, x, y, kernel)
    dx = _add_by_index(op, g, x)
    where, moving = windows(op, x)
    if where.rank == 2 and not moving and None not in where.kernel:
        places = {"strides": where.strides, "dilations": where.dilations, "pads": where.head}
        op.named("MaxPoolGrad", [dx], of=[g, x, y], kernel=where.kernel, **places)
    return dx


def _to_winners_in_planes(op: Op, g: Var, x: Var, y: Var, kernel: list[int], sizes: list[int]) -> Var:
    """Each element of g, in tiles of three axes: first to the plane that has the largest element, then in this plane.

    The first of the largest in order of planes and then within one is the first of all.
    """
    (deep, *plane), (depth, height, width) = kernel, sizes
    pixels = (height // plane[0]) * (width // plane[1])
    planes = op.reshape(x, [-1, depth, height, width])
    largest = op.MaxPool(planes, kernel_shape=plane, strides=plane)
    rows, of_rows, result = (
        op.reshape(v, [-1, 1, n, pixels]) for v, n in zip((largest, g, y), (depth, *[depth // deep] * 2))
    )
    of_planes = op.reshape(
        _to_winners(op, of_rows, rows, result, [deep, 1]), [-1, depth, height // plane[0], width // plane[1]]
    )
    return op.reshape(_to_winners(op, of_planes, planes, largest, plane), op.shape_of(x))


def _to_winners(op: Op, g: Var, x: Var, y: Var, kernel: list[int]) -> Var:
    """Each element of g, at the first of the largest elements of its tile."""
    dx = upsample(op, g, kernel) * _winners(op, x, y, kernel)
    if len(kernel) == 2:
        op.named("MaxPoolGrad", [dx], of=[g, x, y], kernel=kernel, strides=kernel, dilations=[1, 1], pads=[0, 0])
    return dx


def _add_by_index(op: Op, g: Var, x: Var) -> Var:
    """Each element of g, added at the index of the first of the largest elements of its window."""
    wide = op.widen(g)  # ScatterElements does not add 16 bits
    nothing = op.cast_like(op.zeros_like(op.reshape(x, [-1])), wide)
    taken = op.ScatterElements(nothing, _indices(op), op.reshape(wide, [-1]), axis=0, reduction="add")
    return op.reshape(op.cast_like(taken, x), op.shape_of(x))


def _global_largest(op: Op, x: Var) -> Var:
    """The index of the first largest element of each channel, [N·C, 1]."""
    return op.ArgMax(op.Flatten(x, axis=2), axis=1, keepdims=1)


def _global_max_pool_jvp(op: Op, tangents: Tangents, x: Var, y: Var) -> Result:
    """The tangent of the element that wins."""
    taken = op.GatherElements(op.Flatten(tangents[0], axis=2), _global_largest(op, x), axis=1)
    return op.reshape(taken, op.shape_of(y))


@rule("GlobalMaxPool", wrt=(0,), jvp=_global_max_pool_jvp, kind=Kind.ROWS, total=True, piecewise_linear=True)
def global_max_pool(op: Op, g: Var, x: Var) -> Result:
    """y = max of x over each channel: g where x is the first of the largest"""
    nothing = op.zeros_like(op.Flatten(x, axis=2))
    at = op.ScatterElements(nothing, _global_largest(op, x), op.Flatten(g, axis=2), axis=1)
    return op.reshape(at, op.shape_of(x))


@linear("AveragePool", kind=Kind.ROWS, total=True)
def average_pool(op: Op, g: Var, x: Var) -> Result:
    """y = mean of x over each window: Σ g/count over the windows in which x is

    The count excludes the padding unless count_include_pad is set, and always the part of a window beyond the padding.
    """
    kernel = tiled(op, x) if _REPEATED.is_enabled else None
    if kernel:
        return upsample(op, g * (1.0 / float(np.prod(kernel))), kernel)
    return scatter_mean(op, g, x, include_pads=bool(op.attr("count_include_pad")))


@linear("GlobalAveragePool", kind=Kind.ROWS, total=True)
def global_average_pool(op: Op, g: Var, x: Var) -> Result:
    """y = mean of x over each channel: g/count, everywhere"""
    sizes = [size(x, a) for a in range(2, x.rank)]
    known = [n for n in sizes if n is not None]
    if len(known) == len(sizes):
        return expand_to(g / float(math.prod(known)), x)
    return expand_to(g / op.Cast(op.ReduceProd(op.Shape(x, start=2), keepdims=0), to=int(x.dtype or 0)), x)


def _norm_derivative(op: Op, g: Var, x: Var, y: Var, p: int, spread: Callable[[Var], Var]) -> Var:
    """x·|x|ᵖ⁻² times `spread` of g·y¹⁻ᵖ; where y is 0, the derivative is 0 (except for p = 1)."""
    if p == 1:
        return op.Sign(x) * spread(g)
    zero = op.Equal(y, 0.0)
    scaled = op.Where(zero, 0.0, g / op.Where(zero, 1.0, y) ** (p - 1))
    power = x if p == 2 else x * op.Abs(x) if p == 3 else x * op.Abs(x) ** (p - 2)
    return power * spread(scaled)


@rule("LpPool", wrt=(0,), kind=Kind.ROWS)
def lp_pool(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = (Σ |x|ᵖ)^(1/p) over each window: x·|x|ᵖ⁻²·Σ g·y¹⁻ᵖ over the windows in which x is"""
    return _norm_derivative(op, g, x, y, op.attr("p"), lambda u: scatter_sum(op, u, x))


@rule("GlobalLpPool", wrt=(0,))
def global_lp_pool(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = (Σ |x|ᵖ)^(1/p) over each channel: g·x·|x|ᵖ⁻²·y¹⁻ᵖ"""
    return _norm_derivative(op, g, x, y, op.attr("p"), lambda u: u)
