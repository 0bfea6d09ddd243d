"""GraphCall, by which ONNX 1.7 let an algorithm run the inference graph: converted to today's form.

Since 1.8 an algorithm continues where the inference graph ends, and reads its values by name. In 1.7 it saw only the
initializers of that graph, and called it like a function: operands bound by position, optional if they have an
initializer. Such a call becomes a copy of the nodes that it needs, on its operands; missing weights are the inference
graph's own, so they are trained. Names that the algorithm shares with the inference graph by accident (it was a
separate scope) get a number; an input of both is one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir import Names
from onnxgrad.ir.names import described
from onnxgrad.transforms.gradient_node import DOMAIN


def calls(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The GraphCall nodes of an algorithm, those in branches and bodies included."""
    for node in graph.node:
        if node.domain == DOMAIN and node.op_type == "GraphCall":
            yield node
        for inner in (g for a in node.attribute for g in (a.g, *a.graphs)):
            yield from calls(inner)


def without_calls(model: ir.Model, info: onnx.TrainingInfoProto, index: int = 0) -> onnx.TrainingInfoProto:
    """`info` in the form of today; itself if it calls nothing.

    Raises:
        BadInput: a call that ONNX 1.7 does not allow.
    """
    if not any(calls(info.algorithm)):
        return info
    copy = onnx.TrainingInfoProto()
    copy.CopyFrom(info)
    called = _Called(model, copy, f"training entry {index}")
    called.separate_names()
    called.write(copy.algorithm)
    return copy


class _Called:
    """The inference graph as something to call from one training entry."""

    def __init__(self, model: ir.Model, info: onnx.TrainingInfoProto, where: str) -> None:
        self.graph = model.graph
        self.info = info
        self.where = where
        self.nodes = [ir.to_proto(node) for node in model.graph]
        self.inputs = [v.name or "" for v in model.graph.inputs]
        self.outputs = [v.name or "" for v in model.graph.outputs]
        self.names = Names.of(model)
        self.names.reserve(defined_inside(info.algorithm))

    def separate_names(self) -> None:
        """Rename values that both graphs define; an input of both is the same tensor."""
        algorithm = self.info.algorithm
        shared = {n for n in self.inputs if n not in self.graph.initializers}
        kept = [v for v in algorithm.input if v.name not in shared]
        inside = {o for node in self.nodes for o in node.output} | set(self.inputs)
        own = {v.name for v in kept} | {t.name for t in algorithm.initializer}
        own |= {o for node in algorithm.node for o in node.output if o}
        new = {name: self.names.fresh(name) for name in sorted(own & inside - set(self.graph.initializers))}
        del algorithm.input[:]
        algorithm.input.extend(kept)
        rename_in_graph(algorithm, new)
        for binding in self.info.update_binding:
            binding.value = new.get(binding.value, binding.value)
            binding.key = new.get(binding.key, binding.key)
        for binding in self.info.initialization_binding:
            binding.key = new.get(binding.key, binding.key)

    def write(self, graph: onnx.GraphProto) -> None:
        """Replace the calls in `graph`, and in the graphs inside it, in place."""
        for inner in (g for node in graph.node for a in node.attribute for g in (a.g, *a.graphs) if g.node):
            self.write(inner)
        nodes = [new for node in graph.node for new in self._written(node)]
        del graph.node[:]
        graph.node.extend(nodes)

    def _written(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The node itself, or the nodes that replace a call."""
        if node.domain != DOMAIN or node.op_type != "GraphCall":
            return [node]
        where = f"{self.where}: {described(node)}"
        given = {a.name: a for a in node.attribute}
        name = given["graph_name"].s.decode() if "graph_name" in given else ""
        if name != self.graph.name:
            raise BadInput(f"{where} calls {name!r}; only the inference graph, {self.graph.name!r}, can be called")
        operands = self._bound(where, "inputs", list(node.input), self.inputs, given.get("input_names"))
        results = self._bound(where, "outputs", list(node.output), self.outputs, given.get("output_names"))
        for formal in self.inputs:
            if formal not in operands and formal not in self.graph.initializers:
                raise BadInput(f"{where} gives nothing for the input {formal!r}, which has no initializer")
        return self._copied(node.name or node.output[0], operands, results)

    def _bound(
        self, where: str, what: str, actual: list[str], formal: list[str], named: onnx.AttributeProto | None
    ) -> dict[str, str]:
        """Map each formal name to a name in the algorithm; optional names may be absent."""
        if named is not None:  # as an earlier draft had it
            formal = [s.decode() for s in named.strings]
            known = self.inputs if what == "inputs" else self.outputs
            for name in formal:
                if name not in known:
                    raise BadInput(f"{where}: {UnknownName(name, known, what[:-1])}")
        if len(actual) > len(formal):
            raise BadInput(f"{where} has {len(actual)} {what}; the inference graph has {len(formal)}")
        return {f: a for f, a in zip(formal, actual) if a}

    def _copied(self, prefix: str, operands: Mapping[str, str], results: Mapping[str, str]) -> list[onnx.NodeProto]:
        made = {o for node in self.nodes for o in node.output if o}
        inner = {n for node in self.nodes for a in node.attribute for g in (a.g, *a.graphs) for n in defined_inside(g)}
        new = {name: self.names.fresh(f"{prefix}_{name}") for name in sorted(made | inner)} | dict(operands)
        new |= {formal: actual for formal, actual in results.items() if formal in made}
        needed, nodes = set(results), []
        for node in reversed(self.nodes):
            if needed & set(node.output):
                needed |= set(_read(node))
                copy = onnx.NodeProto()
                copy.CopyFrom(node)
                copy.name = f"{prefix}_{node.name}" if node.name else ""
                rename_in_node(copy, new)
                nodes.append(copy)
        through = [(f, a) for f, a in results.items() if f not in made]  # inputs that are outputs as well
        return nodes[::-1] + [onnx.helper.make_node("Identity", [new.get(f, f)], [a]) for f, a in through]


def defined_inside(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name that `graph` and the graphs inside it define."""
    yield from (v.name for v in graph.input)
    yield from (t.name for t in graph.initializer)
    for node in graph.node:
        yield from (o for o in node.output if o)
        for a in node.attribute:
            for inner in (a.g, *a.graphs):
                yield from defined_inside(inner)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for a in node.attribute:
        for inner in (a.g, *a.graphs):
            for n in inner.node:
                yield from _read(n)
            yield from (v.name for v in inner.output)
        if node.domain == DOMAIN and a.name == "y":
            yield a.s.decode()


def rename_in_node(node: onnx.NodeProto, new: Mapping[str, str]) -> None:
    """Rename values in `node` and the graphs inside it, the strings of a Gradient included; in place."""
    for names in (node.input, node.output):
        for i, name in enumerate(names):
            names[i] = new.get(name, name)
    for a in node.attribute:
        if node.domain == DOMAIN and node.op_type == "Gradient":
            for i, s in enumerate(a.strings):
                a.strings[i] = new.get(s.decode(), s.decode()).encode()
            if a.name == "y":
                a.s = new.get(a.s.decode(), a.s.decode()).encode()
        for graph in (a.g, *a.graphs):
            rename_in_graph(graph, new)


def rename_in_graph(graph: onnx.GraphProto, new: Mapping[str, str]) -> None:
    """Rename values in `graph` and the graphs inside it; in place."""
    for node in graph.node:
        rename_in_node(node, new)
    for held in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        held.name = new.get(held.name, held.name)
