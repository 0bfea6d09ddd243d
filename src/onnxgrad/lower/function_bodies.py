"""Lowering by the function body that the ONNX specification defines for an operator.

An operator without a rule becomes differentiable in this way (Relay's "default behaviour"). There are two traps.
A body may leave default attributes to the inliner: they are filled in first. A body may be written for an older
opset than the model's, in which one of its operators means something else: then the body is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.ir import Builder
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.match import not_none


def with_defaults(node: ir.Node, schema: onnx.defs.OpSchema) -> dict[str, ir.Attr]:
    """The attributes of `node`, with defaults for missing ones."""
    attrs = dict(node.attributes)
    for name, spec in schema.attributes.items():
        if name not in attrs and spec.default_value.name:
            attrs[name] = ir.from_proto(spec.default_value)  # type: ignore[assignment]
    return attrs


def body_of(node: ir.Node, opset: int, standard: int | None = None) -> ir.Function | None:
    """The function body of `node`'s operator for its attributes and operand types, or None.

    `opset` is the version of the domain of the node, `standard` that of the standard operators (the same for them).
    """
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    proto = onnx.FunctionProto()
    if schema.has_context_dependent_function:
        raw = _asked(node, schema, opset)
        if not raw:
            return None
        proto.ParseFromString(raw)
    elif schema.has_function:
        version = max((v for v in schema.function_opset_versions if v <= opset), default=0)
        body = schema.get_function_with_opset_version(version)
        if not body:
            return None
        proto.ParseFromString(body)
    else:
        return None
    computed = {name for n in proto.node for name in n.output} | set(proto.input)
    for i, name in enumerate(proto.output):
        if name not in computed:  # an unused output may be declared, but not computed
            if i < len(node.outputs) and node.outputs[i].name:
                return None
            proto.output[i] = proto.input[0]
    function: ir.Function = ir.from_proto(proto)  # type: ignore[assignment]
    written_for = {d or "": v for d, v in function.opset_imports.items()}
    # a domain other than the operator's own has one version per model, which is not known here
    if any(d not in (node.domain, "") for d in written_for) or not means_the_same(
        function, written_for, {node.domain: opset, "": opset if standard is None else standard}
    ):
        return None
    return function


def _asked(node: ir.Node, schema: Any, opset: int) -> bytes:
    """The body that the specification writes for this very node; empty if it writes none."""
    proto = ir.to_proto(node)
    present = {a.name for a in proto.attribute}
    proto.attribute.extend(ir.to_proto(a) for n, a in with_defaults(node, schema).items() if n not in present)
    types = [
        onnx.TypeProto().SerializeToString() if v is None else ir.to_proto(v).type.SerializeToString()
        for v in node.inputs
    ]
    version = max((v for v in schema.context_dependent_function_opset_versions if v <= opset), default=0)
    if not version:
        return b""
    return schema.get_context_dependent_function_with_opset_version(version, proto.SerializeToString(), types)


def means_the_same(nodes: Iterable[ir.Node], written_for: Mapping[str, int], opsets: Mapping[str, int]) -> bool:
    """True if all of `nodes`, written for older opsets, mean the same at `opsets`."""
    for node in nodes:
        opset = opsets[node.domain]
        try:
            old = onnx.defs.get_schema(node.op_type, written_for.get(node.domain, opset), node.domain)
            new = onnx.defs.get_schema(node.op_type, opset, node.domain)
        except onnx.defs.SchemaError:
            return False
        if old.since_version != new.since_version and not _accepts(new, old, node):
            return False
        if not all(means_the_same(graph, written_for, opsets) for graph in subgraphs(node)):
            return False
    return True


def _accepts(new: onnx.defs.OpSchema, old: onnx.defs.OpSchema, node: ir.Node) -> bool:
    """True if `new` accepts the operands and attributes of `node`, and has the defaults of `old` for the rest."""
    if len(node.inputs) > new.max_input or not set(node.attributes) <= set(new.attributes):
        return False
    left = [name for name in old.attributes if name not in node.attributes]
    return all(
        old.attributes[name].default_value == new.attributes[name].default_value
        if name in new.attributes
        else not old.attributes[name].default_value.name  # it became an input, and the node has neither
        for name in left
    )


class BodyCopies(Copies):
    """Copies of the nodes of a function, with operands for its inputs and values for its attributes.

    Attributes:
        values: the value for each one of the function; None for an operand that is left out.
    """

    def __init__(
        self, builder: Builder, prefix: str, attrs: Mapping[str, ir.Attr], values: Mapping[ir.Value, ir.Value | None]
    ) -> None:
        super().__init__(values, builder.names)  # type: ignore[arg-type]
        self.imports, self.prefix, self.attrs = dict(builder.graph.opset_imports), prefix, attrs

    def graph(self, graph: ir.Graph) -> ir.Graph:
        """A copy of `graph`, of the opset of the model."""
        made = super().graph(graph)
        made.opset_imports.update(self.imports)
        return made

    def node(self, node: ir.Node) -> ir.Node:
        """A copy of `node`, without its notes."""
        made = self.unnamed(node)
        made.name = self._fresh(node.op_type)
        for old, new in zip(node.outputs, made.outputs):
            new.name = self._fresh(node.op_type) if old.name else ""
        return made

    def value(self, value: ir.Value) -> ir.Value:
        """A copy of `value`, without its notes."""
        made = ir.Value(name=self._fresh(value.name), type=value.type, shape=value.shape, const_value=value.const_value)
        self.values[value] = made
        return made

    def attributes(self, node: ir.Node) -> list[ir.Attr]:
        """The attributes of a copied node, with references to function attributes resolved."""
        copies: list[ir.Attr] = []
        for a in super().attributes(node):
            if not a.is_ref():
                copies.append(a)
            elif (argument := self.attrs.get(a.ref_attr_name or "")) is not None:
                copies.append(ir.Attr(a.name, argument.type, argument.value))
        return copies

    def _fresh(self, name: str | None) -> str:
        return not_none(self.names).fresh(f"{self.prefix}_{name}")


def expand(builder: Builder, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node`, in its graph, by its function body; the new nodes, or None if it has none."""
    opset = builder.infer.context.get_opset_version(node.domain)
    function = body_of(node, opset, builder.opset)
    graph = node.graph
    if function is None or not isinstance(graph, ir.Graph):
        return None
    attrs = with_defaults(node, onnx.defs.get_schema(node.op_type, opset, node.domain))
    formals = list(function.inputs)
    copy = BodyCopies(builder, node.op_type, attrs, dict(zip(formals, [*node.inputs, *[None] * len(formals)])))
    new = [copy.node(inner) for inner in function]
    taken: set[ir.Value] = set()
    for i, (formal, actual) in enumerate(zip(list(function.outputs), node.outputs)):
        if not actual.name:
            continue
        produced = copy.values[formal]
        if produced is None or produced in taken or not any(produced is v for n in new for v in n.outputs):
            # the body returns an operand, or one value twice: the output needs its own producer
            through = ir.Node("", "Identity", [produced], name=builder.names.fresh(f"{node.op_type}_Identity"))
            through.outputs[0].name = builder.names.fresh(f"{node.op_type}_out{i}")
            new.append(through)
            produced = through.outputs[0]
        taken.add(produced)
        copy.values[formal] = produced
    graph.insert_before(node, new)
    for inner in new:
        builder.infer(inner)
    for formal, actual in zip(list(function.outputs), node.outputs):
        if actual.name:
            _take_place(builder, actual, copy.values[formal])
    graph.remove(node, safe=True)
    return new


def _take_place(builder: Builder, actual: ir.Value, produced: ir.Value | None) -> None:
    """Replace `actual` by `produced` in all consumers, under its name."""
    assert produced is not None
    name, produced.type = actual.name, actual.type or produced.type
    produced.shape = actual.shape if actual.shape is not None else produced.shape
    actual.replace_all_uses_with(produced, replace_graph_outputs=True)
    actual.name, produced.name = None, name
    builder.moved[actual] = produced
