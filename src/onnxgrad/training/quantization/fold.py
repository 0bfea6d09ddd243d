"""Fold trained floats back into stored integers, for integer kernels of stock ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Names
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import constant, not_none
from onnxgrad.training.graph.rounding import is_rounding
from onnxgrad.training.metadata import QUANTIZED
from onnxgrad.training.quantization.numbers import quantize
from onnxgrad.training.quantization.record import Bias, record_in
from onnxgrad.training.quantization.saved_operators import close_operators

#: The most steps of a bias: an int32 must have room for it and for the sum that it is added to.
_MOST_STEPS = 2.0**30


def folded(model: ir.Model) -> ir.Model:
    """`model`, which is used up, with every float that is stored as integers stored so; itself if it has none.

    Raises:
        BadInput: what the model says of itself does not fit it.
    """
    record = record_in(model)
    if record is None:
        return model
    graph, names = model.graph, Names.of_graph(model.graph)
    for name, bias in record.biases.items():
        _widen(graph, name, bias)
    for name, bias in record.biases.items():
        _fold_bias(graph, name, bias, names)
    for name, stored in record.weights.items():
        _fold_weight(graph, name, stored)
    if record.operators:
        close_operators(model, record)
    del model.metadata_props[QUANTIZED]
    return model


def _array(graph: ir.Graph, name: str) -> np.ndarray:
    return not_none(graph.initializers[name].const_value).numpy()


def _set(graph: ir.Graph, name: str, array: np.ndarray) -> None:
    graph.initializers[name].const_value = ir.tensor(array, name=name)


def _fold_weight(graph: ir.Graph, name: str, stored: str) -> None:
    master = graph.initializers[name]
    readers = [node for node, at in master.uses() if at == 0 and node.op_type == "QuantizeLinear" and is_rounding(node)]
    if not readers or len(readers) < len(master.uses()) or any(n.graph is not graph for n in readers):
        raise BadInput(f"the metadata {QUANTIZED!r} name {name!r}, which no single QuantizeLinear rounds")
    node = readers[0]
    scale, point = (*node.inputs[1:], None)[:2]
    steps, zero = (constant(v) for v in (scale, point))
    if steps is None or zero is None or point is None or point.dtype is None:
        raise BadInput(f"the scale or the zero point of {name!r} is computed, so it cannot be stored as integers")
    axis, block, dtype = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0), point.dtype
    array = quantize(_array(graph, name), steps, zero, dtype, axis, block)
    del graph.initializers[name]
    held = add_initializer(graph, ir.tensor(array, dtype=dtype, name=stored))
    for reader in readers:
        reader.outputs[0].replace_all_uses_with(held)
        graph.remove(reader, safe=True)
    if not point.uses():  # DequantizeLinear has none
        del graph.initializers[point.name or ""]


def _widen(graph: ir.Graph, name: str, bias: Bias) -> None:
    """Enlarge the steps of a weight where an int32 bias would overflow: learned steps may become too small.

    ONNX Runtime's quantizer does the same: the terms of such weights are far below the bias.
    """
    if not bias.input:
        return
    x, w, b = (_array(graph, n) for n in (bias.input, bias.weight, name))
    least = np.abs(b.astype(np.float64)) / _MOST_STEPS / x.astype(np.float64)
    least = least.max(initial=0).reshape(w.shape) if w.size == 1 else least.reshape(w.shape)
    if (w < least).any():
        _set(graph, bias.weight, np.maximum(w, least.astype(w.dtype)))


def _fold_bias(graph: ir.Graph, name: str, bias: Bias, names: Names) -> None:
    value, array = graph.initializers[name], _array(graph, name)
    if bias.input:
        steps = _array(graph, bias.input) * _array(graph, bias.weight)
        _set(graph, bias.scale, steps.reshape(_array(graph, bias.scale).shape).astype(steps.dtype))
    point = graph.initializers[bias.point] if bias.point else None
    numbers = quantize(
        array, _array(graph, bias.scale), _array(graph, bias.point) if bias.point else np.zeros((), np.int32),
        ir.DataType.INT32, bias.axis,
    )  # fmt: skip
    del graph.initializers[name]
    held = add_initializer(graph, ir.tensor(numbers, name=bias.stored))
    inputs = [held, graph.initializers[bias.scale], *([point] if point is not None else [])]
    attributes = [ir.AttrInt64("axis", bias.axis)] if _array(graph, bias.scale).ndim else []
    node = ir.Node("", "DequantizeLinear", inputs, attributes, name=names.exactly(f"{name}_DequantizeLinear"))
    (given,) = node.outputs
    given.name = name if name != bias.stored else names.exactly(f"{name}_DequantizeLinear_Output")
    given.type, given.shape = value.type, value.shape
    value.replace_all_uses_with(given)
    first = graph[0]
    graph.insert_before(first, node)
