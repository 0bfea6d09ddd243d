"""Does a node match its operator's schema: number of operands and results, attributes, equal types?

`attributes` and `nodes` check the rules that a schema does not express. All checks return the error as a text, empty
without one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir

from onnxgrad.ir.schemas import schema_of

_Option = onnx.defs.OpSchema.FormalParameterOption


class Formal(NamedTuple):
    """The requirements of an operator's schema on a node, read once."""

    schema: onnx.defs.OpSchema
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    attributes: dict[str, int]
    defaults: dict[str, Any]  # of the attributes that the schema gives one
    required: frozenset[str]
    single: int  # how many operands in front may not be left out
    binds: tuple[str, ...]  # the type variable of each operand, empty for any type


@functools.cache
def formal(domain: str, op_type: str, opset: int) -> Formal | None:
    """The requirements of an operator's schema; None if there is no schema."""
    schema = schema_of(domain, op_type, opset)
    if schema is None:
        return None
    attributes: Any = schema.attributes
    variables = {c.type_param_str for c in schema.type_constraints}
    single = 0
    for parameter in schema.inputs:
        if parameter.option != _Option.Single:
            break
        single += 1
    return Formal(
        schema,
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        {name: int(a.type) for name, a in attributes.items()},
        {
            name: onnx.helper.get_attribute_value(a.default_value)
            for name, a in attributes.items()
            if a.default_value.name
        },
        frozenset(name for name, a in attributes.items() if a.required),
        single,
        tuple(p.type_str if p.type_str in variables and p.is_homogeneous else "" for p in schema.inputs),
    )


def formal_complaint(node: ir.Node, asked: Formal) -> str:
    """The error in the operands and attributes of `node` by the schema `asked`; empty if there is none."""
    for what, count, (least, most) in (
        ("operands", len(node.inputs), asked.inputs),
        ("results", len(node.outputs), asked.outputs),
    ):
        if not least <= count <= most:
            wanted = f"{least}" if least == most else f"at least {least}" if most > 64 else f"{least} to {most}"
            return f"it has {count} {what}, and takes {wanted}"
    for i, value in enumerate(node.inputs[: asked.single]):
        if value is None:
            return f"operand {i} ({asked.schema.inputs[i].name}) is left out"
    for name, a in node.attributes.items():
        type_ = asked.attributes.get(name)
        if type_ is None:
            return f"it has no attribute {name!r}"
        if int(a.type) != type_:
            wanted = onnx.AttributeProto.AttributeType.Name(type_)
            return f"the attribute {name!r} is {a.type.name}, and should be {wanted}"
    if asked.required and (missing := asked.required - node.attributes.keys()):
        return f"the attribute {min(missing)!r} is missing"
    if node.op_type == "If" and not node.domain:
        for a in node.attributes.values():
            if a.type == ir.AttributeType.GRAPH and len(a.as_graph().outputs) != len(node.outputs):
                return f"it has {len(node.outputs)} results, and its {a.name} has {len(a.as_graph().outputs)}"
    if node.op_type == "Scan" and not node.domain:
        scanned = node.attributes["num_scan_inputs"].as_int()
        if not 1 <= scanned <= len(node.inputs):
            return f"it scans {scanned} of its {len(node.inputs)} operands"
    return _types_complaint(node, asked)


def _types_complaint(node: ir.Node, asked: Formal) -> str:
    """Operands that share a type variable have one type."""
    bound: dict[str, ir.DataType] = {}
    for i, value in enumerate(node.inputs):
        variable = asked.binds[min(i, len(asked.binds) - 1)] if asked.binds else ""
        if variable and value is not None and isinstance(value.type, ir.TensorType):
            first = bound.setdefault(variable, value.type.dtype)
            if first != value.type.dtype:
                return (
                    f"its operands are of {first.name.lower()} and {value.type.dtype.name.lower()}, and should be alike"
                )
    return ""
