"""How many bytes each value of a graph takes, for given sizes of its symbolic dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx
import onnx.shape_inference
import onnx_ir as ir

from onnxgrad.errors import BadInput

#: Shapes are computed from small constants only; larger ones are weights, which need not be copied.
_LARGEST_SHAPE = 1024


def sizes(model: ir.Model, dims: Mapping[str, int]) -> dict[ir.Value, int]:
    """Bytes of every value that a node of the graph of `model` gives; 0 where they cannot be known.

    Raises:
        BadInput: `dims` does not say how large a dimension of an input is.
    """
    proto = _fixed(model, dims)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    except Exception as error:  # of no common base
        raise BadInput(f"the sizes of values cannot be told: {' '.join(str(error).split())[:300]}") from error
    known = {v.name: _bytes(v.type) for v in (*inferred.value_info, *inferred.output)}
    return {v: known.get(v.name or "", 0) for node in model.graph for v in node.outputs}


def _fixed(model: ir.Model, dims: Mapping[str, int]) -> onnx.ModelProto:
    """The model with inputs of fixed sizes, without large weights and without what is known of other values."""
    light = model.clone()
    graph = light.graph
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None and value.const_value.size > _LARGEST_SHAPE:
            del graph.initializers[name]
            if not value.is_graph_input():
                graph.inputs.append(value)
    proto = ir.to_proto(light)
    for v in proto.graph.input:
        for axis, d in enumerate(v.type.tensor_type.shape.dim):
            if d.HasField("dim_value"):
                continue
            if d.dim_param not in dims:
                what = f"the dimension {d.dim_param!r}" if d.dim_param else f"axis {axis} of the input"
                raise BadInput(f"the memory of a run depends on {what} of {v.name!r}, whose size was not given")
            d.dim_value = dims[d.dim_param]
    del proto.graph.value_info[:]
    for v in proto.graph.output:
        if any(not d.HasField("dim_value") for d in v.type.tensor_type.shape.dim):
            v.type.tensor_type.ClearField("shape")
    return proto


def _bytes(held: onnx.TypeProto) -> int:
    """Of a tensor of known shape; 0 for another value."""
    tensor = held.tensor_type
    if not held.HasField("tensor_type") or not tensor.HasField("shape"):
        return 0
    if any(not d.HasField("dim_value") for d in tensor.shape.dim) or tensor.elem_type == onnx.TensorProto.STRING:
        return 0
    return math.prod(d.dim_value for d in tensor.shape.dim) * ir.DataType(tensor.elem_type).bitwidth // 8
