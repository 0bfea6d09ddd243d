"""Graphs inside nodes: copy one to differentiate it, and close it on new results."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import prune, reads
from onnxgrad.ir.names import rename_inside


def copy_of(builder: Builder, graph: ir.Graph) -> tuple[Builder, ir.Graph]:
    """A copy of a graph inside a node, with names of its own, and a builder that writes into it."""
    copy = graph.clone(allow_outer_scope_values=True)
    rename_inside(copy, builder.names)
    return builder.nested(copy), copy


def empty(builder: Builder, name: str) -> tuple[Builder, ir.Graph]:
    """An empty graph, to become an attribute of a node, and a builder that writes into it."""
    graph = ir.Graph([], [], nodes=[], name=builder.names.fresh(name), opset_imports=builder.graph.opset_imports)
    return builder.nested(graph), graph


def give(builder: Builder, results: Sequence[Var | ir.Value]) -> None:
    """Make `results` the outputs of the graph of `builder`, and drop what they do not need.

    An output must be made by a node of the graph itself, and can be given only once.
    """
    graph = builder.graph
    graph.outputs.clear()
    for r in results:
        value = r.value if isinstance(r, Var) else r
        maker = value.producer()
        if maker is None or maker.graph is not graph or value.is_graph_output():
            copy = builder.append(ir.Node("", "Identity", [value]))[0].value
            copy.type, copy.shape = (
                copy.type or value.type,
                copy.shape if copy.shape is not None else value.shape,
            )
            value = copy
        graph.outputs.append(value)
    prune(graph)


def formal(builder: Builder, like: ir.Value, hint: str) -> Var:
    """A value to become an input of the graph of `builder`, of the type and shape of `like`."""
    value = ir.Value(name=builder.names.fresh(hint), type=like.type, shape=like.shape)
    return builder.var(value)


def values_read(graph: ir.Graph) -> set[ir.Value]:
    """Everything that the nodes of `graph` read, and its outputs."""
    return {v for node in graph for v in reads(node)} | set(graph.outputs)
