"""The onnx package's own inference, for operators that the library does not know."""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir
import onnx_shape_inference as osi

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
    opset = context.get_opset_version(node.domain)
    if _names_missing_axis(node) or schema_of(node.domain, node.op_type, opset) is None:
        return
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
        proto = ir.to_proto(node)
        types = {v.name or "": ir.to_proto(v).type for v in node.inputs if v is not None}
        data = {v.name or "": ir.to_proto(v.const_value) for v in node.inputs if v is not None and v.const_value}
        inferred = onnx.shape_inference.infer_node_outputs(schema, proto, types, data)
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
