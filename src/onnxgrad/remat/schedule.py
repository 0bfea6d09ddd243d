"""The memory that results of nodes take at each step of a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.ir.execution_order import edges_of, execution_order, orders, reorder
from onnxgrad.ir.graph import reads
from onnxgrad.ir.operators import Moves, traits_of
from onnxgrad.remat.costs import meanwhile


def is_view(node: ir.Node | None) -> bool:
    """True if the result of `node` is a view of its first operand: no memory, no copy."""
    return node is not None and traits_of(node).moves is Moves.VIEW


class ScheduledNode(NamedTuple):
    """One step of a schedule: the keys of the values that it reads and computes, and its workspace in bytes."""

    reads: Sequence[object]
    gives: Sequence[object]
    meanwhile: int = 0


def use(steps: Sequence[ScheduledNode], takes: Mapping[object, int]) -> list[int]:
    """Bytes that are taken while each step runs. A value is freed after the last step that reads it.

    `takes` has the bytes of each value. A tuple is another value that takes as much as its first element.
    """
    last = {v: i for i, step in enumerate(steps) for v in step.reads}
    taken = 0
    ends: dict[int, int] = {}
    uses = []
    for i, step in enumerate(steps):
        for v in step.gives:
            size = takes.get(v[0] if isinstance(v, tuple) else v, 0)
            if size:
                taken += size
                end = max(last.get(v, i), i)
                ends[end] = ends.get(end, 0) + size
        uses.append(taken + step.meanwhile)
        taken -= ends.pop(i, 0)
    return uses


class Roots:
    """The value that each view refers to, and the bytes of each value itself: 0 for a view or an output."""

    def __init__(self, nodes: Iterable[ir.Node], size: Mapping[ir.Value, int], outputs: Iterable[ir.Value]) -> None:
        self.size, self.outputs = size, set(outputs)
        self.root: dict[ir.Value, ir.Value] = {}
        for node in nodes:
            if is_view(node) and node.inputs[0] is not None:
                self.root[node.outputs[0]] = self.of(node.inputs[0])

    def of(self, value: ir.Value) -> ir.Value:
        """The value that `value` is a view of; `value` itself if it is no view."""
        return self.root.get(value, value)

    def takes(self, value: ir.Value) -> int:
        """The bytes of `value` itself."""
        return 0 if value in self.root or value in self.outputs else self.size.get(value, 0)


def settle(graph: ir.Graph, size: Mapping[ir.Value, int]) -> int:
    """Reorder the nodes of `graph` to the candidate order with the smallest peak of memory. Returns the peak in bytes.

    Among orders with about the same peak, it chooses the one with the least average memory over products, which leaves
    most room for savings.
    """
    found: list[tuple[int, int, int, list[ir.Node]]] = []
    schedules = Schedules(graph, size)
    products = [n for n in schedules.nodes if traits_of(n).is_product]
    for order in orders(graph, schedules.edges):
        taken = schedules.used(order)
        found.append((sum(taken[n] for n in products), max(taken.values(), default=0), len(found), order))
    least = min(peak for _, peak, _, _ in found)
    _, peak, _, order = min(f for f in found if f[1] <= least * 1.05)
    reorder(graph, order)
    return peak


class Schedules:
    """The memory that orders of the nodes of `graph` take, by the bytes of each result."""

    def __init__(self, graph: ir.Graph, size: Mapping[ir.Value, int]) -> None:
        self.nodes = list(graph)
        self.edges = edges_of(self.nodes)
        roots = Roots(self.nodes, size, graph.outputs)
        takes: dict[object, int] = {v: taken for n in self.nodes for v in n.outputs if (taken := roots.takes(v))}
        self._takes = takes
        self._steps = {
            n: ScheduledNode(
                [root for v in reads(n) if (root := roots.of(v)) in takes],
                [v for v in n.outputs if v in takes],
                meanwhile(n, size),
            )
            for n in self.nodes
        }

    def used(self, order: Sequence[ir.Node]) -> dict[ir.Node, int]:
        """The bytes of live results while each node runs, as the runtime runs a graph that lists them in `order`."""
        run = execution_order(order, self.edges)
        return dict(zip(run, use([self._steps[n] for n in run], self._takes)))
