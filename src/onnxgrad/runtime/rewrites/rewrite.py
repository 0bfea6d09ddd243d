"""Rewrites as passes, and their common parts: recognising operators, writing others in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.graph import add_initializer, prune
from onnxgrad.ir.match import producer
from onnxgrad.ir.passes import Pass
from onnxgrad.ir.shapes import same_dim
from onnxgrad.runtime.setting import Setting

#: The phase of all rewrites.
REWRITES_PHASE = "rewrites"


def rewrite(
    name: str, what: str, where: str, applies: Callable[[ir.Graph], bool], apply: Callable[[ir.Graph], int]
) -> Pass[Setting]:
    """A pass that replaces operators by faster ones with equal results.

    Args:
        name, what, where: as of `Pass`.
        applies: returns True if a graph has a place for it.
        apply: changes a graph and returns the number of places; results that have no readers left are pruned.
    """

    def write(model: ir.Model, setting: Setting) -> int:
        places = apply(model.graph)
        prune(model.graph)
        setting.is_rewritten |= bool(places)
        return places

    return Pass(name, REWRITES_PHASE, what, where, lambda m, _: applies(m.graph), write, Setting.keeps_layout)


class NodeRule(NamedTuple):
    """A rewrite of single results.

    Attributes:
        match: returns the match that ends in a node, or None.
        write: emits the operators for a match, and returns the value in place of the node's result.
    """

    match: Callable[[ir.Node], Any]
    write: Callable[[Writer, Any], ir.Value]

    def apply(self, graph: ir.Graph, writer: Writer) -> int:
        """Replace every match in `graph`. Returns their number."""
        places = 0
        for node in list(graph):
            if (found := self.match(node)) is not None:
                writer.at = node
                replace_value(self.write(writer, found), node.outputs[0])
                places += 1
        return places


def rewrite_results(name: str, what: str, where: str, *rules: NodeRule) -> Pass[Setting]:
    """A pass of `rules`, one after the other over the whole graph."""

    def applies(graph: ir.Graph) -> bool:
        return any(rule.match(node) is not None for node in graph for rule in rules)

    def apply(graph: ir.Graph) -> int:
        writer = Writer(graph, name)
        return sum(rule.apply(graph, writer) for rule in rules)

    return rewrite(name, what, where, applies, apply)


class Writer:
    """Emits nodes before a given one, with names that begin with the name of the rewrite."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self.graph, self.prefix = graph, prefix
        self.at: ir.Node | None = None
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], ir.Value] = {}
        self._serial = 0

    def name(self, what: str) -> str:
        """A name that nothing has."""
        self._serial += 1
        return f"{self.prefix}.{what}.{self._serial}"

    def emit(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: object) -> ir.Value:
        """Emit a node before the given one. Returns its output."""
        return self.emit_all(op_type, *inputs, domain=domain, outputs=1, **attributes)[0]

    def emit_all(
        self, op_type: str, *inputs: ir.Value | None, domain: str = "", outputs: int, **attributes: object
    ) -> list[ir.Value]:
        """Emit a node with several outputs before the given one."""
        attrs = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]  # type: ignore[arg-type]
        node = ir.Node(domain, op_type, inputs, attrs, num_outputs=outputs, name=self.name(op_type))
        for value in node.outputs:
            value.name = self.name(op_type)
        assert self.at is not None
        self.graph.insert_before(self.at, node)
        return list(node.outputs)

    def constant(self, array: np.ndarray) -> ir.Value:
        """A tensor, held once."""
        key = (array.tobytes(), str(array.dtype), array.shape)
        if key not in self._constants:
            self._constants[key] = add_initializer(self.graph, ir.tensor(array, name=self.name("const")))
        return self._constants[key]

    def ints(self, *numbers: int) -> ir.Value:
        """A vector of integers."""
        return self.constant(np.array(numbers, np.int64))

    def view(self, x: ir.Value, *dims: int) -> ir.Value:
        """`x` reshaped."""
        return self.emit("Reshape", x, self.ints(*dims))


def replace_value(y: ir.Value, old: ir.Value) -> None:
    """Replace `old` by `y`, with its name, type and shape; the producer of `old` becomes unread."""
    y.type, y.shape = old.type, old.shape
    old.replace_all_uses_with(y, replace_graph_outputs=old.is_graph_output())
    y.name, old.name = old.name, y.name


def match_repeated(indices: ir.Value | None, rank: int, axis: int) -> ir.Value | None:
    """The value that `indices`, of `rank` axes, repeats along all axes but `axis`; None if it does not."""
    spread = producer(indices, "Expand")
    column = indices if spread is None else spread.inputs[0]
    if column is None or column.shape is None or indices is None or indices.shape is None:
        return None
    if len(column.shape) > rank or len(indices.shape) != rank:
        return None
    dims = (1,) * (rank - len(column.shape)) + column.shape.dims
    alone = all(d == 1 for i, d in enumerate(dims) if i != axis)
    return column if alone and same_dim(indices.shape[axis], dims[axis]) else None


def same_but(axis: int, one: ir.Shape, other: ir.Shape) -> list[int] | None:
    """The sizes of all axes but `axis`, equal in both shapes (-1: without a number); None if not certain."""
    if len(one) != len(other):
        return None
    found = []
    for i, (a, b) in enumerate(zip(one, other)):
        if i != axis:
            if not same_dim(a, b):
                return None
            found.append(a if isinstance(a, int) else -1)
    return found
