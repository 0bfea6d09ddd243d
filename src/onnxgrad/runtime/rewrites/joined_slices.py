"""Cotangents of slices that cover a tensor: one Concat in place of a Pad for each and their sum.

The cotangent of a sliced tensor is the sum of the slices' cotangents, each padded with zeros. For adjacent slices, as
when queries, keys and values are cut from one product, it is their concatenation: one pass over memory on all threads,
in place of five (2 % of the step of a transformer on one thread). An unrolled scan has as many slices as steps, and
each Pad is as large as all of them. Other cotangents of the sliced tensor are added to the Concat: in a rotation of
queries or keys, whose halves change places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import constant, is_op, only_reader, producer
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite_sites


@dataclass(frozen=True)
class _Piece:
    """A tensor with zeros before and after it along one axis."""

    value: ir.Value
    axis: int
    before: int
    length: int
    after: int


class _Sum(NamedTuple):
    """A sum of adjacent slices, in order, and of other terms."""

    pieces: list[_Piece]
    others: list[ir.Value]


def _concatenations(graph: ir.Graph) -> dict[ir.Node, _Sum]:
    """The sums in `graph` of adjacent slices, by the last Add of each."""
    sites = {}
    for node in graph:
        if is_op(node, "Add") and not _continues(node):
            terms = [(v, _piece(v)) for v in _terms(node)]
            pieces = _order_pieces([piece for _, piece in terms if piece is not None])
            if pieces:
                sites[node] = _Sum(pieces, [v for v, piece in terms if piece is None])
    return sites


def _concatenate(b: Builder) -> Callable[[ir.Node, _Sum], None]:
    moved: dict[ir.Value, Var] = {}  # a term may be such a sum itself: a slice of a slice

    def write(node: ir.Node, found: _Sum) -> None:
        old, pieces = node.outputs[0], found.pieces
        joined = b.Concat(*(moved.get(p.value, p.value) for p in pieces), axis=pieces[0].axis)
        moved[old] = sum((moved.get(v) or b.var(v) for v in found.others), joined)
        replace_value(moved[old], old)
        b.graph.remove(node, safe=True)

    return write


def _continues(node: ir.Node) -> bool:
    """True if another Add is the only reader of the sum."""
    return only_reader(node.outputs[0], "Add") is not None


def _terms(node: ir.Node) -> list[ir.Value]:
    """The terms of a sum, through every Add that nothing else reads."""
    terms: list[ir.Value] = []
    waiting = list(node.inputs)
    while waiting:
        value = waiting.pop()
        if value is None:
            continue
        maker = producer(value, "Add")
        if maker is not None and _continues(maker):
            waiting.extend(maker.inputs)
        else:
            terms.append(value)
    return terms


def _piece(value: ir.Value) -> _Piece | None:
    pad = producer(value, "Pad")
    if pad is None or any(v is not None for v in pad.inputs[2:]) or value.is_graph_output():
        return None
    x, pads = pad.inputs[0], constant(pad.inputs[1])
    if pad.attributes.get_string("mode", "constant") != "constant" or pads is None or x is None or x.shape is None:
        return None
    around = pads.reshape(2, -1)
    axes = np.flatnonzero(around.any(axis=0))
    if len(axes) != 1 or len(x.shape) != around.shape[1] or around.min() < 0:
        return None
    axis = int(axes[0])
    length = x.shape[axis]
    return _Piece(x, axis, int(around[0, axis]), length, int(around[1, axis])) if isinstance(length, int) else None


def _order_pieces(known: list[_Piece]) -> list[_Piece]:
    """The pieces from first to last if they cover an axis without gap or overlap; else an empty list."""
    if len(known) < 2 or len({p.axis for p in known}) > 1:
        return []
    known = sorted(known, key=lambda p: p.before)
    if not all(_are_side_by_side(known[0], p) for p in known):
        return []
    total = known[0].before + known[0].length + known[0].after
    at = 0
    for p in known:
        if p.before != at or p.before + p.length + p.after != total or not p.length:
            return []
        at += p.length
    return known if at == total else []


def _are_side_by_side(one: _Piece, other: _Piece) -> bool:
    """False if two terms provably differ in an axis that is not cut, so that a sum broadcasts one of them."""
    assert one.value.shape is not None
    assert other.value.shape is not None
    dims = [(a, b) for i, (a, b) in enumerate(zip(one.value.shape, other.value.shape)) if i != one.axis]
    alike = all(a == b or not (a == 1 or b == 1 or (isinstance(a, int) and isinstance(b, int))) for a, b in dims)
    return len(one.value.shape) == len(other.value.shape) and alike


JOINED_SLICES = rewrite_sites(
    "joined_slices",
    "slices side by side come back as a Concat",
    "sums of Pads that cover an axis, and of other terms",
    _concatenations,
    _concatenate,
)
