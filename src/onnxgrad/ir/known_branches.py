"""Branches that are always taken: an If whose condition is a constant is the nodes of its branch.

Exporters leave such nodes behind (a model for two sampling rates, one of which was fixed). ONNX Runtime inlines them
too, but checks the types of the dead branch first, and refuses models in which these do not fit; it crashes on some
whose branches contain operators of other domains.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxgrad.ir.constants import known_value
from onnxgrad.ir.graph import discard, walk
from onnxgrad.ir.match import is_op
from onnxgrad.ir.names import Names


def known_branches(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Graph]]:
    """The If nodes of `graph` and of graphs inside of it whose branch is known, outermost first, and that branch."""
    opset = graph.opset_imports.get("", 1)
    for node in walk(graph):
        if node.op_type == "If" and is_op(node, "If") and node.inputs[0] is not None:
            condition = known_value(node.inputs[0], opset)
            if condition is not None and condition.size == 1:
                taken = "then_branch" if condition.reshape(-1)[0] else "else_branch"
                yield node, node.attributes[taken].as_graph()


def take_known_branches(graph: ir.Graph) -> int:
    """Replace each If with a known condition by the nodes of its branch, in place. Returns the count.

    Conditions that are computed from constants of another scope count once that scope is taken apart.
    """
    count = 0
    names = None
    while (branch := next(known_branches(graph), None)) is not None:
        names = names or Names.of_graph(graph)
        _splice_branch(*branch, names)
        count += 1
    return count


def _splice_branch(node: ir.Node, branch: ir.Graph, names: Names) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    outer = {*graph.initializers, *(v.name for v in graph.inputs)}
    outer |= {v.name for n in graph for v in n.outputs}
    ends = list(branch.outputs)
    branch.outputs.clear()
    for name, initializer in list(branch.initializers.items()):
        del branch.initializers[name]
        if name in outer:
            initializer.name = names.fresh(name)
        graph.register_initializer(initializer)
    for inner in list(branch):
        branch.remove(inner)
        for value in inner.outputs:
            if value.name in outer:  # another branch had a value of this name, or will have
                value.name = names.fresh(value.name or "value")
        graph.insert_before(node, inner)
    for old, new in zip(list(node.outputs), ends, strict=True):
        if old.is_graph_output():  # a value is an output under one name only
            made = ir.Node("", "Identity", [new], num_outputs=1, name=names.fresh("Identity"))
            made.outputs[0].type, made.outputs[0].shape = old.type, old.shape
            graph.insert_before(node, made)
            old.replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
            made.outputs[0].name, old.name = old.name, made.outputs[0].name
        else:
            old.replace_all_uses_with(new)
    discard(graph, node)
