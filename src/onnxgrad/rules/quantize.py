"""Quantization: a product is linear in its scale; rounding has derivative zero, or an estimator.

The quantized numbers themselves have tangents only while `straight_through` names QuantizeLinear: these are
floats, in units of the quantized number. Its estimator and DequantizeLinear then make, by the chain rule, for
x the derivative of clip(x, low, high), and for a scale that both share the gradient of learned step size
quantization (Esser et al. 2020, arXiv:1902.08153, equation 3): q - z - x/s inside the range, and q - z outside.

DynamicQuantizeLinear has a derivative through its scale, which its function body in the specification gives.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from onnxgrad.ir import Var, sum_to
from onnxgrad.ir.match import not_none
from onnxgrad.ir.operators import Kind
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import elementwise, rule
from onnxgrad.rules.rule import Result, Tangents


def _shared(scale: Var) -> Any:
    """True if one scale serves the whole tensor."""
    return scale.rank == 0 or (scale.rank == 1 and scale.dims[0] == 1)


def _broadcast_scale(op: Op, scale: Var, like: Var) -> Any:
    """`scale` broadcast to the shape of `like`, or a scalar: the number 1 dequantized in the way of `op`."""
    if _shared(scale):
        return op.Squeeze(scale, [0]) if scale.rank else scale
    ones = op.Expand(op.const(np.ones((), np.int8)), op.shape_of(like))
    return op.DequantizeLinear(ones, scale, axis=op.attr("axis"), block_size=op.attr("block_size") or None)


def _over(op: Op, moved: Var, scale: Var) -> Any:
    """Σ over the elements that share a scale: all, a slice along the axis, or a block."""
    moved = op.cast_like(moved, scale)
    if _shared(scale):
        return sum_to(moved, scale)
    axis = op.attr("axis") % moved.rank
    if not op.attr("block_size"):
        return op.ReduceSum(moved, [a for a in range(moved.rank) if a != axis], keepdims=0)
    return _sum_blocks(op, moved, scale, axis, op.attr("block_size"))


def _dequantize_jvp(op: Op, tangents: Tangents, x: Var, scale: Var, zero_point: Var) -> Result:
    tx, ts, _ = tangents
    y = op.output(0)
    terms = [] if tx is None else [op.cast_like(tx * _broadcast_scale(op, scale, x), y)]
    if ts is not None:
        terms.append(op.replay(x, ts, zero_point))
    return sum(terms[1:], terms[0])


@rule("DequantizeLinear", wrt=(0, 1), jvp=_dequantize_jvp, kind=Kind.ALONG_AXIS)
def dequantize_linear(op: Op, g: Var, x: Var, scale: Var, zero_point: Var) -> Result:
    """y = (x - z)·s: Σ g·(x - z) over what shares a scale: everything, a slice along the axis, or a block;
    g·s for x where that has a tangent, being rounded from a float by an operator that is estimated"""
    dx = ds = None
    if op.needs[0]:
        dx = op.cast_like(g, scale) * _broadcast_scale(op, scale, x)
    if op.needs[1]:
        ds = _over(op, g * op.replay(x, op.full_like(scale, 1), zero_point), scale)
    return dx, ds


def _sum_blocks(op: Op, z: Var, scale: Var, axis: int, size: int) -> Var:
    """Sums of `z` over blocks of `size` along `axis`; the last block may be short."""
    shape = op.shape_of(z)
    have, blocks = (op.Slice(op.shape_of(v), [axis], [axis + 1]) for v in (z, scale))
    whole = z.shape is not None and isinstance(z.shape[axis], int) and z.shape[axis] % size == 0
    if not whole:
        z = op.Pad(z, op.Concat([0], blocks * size - have, axis=0), None, [axis])
    before, after = op.Slice(shape, [0], [axis]), op.Slice(shape, [axis + 1], [z.rank])
    split = op.Reshape(z, op.Concat(before, blocks, [size], after, axis=0), allowzero=1)
    return op.ReduceSum(split, [axis + 1], keepdims=0)


# --- estimators ------------------------------------------------------------------------------------


@elementwise("Round", "Floor", "Ceil", wrt=(0,), estimates=True)
def round_(op: Op, g: Var, x: Var) -> Result:
    """y = x, rounded: g"""
    return g


@elementwise("Sign", wrt=(0,), estimates=True)
def sign(op: Op, g: Var, x: Var) -> Result:
    """y = clip(x, -1, 1), rounded away from 0: g·[|x| ≤ 1]"""
    return op.Where(op.Abs(x) <= 1.0, g, 0.0)


def _unsaturated(op: Op, x: Var, scale: Var, zero_point: Var | None, q: Var) -> tuple[Var, Var]:
    """The scale at each x, and a mask of the x that are rounded without saturation."""
    dtype = not_none(q.dtype)
    limits = (ml_dtypes.finfo if dtype.is_floating_point() else ml_dtypes.iinfo)(dtype.numpy())
    s = op.cast_like(_broadcast_scale(op, scale, x), x)
    r = op.Round(x / s)
    if zero_point is not None and not dtype.is_floating_point():  # that of a float8 is 0
        r = r + op.cast_like(_broadcast_scale(op, op.cast_like(zero_point, scale), x), x)
    return s, op.And(r >= float(limits.min), r <= float(limits.max))


def _quantize_jvp(op: Op, tangents: Tangents, x: Var, scale: Var, zero_point: Var, q: Var) -> Result:
    tx, ts, _ = tangents
    s, inside = _unsaturated(op, x, scale, zero_point, q)
    terms = [] if tx is None else [tx / s]
    if ts is not None:
        terms.append(-(op.cast_like(_broadcast_scale(op, ts, x), x) * (x / (s * s))))
    return op.Where(inside, sum(terms[1:], terms[0]), 0.0)


@rule("QuantizeLinear", wrt=(0, 1), jvp=_quantize_jvp, estimates=True)
def quantize_linear(op: Op, g: Var, x: Var, scale: Var, zero_point: Var, q: Var) -> Result:
    """q = x/s + z, rounded and saturated: (g/s, Σ -g·x/s²) where q is not saturated, 0 elsewhere"""
    s, inside = _unsaturated(op, x, scale, zero_point, q)
    d = op.Where(inside, op.cast_like(g, x), 0.0) / s
    return d if op.needs[0] else None, _over(op, -(d * x / s), scale) if op.needs[1] else None
