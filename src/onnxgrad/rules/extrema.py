"""Absolute value, extrema and clipping. Ties share the cotangent evenly; a clip's bounds belong to x."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Var
from onnxgrad.ir.match import HALF
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import elementwise
from onnxgrad.rules.rule import Result, add
from onnxgrad.rules.step_functions import STEEP, heaviside


@elementwise("Abs", total=True, piecewise_linear=True, interval=(0, math.inf))
def abs_(op: Op, g: Var, x: Var) -> Result:
    """y = |x|: g·sign x, with 0 at the kink"""
    return g * op.Sign(x)


@elementwise("Max", total=True, piecewise_linear=True)
def max_(op: Op, g: Var) -> Result:
    """y = max(x₁, …, xₙ): g·[xᵢ = y]/(number of i with xᵢ = y)"""
    return _extremum(op, g, op.operands, 1)


@elementwise("Min", total=True, piecewise_linear=True)
def min_(op: Op, g: Var) -> Result:
    """y = min(x₁, …, xₙ): g·[xᵢ = y]/(number of i with xᵢ = y)"""
    return _extremum(op, g, op.operands, -1)


def _extremum(op: Op, g: Var, xs: Sequence[Var], sign: int) -> Any:
    """Shares of `g`: for two operands by comparison, for more by equality with `y`."""
    if len(xs) == 1:
        return [g]
    if len(xs) == 2:
        a, b = xs if sign > 0 else xs[::-1]  # the first operand wins where a > b
        above = g * _wins(op, a, b)
        rest = g - above if all(op.needs) else g * _wins(op, b, a)
        return above, rest
    # ONNX Runtime computes some 16-bit operators in 32 bits and does not round between them: then no operand equals the
    # largest of all, which was rounded
    wide = [op.widen(x) for x in xs]
    y = op.replay(*wide) if xs[0].dtype in HALF else op.output(0)
    hits = [op.Cast(op.Equal(x, y), to=int(g.dtype or 0)) for x in wide]
    share = op.Reciprocal(add(hits))
    return [g * (hit * share) for hit in hits]


def _wins(op: Op, a: Var, b: Var) -> Any:
    """1 where a > b, ½ where they are equal, else 0.

    A step of a - b is the fast way; it needs one of them to be a finite constant, as ∞ - ∞ is NaN.
    """
    if any(x.const is not None and np.isfinite(x.const).all() for x in (a, b)):
        return heaviside(op, a - b)
    more, no_less = (op.Cast(mask, to=int(a.dtype or 0)) for mask in (a > b, a >= b))
    return (more + no_less) * 0.5


@elementwise("Clip", total=True, piecewise_linear=True)
def clip(op: Op, g: Var, x: Var, low: Var | None, high: Var | None, y: Var) -> Result:
    """y = min(max(x, low), high): (g·[low ≤ x ≤ high], g·[x < low ≤ high], g·[max(x, low) > high])

    A bound that x just touches leaves the cotangent with x; where low > high, y = high takes it all.
    """
    if low is None and high is None:
        return g
    to_x = _mask_outside(op, g, x, low, high, y)
    to_low = to_high = None
    if low is not None:
        below = x < low
        to_low = op.Where(below if high is None else op.And(below, low <= high), g, 0.0)
    if high is not None:
        to_high = op.Where((x if low is None else op.Max(x, low)) > high, g, 0.0)
    return to_x, to_low, to_high


def _mask_outside(op: Op, g: Var, x: Var, low: Any, high: Any, y: Var) -> Any:
    """`g` where low ≤ x ≤ high, else 0; tested by x = y unless low > high.

    Between two known bounds |x - y| is never ∞ - ∞, and its falling step is fast.
    """
    if x.dtype in HALF:  # y may have been rounded where x was not
        inside = [mask for mask in (low is not None and x >= low, high is not None and x <= high) if mask is not False]
        return op.Where(inside[0] if len(inside) == 1 else op.And(*inside), g, 0.0)
    if low is None or high is None:
        return op.Where(op.Equal(x, y), g, 0.0)
    if low.const is None or high.const is None or low.const > high.const:
        return op.Where(op.And(x >= low, x <= high), g, 0.0)
    if x.dtype == ir.DataType.FLOAT and np.isfinite([low.const, high.const]).all():
        return g * op.HardSigmoid(op.Abs(x - y), alpha=-STEEP, beta=1.0)
    return op.Where(op.Equal(x, y), g, 0.0)
