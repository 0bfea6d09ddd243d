"""Normalizations: x̂ = (x - μ)/σ over some axes, scaled and shifted along others.

All have the same core. With r = 1/σ and the cotangent ĝ of x̂, that of x is
``r·(ĝ - mean ĝ - x̂·mean(ĝ·x̂))``, the means being over the axes of the statistics; `centre` writes it.
Sums over the batch are ReduceSums of centred values: one more pass than expanding x - μ, and no cancellation.
Where the scale does not change along the axes, `_by_sums` writes it with half as many passes over the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var, sum_to
from onnxgrad.ir.constants import MOST_WRITTEN
from onnxgrad.ir.match import not_none
from onnxgrad.ir.operators import Kind
from onnxgrad.rules.conv.convolution import over_channels
from onnxgrad.rules.conv.geometry import dim, size, spatial, view
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import rule
from onnxgrad.rules.rule import Result, Tangents


def mean(op: Op, x: Var, axes: Sequence[int]) -> Var:
    """The mean over `axes`, kept as size 1."""
    return op.ReduceMean(x, list(axes), keepdims=1)


def share(op: Op, g: Var, x: Var, axes: Sequence[int]) -> Var:
    """`g` over the number of elements along `axes` of `x`: the transpose of the mean, before broadcasting."""
    sizes = [size(x, a) for a in axes]
    if None not in sizes:
        return g * (1 / max(1, int(np.prod(sizes))))  # type: ignore[arg-type]
    count = op.ReduceProd(op.Gather(op.Shape(x), list(axes)), keepdims=0)
    return g / op.cast_like(count, g)


def standardize(op: Op, x: Var, axes: Sequence[int], epsilon: float) -> tuple[Var, Var]:
    """x̂ and 1/σ over `axes`, from x."""
    d = x - mean(op, x, axes)
    inv = 1 / op.Sqrt(mean(op, d * d, axes) + epsilon)
    return d * inv, inv


def centre(op: Op, gx: Var, xh: Var, inv: Var, axes: Sequence[int], projected: Var | None = None) -> Var:
    """The cotangent of x, given that of x̂, and the mean of their product unless it is computed here."""
    return inv * (gx - mean(op, gx, axes) - xh * (mean(op, gx * xh, axes) if projected is None else projected))


def mean_of_rows(op: Op, x: Var, scale: Var, axes: Sequence[int]) -> Var | None:
    """The mean of x·s over the last axis as a product with the vector s: one pass, without x·s; None for other axes."""
    (width,) = scale.shape if scale.shape is not None and len(scale.shape) == 1 else (None,)
    if len(axes) != 1 or scale.dtype != ir.DataType.FLOAT or not width or size(x, axes[0]) != width:
        return None
    return op.MatMul(x, op.Unsqueeze(scale * (1 / width), [1]))


def along_channels(op: Op | Builder, p: Var, rank: int) -> Var:
    """A vector with one element per channel, shaped to broadcast with [N, C, …]."""
    return op.Unsqueeze(p, list(range(1, rank - 1))) if rank > 2 else p


@rule("LayerNormalization", wrt=(0, 1, 2), kind=Kind.ALONG_AXIS)
def layer_normalization(op: Op, g: Any, x: Var, scale: Var, b: Var) -> Result:
    """y = x̂·s + b over the axes from `axis` on: (r·(ĝ - mean ĝ - x̂·mean ĝx̂), Σ g·x̂, Σ g) with ĝ = g·s

    The second and third outputs are residuals, μ and r, and can carry cotangents of their own, m and q: then (m -
    q·r²·x̂)/n is added to the first. They are float32 at most, so for float64 both are recomputed.
    """
    g, g_mean, g_inv = (*g, None, None)[:3]
    axis = op.attr("axis") % x.rank
    axes = list(range(axis, x.rank))
    if x.dtype == ir.DataType.DOUBLE:
        wide, (xh, inv) = x, standardize(op, x, axes, op.attr("epsilon"))
    else:
        mu, inv = op.output(1), op.output(2)
        wide = op.cast_like(x, mu)
        xh = (wide - mu) * inv
    terms = []
    d_scale = d_b = None
    if g is not None:
        gw, s = op.cast_like(g, wide), op.cast_like(scale, wide)
        if op.needs[0]:
            projected = mean_of_rows(op, gw * xh, s, axes) if op.needs[1] else None
            terms.append(centre(op, gw * s, xh, inv, axes, projected))
        if op.needs[1]:
            d_scale = op.cast_like(sum_to(gw * xh, scale), scale)
        if op.needs[2]:
            d_b = op.cast_like(sum_to(gw, b), b)
    if g_mean is not None:
        terms.append(share(op, op.cast_like(g_mean, wide), x, axes))
    if g_inv is not None:
        terms.append(-(share(op, op.cast_like(g_inv, wide) * (inv * inv), x, axes) * xh))
    dx = None
    if terms:
        dx = sum(terms[1:], terms[0])
        if g is None and g_inv is None:
            dx = op.Expand(dx, op.shape_of(x))
        dx = op.cast_like(dx, x)
    if g is not None and g_mean is None and g_inv is None and x.dtype != ir.DataType.DOUBLE:
        op.named("LayerNormGrad", [dx, d_scale, d_b], of=[g, x, mu, inv, scale], axis=axis)
    return dx, d_scale, d_b


@rule("RMSNormalization", wrt=(0, 1), kind=Kind.ALONG_AXIS)
def rms_normalization(op: Op, g: Var, x: Var, scale: Var) -> Result:
    """y = x̂·s with x̂ = x·r, r = 1/√(mean x² + ε) over the axes from `axis` on: (r·(ĝ - x̂·mean ĝx̂), Σ g·x̂)"""
    axis, epsilon = op.attr("axis") % x.rank, op.attr("epsilon")
    axes = list(range(axis, x.rank))
    wide = op.widen(x)
    inv = 1 / op.Sqrt(mean(op, wide * wide, axes) + epsilon)
    xh = wide * inv
    gw = op.cast_like(g, wide)
    dx = d_scale = None
    if op.needs[0]:
        gx = gw * op.cast_like(scale, wide)
        dx = op.cast_like(inv * (gx - xh * mean(op, gx * xh, axes)), x)
    if op.needs[1]:
        d_scale = op.cast_like(sum_to(gw * xh, scale), scale)
    return dx, d_scale


@rule("InstanceNormalization", wrt=(0, 1, 2), kind=Kind.ROWS)
def instance_normalization(op: Op, g: Var, x: Var, scale: Var, b: Var) -> Result:
    """y = x̂·s + b over the spatial axes: (r·(ĝ - mean ĝ - x̂·mean ĝx̂), Σ g·x̂, Σ g) with ĝ = g·s"""
    axes = list(range(2, x.rank))
    wide = op.widen(x)
    s = along_channels(op, op.cast_like(scale, wide), x.rank)
    pulled = _by_sums(op, wide, op.cast_like(g, wide), s, axes, axes)
    dx = op.cast_like(pulled[0], x) if op.needs[0] else None
    d_scale, d_b = (op.cast_like(op.ReduceSum(v, [0, *axes], keepdims=0), scale) for v in pulled[1:])
    _named_groups(op, (dx, d_scale, d_b), g, 0)
    return dx, d_scale, d_b


def _by_sums(op: Op, x: Var, g: Var, s: Var, axes: Sequence[int], over: Sequence[int]) -> tuple[Var, Var, Var]:
    """The cotangent of x, and per row the summands of those of s and b.

    s is constant along `over`, a part of the `axes` of the statistics. With d = x - μ, the sums p of g and q of g·d
    along `over` are all that has to be summed: (s·r·g - r·mean(s·p) - d·r³·mean(s·q), q·r, p).
    """
    d = x - mean(op, x, axes)
    inv = 1 / op.Sqrt(mean(op, d * d, axes) + op.attr("epsilon"))
    rest = [a for a in axes if a not in over]
    p, q = (op.ReduceSum(v, list(over), keepdims=1) if over else v for v in (g, g * d))
    q, gain = q * inv, s * inv
    if rest:
        totals, factor = [op.ReduceSum(s * v, rest, keepdims=1) for v in (p, q)], share(op, inv, x, axes)
    else:
        totals, factor = [p, q], share(op, gain, x, axes)
    level, slope = (t * factor for t in totals)
    return g * gain - level - d * (slope * inv), q, p


def _named_groups(op: Op, cotangents: Tangents, g: Var, groups: int) -> None:
    """Name a normalization of groups of channels (0: one channel each), and its cotangents, for kernels."""
    settings = {"groups": groups, "epsilon": op.attr("epsilon")}
    op.named("GroupNorm", op.outputs, of=op.inputs, **settings)
    op.named("GroupNormGrad", cotangents, of=[g, *op.inputs[:2]], **settings)


def _normalize_groups(op: Op, g: Var, x: Var, scale: Var, b: Var, *, per_channel: bool) -> tuple[Var | None, ...]:
    """GroupNormalization over x viewed as [N, G, C/G, …]; its parameters are per channel or per group."""
    groups = op.attr("num_groups")
    shape, inner = op.shape_of(x), size(x, 1)
    split = [groups, -1 if inner is None else inner // groups]
    parted = [dim(op, x, 0), *split, *spatial(op, x)]
    xg, gg = op.widen(view(op, x, parted)), op.widen(view(op, g, parted))
    axes = list(range(2, x.rank + 1))
    last = list(range(3, x.rank + 1))
    s = op.cast_like(scale, xg)
    if per_channel:
        s = op.Unsqueeze(op.reshape(s, split), list(range(2, x.rank)))
    else:
        s = op.Unsqueeze(s, list(range(1, x.rank)))
    pulled = _by_sums(op, xg, gg, s, axes, last if per_channel else axes)
    dx = op.cast_like(op.reshape(pulled[0], shape), x) if op.needs[0] else None
    sums = (op.ReduceSum(v, [0, *(last if per_channel else axes)], keepdims=0) for v in pulled[1:])
    d_scale, d_b = (op.cast_like(op.reshape(v, op.shape_of(scale)), scale) for v in sums)
    _named_groups(op, (dx, d_scale, d_b), g, groups)
    return dx, d_scale, d_b


@rule("GroupNormalization", wrt=(0, 1, 2), since=18, kind=Kind.ROWS)
def group_normalization_per_group(op: Op, g: Var, x: Var, scale: Var, b: Var) -> Result:
    """y = x̂·s + b over each group of channels, one s and b per group: as LayerNormalization"""
    return _normalize_groups(op, g, x, scale, b, per_channel=False)


@rule("GroupNormalization", wrt=(0, 1, 2), since=21, kind=Kind.ROWS)
def group_normalization(op: Op, g: Var, x: Var, scale: Var, b: Var) -> Result:
    """y = x̂·s + b over each group of channels, one s and b per channel: as LayerNormalization"""
    return _normalize_groups(op, g, x, scale, b, per_channel=True)


@rule("BatchNormalization", wrt=(0, 1, 2, 3, 4), kind=Kind.ROWS)
def batch_normalization(op: Op, g: Any, x: Var, scale: Var, b: Var, mu: Var, var: Var) -> Result:
    """y = (x - μ)·r·s + b with r = 1/√(v + ε), per channel

    with μ and v given: (g·r·s, r·Σ g·(x - μ), Σ g, -r·s·Σ g, -½·r³·s·Σ g·(x - μ));
    with μ and v of the batch: (r·s·(g - mean g - x̂·mean g·x̂), Σ g·x̂, Σ g, 0, 0). There the further outputs
    m·μ₀ + (1 - m)·μ and m·v₀ + (1 - m)·v, with cotangents p and q, add (1 - m)·(p + 2q·(x - μ))/n to the
    first, and give m·p and m·q.
    """
    g, g_mu, g_var = (*g, None, None)[:3]
    rank, epsilon = x.rank, op.attr("epsilon")
    wide = op.widen(x)
    mu, var, s = (op.cast_like(p, wide) for p in (mu, var, scale))
    d_mu = d_var = None
    if op.attr("training_mode"):
        momentum = op.attr("momentum")
        d, v = _batch_statistics(op, wide, momentum)
        d_mu = g_mu * momentum if g_mu is not None and op.needs[3] else None
        d_var = g_var * momentum if g_var is not None and op.needs[4] else None
    else:
        d, v = wide - along_channels(op, mu, rank), var
    inv = 1 / op.Sqrt(v + epsilon)
    gain = s * inv
    gw = None if g is None else op.cast_like(g, wide)
    sum_g = over_channels(op, gw) if gw is not None else None
    sum_gd = over_channels(op, gw * d) if gw is not None else None
    dx = None
    if not op.attr("training_mode"):
        if op.needs[0]:  # linear in x: the operator itself, around 0
            dx = op.replay(g, scale, op.zeros_like(scale), op.zeros_like(op.operands[3]), op.operands[4])
        d_mu = op.cast_like(-(gain * sum_g), op.operands[3]) if op.needs[3] else None
        d_var = op.cast_like(gain * (inv * inv) * sum_gd * -0.5, op.operands[4]) if op.needs[4] else None
    elif op.needs[0]:
        running = [None if p is None else op.cast_like(p, wide) for p in (g_mu, g_var)]
        dx = _through_statistics(op, x, d, (gw, sum_g, sum_gd), running, gain, inv)
    d_scale = op.cast_like(inv * sum_gd, scale) if sum_gd is not None and op.needs[1] else None
    d_b = op.cast_like(sum_g, b) if sum_g is not None and op.needs[2] else None
    dx = dx if dx is None else op.cast_like(dx, x)
    if op.attr("training_mode") and g is not None and g_mu is None and g_var is None:
        statistics = [op.output(1), op.output(2)] if op.attr("momentum") == 0 else [None, None]
        if op.attr("momentum") == 0:
            op.named("BatchNorm", [op.outputs[0], *statistics], of=op.inputs, epsilon=epsilon)
        op.named("BatchNormGrad", [dx, d_scale, d_b], of=[g, x, *statistics, scale], epsilon=epsilon)
    return dx, d_scale, d_b, d_mu, d_var


def _batch_statistics(op: Op, x: Var, momentum: float) -> tuple[Var, Var]:
    """x - μ and v of the batch.

    The outputs of the node are μ and v only for a momentum of 0. Otherwise these are recomputed, which costs no more
    than another BatchNormalization would, and reads none of the running statistics: ONNX Runtime overwrites these
    operands in training mode.
    """
    axes = [0, *range(2, x.rank)]
    if momentum == 0:
        mu, v = (op.cast_like(op.output(i), x) for i in (1, 2))
        return x - along_channels(op, mu, x.rank), v
    d = x - mean(op, x, axes)
    return d, op.ReduceMean(d * d, axes, keepdims=0)


def _through_statistics(op: Op, x: Var, d: Var, cotangents: Tangents, running: Any, gain: Var, inv: Var) -> Any:
    """The cotangent of x in training mode, as A·g + B·(x - μ) + C with a factor per channel each."""
    axes = [0, *range(2, x.rank)]
    kept = 1 - op.attr("momentum")
    (g, sum_g, sum_gd), (g_mu, g_var) = cotangents, running
    slope, constant = [], []
    if g is not None:
        slope.append(-(gain * (inv * inv) * sum_gd))
        constant.append(-(gain * sum_g))
    if g_var is not None:
        slope.append(g_var * (2 * kept))
    if g_mu is not None:
        constant.append(g_mu * kept)
    terms = [g * along_channels(op, gain, x.rank)] if g is not None else []
    if slope:
        terms.append(d * along_channels(op, share(op, sum(slope[1:], slope[0]), x, axes), x.rank))
    if constant:
        terms.append(along_channels(op, share(op, sum(constant[1:], constant[0]), x, axes), x.rank))
    total = sum(terms[1:], terms[0])
    return total if g is not None or slope else op.Expand(total, op.shape_of(x))


@rule("LRN", wrt=(0,), kind=Kind.ROWS)
def lrn(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = x·D^-β with D = k + α/size·Σ x² over nearby channels: g·D^-β - 2αβ/size·x·Σ g·y/D, backwards"""
    alpha, beta, length = op.attr("alpha"), op.attr("beta"), op.attr("size")
    before, after = (length - 1) // 2, length // 2
    depth = op.attr("bias") + _nearby(op, x * x, before, after) * (alpha / length)
    spread = _nearby(op, g * y / depth, after, before)
    return g * depth**-beta - x * spread * (2 * alpha * beta / length)


#: Number of slices up to which a sum is written out.
MOST_SLICES = 64


def _nearby(op: Op, x: Var, before: int, after: int) -> Var:
    """For each channel the sum over itself, those `before` and those `after` it.

    A product with a band matrix; if the number of channels is not known or large, a sum of slices where they are few.
    """
    channels = size(x, 1)
    flat = op.reshape(x, op.Concat(op.Shape(x, start=0, end=2), [-1], axis=0)) if x.rank != 3 else x
    if channels is not None and channels**2 <= MOST_WRITTEN:
        at = np.arange(channels)
        reach = at[None, :] - at[:, None]
        band = ((reach >= -before) & (reach <= after)).astype(np.float64)
        return op.reshape(op.const(band, x.dtype) @ flat, op.shape_of(x))
    if before + after >= MOST_SLICES:
        at = op.Range(op.const(0), op.Squeeze(op.Shape(flat, start=1, end=2), [0]), op.const(1))
        reach = at - op.Unsqueeze(at, [1])
        band = op.And(op.GreaterOrEqual(reach, -before), op.LessOrEqual(reach, after))
        return op.reshape(op.cast_like(band, x) @ flat, op.shape_of(x))
    padded = op.Pad(flat, [0, before, 0, 0, after, 0])
    rows = op.Shape(x, start=1, end=2)
    total = None
    for i in range(before + after + 1):
        here = op.Slice(padded, [i], rows + i, [1])
        total = here if total is None else total + here
    return op.reshape(not_none(total), op.shape_of(x))


@rule("LpNormalization", wrt=(0,), kind=Kind.ALONG_AXIS)
def lp_normalization(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = x/‖x‖ along an axis: (g - z·Σ g·y)/‖x‖ with z = y (p = 2) or sign x (p = 1); 0 where ‖x‖ is 0"""
    axis, p = [op.attr("axis")], op.attr("p")
    norm = (op.ReduceL1 if p == 1 else op.ReduceL2)(x, axis, keepdims=1)
    zero = op.Equal(norm, 0.0)
    inv = op.Where(zero, 0.0, 1 / op.Where(zero, 1.0, norm))
    direction = op.Sign(x) if p == 1 else y
    return (g - direction * op.ReduceSum(g * y, axis, keepdims=1)) * inv


@rule("MeanVarianceNormalization", wrt=(0,))
def mean_variance_normalization(op: Op, g: Var, x: Var) -> Result:
    """y = d/(σ + ε) with d = x - μ: h - mean h with h = g/(σ + ε) - d·mean(g·d)/(σ·(σ + ε)²)"""
    axes = op.attr("axes")
    d = x - mean(op, x, axes)
    sigma = op.Sqrt(mean(op, d * d, axes))
    inv = 1 / (sigma + 1e-9)
    zero = op.Equal(sigma, 0.0)
    pull = mean(op, g * d, axes) * (inv * inv)
    h = g * inv - d * op.Where(zero, 0.0, pull / op.Where(zero, 1.0, sigma))
    return h - mean(op, h, axes)
