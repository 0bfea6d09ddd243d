"""Moments of an optimizer decay as a whole, and take in the gradient of an embedding in the rows of a batch alone.

That gradient is zero elsewhere: β₁·V + (1-β₁)·G is β₁·V with a few rows added, and β₂·H + (1-β₂)·G² likewise. That is
two passes over a table in place of seven, and of zeros. ScatterND adds a row in a fifteenth of the time, but from all
threads at once: rows of the same place are summed first, in their order, into the first of them. The bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_constant, is_op, is_zero, not_none, rank, sizes
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite_sites
from onnxgrad.runtime.rewrites.scattered_rows import Rows
from onnxgrad.runtime.setting import Setting

_EXACT = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
#: Calls take longer than passes over a smaller table, and the places of rows than narrow ones.
_SMALLEST, _NARROWEST = 100_000, 8


class _Touched(NamedTuple):
    """Rows of a table of zeros, and its readers: multiples and squares of it, and sums with tables of that size."""

    rows: Rows
    scaled: list[ir.Node]
    sums: list[ir.Node]


def _find(graph: ir.Graph) -> dict[ir.Node, _Touched]:
    return {node: found for node in graph if (found := _match(node)) is not None}


def _match(node: ir.Node) -> _Touched | None:
    rows = Rows.ending_in(node)
    size = None if rows is None else sizes(node.outputs[0])
    if rows is None or size is None or math.prod(size) < _SMALLEST or math.prod(size[1:]) < _NARROWEST:
        return None
    if rows.rows.dtype not in _EXACT or not is_zero(rows.table) or is_constant(rows.ids):
        return None
    tables, found = [node.outputs[0]], _Touched(rows, [], [])
    for table in tables:
        for reader in table.consumers():
            if not is_op(reader, ("Add", "Mul", "Sub")) or reader.graph is not node.graph or table.is_graph_output():
                return None
            x, y = reader.inputs
            other = y if x is table else x
            is_scaled = reader.op_type == "Mul" and (other is table or rank(other) == 0)
            is_sum = reader.op_type == "Add" or (reader.op_type == "Sub" and y is table)
            if is_scaled:
                tables.append(reader.outputs[0])
            elif not is_sum or other in tables or sizes(other) != size:
                return None
            (found.scaled if is_scaled else found.sums).append(reader)
    return found if found.sums and len({*found.sums}) == len(found.sums) else None


def _sum(b: Builder, found: Rows, count: int) -> tuple[Var, Var]:
    """The places of `found`, among `count`, each of them once, and the sums of their rows."""
    ids, rows = b.reshape(found.ids, [-1]), b.var(found.rows)
    length = b.size_of(rows, 0)
    order, back = b.Range(0, length, 1), b.Range(length - 1, -1, -1)
    # of rows that are written to the same place, the last one stays
    first = b.ScatterElements(np.zeros(count, np.int64), b.Gather(ids, back), back)
    first = b.Gather(first, ids)
    is_first = b.Equal(first, order)
    once, others = b.Compress(order, is_first), b.Compress(order, b.Not(is_first))
    added = b.Gather(rows, others)
    places = b.Expand(b.reshape(b.Gather(first, others), [-1, *[1] * len(found.dims)]), b.shape_of(added))
    sums = b.ScatterElements(rows, places, added, axis=0, reduction="add")
    return b.Unsqueeze(b.Gather(ids, once), [1]), b.Gather(sums, once)


def _writer(b: Builder) -> Callable[[ir.Node, _Touched], None]:
    def write(node: ir.Node, found: _Touched) -> None:
        table = node.outputs[0]
        places, rows = _sum(b, found.rows, not_none(sizes(table))[0])
        values = {table: rows}
        for b.before in found.scaled:
            x, y = (values.get(not_none(v), v) for v in b.before.inputs)
            values[b.before.outputs[0]] = b.Mul(x, y)
        for b.before in found.sums:
            x, y = map(not_none, b.before.inputs)
            other, added = (x, values[y]) if y in values else (y, values[x])
            added = -added if b.before.op_type == "Sub" else added
            replace_value(b.ScatterND(other, places, added, reduction="add"), b.before.outputs[0])

    return write


TOUCHED_ROWS = replace(
    rewrite_sites(
        "touched_rows",
        "moments decay as a whole, and rows are added to them",
        "sums with multiples and squares of a table of 100,000 numbers or more to which ScatterElements adds rows, "
        "of float32 or float64, where no kernel has them",
        _find,
        _writer,
    ),
    unless=Setting.keeps_functions,
)
