"""A model as a message.

``onnx_ir`` writes the parts; this says what needs only one step each: nodes without notes, and values whose type and
shape another value has too. That is most of a derived model, and takes a third of the time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxgrad.model_io.read import ANNOTATED


def serialize(model: ir.Model) -> onnx.ModelProto:
    """What ``onnx_ir.to_proto(model)`` gives."""
    if model.meta.get(ANNOTATED, True):  # notes on quantization, which may be beside any value
        return ir.to_proto(model)
    graph = model.graph
    shell = copy.copy(model)
    shell.graph = ir.Graph(
        (),
        (),
        nodes=(),
        name=graph.name,
        doc_string=graph.doc_string,
        opset_imports=graph.opset_imports,
        metadata_props=graph.metadata_props,
    )
    proto = ir.to_proto(shell)
    _Writer(proto.graph, model.ir_version).write(graph)
    return proto


_SMALL = frozenset({ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.FLOAT, ir.AttributeType.STRING})


class _Writer:
    """Fills one message."""

    def __init__(self, proto: onnx.GraphProto, ir_version: int) -> None:
        self.proto, self.ir_version = proto, ir_version
        self._types: dict[tuple[int, ir.DataType], onnx.TypeProto] = {}
        self._attributes: dict[int, onnx.AttributeProto] = {}  # nodes share what holds them

    def write(self, graph: ir.Graph) -> None:
        for value in graph.inputs:
            ir.serde.serialize_value_into(self.proto.input.add(), value)
        given = {value.name for value in graph.inputs}
        for value in graph.initializers.values():
            if value.name not in given:
                self.describe(value)
            if value.const_value is not None:
                value.const_value.name = value.name
                ir.serde.serialize_tensor_into(self.proto.initializer.add(), value.const_value)
        for node in graph:
            self.node(node)
            for value in node.outputs:
                if value.name and not value.is_graph_output():
                    self.describe(value)
        for value in graph.outputs:
            ir.serde.serialize_value_into(self.proto.output.add(), value)

    def node(self, node: ir.Node) -> None:
        if node.doc_string or node.metadata_props or node.overload or node.device_configurations:
            ir.serde.serialize_node_into(self.proto.node.add(), node, model_ir_version=self.ir_version)
            return
        proto = self.proto.node.add(
            op_type=node.op_type,
            input=["" if v is None else v.name for v in node.inputs],
            output=_named(node.outputs),
        )
        if node.domain:
            proto.domain = node.domain
        if node.name:
            proto.name = node.name
        for a in node.attributes.values():
            known = self._attributes.get(id(a))
            if known is not None:
                proto.attribute.append(known)
                continue
            write = ir.serde.serialize_reference_attribute_into if a.is_ref() else ir.serde.serialize_attribute_into
            write(proto.attribute.add(), a)
            if a.type in _SMALL:
                self._attributes[id(a)] = proto.attribute[-1]

    def describe(self, value: ir.Value) -> None:
        """Type and shape of `value`, if there is anything to say."""
        held, shape = value.type, value.shape
        noted = value.metadata_props or value.doc_string
        if isinstance(held, ir.TensorType) and shape is not None and not held.denotation and not noted:
            key = (id(shape), held.dtype)
            known = self._types.get(key)
            if known is None:
                known = self._types[key] = ir.serde.serialize_type(held)
                ir.serde.serialize_shape_into(known, shape)
            self.proto.value_info.add(name=value.name, type=known)
        elif held is not None or shape is not None or noted:
            ir.serde.serialize_value_into(self.proto.value_info.add(), value)


def _named(values: Sequence[ir.Value]) -> list[str]:
    """The names of `values`, but for those at the end that have none."""
    names = [v.name or "" for v in values]
    while names and not names[-1]:
        names.pop()
    return names
