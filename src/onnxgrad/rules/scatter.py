"""Operators that write elements into a copy of a tensor: ScatterElements and ScatterND.

Both compute y[i] = x[i] ∘ u, for each update u at its index i; `_Places` reads and writes there. For repeated indices,
`reduction` is the operation; without one the specification leaves the result undefined, and every update at the same
place gets its cotangent. Writes with possible collisions use ScatterElements: ScatterND with a reduction races on
repeated indices in ONNX Runtime.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.ir import Var, reshape_to
from onnxgrad.ir.match import HALF
from onnxgrad.rules.index import numbered
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear, rule
from onnxgrad.rules.rule import Result, Tangents


class _Places:
    """The places of `x` that a scatter writes to."""

    def __init__(self, op: Op, x: Var, index: Var, u: Var) -> None:
        self.op, self.x, self.index, self.u = op, x, index, u
        self.by_element = op.node.op_type == "ScatterElements"
        self.axis = op.attr("axis") % x.rank if self.by_element else 0

    def read(self, base: Var) -> Var:
        """The elements of `base` at these places."""
        if self.by_element:
            return self.op.GatherElements(base, self.index, axis=self.axis)
        return self.op.GatherND(base, self.index)

    def write(self, base: Var, u: Var, reduction: str) -> Var:
        """`base` with `u` written there; reduced in float32 for half types, which ONNX Runtime does not reduce."""
        op = self.op
        if reduction != "none" and base.dtype in HALF:
            wide = [op.Cast(z, to=int(ir.DataType.FLOAT)) for z in (base, u)]
            return op.cast_like(self.write(wide[0], wide[1], reduction), base)
        if self.by_element:
            return op.ScatterElements(base, self.index, u, axis=self.axis, reduction=reduction)
        if reduction == "none":
            return op.ScatterND(base, self.index, u)
        flat = op.Reshape(op.GatherND(numbered(op, self.x), self.index), [-1])
        written = op.ScatterElements(op.Reshape(base, [-1]), flat, op.Reshape(u, [-1]), axis=0, reduction=reduction)
        return reshape_to(written, self.x)


def _product_of_others(op: Op, at: _Places, x: Var, u: Var) -> Var:
    """x·Πu over the other updates of the same place, for each update.

    Not y/u, which has no value where u = 0: y is the product of the factors that are not 0, times those
    that are. With one such factor among the others its value is kept as a factor, so that the second
    derivative sees it; with two or more, so does only the third.
    """
    zero = op.Equal(u, 0.0)
    factors = op.Where(zero, 1.0, u)
    zeros, empty = op.Where(zero, op.const(1.0, u.dtype), 0.0), op.zeros_like(x)
    count = at.read(at.write(empty, zeros, "add")) - zeros
    held = op.Where(zero, u, 0.0)
    single = at.read(at.write(empty, held, "add")) - held
    rest = op.Where(op.Equal(count, 0.0), 1.0, op.Where(op.Equal(count, 1.0), single, 0.0))
    return at.read(at.write(x, factors, "mul")) / factors * rest


def _ties(op: Op, at: _Places, x: Var, u: Var, y: Var) -> tuple[Var, Var, Var]:
    """The elements that attain the extremum: (mask of x, mask of u, number of ties at each place)."""
    wide, updates = op.widen(x), op.widen(u)  # see `_extremum`
    top = at.write(wide, updates, op.attr("reduction")) if x.dtype in HALF else y
    x_wins, u_wins = op.Equal(wide, top), op.Equal(updates, at.read(top))
    ones = [op.cast_like(mask, x) for mask in (x_wins, u_wins)]
    return x_wins, u_wins, at.write(ones[0], ones[1], "add")


def _scatter_jvp(op: Op, tangents: Tangents, x: Var, index: Var, u: Var, y: Var) -> Result:
    at, how = _Places(op, x, index, u), op.attr("reduction")
    tx, _, tu = tangents
    if how in ("max", "min"):
        x_wins, u_wins, count = _ties(op, at, x, u, y)
        moved = op.zeros_like(x) if tx is None else op.Where(x_wins, tx, 0.0)
        moved = moved if tu is None else at.write(moved, op.Where(u_wins, tu, 0.0), "add")
        return moved / count
    if how == "mul":
        moved = op.zeros_like(x) if tx is None else at.write(tx, u, "mul")
        return moved if tu is None else at.write(moved, tu * _product_of_others(op, at, x, u), "add")
    tx = op.zeros_like(x) if tx is None else tx
    return tx if tu is None and how == "add" else at.write(tx, op.zeros_like(u) if tu is None else tu, how)


@rule("ScatterElements", "ScatterND", wrt=(0, 2), jvp=_scatter_jvp)
def scatter(op: Op, g: Var, x: Var, index: Var, u: Var, y: Var) -> Result:
    """y[i] = x[i] ∘ u: assigned (g off the places, g[i]); + (g, g[i]); · (g·Πu, g[i]·x·Π of the other u);
    max and min: g shared evenly by all, x included, that attain the extremum (as PyTorch does)"""
    at, how = _Places(op, x, index, u), op.attr("reduction")
    if how == "none":
        return at.write(g, op.zeros_like(u), how), None, at.read(g)
    if how == "add":
        return g, None, at.read(g)
    if how == "mul":
        others = _product_of_others(op, at, x, u) if op.needs[2] else None
        return at.write(g, u, how), None, None if others is None else at.read(g) * others
    x_wins, u_wins, count = _ties(op, at, x, u, y)
    share = g / count
    return op.Where(x_wins, share, 0.0), None, op.Where(u_wins, at.read(share), 0.0)


@linear("TensorScatter", wrt=(0, 1), joint=True)
def tensor_scatter(op: Op, g: Var, cache: Var, u: Var, start: Var) -> Result:
    """y = x with u written from an index on, one for each of a batch: (g with 0 there, g there)"""
    d_cache = op.replay(g, op.zeros_like(u), start) if op.needs[0] else None
    return d_cache, _written_there(op, g, u, start) if op.needs[1] else None


def _written_there(op: Op, g: Var, u: Var, start: Any) -> Any:
    """The slices of `g` along the axis of the node from `start` on, as many as `u` has."""
    axis = op.attr("axis") % u.rank
    rows = op.places_along(u, axis)
    index = op.Unsqueeze(rows, [a for a in range(u.rank) if a != axis])
    if start is not None:
        index = index + op.Unsqueeze(start, list(range(1, u.rank)))
        if op.attr("mode") == "circular":
            index = op.Mod(index, op.shape_of(g, axis, axis + 1))
    return op.GatherElements(g, op.Expand(index, op.shape_of(u)), axis=axis)
