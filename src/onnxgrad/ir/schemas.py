"""Operator schemas of the onnx package, cached."""

from __future__ import annotations

import functools
from typing import Any

import onnx
import onnx_ir as ir


@functools.cache
def schema_of(domain: str, op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """The specification of an operator, or None for one that the onnx package does not know."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def attribute(node: ir.Node, name: str, default: Any = None, opset: int | None = None) -> Any:
    """The attribute `name` of `node`, several numbers or texts as a list.

    Args:
        node: a node.
        name: of the attribute.
        default: the value of an attribute that is left out and has no default in the specification.
        opset: the version of the specification; None: its defaults do not count.
    """
    own = node.attributes.get(name)
    if own is None and opset is not None:
        own = _specified(node.domain, node.op_type, opset, name)
    if own is None:
        return default
    return list(own.value) if isinstance(own.value, (tuple, list)) else own.value


@functools.cache
def _specified(domain: str, op_type: str, opset: int, name: str) -> ir.Attr | None:
    schema = schema_of(domain, op_type, opset)
    if schema is None or name not in schema.attributes:
        return None
    spec = schema.attributes[name].default_value
    return ir.serde.deserialize_attribute(spec) if spec.name else None
