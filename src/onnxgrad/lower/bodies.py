"""Replace a node by the function body that the ONNX specification gives for its operator.

This is what makes an operator without a rule differentiable (Relay's "default behaviour").
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnxgrad.ir import Builder


def body_of(node: ir.Node, opset: int) -> ir.Function | None:
    """The function body of `node`'s operator for its attributes and operand types, or None."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    if schema.has_function:
        return ir.from_proto(schema.function_body)  # type: ignore[return-value]
    if schema.has_context_dependent_function:
        types = [onnx.TypeProto() if v is None else ir.to_proto(v).type for v in node.inputs]
        raw = schema.get_context_dependent_function(
            ir.to_proto(node).SerializeToString(), [t.SerializeToString() for t in types]
        )
        if raw:
            return ir.from_proto(onnx.FunctionProto.FromString(raw))  # type: ignore[return-value]
    return None


def expand(builder: Builder, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node`, in its graph, by its function body; the new nodes, or None if it has none."""
    opset = builder.infer.context.get_opset_version(node.domain)
    function = body_of(node, opset)
    if function is None or node.graph is None:
        return None
    given = dict(node.attributes)
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    for name, spec in schema.attributes.items():
        if name not in given and spec.default_value.name:
            given[name] = ir.from_proto(spec.default_value)  # type: ignore[assignment]
    graph = node.graph
    values: dict[ir.Value, ir.Value | None] = dict(zip(function.inputs, node.inputs))
    values.update({v: None for v in list(function.inputs)[len(node.inputs) :]})
    new: list[ir.Node] = []
    for inner in function:
        attrs = []
        for a in inner.attributes.values():
            if not a.is_ref():
                attrs.append(a)
            elif a.ref_attr_name in given:
                held = given[a.ref_attr_name]
                attrs.append(ir.Attr(a.name, held.type, held.value))
        copy = ir.Node(
            inner.domain,
            inner.op_type,
            [None if v is None else values[v] for v in inner.inputs],
            attrs,
            num_outputs=len(inner.outputs),
            name=builder.names.fresh(f"{node.op_type}_{inner.op_type}"),
        )
        for old, value in zip(inner.outputs, copy.outputs):
            value.name = builder.names.fresh(f"{node.op_type}_{inner.op_type}") if old.name else ""
            values[old] = value
        graph.insert_before(node, copy)
        builder.infer(copy)
        new.append(copy)
    for formal, actual in zip(function.outputs, node.outputs):
        produced = values[formal]
        assert produced is not None
        name, produced.type, produced.shape = actual.name, actual.type or produced.type, actual.shape or produced.shape
        actual.replace_all_uses_with(produced, replace_graph_outputs=True)
        actual.name, produced.name = None, name
        builder.moved[actual] = produced
    graph.remove(node, safe=True)
    return new
