"""Graphs inside nodes: copy one to differentiate it, write a new one, or write the two branches of an If."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import prune
from onnxgrad.ir.names import Names


def copy_of(builder: Builder, graph: ir.Graph) -> tuple[Builder, ir.Graph]:
    """A copy of a graph inside a node, with names of its own, and a builder that writes into it."""
    copy = Copies({}, builder.names, builder.noting).graph(graph)
    return builder.nested(copy), copy


def empty(builder: Builder, name: str) -> tuple[Builder, ir.Graph]:
    """An empty graph, to become an attribute of a node, and a builder that writes into it."""
    graph = ir.Graph([], [], nodes=[], name=builder.names.fresh(name), opset_imports=builder.graph.opset_imports)
    return builder.nested(graph), graph


def give(builder: Builder, results: Sequence[Var | ir.Value]) -> None:
    """Make `results` the outputs of the builder's graph, and prune it.

    An output must be made by a node of the graph itself, and can be given only once.
    """
    graph = builder.graph
    graph.outputs.clear()
    for r in results:
        value = r if isinstance(r, ir.Value) else r.value
        maker = value.producer()
        if maker is None or maker.graph is not graph or value.is_graph_output():
            value = builder.copy(value).value
        graph.outputs.append(value)
    prune(graph)


def formal(builder: Builder, like: ir.Value, hint: str) -> Var:
    """A value to become an input of the graph of `builder`, of the type and shape of `like`."""
    value = ir.Value(name=builder.names.fresh(hint), type=like.type, shape=like.shape)
    return builder.var(value)


def loop_lead(builder: Builder) -> list[Var]:
    """The number of the step and the condition: the first inputs of the body of a Loop, which `builder` writes."""
    kinds = (("step", ir.DataType.INT64), ("goes_on", ir.DataType.BOOL))
    values = [ir.Value(name=hint, type=ir.TensorType(dtype), shape=ir.Shape([])) for hint, dtype in kinds]
    return [formal(builder, value, value.name or "") for value in values]


def cond(
    builder: Builder,
    condition: Var,
    then: Callable[[Builder], Sequence[Var | ir.Value]],
    otherwise: Callable[[Builder], Sequence[Var | ir.Value]],
    like: Sequence[ir.Value] | None = None,
) -> list[Var]:
    """Append an If whose branches are written by `then` and `otherwise`.

    The results have the types and shapes of `like`, by default the types of the results of `then`.
    """
    branches = []
    for name, write in (("then_branch", then), ("else_branch", otherwise)):
        inner, graph = empty(builder, name)
        give(inner, write(inner))
        branches.append(graph)
    attributes = [ir.AttrGraph("then_branch", branches[0]), ir.AttrGraph("else_branch", branches[1])]
    node = ir.Node("", "If", [condition.value], attributes, num_outputs=len(branches[0].outputs))
    for value, model in zip(node.outputs, like or branches[0].outputs):
        value.type, value.shape = model.type, None if like is None else model.shape
    return list(builder.append(node))


def rewire(attribute: ir.Attr, values: Mapping[ir.Value, ir.Value], names: Names | None = None) -> ir.Attr:
    """`attribute` with graphs copied so that they read the mapped `values`, optionally under fresh names.

    Args:
        attribute: of any type.
        values: what is read instead, by what is read now.
        names: the pool that new names of what the copies define are from; without it, they keep theirs.
    """
    return Copies(values, names).attribute(attribute)
