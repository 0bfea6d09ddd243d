"""Weights, wherever an exporter has put them: as initializers of their own, so that bindings can name them.

Weights inside branches and bodies move to the outer graph, where bindings can name them. Weights in Constant nodes
become initializers. If the model has initializers of rank 2 or more as well, only those that a layer reads do: its
exporter may store weights there, and constants in Constants, as PyTorch's always does, whose Constants stay. Weights
that an exporter has stored once because they are equal are parted.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxgrad.ir import Names
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import constant_tensor, is_op
from onnxgrad.training.graph.copied_weights import only_statistics, part_copies, rename_tensor, replace_node
from onnxgrad.training.graph.exported_constants import LAYERS, behind_layer, meetings


def own_weights(model: ir.Model, wanted: Collection[str]) -> None:
    """Make every weight of `model`, and all `wanted` ones, an initializer of its own, in place."""
    graph = model.graph
    keeps = any(_is_matrix(v) for g in (graph, *graph.subgraphs()) for v in g.initializers.values())
    sure = keeps and model.producer_name == "pytorch"
    names = Names.of_graph(graph)
    for inner in list(graph.subgraphs()):
        _hoist(graph, inner, names)
    for scope in (graph, *graph.subgraphs()):
        for node in list(scope):
            if is_op(node, "Constant"):
                _lift(graph, node, wanted, keeps, sure, names)
    part_copies(model)


def _is_matrix(value: ir.Value) -> bool:
    return value.dtype in FLOATS and value.shape is not None and len(value.shape) > 1 and bool(value.uses())


def _hoist(graph: ir.Graph, inner: ir.Graph, names: Names) -> None:
    """Move the float initializers of a branch or a body to the graph around it."""
    for name, value in list(inner.initializers.items()):
        tensor = value.const_value
        if tensor is None or value.dtype not in FLOATS or tensor.size < 2 or value in (*inner.inputs, *inner.outputs):
            continue
        own = add_initializer(
            graph, rename_tensor(tensor, name if name not in graph.initializers else names.fresh(name))
        )
        value.replace_all_uses_with(own)
        del inner.initializers[name]


def _of_layer(value: ir.Value) -> bool:
    """True if a layer reads `value` as a weight, or it is the bias behind one."""
    return any(
        (at == 0 if node.op_type == "Gather" else at > 0) if node.op_type in LAYERS else
        node.op_type in ("Add", "Sub") and behind_layer(node, at)
        for node, at, _ in meetings(value)
    )  # fmt: skip


def _lift(graph: ir.Graph, node: ir.Node, wanted: Collection[str], keeps: bool, sure: bool, names: Names) -> None:
    """Make a float Constant an initializer if it is wanted, a statistic, or the weight of a layer.

    Other constants of several elements too, unless the graph `keeps` weights as initializers; weights of layers unless
    it is `sure` to keep all there.
    """
    value = node.outputs[0]
    tensor = constant_tensor(value)
    if tensor is None or tensor.dtype not in FLOATS or value.is_graph_output():
        return
    weight = (not sure and len(tensor.shape) > 0 and _of_layer(value)) or (tensor.size > 1 and not keeps)
    if weight or value.name in wanted or only_statistics(value):
        replace_node(graph, node, tensor, names)
