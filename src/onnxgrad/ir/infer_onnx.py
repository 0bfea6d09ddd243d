"""The onnx package's own inference, for operators that the library does not know."""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir


def ask_onnx(node: ir.Node, opset: int) -> None:
    """Set types and shapes of those outputs of `node` that have none, where the onnx package knows them."""
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
