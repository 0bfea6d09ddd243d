"""Groups of elementwise operators that are computed together in one pass over memory, and their results.

Every elementwise operator has a *level*: the number of other operators (products, reductions, reshapes) on the longest
path to it. Only elementwise operators of the same level are between two elementwise operators of one level. So the
connected ones of one level and one shape can be computed together, in any graph, and small ones that are not connected,
to spare calls.

A later group reads a result of an earlier one, or recomputes it, whichever moves less memory. For a SiLU, the backward
pass recomputes the sigmoid, which costs less than to write, keep and read it.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onnxgrad.ir.graph import reads
from onnxgrad.ir.match import is_constant, is_op
from onnxgrad.runtime.kernels.elementwise_programs import Reduction, TileProgram, compile_program
from onnxgrad.runtime.kernels.elementwise_steps import (
    Dims,
    dims,
    is_known,
    is_only_here,
    is_written,
    operands_of,
    real_of,
)
from onnxgrad.runtime.kernels.lone_operators import is_slow_alone, is_the_runtimes
from onnxgrad.runtime.kernels.reductions import VIEWS, reductions
from onnxgrad.runtime.kernels.steps import Real, Unfit, letter

#: Most operators of a group, the same for small tensors, and most that are computed again for one; most operands of its
#: full shape.
_LONGEST, _LONGEST_SMALL, _AGAIN, _WIDEST = 40, 1600, 24, 12

#: Up to as many numbers (a symbol counts as 64), calls take about as long as what they do: one does what several would,
#: connected or not, with as many operands and results.
_FEW, _OPERANDS, _RESULTS = 1 << 16, 16, 8

#: Operators that take about as long as it takes to read a tensor.
_LONG = frozenset({"Cos", "Erf", "Exp", "Gelu", "Log", "Mish", "Pow", "Sigmoid", "Sin", "Softplus", "Tanh"})

#: Groups on tensors of fewer elements spare calls, not memory: with fewer operators they are not worth one.
_SMALL, _FEWEST = 2048, 3


def _is_small(shape: Dims) -> bool:
    known = [d for d in shape if isinstance(d, int)]
    return len(known) == len(shape) and math.prod(known) < _SMALL


@dataclass
class _Group:
    """Operators of one level and one shape, in topological order."""

    level: int
    shape: Dims
    nodes: list[ir.Node] = field(default_factory=list)
    parts: list[_Group] = field(default_factory=list)  #: groups that are joined in it

    @property
    def is_small(self) -> bool:
        """True if its tensors are known to be small."""
        return _is_small(self.shape)

    def order(self) -> tuple[int, int, int]:
        """The sort key among groups: a group reads from one of its level that has fewer axes, or fewer long ones."""
        return self.level, len(self.shape), sum(d != 1 for d in self.shape)


@dataclass(frozen=True)
class GroupCall:
    """A call under construction: its operators, and their results that other nodes read."""

    program: TileProgram
    nodes: Sequence[ir.Node]


def _fits(node: ir.Node) -> bool:
    """True if programs support this operator, and the shapes of its operands and results are known."""
    if not is_known(node) or any(v is None or dims(v) is None for v in (*node.inputs[:1], *node.outputs)):
        return False
    if any(v is not None and dims(v) is None for v in node.inputs):
        return False
    if all(v is None or is_constant(v) for v in node.inputs):
        return False
    return is_written(node) and not is_the_runtimes(node)


class _Grouping:
    """The elementwise operators of a graph, their groups, and the results that other nodes read."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.place = {node: i for i, node in enumerate(graph)}
        self.level: dict[ir.Value, int] = {}
        self.fitting = {node for node in graph if _fits(node)}
        for node in graph:
            depth = max((self.level.get(v, 0) for v in reads(node)), default=0)
            barrier = node not in self.fitting and any(not is_constant(v) for v in reads(node))
            for value in node.outputs:
                self.level[value] = depth + barrier
        #: sums of values of fitting operators, which their groups give as well
        self.sums = {n.outputs[0]: found for n in self.fitting if (found := list(reductions(n.outputs[0])))}
        self.summing = {r.result.producer() for found in self.sums.values() for r in found}
        for node in reversed(graph):
            if (is_op(node, VIEWS)) and not node.outputs[0].is_graph_output():
                users = node.outputs[0].consumers()
                self.summing |= {node} if users and all(user in self.summing for user in users) else set()
        #: values of fitting operators that other nodes read, as far as is known
        self.needed: set[ir.Value] = set()
        self.groups = self._groups()
        #: operators whose results calls must return anyway, and those that are not recomputed
        self.called: set[ir.Node] = set()
        self.once: set[ir.Node] = set()
        self._found: dict[ir.Node, list[tuple[ir.Value, ir.Node | None]]] = {}

    def _leaves(self, value: ir.Value) -> bool:
        users = value.consumers()
        return value.is_graph_output() or any(u not in self.fitting and u not in self.summing for u in users)

    def maker(self, value: ir.Value | None) -> ir.Node | None:
        """The supported operator that computes `value`."""
        node = None if value is None else value.producer()
        return node if node in self.fitting else None

    def _groups(self) -> list[_Group]:
        """Connected operators of one level and shape, split where they become too many, in topological order."""
        owner: dict[ir.Node, ir.Node] = {node: node for node in self.fitting}

        def root(node: ir.Node) -> ir.Node:
            while owner[node] is not node:
                owner[node] = node = owner[owner[node]]
            return node

        inside = [node for node in self.graph if node in self.fitting]
        keys: dict[ir.Node, tuple[int, Dims | None, Real]] = {}
        for node in inside:
            makers = [m for v in node.inputs if (m := self.maker(v)) is not None]
            only_bits = makers and all(letter(v) == "B" for v in (*node.inputs, *node.outputs))
            real = keys[makers[0]][2] if only_bits else real_of([node])
            keys[node] = self.level[node.outputs[0]], dims(node.outputs[0]), real
        for node in inside:
            for value in node.inputs:
                maker = self.maker(value)
                if maker is not None and keys[maker] == keys[node]:
                    owner[root(node)] = root(maker)
        open_groups: dict[ir.Node, _Group] = {}
        operands: dict[ir.Node, set[ir.Value]] = {}
        found: list[_Group] = []
        for node in inside:
            top = root(node)
            level, shape, _ = keys[node]
            assert shape is not None
            group = open_groups.get(top)
            more = {v for v in operands_of(node) if v is not None and dims(v) == shape and self.maker(v) is None}
            longest = _LONGEST_SMALL if _is_small(shape) else _LONGEST
            if group is None or len(group.nodes) >= longest or len(operands[top] | more) > _WIDEST:
                group = open_groups[top] = _Group(level, shape)
                operands[top] = set()
                found.append(group)
            operands[top] |= more
            group.nodes.append(node)
        kinds = Counter((level, shape) for level, shape, _ in set(keys.values()))
        return sorted(self._join(found, kinds), key=_Group.order)

    def _join(self, groups: Iterable[_Group], kinds: Mapping[tuple[int, Dims | None], int]) -> list[_Group]:
        """`groups`, of which those of one level and of few numbers are one, as far as programs allow.

        `kinds` counts the types of numbers of a level and shape: what lies between two groups there has another one.
        """
        last: dict[tuple[int, Dims], _Group] = {}
        found = []
        for group in groups:
            key = group.level, group.shape
            before = last.get(key)
            if kinds[key] > 1 or math.prod(d if isinstance(d, int) else 64 for d in group.shape) > _FEW:
                found.append(group)
            elif before is not None and self._go_together(nodes := [*before.nodes, *group.nodes]):
                before.parts = [*(before.parts or [replace(before)]), group]
                before.nodes = sorted(nodes, key=self.place.__getitem__)
            else:
                last[key] = group
                found.append(group)
        return found

    def _go_together(self, nodes: Collection[ir.Node]) -> bool:
        """True if a program has as many operators, operands and results."""
        inside = {n.outputs[0] for n in nodes}
        operands = {v for n in nodes for v in operands_of(n) if v is not None and v not in inside}
        results = sum(self._leaves(v) + len(self.sums.get(v, ())) for v in inside)
        return len(nodes) <= _LONGEST and len(operands) <= _OPERANDS and results <= _RESULTS

    def plans(self) -> list[GroupCall]:
        """The calls, in topological order.

        A value that the kernel rounds differently from ONNX Runtime's operator is not computed by both: a maximum of
        one would not be among the elements of the other, and its gradient would be lost.
        """
        while True:
            found, left = self._attempt()
            again = {node for plan in found for node in plan.nodes if node.op_type in _LONG}
            torn = again & left
            if not torn:
                return found
            self.once |= torn & self.called
            self.called |= torn

    def _attempt(self) -> tuple[list[GroupCall], set[ir.Node]]:
        """The calls, and the operators that stay unchanged.

        Groups are examined from the last on, since earlier ones compute their operands. A group that does not fit is
        split in two.
        """
        self.needed = {n.outputs[0] for n in self.fitting if self._leaves(n.outputs[0])}
        found: list[GroupCall] = []
        left: set[ir.Node] = set()
        todo = list(self.groups)
        while todo:
            group = todo.pop()
            targets = [n.outputs[0] for n in group.nodes if n.outputs[0] in self.needed]
            sums = [r for n in group.nodes for r in self.sums.get(n.outputs[0], ())]
            inside = self._slice(group, [*targets, *(r.source for r in sums)])
            again = self._computed_again(group, inside) if inside and not group.is_small else set()
            try:
                plan = self._plan(group, targets, sums, inside, again)
            except Unfit:
                plan, half = None, len(group.nodes) // 2
                if group.parts:
                    todo += group.parts
                    continue
                if half:
                    todo += [replace(group, nodes=part) for part in (group.nodes[:half], group.nodes[half:])]
                    continue
            everything = inside if plan is None else inside | again
            for node in everything:
                for v in node.inputs:
                    if v is not None and (maker := self.maker(v)) is not None and maker not in everything:
                        self.needed.add(v)
            if plan is None:
                left |= inside
            else:
                found.append(plan)
        return found[::-1], left

    def _slice(self, group: _Group, targets: Iterable[ir.Value]) -> set[ir.Node]:
        """The operators of `group` that lead to `targets`."""
        wanted, members = set(targets), set(group.nodes)
        found = set()
        for node in reversed(group.nodes):
            if node.outputs[0] in wanted:
                found.add(node)
                wanted.update(v for v in node.inputs if self.maker(v) in members and v is not None)
        return found

    def _plan(
        self,
        group: _Group,
        targets: Sequence[ir.Value],
        sums: Sequence[Reduction],
        inside: set[ir.Node],
        again: set[ir.Node],
    ) -> GroupCall | None:
        """The call for a group; None if it gains nothing.

        Raises:
            Unfit: it does not fit into a program.
        """
        nodes = sorted(inside | again, key=self.place.__getitem__)
        free = self.called.isdisjoint(inside) and not any(map(is_only_here, inside))
        if free and len(nodes) + len(sums) < (_FEWEST if group.is_small else 2):
            alone = not group.is_small and nodes and is_slow_alone(nodes[0], group.shape)
            if not alone:
                return None
        is_silu = [n.op_type for n in nodes] == ["Sigmoid", "Mul"] and set(nodes[0].inputs) <= set(nodes[1].inputs)
        if free and is_silu and not sums and letter(nodes[0].outputs[0]) == "F":
            return None  # ONNX Runtime has a kernel for x·σ(x)
        summed = [r.source for r in sums if r.source not in targets]
        for given, ends in (([*targets], sums), ([*targets, *dict.fromkeys(summed)], ())):
            with contextlib.suppress(Unfit):
                return GroupCall(compile_program(nodes, given, ends, group.is_small), nodes)
        raise Unfit

    # --- recomputed operators -------------------------------------------------------------------------------------

    def _computed_again(self, group: _Group, inside: set[ir.Node]) -> set[ir.Node]:
        """Operators of earlier groups that are better computed again in this one than read."""
        foreign = {m for n in inside for _, m in self._whole_operands(n) if m is not None and m not in inside}
        if not foreign:
            return set()
        given = {v for n in inside for v, m in self._whole_operands(n) if m is None}
        prices: dict[ir.Value, float] = {}

        def total(values: Iterable[ir.Value]) -> float:
            for v in values:
                if v not in prices:
                    prices[v] = self._price(v, group, inside)
            return sum([prices[v] for v in values])

        best: set[ir.Node] = set()
        attempts: list[Collection[ir.Node]] = [foreign]
        attempts += [[m] for m in sorted(foreign, key=self.place.__getitem__, reverse=True)] if len(foreign) > 1 else []
        price = total([m.outputs[0] for m in foreign])
        for start in attempts:
            for halting in (False, True):
                taken = self._closure(start, halting) | best
                if len(taken) > _AGAIN:
                    continue
                both = taken | inside
                leaves = {v for n in both for v, m in self._whole_operands(n) if m not in both}
                fresh = total(leaves - given) + self._work(taken)
                if fresh < price and len(leaves) <= _WIDEST:
                    best, price = taken, fresh
        return best

    def _whole_operands(self, node: ir.Node) -> list[tuple[ir.Value, ir.Node | None]]:
        """The operands of `node` that have the shape of its result, with the supported operators that compute them."""
        found = self._found.get(node)
        if found is None:
            shape = dims(node.outputs[0])
            found = [(v, self.maker(v)) for v in node.inputs if v is not None and dims(v) == shape]
            self._found[node] = found
        return found

    def _closure(self, start: Iterable[ir.Node], halting: bool) -> set[ir.Node]:
        """The nodes that compute the results of `start`, back to other operators, or also to kept values."""
        taken: set[ir.Node] = set()
        todo = list(start)
        while todo and len(taken) <= _AGAIN:
            node = todo.pop()
            if node in taken or node in self.once or (halting and node.outputs[0] in self.needed):
                continue
            taken.add(node)
            todo += [m for _, m in self._whole_operands(node) if m is not None]
        return taken

    def _price(self, value: ir.Value, group: _Group, inside: Collection[ir.Node]) -> float:
        """The cost of reading `value`: a read, a write where no other node needs it, and its memory until then."""
        maker = self.maker(value)
        written = maker is not None and value not in self.needed
        return 1 + written + (not self._is_held(value, group, inside))

    def _work(self, nodes: Iterable[ir.Node]) -> float:
        """The cost of computing `nodes`, in reads of a tensor."""
        return sum(1.0 if node.op_type in _LONG else 0.1 for node in nodes)

    def _is_held(self, value: ir.Value, group: _Group, inside: Collection[ir.Node]) -> bool:
        """True if another node reads `value` as late as `group`, so that its memory is taken anyway."""
        if value.is_graph_output() or value.is_graph_input() or value.producer() is None:
            return True
        for user in value.consumers():
            if user in inside or (user in self.fitting and value not in self.needed):
                continue
            level = max((self.level.get(v, 0) for v in user.outputs), default=0)
            if level - (user not in self.fitting) >= group.level:
                return True
        return False


def plans(graph: ir.Graph) -> list[GroupCall]:
    """The calls that replace elementwise operators of `graph`, in topological order."""
    grouping = _Grouping(graph)
    return grouping.plans() if grouping.fitting else []
