"""What the onnx package specifies of an operator."""

from __future__ import annotations

import functools

import onnx


@functools.cache
def schema_of(domain: str, op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """The specification of an operator, or None for one that the onnx package does not know."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None
