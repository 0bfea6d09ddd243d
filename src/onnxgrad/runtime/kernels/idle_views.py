"""Nodes that only cost their call, where ONNX Runtime removes none itself (level "none").

A step of a loop over small arrays takes as long as its calls: a microsecond for each, whatever it computes. Derivatives
leave views that give back the shape that there was, sums that keep an axis for a view to drop, and vectors as columns
beside matrices of few rows (see `ir.cleanup`: ONNX Runtime's fusion that this prevents is of a higher level).
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.cleanup import has_few_rows
from onnxgrad.ir.graph import prune
from onnxgrad.ir.match import constant, is_op, not_none, only_reader, producer, rank
from onnxgrad.runtime.kernels.elementwise_steps import dims
from onnxgrad.runtime.kernels.reductions import VIEWS


def drop_idle_views(graph: ir.Graph) -> int:
    """Drop them from `graph`, without nested graphs, in place. Returns the count."""
    count = 0
    for node in list(graph):
        if is_op(node, VIEWS) and (_undo_column(node) or _skip_views(node) or _drop_kept_axes(node)):
            count += 1
    if count:
        prune(graph)
    return count


def _undo_column(squeeze: ir.Node) -> bool:
    """Write Squeeze(A · Unsqueeze(x, -1), -1) as A · x."""
    product = producer(squeeze.inputs[0], "MatMul") if is_op(squeeze, "Squeeze") and _axes(squeeze) == [-1] else None
    if product is None or not _is_only_read(product, "Squeeze") or not has_few_rows(product.inputs[0]):
        return False
    view = producer(product.inputs[1], "Unsqueeze")
    if view is None or _axes(view) != [-1] or rank(view.inputs[0]) != 1:
        return False
    squeeze.op_type = "MatMul"
    squeeze.replace_input_with(0, product.inputs[0])
    squeeze.replace_input_with(1, view.inputs[0])
    return True


def _skip_views(view: ir.Node) -> bool:
    """Let readers of a view of views read the first operand of the same shape."""
    y, x = view.outputs[0], view.inputs[0]
    shape = dims(y)
    if shape is None or y.is_graph_output():
        return False
    while x is not None:
        if dims(x) == shape:
            y.replace_all_uses_with(x)
            return True
        before = producer(x, VIEWS)
        x = before.inputs[0] if before is not None and before.graph is view.graph else None
    return False


def _drop_kept_axes(view: ir.Node) -> bool:
    """Let a sum drop its axes itself if `view`, its only reader, does."""
    total = producer(view.inputs[0], ("ReduceSum", "ReduceMean"))
    y = view.outputs[0]
    if total is None or y.is_graph_output() or not _is_only_read(total, VIEWS) or len(total.inputs) != 2:
        return False
    shape, axes = dims(not_none(total.inputs[0])), _axes(total)
    if shape is None or axes is None or not total.attributes.get_int("keepdims", 1):
        return False
    gone = {a % len(shape) for a in axes}
    if dims(y) != tuple(d for a, d in enumerate(shape) if a not in gone):
        return False
    total.attributes["keepdims"] = ir.AttrInt64("keepdims", 0)
    total.outputs[0].shape = y.shape
    y.replace_all_uses_with(total.outputs[0])
    return True


def _is_only_read(node: ir.Node, op_types: str | frozenset[str]) -> bool:
    return only_reader(node.outputs[0], op_types) is not None


def _axes(node: ir.Node) -> list[int] | None:
    axes = constant(node.inputs[1]) if len(node.inputs) == 2 else None
    return None if axes is None else [int(a) for a in axes.reshape(-1)]
