"""Constant folding in derived graphs: nodes whose operands are constants become constants, where that is exact.

What is folded moves data, compares, or is one operation of IEEE 754 that every runtime rounds alike (+, −, ·, /), so
the graph gives the same bits. Functions that runtimes approximate, each in its own way (Exp, Tanh, Sqrt on some), stay
nodes: ONNX Runtime folds these itself when it loads a model, by its own kernels. Only small tensors are folded (at most
`MOST_ELEMENTS`), so no graph grows, and only `Constant` nodes and what rules wrote down count as constants: an
initializer is a parameter that a user may exchange.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.constants import constant, evaluate

_MOVES = (
    "Concat ConstantOfShape Expand Flatten Gather Identity Reshape Slice Squeeze Tile Transpose Trilu Unsqueeze Where"
)
_LOGIC = "And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor"
_ARITHMETIC = "Abs Add Ceil Div Floor Max Min Mul Neg Sub"
#: The operators that are folded.
EXACT = frozenset(f"{_MOVES} {_LOGIC} {_ARITHMETIC}".split())
_DTYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


def fold_constants(graph: ir.Graph, written: Container[ir.Value]) -> int:
    """Replace nodes of `graph` by `Constant` nodes with outputs of the same names, in place; how many.

    Args:
        graph: a graph, whose nodes are in order of execution.
        written: the initializers that are constants.
    """
    opset = graph.opset_imports.get("", 1)
    count = 0
    for node in list(graph):
        if node.op_type not in EXACT or node.domain or len(node.outputs) != 1:
            continue
        (value,) = node.outputs
        operands = [v for v in node.inputs if v is not None]
        if value.is_graph_output() or not operands or not all(_fixed(v, written) for v in operands):
            continue
        array = _exact(node, operands, opset)
        if array is None:
            continue
        tensor = ir.tensor(array, dtype=value.dtype, name=value.name)
        made = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], name=node.name)
        (held,) = made.outputs
        held.name, held.type, held.shape, held.const_value = value.name, value.type, ir.Shape(array.shape), tensor
        graph.insert_before(node, made)
        value.replace_all_uses_with(held)
        graph.remove(node, safe=True)
        count += 1
    return count


def _fixed(value: ir.Value, written: Container[ir.Value]) -> bool:
    node = value.producer()
    return value in written if node is None else node.op_type == "Constant" and not node.domain


def _exact(node: ir.Node, operands: Iterable[ir.Value], opset: int) -> np.ndarray | None:
    """The output of `node`, if every runtime gives the same bits; not NaN, nor denormals, which some take as zeros."""
    feeds = {v: array for v in operands if (array := constant(v)) is not None}
    if any(v not in feeds for v in operands) or any(v.dtype not in _DTYPES for v in (*feeds, node.outputs[0])):
        return None
    if node.op_type == "Div" and node.outputs[0].dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    with np.errstate(all="ignore"):
        array = evaluate(node, feeds, opset)
    if array is None or array.dtype.kind != "f":
        return array
    tiny = np.finfo(array.dtype).tiny
    arrays = [array, *(a for a in feeds.values() if a.dtype.kind == "f")]
    plain = all(not np.isnan(a).any() and not ((a != 0) & (np.abs(a) < tiny)).any() for a in arrays)
    return array if plain else None
