"""Rows added to a table (cotangents of an embedding, messages along edges) one number after the other, not row by row.

ScatterElements increments a counter for every axis and looks up the index of each number. On a tensor of one axis there
is one counter, and each number takes two thirds of the time. The row indices become element indices, id·width + column,
also for ids that count from the end. Numbers of narrow rows are added column by column, since a short row plus a column
takes long: at a width of 2 that takes a third of the time. A place gets its numbers in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_op, producer
from onnxgrad.runtime.rewrites.rewrite import NodeRule, match_repeated, rewrite_results, same_but

#: Wider rows are added one after the other.
_MOST_COLUMNS = 16


@dataclass(frozen=True)
class _Rows:
    table: ir.Value
    ids: ir.Value
    rows: ir.Value
    dims: list[int]  #: of a row

    @classmethod
    def ending_in(cls, node: ir.Node) -> _Rows | None:
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


def _write(b: Builder, found: _Rows) -> Var:
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
    NodeRule(_Rows.ending_in, _write),
)
