"""MaxPool(Relu(x)) is Relu(MaxPool(x)): the step pools first.

Both are monotone, so results are equal, ties and kinks included: if the largest element of a window is at most 0,
neither order passes a cotangent. But the Relu, its derivative and the mask shrink to the pooled size: two passes fewer
over the larger tensor, which is also not saved for the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnxgrad.ir.match import is_op, producer


def pool_first(graph: ir.Graph, keep: Collection[str] = ()) -> int:
    """Swap every Relu of `graph` with a MaxPool that is its only reader, except names in `keep`. Returns the count."""
    count = 0
    for relu, pool in exchangeable(graph, keep):
        _exchange(graph, relu, pool)
        count += 1
    return count


def exchangeable(graph: ir.Graph, keep: Collection[str] = ()) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Each Relu of `graph` that `keep` does not name, with a MaxPool that alone reads it."""
    for pool in list(graph):
        if not is_op(pool, "MaxPool") or len(pool.outputs) > 1 or pool.inputs[0] is None:
            continue
        between = pool.inputs[0]
        relu = producer(between, "Relu")
        if relu is None or relu.graph is not graph:
            continue
        if len(list(between.uses())) == 1 and not between.is_graph_output() and between.name not in keep:
            yield relu, pool


def _exchange(graph: ir.Graph, relu: ir.Node, pool: ir.Node) -> None:
    x, between, y = relu.inputs[0], relu.outputs[0], pool.outputs[0]
    y.replace_all_uses_with(between, replace_graph_outputs=True)
    pool.replace_input_with(0, x)
    relu.replace_input_with(0, y)
    between.shape = y.shape
    y.name, between.name = between.name, y.name
    graph.remove(relu)
    graph.insert_after(pool, relu)
