"""BatchNormalization folded into the layer before it: γ·(W·x + b - μ)/√(σ² + ε) + β is such a layer itself."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Names
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import constant, is_op, is_standard
from onnxgrad.training.graph.batchnorm import trains


def fold_norms(graph: ir.Graph) -> None:
    """Fold every BatchNormalization of `graph` that only follows a Conv, ConvTranspose or Gemm into it, in place."""
    names = Names.of_graph(graph)
    for node in list(graph):
        if is_op(node, "BatchNormalization") and not trains(node):
            _fold(graph, node, names)


def _fold(graph: ir.Graph, norm: ir.Node, names: Names) -> None:
    x = norm.inputs[0]
    layer = None if x is None else x.producer()
    if layer is None or x is None or len(x.uses()) > 1 or x.is_graph_output() or layer.graph is not graph:
        return
    axis = _out_axis(layer)
    numbers = [constant(v) for v in norm.inputs[1:5]]
    given = [constant(v) for v in (*layer.inputs, None)[1:3]]
    if axis is None or any(n is None for n in numbers) or given[0] is None:
        return
    if len(layer.inputs) > 2 and layer.inputs[2] is not None and given[1] is None:
        return
    gamma, beta, mean, variance = (n.astype(np.float64) for n in numbers if n is not None)
    factor = gamma / np.sqrt(variance + norm.attributes.get_float("epsilon", 1e-5))
    weight = given[0]
    groups = layer.attributes.get_int("group", 1) if axis else 1
    bias = np.zeros(1) if given[1] is None else np.atleast_1d(given[1].astype(np.float64))
    if weight.shape[axis] * groups != len(factor) or bias.size != bias.shape[-1]:  # rows with biases of their own
        return
    scale = np.repeat(factor.reshape(groups, -1), weight.shape[0] // groups, 0) if axis else factor
    arrays = [
        weight * scale.reshape(*scale.shape, *[1] * (weight.ndim - scale.ndim)),
        (bias.reshape(-1) - mean) * factor + beta,
    ]
    held = []
    for value, array, hint in zip((*layer.inputs, None)[1:3], arrays, ("weight", "bias")):
        name = names.exactly(f"{layer.outputs[0].name}_{hint}")
        alone = value is not None and value.is_initializer() and len(value.uses()) == 1 and not value.is_graph_input()
        if alone and value is not None:
            name = value.name or name
            del graph.initializers[name]
        held.append(add_initializer(graph, ir.tensor(array.astype(weight.dtype), name=name)))
    replaced = [v for v in layer.inputs[1:3] if v is not None and v.name not in {h.name for h in held}]
    layer.resize_inputs(3)
    for at, value in enumerate(held, 1):
        layer.replace_input_with(at, value)
    out, given_name = norm.outputs[0], norm.outputs[0].name
    out.replace_all_uses_with(x, replace_graph_outputs=True)
    out.name = None
    read = [v for v in (*norm.inputs, *replaced) if v is not None and v.is_initializer() and not v.is_graph_input()]
    graph.remove(norm, safe=True)
    x.name = given_name
    for value in read:
        if not value.uses():
            graph.initializers.pop(value.name or "", None)


def _out_axis(layer: ir.Node) -> int | None:
    """The channel axis of the weight of `layer`; None if it is no layer, or has factors."""
    if not is_standard(layer):
        return None
    if layer.op_type == "Conv":
        return 0
    if layer.op_type == "ConvTranspose":
        return 1
    if layer.op_type == "Gemm" and all(layer.attributes.get_float(name, 1.0) == 1 for name in ("alpha", "beta")):
        return 0 if layer.attributes.get_int("transB", 0) else 1
    return None
