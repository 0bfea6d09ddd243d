"""Rows added up at places (messages along edges, sums of segments) to the call that adds up cotangents of lookups.

ScatterElements looks up the index of each number. Where the index is the same along a row, and the table starts from
zeros, a call of ``source/optimizers.c`` adds row by row, and reads each index once. Rows that are gathered for it alone
(messages that are rows of nodes, and their cotangents) it reads in their table.
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from onnxgrad.ir.graph import prune, scopes, take_over
from onnxgrad.ir.match import is_op, is_zero, producer
from onnxgrad.ir.passes import Pass
from onnxgrad.ir.shapes import same_dims
from onnxgrad.runtime.kernels.elementwise import PHASE
from onnxgrad.runtime.kernels.row_kernels import INDICES
from onnxgrad.runtime.kernels.substitute import DOMAIN, widen_integers
from onnxgrad.runtime.rewrites.rewrite import match_repeated, same_but
from onnxgrad.runtime.setting import Setting


def _call_sums(model: ir.Model, setting: Setting) -> int:
    """Replace sums of rows in `model` by calls. Returns the count."""
    numbers = itertools.count()
    for graph in scopes(model.graph):
        for node in list(graph):
            operands = _operands(node)
            if operands is None:
                continue
            (old,) = node.outputs
            name = f"native.summed_rows.{next(numbers)}"
            call = ir.Node(DOMAIN, "GatherGrad", operands, num_outputs=1, name=name)
            graph.insert_after(node, call)
            widen_integers(graph, call)
            old.replace_all_uses_with(call.outputs[0], replace_graph_outputs=True)
            (new,) = call.outputs
            new.type, new.shape, new.name, old.name = old.type, old.shape, old.name, f"{name}.operators"
        prune(graph)
    model.opset_imports[DOMAIN] = 1
    return next(numbers)


def _operands(node: ir.Node) -> list[ir.Value | None] | None:
    """The operands of the kernel for a ScatterElements that adds rows up: a tensor like the table, rows, and index."""
    if not is_op(node, "ScatterElements") or node.attributes.get_string("reduction") != "add":
        return None
    table, indices, rows = node.inputs
    (result,) = node.outputs
    if table is None or rows is None or table.shape is None or rows.shape is None or not len(table.shape):
        return None
    if node.attributes.get_int("axis", 0) % len(table.shape) or table.dtype != ir.DataType.FLOAT:
        return None
    # as wide as the table: the call adds whole rows
    index = match_repeated(indices, len(table.shape), 0)
    wide = same_but(0, result.shape or table.shape, rows.shape)
    if index is None or index.dtype not in INDICES or wide is None or not is_zero(table):
        return None
    return [_of_same_shape(table), rows, None, index]


def _of_same_shape(table: ir.Value) -> ir.Value:
    """A tensor of the shape of `table`, which is made for another purpose if there is one."""
    filled = producer(table, "ConstantOfShape")
    shape = None if filled is None else producer(filled.inputs[0], "Shape")
    like = None if shape is None or shape.attributes else shape.inputs[0]
    return like if like is not None and like.dtype == ir.DataType.FLOAT else table


def _gathered(call: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The table and the index of the rows that `call` adds up, if they are gathered for it alone."""
    if (call.domain, call.op_type) != (DOMAIN, "GatherGrad") or len(call.inputs) != 4:
        return None
    _, rows, _, index = call.inputs
    gather = producer(rows, "Gather")
    if rows is None or gather is None or len(rows.uses()) != 1 or rows.is_graph_output():
        return None
    table, places = gather.inputs
    if table is None or places is None or index is None or table.shape is None or places.dtype != ir.DataType.INT64:
        return None
    if places.shape is None or index.shape is None or gather.attributes.get_int("axis", 0) % len(table.shape):
        return None
    each = [[d for d in shape.dims if d != 1] for shape in (places.shape, index.shape)]
    return (table, places) if same_dims(*each) else None


def _read_tables(model: ir.Model, setting: Setting) -> int:
    """Let calls read the rows that they add up where these are. Returns the count."""
    count = 0
    for graph in scopes(model.graph):
        for call in list(graph):
            if (gathered := _gathered(call)) is None:
                continue
            table, places = gathered
            (old,) = call.outputs
            operands = [call.inputs[0], table, *call.inputs[2:], places]
            new = ir.Node(DOMAIN, call.op_type, operands, num_outputs=1, name=call.name)
            graph.insert_after(call, new)
            take_over(new.outputs[0], old)
            count += 1
        prune(graph)
    return count


SUMMED_ROWS = Pass(
    "summed_rows",
    PHASE,
    "a call that adds up rows where they belong",
    "ScatterElements(add) along the first axis into zeros, the same index along a row, float32",
    lambda model, _: any(is_op(n, "ScatterElements") for g in scopes(model.graph) for n in g),
    _call_sums,
    Setting.keeps_operators,
)

GATHERED_SUMS = Pass(
    "gathered_sums",
    PHASE,
    "rows are read where they are, not copied",
    "a call that adds up rows, of a Gather that nothing else reads, int64 indices",
    lambda model, _: any(_gathered(n) is not None for g in scopes(model.graph) for n in g),
    _read_tables,
    Setting.keeps_operators,
)
