"""The bytes of each value of a graph, for given sizes of its symbolic dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.constants import evaluate
from onnxgrad.ir.match import constant, is_op, is_standard

#: Shapes are computed from small constants only; larger ones are weights, which need not be copied.
_LARGEST_SHAPE = 1024
#: How often what follows from sizes is looked at again.
ROUNDS = 3


def sizes(model: ir.Model, dims: Mapping[str, int], others: int | None = None) -> dict[ir.Value, int]:
    """Bytes of every value that a node of the graph of `model` gives; 0 where they cannot be known.

    Args:
        model: it is not changed.
        dims: sizes of symbolic dimensions of its inputs; one without a name is called ``x[0]``.
        others: the size of every dimension that is not in `dims`.

    Raises:
        BadInput: nothing says how large a dimension of an input is.
    """
    light = _fixed(model, dims, others)
    known: dict[str, onnx.TypeProto] = {}
    for _ in range(ROUNDS):
        known = _inferred(light)
        unknown = any(v.name and _dims(known.get(v.name)) is None for node in light.graph for v in node.outputs)
        if not unknown or not _fold(light, known):
            break
    return {v: _bytes(known.get(v.name or "")) for node in model.graph for v in node.outputs}


def _inferred(light: ir.Model) -> dict[str, onnx.TypeProto]:
    """The types of all values, by name."""
    proto = ir.to_proto(light)
    del proto.graph.value_info[:]
    for v in proto.graph.output:
        if any(not d.HasField("dim_value") for d in v.type.tensor_type.shape.dim):
            v.type.tensor_type.ClearField("shape")
    known = _types(proto, follow=False)
    if all(_dims(known.get(name)) is not None for node in proto.graph.node for name in node.output if name):
        return known
    _take_out_long(proto.graph, known)
    return known | _types(proto, follow=True)


def _types(proto: onnx.ModelProto, follow: bool) -> dict[str, onnx.TypeProto]:
    """The types that ONNX's inference finds; with `follow`, it propagates elements of shape vectors."""
    try:
        graph = onnx.shape_inference.infer_shapes(proto, data_prop=follow).graph
    except Exception as error:  # of no common base
        raise BadInput(f"the sizes of values cannot be told: {' '.join(str(error).split())[:300]}") from error
    return {v.name: v.type for v in (*graph.value_info, *graph.output, *graph.input)}


def _take_out_long(graph: onnx.GraphProto, known: Mapping[str, onnx.TypeProto]) -> None:
    """Make inputs of what nodes with long vectors give, if it is known: each element is followed, in 400 bytes."""
    long = {n for n, held in known.items() if (dims := _dims(held)) and len(dims) == 1 and dims[0] > _LARGEST_SHAPE}
    staying = []
    for node in graph.node:
        if not long.isdisjoint((*node.input, *node.output)) and all(
            n in known and _dims(known[n]) is not None for n in node.output
        ):
            graph.input.extend(onnx.ValueInfoProto(name=n, type=known[n]) for n in node.output)
        else:
            staying.append(node)
    del graph.node[:]
    graph.node.extend(staying)


def _fold(light: ir.Model, known: Mapping[str, onnx.TypeProto]) -> bool:
    """Make constants of what is computed from sizes that are known (the inference follows a part of it); if any."""
    graph = light.graph
    opset = light.opset_imports.get("", 18)
    found: dict[ir.Value, np.ndarray] = {}
    for node in list(graph):
        if len(node.outputs) != 1 or node.outputs[0].is_graph_output() or not node.outputs[0].uses():
            continue
        operands = [v for v in node.inputs if v is not None]
        array = None
        dims = _dims(known.get(operands[0].name or "")) if operands else None
        if is_op(node, ("Shape", "Size")) and not node.attributes and dims is not None:
            array = np.array(dims if node.op_type == "Shape" else math.prod(dims), np.int64)
        elif is_standard(node) and operands:
            feeds = {v: a for v in operands if (a := found.get(v, constant(v))) is not None}
            if len(feeds) == len(operands) and any(v in found for v in operands):
                array = evaluate(node, feeds, opset)
        if array is not None:
            found[node.outputs[0]] = array
    for value, array in found.items():
        fixed = ir.Value(name=f"{value.name}.fixed", const_value=ir.tensor(array, name=f"{value.name}.fixed"))
        fixed.type, fixed.shape = value.type or ir.TensorType(ir.DataType.INT64), ir.Shape(array.shape)
        graph.register_initializer(fixed)
        value.replace_all_uses_with(fixed)
    return bool(found)


def _fixed(model: ir.Model, dims: Mapping[str, int], others: int | None) -> ir.Model:
    """The model with inputs of fixed sizes, without large weights and without what is known of other values."""
    light = model.clone()
    graph = light.graph
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None and value.const_value.size > _LARGEST_SHAPE:
            del graph.initializers[name]
            if not value.is_graph_input():
                graph.inputs.append(value)
    for v in graph.inputs:
        sizes: list[int] = []
        for axis, d in enumerate(v.shape or ()):
            if isinstance(d, int):
                sizes.append(d)
                continue
            name = d.value or f"{v.name}[{axis}]"
            if name not in dims and others is None:
                raise BadInput(
                    f"the memory of a run depends on the dimension {name!r} of {v.name!r}\n"
                    f"  hint: say how large it is, as in dims={{{name!r}: 64}}"
                )
            sizes.append(dims.get(name, others or 0))
        if v.shape is not None:
            v.shape = ir.Shape(sizes)
    return light


def _dims(held: onnx.TypeProto | None) -> list[int] | None:
    """The shape of a tensor, if all of it is known."""
    if held is None or not held.HasField("tensor_type") or not held.tensor_type.HasField("shape"):
        return None
    dims = held.tensor_type.shape.dim
    return [d.dim_value for d in dims] if all(d.HasField("dim_value") for d in dims) else None


def _bytes(held: onnx.TypeProto | None) -> int:
    """Of a tensor of known shape; 0 for another value."""
    dims = _dims(held)
    if held is None or dims is None or held.tensor_type.elem_type in (0, onnx.TensorProto.STRING):
        return 0
    return math.prod(dims) * ir.DataType(held.tensor_type.elem_type).bitwidth // 8
