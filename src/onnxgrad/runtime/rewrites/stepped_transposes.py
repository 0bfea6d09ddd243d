"""Transposes in two steps: one axis moves to or from the last place, and the others in rows. Short rows are gathered.

ONNX Runtime has fast loops where a single axis moves, and where the last axes stay in their place. Any other Transpose
moves number by number, which takes five to eight times as long as one of each kind: of [8, 192, 16, 16] to
[8, 16, 16, 192] with columns ahead of rows, 860 against 125 µs. A Reshape that adds an axis of size 1 keeps ONNX
Runtime from merging both.

A Transpose that leaves the last axis in its place moves row by row, 14 ns each, on one thread where rows are short. A
Gather of rows takes half of that: heads of 16 numbers, 100 words and 4 heads of each, 63 against 113 µs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import Dim, is_constant, is_op, permutation
from onnxgrad.runtime.rewrites.rewrite import NodeRule, rewrite_results

#: Numbers of a row that is moved by a Gather (ONNX Runtime moves two as one), and the most rows in an order.
_SHORT, _MOST = range(3, 17), 1 << 12
#: Fewer numbers are moved soon enough.
_FEWEST = 1 << 15
#: Size of an axis that has no number.
_OPEN = 16


class _Steps(NamedTuple):
    """A Transpose of `x` by one permutation after the other."""

    x: ir.Value
    first: list[int]
    second: list[int]


class _Heads(NamedTuple):
    """A Transpose of `x` that exchanges axes of sizes `one`, at `axis`, and `other`, ahead of rows."""

    x: ir.Value
    axis: int
    one: int
    other: int
    row: int


def _size(dims: Sequence[Dim]) -> int:
    return math.prod(d if isinstance(d, int) else _OPEN for d in dims)


def _moves_one(perm: Sequence[int]) -> bool:
    """True if all axes but one keep their order."""
    axes = range(len(perm))
    return any([a for a in perm if a != one] == [a for a in axes if a != one] for one in axes)


def _row(dims: Sequence[Dim], perm: Sequence[int]) -> int:
    """The numbers that stay side by side."""
    moved = [i for i, axis in enumerate(perm) if axis != i]
    return _size(dims[max(moved, default=-1) + 1 :])


def _match(node: ir.Node) -> _Steps | None:
    x = node.inputs[0] if is_op(node, "Transpose") else None
    if x is None or x.shape is None or x.dtype != ir.DataType.FLOAT or is_constant(x):
        return None
    dims, perm = x.shape.dims, permutation(node)
    last = len(dims) - 1
    if perm is None or last < 2 or perm[-1] == last or _moves_one(perm) or _size(dims) < _FEWEST:
        return None
    found = []
    # the axis that ends up last goes there first, or the one that is last stays there first
    for kept in (perm[-1], last):
        order = perm if kept == last else range(last + 1)
        first = [*(a for a in order if a != kept), kept]
        second = [first.index(a) for a in perm]
        rows = (first, dims) if kept == last else (second, [dims[a] for a in first])
        found.append((_row(rows[1], rows[0]), _Steps(x, first, second)))
    return max(found, key=lambda way: way[0])[1]


def _write(b: Builder, found: _Steps) -> Var:
    rank = len(found.first)
    as_they_are = [0] * rank
    y = b.emit("Transpose", found.x, perm=found.first)
    y = b.emit("Transpose", b.Reshape(y, [*as_they_are, 1]), perm=[*found.second, rank])
    return b.Reshape(y, as_they_are)


def _match_heads(node: ir.Node) -> _Heads | None:
    x = node.inputs[0] if is_op(node, "Transpose") else None
    if x is None or x.shape is None or x.dtype != ir.DataType.FLOAT or is_constant(x) or len(x.shape) < 3:
        return None
    axis, dims = len(x.shape) - 3, x.shape.dims
    if permutation(node) != (*range(axis), axis + 1, axis, axis + 2) or _size(dims) < _FEWEST:
        return None
    one, other, row = (d if isinstance(d, int) else 0 for d in dims[axis:])
    return _Heads(x, axis, one, other, row) if 0 < one * other <= _MOST and row in _SHORT else None


def _write_heads(b: Builder, found: _Heads) -> Var:
    x, axis, one, other, row = found
    order = np.arange(one * other).reshape(one, other).T.reshape(-1)
    rows = b.Gather(b.Reshape(x, [*[0] * axis, one * other, row]), order, axis=axis)
    return b.Reshape(rows, [*[0] * axis, other, one, row])


STEPPED_TRANSPOSES = rewrite_results(
    "stepped_transposes",
    "one axis that moves, and rows; a Gather of short rows",
    "Transpose of float32, of 32,768 numbers or more, that moves several axes, the last among them, or exchanges two "
    "ahead of a last one of 3 to 16",
    NodeRule(_match, _write),
    NodeRule(_match_heads, _write_heads),
)
