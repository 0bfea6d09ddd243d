"""Checks that a graph is still one after it was rewritten: order, scopes, names, types, readers."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.ir.graph import scopes, subgraphs

#: Name and element type; of an output, the number of axes as well.
_Input = tuple[str | None, ir.DataType | None]
_Output = tuple[str | None, ir.DataType | None, int | None]


@dataclass(frozen=True)
class Interface:
    """The properties of a graph that optimization must preserve.

    Attributes:
        inputs, outputs: names and types, in order.
        dtypes: element types of values of the graph and of graphs inside it, by name.
    """

    inputs: tuple[_Input, ...]
    outputs: tuple[_Output, ...]
    dtypes: dict[str | None, ir.DataType | None]


def interface_of(graph: ir.Graph) -> Interface:
    """The interface of a graph."""
    typed = (v for scope in scopes(graph) for node in scope for v in node.outputs if v.dtype is not None)
    return Interface(*_ends(graph), {v.name: v.dtype for v in typed})


def fault_of(graph: ir.Graph, like: Interface | None) -> str:
    """The first fault of a rewritten graph; empty if there is none.

    Args:
        graph: with the graphs inside it.
        like: the interface of the graph that it was made of. None: it was not made of another one, and nodes outside
            may read its values.
    """
    if like is not None:
        inputs, outputs = _ends(graph)
        if inputs != like.inputs or len(outputs) != len(like.outputs):
            return "the inputs and outputs of the graph are not what they were"
        for now, before in zip(outputs, like.outputs):
            if any(a != b and None not in (a, b) for a, b in zip(now, before)):
                return f"the output {before[0]!r} is not what it was"
    walk = _Walk({} if like is None else like.dtypes)
    return walk.graph(graph) or ("" if like is None else walk.strangers())


def _ends(graph: ir.Graph) -> tuple[tuple[_Input, ...], tuple[_Output, ...]]:
    """Inputs and outputs as `Interface` has them."""
    outputs = tuple((v.name, v.dtype, None if v.shape is None else len(v.shape)) for v in graph.outputs)
    return tuple((v.name, v.dtype) for v in graph.inputs), outputs


class _Walk:
    """One pass over a graph and the graphs inside it."""

    def __init__(self, dtypes: dict[str | None, ir.DataType | None]) -> None:
        self.dtypes = dtypes
        self.nodes: set[ir.Node] = set()
        self.values: list[ir.Value] = []
        self.visible: dict[str | None, ir.Value] = {}  #: computed so far, in this scope or one around it

    def graph(self, graph: ir.Graph) -> str:
        """The first fault of `graph`."""
        visible = self.visible
        own: dict[str | None, ir.Value] = {}
        for value in (*graph.inputs, *graph.initializers.values()):
            if own.setdefault(value.name, value) is not value:
                return f"two values are called {value.name!r}"
        hidden = {name: visible[name] for name in own if name in visible}
        visible.update(own)
        for node in graph:
            for x in node.inputs:
                if x is not None and visible.get(x.name) is not x:
                    return f"{_called(node)} reads {x.name!r}, which nothing has computed before"
            if node.attributes.data:
                for body in subgraphs(node):
                    if fault := self.graph(body):
                        return fault
            for value in node.outputs:
                if not (name := value.name):
                    if value.uses():
                        return f"{_called(node)} gives a value without a name"
                    continue
                if name in own:
                    return f"two values are called {name!r}"
                if (old := self.dtypes.get(name)) is not None and (dtype := value.dtype) not in (None, old):
                    return f"{name!r} was of type {old} and is of type {dtype}"
                if name in visible:
                    hidden[name] = visible[name]
                own[name] = visible[name] = value
            self.nodes.add(node)
        for value in graph.outputs:
            if visible.get(value.name) is not value:
                return f"the output {value.name!r} is computed by nothing"
        self.values += own.values()
        for name in own:
            del visible[name]
        visible.update(hidden)
        return ""

    def strangers(self) -> str:
        """Nodes that read a value, and are in none of the graphs."""
        nodes = self.nodes
        for value in self.values:
            for node, _ in value.uses():
                if node not in nodes:
                    return f"{_called(node)} reads {value.name!r} and is in the graph no more"
        return ""


def _called(node: ir.Node) -> str:
    return f"{node.op_type} {node.name!r}"
