"""Constant folding: nodes whose results no input can change become constants.

`fold_constants` works on derived graphs. It folds nodes that move data, compare, or are one operation of IEEE 754 that
every runtime rounds alike (+, −, ·, /), so the results have the same bits. Functions that runtimes approximate
differently (Exp, Tanh, Sqrt on some) stay nodes: ONNX Runtime folds these with its own kernels when it loads a model.
Only small tensors are folded (at most `MOST_ELEMENTS`), so no graph grows. Only `Constant` nodes and constants of rules
are folded: an initializer is a parameter that a user may exchange.

`infer_and_fold` works on models that are opened or measured, and folds their shape arithmetic. Exporters write out how
they found a shape: a dozen nodes compute the integer 3 from two constants. As long as such a value is not known,
neither are the shapes that depend on it, and a rule that needs a rank must refuse. So small whole-number values that
follow from constants, or from the shape of something whose shape is fixed, become constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.constants import MOST_ELEMENTS, evaluate
from onnxgrad.ir.exact import exact
from onnxgrad.ir.graph import scopes, subgraphs
from onnxgrad.ir.infer.context import Calls
from onnxgrad.ir.infer.inference import Inference, infer_model
from onnxgrad.ir.match import WHOLE, constant, is_op


def fold_constants(graph: ir.Graph, written: Iterable[ir.Value]) -> int:
    """Replace nodes of `graph` by `Constant` nodes with equal output names, in place. Returns the count.

    Args:
        graph: a graph, whose nodes are in order of execution.
        written: the initializers that are constants.
    """
    opset = graph.opset_imports.get("", 1)
    fixed = {None, *written}

    def constant_result(node: ir.Node) -> np.ndarray | None:
        if not fixed.issuperset(node.inputs):
            return None
        if is_op(node, "Constant"):
            fixed.update(node.outputs)
        return exact(node, opset)

    def hold(node: ir.Node, tensor: ir.TensorProtocol) -> ir.Value:
        made = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], name=node.name)
        (value,) = made.outputs
        graph.insert_before(node, made)
        fixed.add(value)
        return value

    return _fold(graph, constant_result, hold)


def infer_and_fold(model: ir.Model, calls: Calls | None = None) -> Inference:
    """Type and shape every value of `model`, with its integer arithmetic folded; in place. Returns the inference.

    Raises:
        BadInput: shapes or inputs that no node of their kind can have.
    """
    opset = model.graph.opset_imports[""]
    inner = scopes(model.graph)[1:]
    for node in (n for g in (model.graph, *inner) for n in g if opset >= 13 and is_op(n, "Resize")):
        _omit_empty(node)
    declared = {v: v.shape for g in (model.graph, *inner) for node in g for v in node.outputs} if inner else {}

    def fold(node: ir.Node) -> None:
        if (array := _whole_value(node, opset)) is not None:
            _replace(model.graph, node, array)

    inference = infer_model(model, calls, fold)
    if sum(_fold(g, lambda node: _whole_value(node, opset)) for g in inner):  # shapes in a body are known at its end
        for value, shape in declared.items():  # symbols of the first inference are dropped
            value.shape = shape
        inference = infer_model(model, calls, fold)
    return inference


def _omit_empty(node: ir.Node) -> None:
    """Omit a region, scales or sizes of a Resize without elements: before opset 13 none could be left out."""
    for i, value in enumerate(node.inputs[1:], 1):
        array = None if value is None else constant(value)
        if array is not None and not array.size:
            node.replace_input_with(i, None)


def _fold(
    graph: ir.Graph,
    known: Callable[[ir.Node], np.ndarray | None],
    hold: Callable[[ir.Node, ir.TensorProtocol], ir.Value] | None = None,
) -> int:
    """Replace the nodes of `graph` whose single result is `known`, in order. Returns the count.

    Args:
        graph: a graph, whose nodes are in order of execution.
        known: returns the result of a node, or None.
        hold: makes a value of a tensor in the place of a node. None: an initializer.
    """
    found = ((node, array) for node in list(graph) if (array := known(node)) is not None)
    return sum(_replace(graph, node, array, hold) for node, array in found)


def _replace(
    graph: ir.Graph,
    node: ir.Node,
    array: np.ndarray,
    hold: Callable[[ir.Node, ir.TensorProtocol], ir.Value] | None = None,
) -> bool:
    """Replace `node` by its single result, unless that is an output of `graph`. Returns whether it was replaced."""
    if node.outputs[0].is_graph_output():
        return False
    (value,) = node.outputs
    tensor = ir.Tensor(array, dtype=value.dtype, name=value.name)
    fixed = ir.Value() if hold is None else hold(node, tensor)
    fixed.name, fixed.type, fixed.shape, fixed.const_value = value.name, value.type, ir.Shape(array.shape), tensor
    value.replace_all_uses_with(fixed)
    graph.remove(node, safe=True)
    if hold is None:
        graph.register_initializer(fixed)
    return True


def _whole_value(node: ir.Node, opset: int) -> np.ndarray | None:
    """The one output of `node`, if it is a small whole-number tensor, or scales, that no input can change."""
    if node.domain or len(node.outputs) != 1:
        return None
    (value,) = node.outputs
    if (value.dtype not in WHOLE and not _are_scales(value)) or (node.attributes.data and subgraphs(node)):
        return None
    if node.op_type == "Shape":
        source = node.inputs[0] if node.inputs else None
        if source is None or source.shape is None:
            return None
        dims = list(source.shape)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
        return np.array(dims, np.int64) if all(isinstance(d, int) for d in dims) else None
    if node.op_type == "Size" and (source := node.inputs[0]) is not None and source.shape is not None:
        return np.array(math.prod(source.shape), np.int64) if source.shape.is_static() else None
    inferred = value.const_value  # the elements of a shape
    if inferred is not None and node.op_type != "Constant":
        return inferred.numpy()
    feeds = {v: a for v in node.inputs if v is not None and (a := _small_constant(v)) is not None}
    complete = bool(feeds) and all(v is None or v in feeds for v in node.inputs)
    return evaluate(node, feeds, opset) if complete else None


def _are_scales(value: ir.Value) -> bool:
    """True if `value` is read as the scales of Resize only, which decide a shape."""
    if value.dtype != ir.DataType.FLOAT or value.shape is None or len(value.shape) != 1:
        return False
    return bool(value.uses()) and all(is_op(node, "Resize") and i == 2 for node, i in value.uses())


def _small_constant(value: ir.Value) -> np.ndarray | None:
    size = value.const_value.size if value.const_value is not None else 0
    return constant(value) if size <= MOST_ELEMENTS else None
