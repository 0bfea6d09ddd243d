"""MaxPool(Relu(x)) is Relu(MaxPool(x)): the step pools first.

Both are monotone, so nothing changes, ties and kinks included: where the largest element of a window is at most 0,
neither order lets a cotangent through. But the Relu, its derivative and the mask between them shrink to the
size of what is pooled: two passes fewer over the larger tensor, which is also not kept for the way back.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir


def pool_first(graph: ir.Graph, keep: Collection[str] = ()) -> None:
    """Exchange every Relu of `graph` with a MaxPool that alone reads it; values named in `keep` stay what they are."""
    for pool in list(graph):
        if not _is(pool, "MaxPool") or len(pool.outputs) > 1 or pool.inputs[0] is None:
            continue
        between = pool.inputs[0]
        relu = between.producer()
        if relu is None or not _is(relu, "Relu") or relu.graph is not graph:
            continue
        if len(list(between.uses())) == 1 and not between.is_graph_output() and between.name not in keep:
            _exchange(graph, relu, pool)


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == ""


def _exchange(graph: ir.Graph, relu: ir.Node, pool: ir.Node) -> None:
    x, between, y = relu.inputs[0], relu.outputs[0], pool.outputs[0]
    y.replace_all_uses_with(between, replace_graph_outputs=True)
    pool.replace_input_with(0, x)
    relu.replace_input_with(0, y)
    between.shape = y.shape
    y.name, between.name = between.name, y.name
    graph.remove(relu)
    graph.insert_after(pool, relu)
