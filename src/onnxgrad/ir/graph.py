"""Walks through graphs: what a node reads (captured values included), what leads where, what is dead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs that `node` holds as attributes."""
    return [
        g
        for a in node.attributes.values()
        for g in ([a.as_graph()] if a.type == ir.AttributeType.GRAPH else
                  list(a.as_graphs()) if a.type == ir.AttributeType.GRAPHS else [])
    ]  # fmt: skip


def captured(node: ir.Node) -> list[ir.Value]:
    """Values of outer scopes that the graphs inside `node` read, each once, in order of first use."""
    found: dict[ir.Value, None] = {}
    for graph in subgraphs(node):
        for value in free(graph):
            found.setdefault(value)
    return list(found)


def free(graph: ir.Graph) -> Iterator[ir.Value]:
    """Values of outer scopes that `graph` reads, as often as it does."""
    own = set(graph.inputs) | set(graph.initializers.values())
    for node in graph:
        for value in reads(node):
            if value not in own:
                yield value
        own.update(node.outputs)
    for value in graph.outputs:
        if value not in own:
            yield value


def reads(node: ir.Node) -> list[ir.Value]:
    """Everything that `node` depends on: its inputs, then what its graphs capture."""
    direct = [v for v in node.inputs if v is not None]
    return direct + captured(node) if node.attributes and subgraphs(node) else direct


def prune(graph: ir.Graph, keep: Iterable[ir.Value] = ()) -> int:
    """Remove the nodes that no output (nor `keep`) needs; returns how many went. Initializers likewise."""
    live = set(graph.outputs) | set(keep)
    dead: list[ir.Node] = []
    for node in reversed(graph):
        if any(v in live for v in node.outputs):
            live.update(reads(node))
        else:
            dead.append(node)
    graph.remove(dead, safe=False)
    for node in dead:
        for i in range(len(node.inputs)):
            node.replace_input_with(i, None)
    for name, value in list(graph.initializers.items()):
        if value not in live and not value.is_graph_input():
            del graph.initializers[name]
    return len(dead)


def named_values(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every value of `graph` (not of graphs inside it) by name: inputs, initializers and what the nodes give."""
    values = {v.name or "": v for v in graph.inputs} | dict(graph.initializers)
    return values | {v.name: v for node in graph for v in node.outputs if v.name}


def rewired(attribute: ir.Attr, copies: Mapping[ir.Value, ir.Value]) -> ir.Attr:
    """`attribute`; a graph in it as a clone that reads copies where there are some."""
    if attribute.type == ir.AttributeType.GRAPH:
        return ir.AttrGraph(attribute.name, _clone(attribute.as_graph(), copies))
    if attribute.type == ir.AttributeType.GRAPHS:
        return ir.AttrGraphs(attribute.name, [_clone(g, copies) for g in attribute.as_graphs()])
    return attribute


def _clone(graph: ir.Graph, copies: Mapping[ir.Value, ir.Value]) -> ir.Graph:
    clone = graph.clone(allow_outer_scope_values=True)
    for node in clone.all_nodes():
        for i, value in enumerate(node.inputs):
            if value is not None and value in copies:
                node.replace_input_with(i, copies[value])
    for i, value in enumerate(clone.outputs):
        if value in copies:
            clone.outputs[i] = copies[value]
    return clone
