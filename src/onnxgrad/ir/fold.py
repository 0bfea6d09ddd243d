"""Constant folding in derived graphs: nodes whose operands are constants become constants, where that is exact.

What is folded moves data, compares, or is one operation of IEEE 754 that every runtime rounds alike (+, −, ·, /), so
the graph gives the same bits. Functions that runtimes approximate, each in its own way (Exp, Tanh, Sqrt on some), stay
nodes: ONNX Runtime folds these itself when it loads a model, by its own kernels. Only small tensors are folded (at most
`MOST_ELEMENTS`), so no graph grows, and only `Constant` nodes and what rules wrote down count as constants: an
initializer is a parameter that a user may exchange.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxgrad.ir.exact import exact
from onnxgrad.ir.match import is_op


def fold_constants(graph: ir.Graph, written: Iterable[ir.Value]) -> int:
    """Replace nodes of `graph` by `Constant` nodes with outputs of the same names, in place; how many.

    Args:
        graph: a graph, whose nodes are in order of execution.
        written: the initializers that are constants.
    """
    opset = graph.opset_imports.get("", 1)
    count = 0
    fixed = {None, *written}
    for node in list(graph):
        if not fixed.issuperset(node.inputs):
            continue
        if is_op(node, "Constant"):
            fixed.update(node.outputs)
        if any(v.is_graph_output() for v in node.outputs):
            continue
        array = exact(node, opset)
        if array is None:
            continue
        (value,) = node.outputs
        tensor = ir.tensor(array, dtype=value.dtype, name=value.name)
        made = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], name=node.name)
        (held,) = made.outputs
        held.name, held.type, held.shape, held.const_value = value.name, value.type, ir.Shape(array.shape), tensor
        graph.insert_before(node, made)
        value.replace_all_uses_with(held)
        graph.remove(node, safe=True)
        fixed.add(held)
        count += 1
    return count
