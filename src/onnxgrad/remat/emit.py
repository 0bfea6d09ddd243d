"""Emit a schedule with recomputed nodes as a graph.

A runtime merges equal nodes and may run ready nodes early, and either would save no memory. So recomputed nodes read
kept values through a gate: a Reshape of the value to its own shape, where the shape is concatenated with an empty slice
of a result to wait for. The Reshape copies nothing and the slice has no elements. But an optimizer cannot prove that,
so the nodes behind the gate run after that result.

A gate waits for all nodes that free memory since the last gate. So the values recomputed for one part of the backward
pass are freed before those for the next part are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import captured, prune, reads, subgraphs
from onnxgrad.ir.infer.inference import Inference
from onnxgrad.ir.match import not_none
from onnxgrad.ir.names import Names
from onnxgrad.remat.choose import Again, statistics
from onnxgrad.remat.schedule import is_view, settle

#: From which share of the peak on a gate waits for a value to be given back.
WORTH_WAITING = 0.005


class Rewriter:
    """Writes one schedule into a graph.

    Args:
        graph: whose nodes the schedule has; it is changed.
        size: bytes of values; those of new ones are added.
        turn: the place of the last node of the way forward in the schedule.
        peak: bytes at the fullest step of the schedule.
    """

    def __init__(self, graph: ir.Graph, size: dict[ir.Value, int], turn: int, peak: int) -> None:
        self.graph, self.size, self.turn = graph, size, turn
        self.names = Names.of_graph(graph)
        self.least = peak * WORTH_WAITING
        self.anew: dict[ir.Value, ir.Value] = {}
        self.plan: list[ir.Node] = []
        self.group: dict[ir.Node, int] = {}
        self.nodes: list[ir.Node] = []
        self.gates: dict[ir.Value, ir.Value] = {}
        self.behind: dict[ir.Node, list[ir.Node]] = {}
        self.waits: dict[ir.Value, Var] = {}
        self.builder = Builder(graph, self.names, Inference(dict(graph.opset_imports)), noting=False, prefix="gate")

    def write(self, line: Sequence[ir.Node | Again], dropped: frozenset[ir.Value]) -> int:
        """Rewrite the graph to the schedule `line`, which recomputes `dropped`; its peak memory in bytes."""
        original = list(self.graph)
        number, open_ = 0, False
        for i, item in enumerate(line):
            if isinstance(item, Again):
                number += not open_
                open_ = True
                for copy in self._copies(item.node, dropped):
                    self.plan.append(copy)
                    self.group[copy] = number
            else:
                open_ = False
                if i > self.turn:
                    self._redirect(item)
                self.plan.append(item)
        self._lay_out()
        self.graph.remove(original)
        self.graph.extend(self.nodes)
        prune(self.graph)
        return settle(self.graph, self.size)

    # --- nodes that run again --------------------------------------------------------------------

    def _copies(self, node: ir.Node, dropped: frozenset[ir.Value]) -> list[ir.Node]:
        """A copy of `node` that reads recomputed values, after copies of the nodes that it must not share."""
        new = self._copy(node)
        self.anew |= {old: out for old, out in zip(node.outputs, new.outputs) if old in dropped}
        own = []
        for i, v in enumerate(node.inputs):
            producer = None if v is None else v.producer()
            if v in statistics(node) and v is not None and producer is not None:
                own.append(self._copy(producer))
                new.replace_input_with(i, own[-1].outputs[v.index() or 0])
        return [*own, new]

    def _copy(self, node: ir.Node) -> ir.Node:
        new = Copies({v: self.anew[v] for v in node.inputs if v in self.anew}, None).unnamed(node)
        new.name = self.names.fresh(f"again_{node.name or node.op_type}")
        for old, out in zip(node.outputs, new.outputs):
            out.name = self.names.fresh(f"again_{old.name}") if old.name else ""
            self.size[out] = self.size.get(old, 0)
        return new

    def _redirect(self, node: ir.Node) -> None:
        """Have `node`, and graphs inside it, read the recomputed values."""
        for i, v in enumerate(node.inputs):
            if v is not None and v in self.anew:
                node.replace_input_with(i, self.anew[v])
        inside = {n for graph in subgraphs(node) for n in graph.all_nodes()}
        for v in captured(node):
            if v in self.anew:
                for use in list(v.uses()):
                    if use.node in inside:
                        use.node.replace_input_with(use.idx, self.anew[v])

    # --- gates -----------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """All nodes in order, gates between them."""
        place = {node: i for i, node in enumerate(self.plan)}
        ends = self._ends()
        before: dict[ir.Node, int] = {}  # of late nodes, the late nodes that each needs, as bits
        since, group = self.turn + 1, 0
        waits: list[ir.Value] = []
        for i, node in enumerate(self.plan):
            number = self.group.get(node, 0)
            if number > group:
                group, self.gates = number, {}
                trigger = next(n for n in self.plan[i:] if n not in self.group)
                ready = [j for j in range(since, i) if ends.get(j, 0) >= self.least]
                ready += [place[p] for v in reads(trigger) if (p := v.producer()) in before and place[p] < i]
                waits = self._results(ready or range(i), before, first=bool(ready))
                since = i
            if number:
                self._delay(node, waits, number)
            bits = 0
            for p in (v.producer() for v in reads(node)):
                for q in self.behind.get(p, [p]) if p is not None else ():
                    if q in before:
                        bits |= before[q] | 1 << place[q]
            if i > self.turn:
                before[node] = bits
            self.nodes.append(node)

    def _ends(self) -> dict[int, int]:
        """The bytes that are freed after each node, by its index."""
        root: dict[ir.Value, ir.Value] = {}
        last: dict[ir.Value, int] = {}
        for i, node in enumerate(self.plan):
            if is_view(node) and node.inputs[0] is not None:
                root[node.outputs[0]] = root.get(node.inputs[0], node.inputs[0])
            last |= {root.get(v, v): i for v in reads(node)}
        ends: dict[int, int] = {}
        for node in self.plan:
            for v in node.outputs:
                if v not in root and v in last and not v.is_graph_output():
                    ends[last[v]] = ends.get(last[v], 0) + self.size.get(v, 0)
        # an unread result (the update of a weight) keeps its place in the schedule only while no gate reads it
        return {i: size for i, size in ends.items() if any(v.uses() for v in self.plan[i].outputs)}

    def _results(self, places: Sequence[int], before: Mapping[ir.Node, int], first: bool) -> list[ir.Value]:
        """Results that are ready only when all nodes at `places` are done; implied ones are left out."""
        results = {i: v for i in places if (v := _result(self.plan[i])) is not None}
        if not first:
            return list(results.values())[-1:]
        implied = 0
        for i in results:
            implied |= before.get(self.plan[i], 0)
        return [v for i, v in results.items() if not implied >> i & 1]

    def _delay(self, node: ir.Node, waits: Sequence[ir.Value], number: int) -> None:
        """Have `node`, which is recomputed, read an operand behind a gate of its group.

        A view uses no memory and stays in place; next to a gate the runtime might merge both Reshapes.
        """
        producers = (v.producer() for v in node.inputs if v is not None)
        if is_view(node) or any(self.group.get(p) == number for p in producers if p is not None):
            return
        varying = [v for v in node.inputs if v is not None and v.const_value is None]
        if not varying:
            return
        value = max(varying, key=lambda v: self.size.get(v, 0))
        if value not in self.gates:
            self.gates[value] = self._gate(value, waits)
        for i, v in enumerate(node.inputs):
            if v is value:
                node.replace_input_with(i, self.gates[value])

    def _gate(self, value: ir.Value, waits: Sequence[ir.Value]) -> ir.Value:
        """`value`, available only once the values of `waits` are."""
        with self.builder.record() as gates:
            tokens, x = [self._wait(v) for v in waits if v is not value], self.builder.var(value)
            gate = self.builder.Reshape(x, self.builder.Concat(self.builder.Shape(x), *tokens, axis=0)).value
        self.nodes += gates
        # a Reshape to a shape that is known may be taken for one to a constant, so it must not be known
        gate.shape = None if value.shape is None else ir.Shape([None] * len(value.shape))
        node = not_none(gate.producer())
        self.behind[node] = [p for v in (value, *waits) if (p := v.producer()) is not None]
        return gate

    def _wait(self, value: ir.Value) -> Var:
        """An empty vector of integers that depends on `value`."""
        if value not in self.waits:
            b = self.builder
            self.waits[value] = b.Cast(b.Slice(b.Reshape(b.var(value), [-1]), [0], [0]), to=int(ir.DataType.INT64))
        return self.waits[value]


def _result(node: ir.Node) -> ir.Value | None:
    """A result of `node` that is a tensor of numbers."""
    for v in node.outputs:
        if v.name and isinstance(v.type, ir.TensorType) and v.dtype not in (None, ir.DataType.STRING):
            return v
    return None
