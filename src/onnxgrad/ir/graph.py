"""Walks through graphs: operands of nodes (captured values included), slices, cuts, dead-code elimination.

A *slice* is the set of nodes that depend on some values (`dependents`) or that some values depend on (`ancestors`); a
*cut* is the set of values that cross the border between two parts of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Reversible, Sequence

import onnx_ir as ir

from onnxgrad.ir.aliases import follow, known_as
from onnxgrad.ir.match import not_none
from onnxgrad.ir.notes import SETTLED, notes

#: Looked up once: a derivation asks every node of bodies, many times.
_GRAPH, _GRAPHS = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs in the attributes of `node`."""
    graphs: list[ir.Graph] = []
    for a in node.attributes.data.values():
        kind = a.type
        if kind is _GRAPH:
            graphs.append(a.value)
        elif kind is _GRAPHS:
            graphs.extend(a.value)
    return graphs


def scopes(graph: ir.Graph) -> list[ir.Graph]:
    """`graph`, and every graph inside it."""
    graphs = [graph]
    for node in graph:
        if node.attributes.data:  # a length would be asked of it in Python, once for each node
            for inner in subgraphs(node):
                graphs += scopes(inner)
    return graphs


def walk(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """Yield every node of `graph`, and after a node those of the graphs inside it."""
    for node in graph:
        yield node
        if node.attributes.data:
            for inner in subgraphs(node):
                yield from walk(inner)


def values_in(graph: ir.Graph | ir.Function) -> list[ir.Value]:
    """The inputs of `graph` and the results of its nodes, and those of the graphs inside it."""
    values = list(graph.inputs)
    for node in graph:
        values += node.outputs
        if node.attributes.data:
            for inner in subgraphs(node):
                values += values_in(inner)
    return values


def captured(node: ir.Node) -> list[ir.Value]:
    """Values of outer scopes that the graphs inside `node` read, each once, in order of first use."""
    graphs = subgraphs(node) if node.attributes.data else ()
    return list(dict.fromkeys([value for graph in graphs for value in free(graph)])) if graphs else []


def free(graph: ir.Graph) -> list[ir.Value]:
    """Values of outer scopes that `graph` reads, as often as it does."""
    own = {*graph.inputs.data, *graph.initializers.data.values()}  # type: ignore[attr-defined]  # plain lists are faster
    outer: list[ir.Value] = []
    for node in graph:
        outer += [v for v in node.inputs if v is not None and v not in own]
        if node.attributes.data:
            outer += [v for v in captured(node) if v not in own]
        own.update(node.outputs)
    return outer + [v for v in graph.outputs.data if v not in own]  # type: ignore[attr-defined]


def reads(node: ir.Node) -> list[ir.Value]:
    """All values that `node` depends on: its inputs, then the captured values of its graphs."""
    direct = [v for v in node.inputs if v is not None]
    return direct + captured(node) if node.attributes.data else direct


def required_inputs(graph: ir.Graph) -> list[ir.Value]:
    """The inputs of `graph` without a default value: data, not weights."""
    return [v for v in graph.inputs if not v.is_initializer()]


def values_read(graph: ir.Graph) -> set[ir.Value]:
    """All values that the nodes of `graph` read, and its outputs."""
    return {v for node in graph for v in reads(node)} | set(graph.outputs)


def dependents(nodes: Iterable[ir.Node], start: Iterable[ir.Value]) -> set[ir.Value]:
    """`start`, and everything that `nodes`, in topological order, compute from it."""
    dependent = set(start)
    for node in nodes:
        if not dependent.isdisjoint(reads(node)):
            dependent.update(node.outputs)
    return dependent


def ancestors(nodes: Reversible[ir.Node], ends: Iterable[ir.Value], start: Collection[ir.Value] = ()) -> list[ir.Node]:
    """The nodes, in topological order, that compute `ends`, starting from the values `start`."""
    wanted = {v for v in ends if v not in start}
    nodes_before = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            wanted.update(v for v in reads(node) if v not in start)
            nodes_before.append(node)
    return nodes_before[::-1]


def reach(start: Iterable[ir.Value], onward: Callable[[ir.Value], Iterable[ir.Value]]) -> list[ir.Value]:
    """`start`, and all that `onward` leads to from there, each once, in the order of a walk depth first."""
    reached: dict[ir.Value, None] = {}
    stack = list(start)
    while stack:
        value = stack.pop()
        if value not in reached:
            reached[value] = None
            stack.extend(onward(value))
    return list(reached)


def cut(ends: Iterable[ir.Value], crosses: Callable[[ir.Value], bool]) -> list[ir.Value]:
    """The first values that satisfy `crosses` on all backward paths from `ends`."""

    def successors(value: ir.Value) -> list[ir.Value]:
        node = None if crosses(value) else value.producer()
        return [] if node is None else reads(node)

    return [v for v in reach(ends, successors) if crosses(v)]


def stand_in(value: ir.Value, name: str | None = None) -> ir.Value:
    """A new value like `value`, and by default of its name, that replaces it in all consumers; it becomes an input."""
    new = ir.Value(name=name or value.name, type=value.type, shape=value.shape)
    value.replace_all_uses_with(new, replace_graph_outputs=True)
    follow(new, known_as(value))
    if SETTLED in (notes(value) or ()):
        new.meta[SETTLED] = True
    if name is None:
        value.name = f"{value.name}_computed"
    return new


def take_over(y: ir.Value, old: ir.Value) -> None:
    """Replace `old` by `y`, which gets its name, type and shape."""
    y.type, y.shape = old.type, old.shape
    old.replace_all_uses_with(y, replace_graph_outputs=old.is_graph_output())
    y.name, old.name = old.name, y.name


def replace_everywhere(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` by `new` in all consumers and outputs, of which the library looks at each in Python."""
    if old.is_graph_output() and old.graph is not None:
        outputs = old.graph.outputs
        while old in outputs.data:  # type: ignore[attr-defined]
            outputs[outputs.data.index(old)] = new  # type: ignore[attr-defined]
    old.replace_all_uses_with(new)


def in_order(nodes: Sequence[ir.Node]) -> bool:
    """True if each of `nodes` comes after those whose results it reads."""
    missing = set(nodes)
    for node in nodes:
        for value in reads(node):
            if value.producer() in missing:
                return False
        missing.discard(node)
    return True


def detach(nodes: Iterable[ir.Node], kept: Iterable[ir.Graph] = ()) -> None:
    """Have `nodes`, in no graph any more, read nothing that stays, nor the graphs inside them but for those `kept`."""
    left = {id(body) for body in kept}
    todo = list(nodes)
    gone = set(todo)
    while todo:
        node = todo.pop()
        for i, value in enumerate(node.inputs):
            if value is not None and value.producer() not in gone:
                node.replace_input_with(i, None)
        for body in subgraphs(node) if node.attributes.data else ():
            if id(body) not in left:
                body.outputs.clear()
                todo.extend(body)


def discard(graph: ir.Graph, node: ir.Node) -> None:
    """Remove `node`, whose results have no readers, from `graph`, with the graphs inside it."""
    graph.remove(node, safe=True)
    detach([node])


def prune(graph: ir.Graph, keep: Iterable[ir.Value] = ()) -> int:
    """Remove the nodes and initializers that neither an output nor `keep` needs. Returns the number of nodes."""
    live: set[ir.Value | None] = {*graph.outputs, *keep}
    dead: list[ir.Node] = []
    for node in reversed(graph):
        if live.isdisjoint(node.outputs):
            dead.append(node)
        else:
            live.update(node.inputs)
            if node.attributes.data:
                live.update(captured(node))
    graph.remove(dead, safe=False)
    holds_graphs = any(node.attributes.data and subgraphs(node) for node in dead)
    detach(dead, [body for node in graph for body in subgraphs(node)] if holds_graphs else ())
    for name, value in list(graph.initializers.items()):
        if value not in live and not value.is_graph_input():
            del graph.initializers[name]
    return len(dead)


def named_values(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every value of `graph`, without nested graphs, by name: inputs, initializers and results of nodes."""
    values = {v.name or "": v for v in graph.inputs} | dict(graph.initializers)
    return values | {v.name: v for node in graph for v in node.outputs if v.name}


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add an initializer with the name of `tensor` to `graph`."""
    shape = tensor.shape if type(tensor) is ir.Tensor else ir.Shape(tensor.shape)  # type: ignore[arg-type]
    value = ir.Value(name=tensor.name, const_value=tensor, shape=shape, type=ir.TensorType(tensor.dtype))
    graph.register_initializer(value)
    return value


def into_input(graph: ir.Graph, name: str) -> ir.TensorProtocol:
    """Turn the initializer `name` into an input of its type and shape. Returns its tensor."""
    value = graph.initializers.pop(name)
    tensor = not_none(value.const_value)
    value.const_value, value.type = None, ir.TensorType(tensor.dtype)
    value.shape = ir.Shape(tensor.shape)  # type: ignore[arg-type]
    if not value.is_graph_input():
        graph.inputs.append(value)
    return tensor
