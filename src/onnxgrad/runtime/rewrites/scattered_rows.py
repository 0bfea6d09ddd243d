"""Rows added to a table (cotangents of an embedding, messages along edges) one number after the other, not row by row.

ScatterElements increments a counter for every axis and looks up the index of each number. On a tensor of one axis there
is one counter, and each number takes two thirds of the time. The row indices become element indices, id·width + column,
also for ids that count from the end. Numbers of narrow rows are added column by column, since a short row plus a column
takes long: at a width of 2 that takes a third of the time. A place gets its numbers in the same order.

Rows picked from each entry of a batch (neighbours of points, the best queries), or added up there, are made rows of one
table first, also for the kernel that adds up rows: of `m` rows each, row i of entry n is row n·m + i of all. Gather
copies it as a whole, in a third of the time of GatherElements with its Expand. An index beyond an entry would be a row
of the next one in place of an error; so it has to be one that TopK, ArgMax or ArgMin found, a Clip bounds, or known.

Numbers of each row that are the same ones for a whole batch (distances between tokens) are rows once the batch is the
last axis: in a third of the time, both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import Dim, is_op, is_zero, producer, single_constant
from onnxgrad.ir.shapes import same_dim, same_dims
from onnxgrad.runtime.rewrites.known_rows import FEWEST
from onnxgrad.runtime.rewrites.rewrite import NodeRule, constant_ids, match_repeated, rewrite_results, same_but

#: Wider rows are added one after the other.
_MOST_COLUMNS = 16
#: Between a search and its places.
_MOVES = ("Reshape", "Unsqueeze", "Squeeze", "Identity", "Transpose", "Slice")


@dataclass(frozen=True)
class Rows:
    """Rows that are added to a table."""

    table: ir.Value
    ids: ir.Value
    rows: ir.Value
    dims: list[int]  #: of a row

    @classmethod
    def ending_in(cls, node: ir.Node) -> Rows | None:
        """ScatterElements(add) along axis 0 of a table whose indices are the same in a row; None for anything else."""
        if not is_op(node, "ScatterElements"):
            return None
        if node.attributes.get_string("reduction") != "add" or node.attributes.get_int("axis", 0) != 0:
            return None
        table, indices, rows = node.inputs
        shape = node.outputs[0].shape or (None if table is None else table.shape)
        if table is None or rows is None or shape is None or rows.shape is None or len(shape) < 2:
            return None
        ids = match_repeated(indices, len(shape), 0)
        # as wide as the table, or the columns beyond would be those of the next row
        dims = same_but(0, shape, rows.shape)
        if ids is None or ids.dtype != ir.DataType.INT64 or producer(indices, "Expand") is None or dims is None:
            return None
        return cls(table, ids, rows, dims) if min(dims) > 0 else None


def _write(b: Builder, found: Rows) -> Var:
    width = int(np.prod(found.dims))
    rows = b.var(found.rows)
    if 1 < width <= _MOST_COLUMNS:
        rows = b.Transpose(b.reshape(rows, [-1, width]), perm=[1, 0])
        numbers = b.reshape(found.ids, [1, -1]) * [width] + np.arange(width)[:, None]
    else:
        numbers = b.reshape(found.ids, [-1, 1]) * [width] + np.arange(width)[None]
    flat = [b.reshape(v, [-1]) for v in (found.table, numbers, rows)]
    return b.reshape(b.ScatterElements(*flat, axis=0, reduction="add"), [-1, *found.dims])


SCATTERED_ROWS = rewrite_results(
    "scattered_rows",
    "rows are added to a table as numbers to a vector",
    "ScatterElements(add) along axis 0, the same index along a row",
    NodeRule(Rows.ending_in, _write),
)


@dataclass(frozen=True)
class _Entries:
    x: ir.Value
    ids: ir.Value
    added: ir.Value | None  #: rows that are added up; without, rows are picked
    axis: int  #: of the rows of an entry
    row: list[int]  #: the shape of a row

    @classmethod
    def ending_in(cls, node: ir.Node) -> _Entries | None:
        """GatherElements, or ScatterElements(add), behind the first axis, of whole rows; None for anything else."""
        picks = is_op(node, "GatherElements")
        if not picks and (not is_op(node, "ScatterElements") or node.attributes.get_string("reduction") != "add"):
            return None
        x, index, spread = node.inputs[0], node.inputs[1], producer(node.inputs[1], "Expand")
        ids = None if spread is None else spread.inputs[0]
        if x is None or index is None or ids is None or x.shape is None or index.shape is None or ids.shape is None:
            return None
        axis = node.attributes.get_int("axis", 0) % len(x.shape)
        dims = (*[1] * (len(x.shape) - len(ids.shape)), *ids.shape)
        row = [d for d in x.shape[axis + 1 :] if isinstance(d, int) and d]
        outer, own = x.shape.dims[:axis], dims[:axis]
        is_of_rows = 0 < axis < len(x.shape) - 1 and len(row) == len(x.shape) - axis - 1 and set(row) != {1}
        is_of_rows = is_of_rows and all(d == 1 for d in dims[axis + 1 :]) and same_dim(dims[axis], index.shape[axis])
        is_of_all = same_dims(outer, index.shape.dims[:axis]) and same_dims(row, index.shape.dims[axis + 1 :])
        is_of_all = is_of_all and all(d == 1 or same_dim(d, n) for d, n in zip(own, outer))
        if picks and all(d == 1 for d in own):  # whole rows of the batch
            return None
        known = constant_ids(ids)
        is_few = known is None or known.size < FEWEST  # many are added up by place
        return (
            cls(x, ids, None if picks else node.inputs[2], axis, row)
            if is_of_rows and is_of_all and is_few and _is_within(ids, x.shape[axis])
            else None
        )


def _is_within(ids: ir.Value | None, size: Dim) -> bool:
    """True if `ids` are certainly from 0 on and below `size`."""
    known = constant_ids(ids)
    if known is not None:
        return isinstance(size, int) and known.size > 0 and known.min() >= 0 and known.max() < size
    while (moved := producer(ids, _MOVES)) is not None:
        ids = moved.inputs[0]
    if (clip := producer(ids, "Clip")) is not None and len(clip.inputs) == 3:
        low, high = (single_constant(v) for v in clip.inputs[1:])
        return isinstance(size, int) and low is not None and high is not None and bool(0 <= low <= high < size)
    node = producer(ids, ("TopK", "ArgMax", "ArgMin"))
    if node is None or node.inputs[0] is None or node.inputs[0].shape is None or ids is not node.outputs[-1]:
        return False
    shape = node.inputs[0].shape
    return same_dim(size, shape[node.attributes.get_int("axis", -1 if node.op_type == "TopK" else 0) % len(shape)])


def _write_entries(b: Builder, found: _Entries) -> Var:
    x, ids, axis, row = b.var(found.x), b.var(found.ids), found.axis, found.row
    outer = b.shape_of(x, 0, axis)
    entries = b.Range(0, b.ReduceProd(outer, keepdims=0), 1) * b.size_of(x, axis)
    first = b.reshape(entries, b.join(outer, [1] * (1 + len(row))))
    places = b.Squeeze(b.Cast(ids, to=ir.DataType.INT64) + first, list(range(axis + 1, axis + 1 + len(row))))
    table = b.reshape(x, [-1, *row])
    if found.added is None:
        return b.Gather(table, places, axis=0)
    rows = b.reshape(found.added, [-1, *row])
    index = b.Expand(b.reshape(places, [-1, *[1] * len(row)]), b.shape_of(rows))
    return b.reshape(b.ScatterElements(table, index, rows, axis=0, reduction="add"), b.shape_of(x))


@dataclass(frozen=True)
class _Columns:
    x: ir.Value
    index: ir.Value
    ids: ir.Value
    added: ir.Value | None  #: numbers that are added up; without, numbers are picked
    batch: int  #: the number of axes of the batch

    @classmethod
    def ending_in(cls, node: ir.Node) -> _Columns | None:
        """GatherElements, or ScatterElements(add) into zeros, along the last axis, the same for all of a batch."""
        picks = is_op(node, "GatherElements")
        if not picks and (not is_op(node, "ScatterElements") or node.attributes.get_string("reduction") != "add"):
            return None
        x, index = node.inputs[:2]
        spread = producer(index, "Expand")
        ids = None if spread is None else spread.inputs[0]
        if x is None or index is None or ids is None or x.shape is None or index.shape is None or ids.shape is None:
            return None
        rank = len(x.shape)
        own = (*[1] * (rank - len(ids.shape)), *ids.shape)
        batch = next((i for i, d in enumerate(own) if d != 1), 0)
        if not 0 < batch < rank - 1 or node.attributes.get_int("axis", 0) % rank != rank - 1 or len(own) != rank:
            return None
        lengths = zip((*x.shape.dims[:-1], *own[batch:]), (*index.shape.dims[:-1], *index.shape.dims[batch:]))
        fits = all(same_dim(a, c) for a, c in lengths) and (picks or is_zero(x))
        return (
            cls(x, index, ids, None if picks else node.inputs[2], batch)
            if fits and _is_within(ids, x.shape[-1])
            else None
        )


def _write_columns(b: Builder, found: _Columns) -> Var:
    x, index, batch = b.var(found.x), b.var(found.index), found.batch
    count = b.ReduceProd(b.shape_of(x, 0, batch), keepdims=1)

    def turn(v: Var) -> Var:
        behind = b.folded(b.ReduceProd(b.shape_of(v, batch), keepdims=1))
        return b.Transpose(b.reshape(v, b.join(count, behind)), perm=[1, 0])

    ids = b.reshape(found.ids, b.shape_of(index, batch))
    firsts = b.Range(0, b.ReduceProd(b.shape_of(x, batch, -1), keepdims=0), 1) * b.size_of(x, -1)
    firsts = b.reshape(firsts, b.join(b.shape_of(x, batch, -1), [1]))
    places = b.reshape(b.Cast(ids, to=ir.DataType.INT64) + firsts, [-1])
    if found.added is None:
        return b.reshape(b.Transpose(b.Gather(turn(x), places, axis=0), perm=[1, 0]), b.shape_of(index))
    rows = turn(b.var(found.added))
    size = b.join(b.folded(b.ReduceProd(b.shape_of(x, batch), keepdims=1)), b.shape_of(rows, 1))
    spread = b.Expand(b.Unsqueeze(places, [1]), b.shape_of(rows))
    sums = b.ScatterElements(b.Expand(b.const(0.0, x.dtype), size), spread, rows, axis=0, reduction="add")
    return b.reshape(b.Transpose(sums, perm=[1, 0]), b.shape_of(x))


ROWS_OF_BATCHES = rewrite_results(
    "rows_of_batches",
    "rows of the entries of a batch are those of one table",
    "GatherElements, ScatterElements(add) behind the first axis, places of TopK or known ones, the same along a row",
    NodeRule(_Entries.ending_in, _write_entries),
)

COLUMNS_OF_BATCHES = replace(
    rewrite_results(
        "columns_of_batches",
        "numbers at the same places of each entry of a batch are rows",
        "GatherElements, ScatterElements(add) into zeros along the last axis, bounded places, the same for a batch",
        NodeRule(_Columns.ending_in, _write_columns),
    ),
    unless=lambda setting: setting.keeps_layout() or setting.keeps_operators(),
)
