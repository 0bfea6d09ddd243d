"""Operators that compute a grid of numbers: Range and AffineGrid."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.ir import Var, expand_to, product, reshape_to
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear, rule
from onnxgrad.rules.rule import Result, Tangents


def _count_like(op: Op, g: Var) -> Any:
    """0, 1, 2, … in the dtype and shape of the vector `g`."""
    size = op.size_of(g, 0)
    return op.cast_like(op.Range(op.const(0), size, op.const(1)), g)


def _range_jvp(op: Op, tangents: Tangents, start: Var, limit: Var, delta: Var, y: Var) -> Result:
    moved = None if tangents[2] is None else tangents[2] * _count_like(op, y)
    if tangents[0] is None:
        return moved
    return expand_to(tangents[0], y) if moved is None else moved + tangents[0]


@rule("Range", wrt=(0, 2), jvp=_range_jvp)
def range_(op: Op, g: Var, start: Var, limit: Var, delta: Var) -> Result:
    """y = start + i·delta: (Σ g, 0, Σ i·g); the limit only decides how many there are"""
    return (
        reshape_to(op.ReduceSum(g, None, keepdims=0), start),
        None,
        reshape_to(op.ReduceSum(g * _count_like(op, g), None, keepdims=0), delta),
    )


@linear("AffineGrid")
def affine_grid(op: Op, g: Var, theta: Var, size: Var) -> Result:
    """y = A·p + b at each point p of a grid, θ = [A b]: [Σ g·pᵀ, Σ g]

    The points are the operator's own result for A = 1, b = 0.
    """
    n = g.rank - 2
    same = expand_to(op.const(np.eye(n, n + 1)[None], theta.dtype), theta)
    count = op.folded(op.ReduceProd(op.shape_of(g, 1, n + 1), keepdims=1))  # a -1 would be unknown in no batch
    points, rows = (op.Reshape(x, op.join([0], count, [n])) for x in (op.replay(same, size), g))
    met = product(op.Transpose(rows, perm=[0, 2, 1]), points)
    return op.Concat(met, op.Unsqueeze(op.ReduceSum(rows, [1], keepdims=0), [2]), axis=2)
