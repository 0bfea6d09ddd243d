"""Rows that are only put in another order, in one pass: windows that are rolled, cut out, and put back.

PyTorch exports ``roll`` as two Slices and a Concat, for each axis, which its cotangent reverses; and attention in
windows transposes behind that. All of these copy whole rows, [N, …, C], to other places, which are known: together they
are one Gather. Where every row stays (a roll by nothing) they are a view.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder
from onnxgrad.ir.match import constant, is_op, not_none, permutation, producer, rank
from onnxgrad.ir.shapes import same_dim, same_dims
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite_found

#: Rows of fewer numbers are not copied faster one by one.
_FEWEST = 16
#: Operators that may only move rows.
_STEPS = ("Concat", "Slice", "Split", "Transpose", "Reshape", "Add")


@dataclass(frozen=True)
class _Rows:
    """Rows of `x`, all axes but the first and the last flattened: those at `places`, with 1 in place of these axes."""

    x: ir.Value
    places: np.ndarray
    joined: bool = False

    @classmethod
    def all_of(cls, x: ir.Value) -> _Rows | None:
        """The rows of `x` in order; None if their number or size is not known, or small."""
        sizes = None if x.shape is None else _sizes(x.shape)
        if sizes is None or sizes[-1] < _FEWEST:
            return None
        return cls(x, np.arange(math.prod(sizes[:-1])).reshape(1, *sizes[:-1], 1))

    @property
    def are_as_many(self) -> bool:
        """True if `x` has this number of rows, which is not 0."""
        every = _Rows.all_of(self.x)
        return every is not None and 0 < self.places.size == every.places.size


def _sizes(shape: ir.Shape) -> list[int] | None:
    """The sizes of all axes but the first, two or more; None if one is not known."""
    found = [d for d in shape[1:] if isinstance(d, int)]
    return found if 2 <= len(found) == len(shape) - 1 else None


#: For values, rows of which others they are.
_Found = dict[ir.Value, _Rows]


def _find(graph: ir.Graph) -> _Found:
    """The last values of steps that put the rows of another value in some order, as many as there are."""
    found: _Found = {}
    if not any(_joins_slices(node) for node in graph):
        return found
    for node in graph:
        for y in node.outputs if is_op(node, _STEPS) else ():
            if (rows := _follow(found, node, y)) is not None:
                found[y] = rows
    sites: _Found = {}
    passed: set[ir.Value] = set()
    for y, rows in reversed(found.items()):
        if not y.is_graph_output() and all(passed.issuperset(n.outputs) for n in y.consumers()):
            passed.add(y)
        elif rows.joined and rows.are_as_many:
            passed.add(y)
            sites[y] = rows
    return dict(reversed(sites.items()))


def _of(found: _Found, x: ir.Value | None) -> _Rows | None:
    return None if x is None else found.get(x) or _Rows.all_of(x)


def _follow(found: _Found, node: ir.Node, y: ir.Value) -> _Rows | None:
    """The rows that `node` makes `y` of; None if it does more than to move them."""
    if y.shape is None or (sizes := _sizes(y.shape)) is None:
        return None
    if is_op(node, "Concat"):
        return _join(found, node, len(y.shape))
    if is_op(node, "Add"):
        kept = [a for a, b in (node.inputs, node.inputs[::-1]) if a is not None and _is_nothing(b)]
        same = bool(kept) and kept[0].shape is not None and same_dims(kept[0].shape.dims, y.shape.dims)
        return replace(rows, joined=True) if same and (rows := _of(found, kept[0])) is not None else None
    x = not_none(node.inputs[0])
    rows = _of(found, x)
    if rows is None or x.shape is None or not same_dim(x.shape[0], y.shape[0]) or sizes[-1] != x.shape[-1]:
        return None
    places, axes = rows.places, len(y.shape)
    if is_op(node, "Reshape"):
        whole = math.prod(sizes[:-1]) == places.size  # else there is no first axis
        return replace(rows, places=places.reshape(1, *sizes[:-1], 1)) if whole else None
    if is_op(node, "Transpose"):
        order = permutation(node)
        ends = order is not None and (order[0], order[-1]) == (0, axes - 1)
        return replace(rows, places=places.transpose(order)) if ends else None
    cuts = _part(node, y, axes) if is_op(node, "Split") else _cuts(node, axes)
    if cuts is None or not {*cuts} <= {*range(1, axes - 1)}:
        return None
    return replace(rows, places=places[tuple(cuts.get(axis, slice(None)) for axis in range(axes))])


def _join(found: _Found, node: ir.Node, axes: int) -> _Rows | None:
    axis = node.attributes.get_int("axis", 0) % axes
    parts = [_of(found, x) for x in node.inputs]
    known = [rows for rows in parts if rows is not None]
    if axis in (0, axes - 1) or len(known) < len(parts) or len({rows.x for rows in known}) > 1:
        return None
    return _Rows(known[0].x, np.concatenate([rows.places for rows in known], axis), True)


def _joins_slices(node: ir.Node) -> bool:
    """True for a Concat of slices, along an axis between the first and the last."""
    axes = rank(node.outputs[0]) if is_op(node, "Concat") else None
    inner = axes is not None and 0 < node.attributes.get_int("axis", 0) % axes < axes - 1
    return inner and any(producer(x, ("Slice", "Split")) is not None for x in node.inputs)


def _is_nothing(value: ir.Value | None) -> bool:
    """True for zeros around a tensor without numbers: the cotangent of a slice of nothing."""
    pad = producer(value, "Pad")
    x = None if pad is None else pad.inputs[0]
    if pad is None or x is None or x.shape is None or pad.attributes.get_string("mode", "constant") != "constant":
        return False
    return 0 in x.shape.dims and (len(pad.inputs) < 3 or pad.inputs[2] is None)


def _part(split: ir.Node, part: ir.Value, axes: int) -> dict[int, slice] | None:
    """The part of its axis that a Split hands on as `part`; None if it is not known."""
    axis = split.attributes.get_int("axis", 0) % axes
    sizes: list[Any] = [None if y.shape is None else y.shape[axis] for y in split.outputs]
    if not all(isinstance(size, int) for size in sizes):
        return None
    index = not_none(part.index())
    start = sum(sizes[:index])
    return {axis: slice(start, start + sizes[index])}


def _cuts(node: ir.Node, axes: int) -> dict[int, slice] | None:
    """The part of each axis that a Slice keeps, by axis; None if it is computed, or goes backwards."""
    starts, ends, along, steps = (constant(v) for v in (*node.inputs[1:], None, None)[:4])
    computed = any(v is not None and constant(v) is None for v in node.inputs[1:])
    if starts is None or ends is None or computed or (steps is not None and (steps < 1).any()):
        return None
    numbers = zip(
        range(axes) if along is None else along, starts, ends, np.ones_like(starts) if steps is None else steps
    )
    return {int(a) % axes: slice(int(i), int(e), int(k)) for a, i, e, k in numbers}


def _write(b: Builder, sites: _Found) -> int:
    for y, rows in sites.items():
        b.before = y.producer()
        last = not_none(rows.x.shape)[-1]
        table, places = b.Reshape(rows.x, [0, rows.places.size, last]), rows.places.reshape(-1)
        if (places != np.arange(places.size)).any():
            table = b.Gather(table, places, axis=1)
        replace_value(b.Reshape(table, [0, *rows.places.shape[1:-1], last]), y)
    return len(sites)


ROLLED_ROWS = rewrite_found(
    "rolled_rows",
    "rows in another order are picked in one pass",
    "slices side by side that change places, or do not, of rows of 16 numbers or more, and Transposes around them",
    _find,
    _write,
)
