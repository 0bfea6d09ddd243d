"""Fusions of ONNX Runtime that would make the numbers of a model wrong, and are switched off for it.

- ``MatmulTransposeFusion`` forgets the transposition of MatMul(Transpose(w), vector) (see `onnxgrad.ir.cleanup`).
- ``MatMulScaleFusion`` holds the factor of a scaled MatMul in float32, also where the matrices are of float64: eight of
  sixteen digits are lost.
- ``QDQPropagationTransformer``, from opset 21 on, writes a QuantizeLinear with a zero point of uint8 behind operators
  that move int8 numbers: the model does not load.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from onnxgrad.ir.cleanup import vector_products
from onnxgrad.ir.graph import scopes
from onnxgrad.ir.match import is_op

#: Operators through which rounding is propagated.
_MOVING = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "MaxPool", "Slice")


def wrong_fusions(model: ir.Model | bytes | str | Path) -> list[str]:
    """The names of fusions that must be disabled for `model`."""
    if isinstance(model, ir.Model):
        read = model
    else:
        try:
            content = model if isinstance(model, bytes) else Path(model).read_bytes()
            if b"MatMul" not in content and b"DequantizeLinear" not in content:
                return []
            read = ir.from_proto(onnx.ModelProto.FromString(content))
        except Exception:  # unreadable models are reported by the runtime
            return []
    outer = [read.graph, *(f.graph for f in read.functions.values())]
    graphs = [inner for graph in outer for inner in scopes(graph)]
    nodes = [n for g in graphs for n in g]
    operators = {n.op_type for n in nodes}
    names = []
    if "MatMul" in operators:
        if "Transpose" in operators and any(map(vector_products, outer)):
            names.append("MatmulTransposeFusion")
        if any(map(_may_multiply_doubles, graphs)):
            names.append("MatMulScaleFusion")
    if "DequantizeLinear" in operators and read.graph.opset_imports.get("", 0) >= 21 and any(map(_moves_signed, nodes)):
        names.append("QDQPropagationTransformer")
    return names


def _moves_signed(node: ir.Node) -> bool:
    """True for a DequantizeLinear of other integers than uint8, if an operator reads it that moves elements."""
    point = (*node.inputs, None, None, None)[2]
    if not is_op(node, "DequantizeLinear") or point is None:
        return False
    dtype = point.dtype or (None if point.const_value is None else point.const_value.dtype)
    return dtype != ir.DataType.UINT8 and any(r.op_type in _MOVING for r, _ in node.outputs[0].uses())


def _may_multiply_doubles(graph: ir.Graph) -> bool:
    """True unless all products in `graph`, without graphs inside it, are of other types, or it has no float64."""
    dtypes = {v.dtype for n in graph if n.op_type == "MatMul" for v in (*n.inputs, *n.outputs) if v is not None}
    return ir.DataType.DOUBLE in dtypes or (None in dtypes and _has_doubles(graph))


def _has_doubles(graph: ir.Graph) -> bool:
    """True if a value in `graph`, without graphs inside it, is declared as float64."""
    double = ir.DataType.DOUBLE
    values = [*graph.inputs, *graph.initializers.values(), *[v for n in graph for v in n.outputs]]
    attributes = [a for n in graph for a in n.attributes.data.values() if not a.is_ref()]
    return (
        any(v.dtype == double for v in values)
        or any(a.type == ir.AttributeType.TENSOR and a.value.dtype == double for a in attributes)
        or any(a.type == ir.AttributeType.INT and a.name == "to" and a.value == double for a in attributes)
    )
