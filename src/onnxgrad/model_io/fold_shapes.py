"""Constant folding of shape arithmetic, when a model is opened.

Exporters write out how they found a shape: a dozen nodes that compute the integer 3 from two constants.
As long as such a value is not known, neither are the shapes that depend on it, and a rule that needs a
rank must refuse. So small whole-number values that follow from constants, or from the shape of something
whose shape is fixed, become constants.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.constants import MOST_ELEMENTS, evaluate
from onnxgrad.ir.graph import scopes, subgraphs
from onnxgrad.ir.infer.context import Calls
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.match import constant

WHOLE = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


def infer_and_fold(model: ir.Model, calls: Calls | None = None) -> None:
    """Type and shape every value of `model`, with its integer arithmetic folded; in place."""
    graphs = scopes(model.graph)
    declared = {v: v.shape for g in graphs for node in g for v in node.outputs}
    infer_model(model, calls)
    opset = model.graph.opset_imports[""]
    if sum(_fold(graph, opset) for graph in graphs):  # with values known, more shapes are;
        for value, shape in declared.items():  # those that the first inference made up go
            value.shape = shape
        infer_model(model, calls)


def _fold(graph: ir.Graph, opset: int) -> int:
    """Replace nodes of `graph` by initializers of the same names; how many."""
    count = 0
    for node in list(graph):
        found = None if node.op_type == "Constant" else _whole_value(node, opset)
        if found is None or node.outputs[0].is_graph_output():
            continue
        (value,) = node.outputs
        tensor = ir.tensor(found, dtype=value.dtype, name=value.name)
        held = ir.Value(name=value.name, const_value=tensor, type=value.type, shape=ir.Shape(found.shape))
        value.replace_all_uses_with(held)
        graph.remove(node, safe=True)
        graph.register_initializer(held)
        count += 1
    return count


def _whole_value(node: ir.Node, opset: int) -> np.ndarray | None:
    """The one output of `node`, if it is a small whole-number tensor that no input can change."""
    if node.domain or len(node.outputs) != 1 or node.outputs[0].dtype not in WHOLE or subgraphs(node):
        return None
    if node.op_type == "Shape":
        source = node.inputs[0] if node.inputs else None
        if source is None or source.shape is None:
            return None
        dims = list(source.shape)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
        return np.array(dims, np.int64) if all(isinstance(d, int) for d in dims) else None
    feeds = {v: a for v in node.inputs if v is not None and (a := _small_constant(v)) is not None}
    complete = bool(feeds) and all(v is None or v in feeds for v in node.inputs)
    return evaluate(node, feeds, opset) if complete else None


def _small_constant(value: ir.Value) -> np.ndarray | None:
    size = value.const_value.size if value.const_value is not None else 0
    return constant(value) if size <= MOST_ELEMENTS else None
