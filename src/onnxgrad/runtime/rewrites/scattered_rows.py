"""Rows added to a table (the cotangent of an embedding) one number after the other, not row by row.

ScatterElements keeps a counter for every axis and looks up the index of each number; on a tensor of one axis there
is one counter, and each number takes two thirds of the time. What indexes the rows then indexes the numbers:
id·width + column, which for an id that counts from the end counts from the end as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.runtime.rewrites.rewrite import Rewrite, Writer, known, made, put, sizes


@dataclass(frozen=True)
class _Rows:
    table: ir.Value
    ids: ir.Value
    rows: ir.Value
    shape: tuple[int, int]

    @classmethod
    def ending_in(cls, node: ir.Node) -> _Rows | None:
        """ScatterElements(add) along axis 0 of a table whose indices are the same in a row; None for anything else."""
        if node.op_type != "ScatterElements" or node.domain != "":
            return None
        reduction, axis = node.attributes.get("reduction"), node.attributes.get("axis")
        if reduction is None or reduction.as_string() != "add" or (axis is not None and axis.as_int() != 0):
            return None
        table, indices, rows = node.inputs
        spread = made(indices, "Expand")
        shape = sizes(node.outputs[0]) or sizes(table)
        if spread is None or table is None or rows is None or shape is None or len(shape) != 2:
            return None
        ids = spread.inputs[0]
        column = made(ids, "Reshape")
        dims = known(column.inputs[1]) if column is not None else None
        if ids is None or ids.dtype != ir.DataType.INT64 or dims is None or list(dims) != [-1, 1]:
            return None
        # as wide as the table, or the columns beyond would be those of the next row
        if rows.shape is None or len(rows.shape) != 2 or rows.shape[1] != shape[1] or not shape[1]:
            return None
        return cls(table, ids, rows, (shape[0], shape[1]))


def _write(graph: ir.Graph) -> None:
    writer = Writer(graph, "scattered_rows")
    for node in list(graph):
        found = _Rows.ending_in(node)
        if found is not None:
            writer.at = node
            width = found.shape[1]
            first = writer.emit("Mul", found.ids, writer.ints(width))
            places = writer.emit("Add", first, writer.constant(np.arange(width)[None]))
            flat = [writer.view(v, -1) for v in (found.table, places, found.rows)]
            y = writer.emit("ScatterElements", *flat, axis=0, reduction="add")
            put(writer.view(y, *found.shape), node.outputs[0])


SCATTERED_ROWS = Rewrite(
    "scattered_rows",
    "rows are added to a table as numbers to a vector",
    "the cotangent of an embedding",
    lambda graph: any(_Rows.ending_in(node) is not None for node in graph),
    _write,
)
