"""The onnx package's own inference: for operators that the library does not know, and its objections to operands."""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir
import onnx_shape_inference as osi

from onnxgrad.ir.constants import MOST_ELEMENTS
from onnxgrad.ir.match import constant_tensor
from onnxgrad.ir.schemas import schema_of


def _names_missing_axis(node: ir.Node) -> bool:
    """Return True if `node` names an axis that its operand lacks: the package reads beyond the end of a shape then."""
    axis, first = node.attributes.get_int("axis", None), node.inputs[0] if node.inputs else None
    if axis is None:
        return False
    rank = len(first.shape) if first is not None and first.shape is not None else 64
    return not -rank - 1 <= axis <= rank


def ask_onnx(node: ir.Node, context: osi.ShapeInferenceContext) -> None:
    """Set types and shapes of those outputs of `node` that have none, where the onnx package knows them."""
    try:
        inferred = _infer_by_onnx(node, context.get_opset_version(node.domain))
    except Exception:
        logging.getLogger(__name__).debug("inference failed on %s", node, exc_info=True)
        return
    for value in node.outputs:
        if value.name in inferred:
            typed = ir.serde.deserialize_type_proto_for_type(inferred[value.name])
            value.type = value.type or typed
            if value.shape is None:
                value.shape = ir.serde.deserialize_type_proto_for_shape(inferred[value.name])
                context.name_anonymous_dims(value)


def objection(node: ir.Node, opset: int) -> str:
    """The objection of the onnx package to the operands of `node`; empty if it has none."""
    try:
        _infer_by_onnx(node, opset)
    except onnx.shape_inference.InferenceError as error:
        return str(error).rsplit("] ", 1)[-1]
    return ""


def _infer_by_onnx(node: ir.Node, opset: int) -> dict[str, onnx.TypeProto]:
    """Types of the outputs of `node`, as the onnx package infers them; empty for an operator that it does not know."""
    if _names_missing_axis(node) or schema_of(node.domain, node.op_type, opset) is None:
        return {}
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    operands = {v.name or "": v for v in node.inputs if v is not None}
    types = {name: ir.serde.serialize_value(v).type for name, v in operands.items()}
    tensors = {name: constant_tensor(v) for name, v in operands.items()}
    small = {name: t for name, t in tensors.items() if t is not None and t.size <= MOST_ELEMENTS}
    data = {name: ir.serde.serialize_tensor(t) for name, t in small.items()}
    return onnx.shape_inference.infer_node_outputs(schema, ir.serde.serialize_node(node), types, data)
