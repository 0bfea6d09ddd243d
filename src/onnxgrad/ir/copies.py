"""Copies of graphs inside nodes, which read the same values of outer scopes.

``clone`` of ``onnx_ir`` copies every shape and allocates metadata everywhere. Here copies share shapes: no code changes
a shape in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import onnx_ir as ir

from onnxgrad.ir.aliases import follow, known_as
from onnxgrad.ir.composites import detach_parts
from onnxgrad.ir.graph import scopes
from onnxgrad.ir.names import Names, own_tensor
from onnxgrad.ir.notes import notes, properties

Noted = TypeVar("Noted", ir.Node, ir.Value)


def copy_model(model: ir.Model) -> ir.Model:
    """A copy of `model` without notes of its own, which shares tensors, types and shapes."""
    graph = Copies({}, None).graph(model.graph)
    for scope in scopes(graph):
        detach_parts(scope)
    return ir.Model(
        graph,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        domain=model.domain,
        model_version=model.model_version,
        doc_string=model.doc_string,
        functions=[function.clone() for function in model.functions.values()],
        metadata_props=dict(model.metadata_props),
        device_configurations=model.device_configurations,
    )


class Copies:
    """A map from values to their copies, for copying nodes and graphs.

    Attributes:
        values: what copies read in the place of others: given at first, and what was copied so far.
        names: the pool that names of copies are from; None: they keep those of the originals.
        noting: whether copies go by the names of the originals as well (see `aliases`).
    """

    def __init__(self, values: Mapping[ir.Value, ir.Value], names: Names | None, noting: bool = True) -> None:
        self.values = dict(values)
        self.names = names
        self.noting = noting and names is not None

    def graph(self, graph: ir.Graph) -> ir.Graph:
        """A copy of `graph`."""
        inputs = [self.value(v) for v in graph.inputs]
        initializers = [self.values[v] if v in self.values else self.value(v) for v in graph.initializers.values()]
        nodes = [self.node(node) for node in graph]
        made = ir.Graph(
            inputs,
            [self.values.get(v, v) for v in graph.outputs],
            nodes=nodes,
            initializers=initializers,
            doc_string=graph.doc_string,
            opset_imports=graph.opset_imports.copy(),
            name=graph.name,
        )
        if graph.metadata_props:
            made.metadata_props.update(graph.metadata_props)
        if graph.meta:
            made.meta.update(graph.meta)
        return made

    def node(self, node: ir.Node) -> ir.Node:
        """A copy of `node`, in no graph yet."""
        values = self.values
        attributes = node.attributes.data
        name = node.name
        outputs = [self.value(v) for v in node.outputs]
        made = ir.Node(
            node.domain,
            node.op_type,
            [v if v is None else values.get(v, v) for v in node.inputs],
            self.attributes(node) if attributes else (),
            overload=node.overload,
            outputs=outputs,
            version=node.version,
            name=self.names.fresh(name) if name and self.names else name,
            doc_string=node.doc_string,
            device_configurations=node.device_configurations,
        )
        return _copy_notes(made, node)

    def unnamed(self, node: ir.Node) -> ir.Node:
        """A copy of `node`, in no graph yet, to be named by a builder; results have the types of the originals.

        It has the metadata of `node`, which may say that no derivative passes it, but no notes of this process.
        """
        values = self.values
        made = ir.Node(
            node.domain,
            node.op_type,
            [None if v is None else values.get(v, v) for v in node.inputs],
            self.attributes(node),
            num_outputs=len(node.outputs),
            overload=node.overload,
        )
        for old, new in zip(node.outputs, made.outputs):
            new.type, new.shape = old.type, old.shape
            values[old] = new
        if metadata := properties(node):
            made.metadata_props.update(metadata)
        return made

    def attributes(self, node: ir.Node) -> list[ir.Attr]:
        """The attributes of a copy of `node`."""
        return [self.attribute(a) for a in node.attributes.values()]

    def attribute(self, a: ir.Attr) -> ir.Attr:
        """`a`, with copies of the graphs in it."""
        if a.type == ir.AttributeType.GRAPH and not a.is_ref():
            return ir.Attr(a.name, a.type, self.graph(a.value), doc_string=a.doc_string)
        if a.type == ir.AttributeType.GRAPHS and not a.is_ref():
            return ir.Attr(a.name, a.type, [self.graph(g) for g in a.value], doc_string=a.doc_string)
        return a

    def value(self, value: ir.Value) -> ir.Value:
        """A copy of `value`, which nothing makes yet."""
        name, tensor = value.name, value.const_value
        if self.names is not None and name:
            name = self.names.fresh(name)
            if tensor is not None and value.is_initializer():  # a value renames its tensor, which copies share
                tensor = own_tensor(tensor)
                tensor.name = name
        made = ir.Value(name=name, type=value.type, shape=value.shape, doc_string=value.doc_string, const_value=tensor)
        self.values[value] = _copy_notes(made, value)
        if self.noting:
            follow(made, known_as(value))
        return made


def _copy_notes(made: Noted, like: Noted) -> Noted:
    """`made`, with the notes of `like`."""
    if metadata := properties(like):
        made.metadata_props.update(metadata)
    if own_notes := notes(like):
        made.meta.update(own_notes)
    return made
