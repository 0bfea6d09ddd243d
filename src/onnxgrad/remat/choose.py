"""Choose the values of a schedule to save and to recompute under a memory budget.

A schedule has a turning point between the forward and the backward pass. A dropped value uses memory until its last use
in the forward pass, and again from its first use in the backward pass: there it is recomputed from the nearest earlier
values that are saved. (If the turning point is not known, it is where most bytes are idle.)

Candidates are made as by Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174): values
are dropped until they add up to a bound; then all values that cross the schedule at its narrowest place are saved, and
so on. This is repeated for many bounds, for all operators and for cheap ones only (saving results of matrix products
and convolutions). The candidate with the least work that meets the budget is chosen; remaining room is used to save the
values that are most costly to recompute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrad.ir.constants import is_repeatable
from onnxgrad.ir.graph import ancestors, reads, subgraphs
from onnxgrad.ir.operators import traits_of
from onnxgrad.remat.costs import meanwhile, seconds
from onnxgrad.remat.schedule import Roots, ScheduledNode, use

#: How many bounds are tried, and how many values are looked at twice.
BOUNDS, SECOND_LOOKS = 32, 150

#: Without a known turn, a value is idle if no node reads it for this share of the schedule.
WAIT = 0.1


@dataclass(frozen=True)
class Again:
    """A node that is run a second time, at a place in the schedule."""

    node: ir.Node


@dataclass
class Candidate:
    """Values to drop, with the memory and the work that result.

    Attributes:
        dropped: the values.
        peak: bytes at the fullest step.
        seconds: an estimate of the work that is done twice.
        line: the schedule: nodes, and those that are run once more where they are.
    """

    dropped: frozenset[ir.Value]
    peak: int
    seconds: float
    line: list[ir.Node | Again] = field(repr=False, default_factory=list)

    @property
    def recomputed_nodes(self) -> list[ir.Node]:
        """The nodes that are run once more."""
        return [item.node for item in self.line if isinstance(item, Again)]


class Chooser:
    """Looks for candidates.

    Args:
        order: the nodes in the order in which they run.
        size: bytes of values.
        outputs: values that are handed out: they are never dropped, and what they take is not counted.
        opset: of the standard operators.
        forward: what the way back starts from (a loss), if it is known.

    Attributes:
        order: the nodes, those of the way forward first.
        turn: the place of the last one of these.
        plain: bytes at the fullest step if nothing is dropped.
        seconds: an estimate of the time of all of them.
    """

    def __init__(
        self,
        order: Sequence[ir.Node],
        size: Mapping[ir.Value, int],
        outputs: Sequence[ir.Value],
        opset: int,
        forward: Sequence[ir.Value] = (),
    ) -> None:
        first = ancestors(order, forward)
        needed = set(first)
        self.order = first + [node for node in order if node not in needed]
        self.opset = opset
        self.roots = roots = Roots(order, size, outputs)
        self.place = {node: i for i, node in enumerate(self.order)}
        self.cost = {node: seconds(node, size) for node in order}
        self.seconds = sum(self.cost.values())
        self.steps = {
            n: ScheduledNode([roots.of(v) for v in reads(n)], list(n.outputs), meanwhile(n, size)) for n in order
        }
        self.takes: dict[object, int] = {v: roots.takes(v) for node in order for v in node.outputs}
        self.plain = max(use([self.steps[n] for n in self.order], self.takes), default=0)
        self.turn = len(first) - 1 if first else self._turn()
        self.least = self.plain // 1000
        self.early = self.order[: self.turn + 1]
        self.views: dict[ir.Value, list[ir.Value]] = {}
        for view, root in roots.root.items():
            self.views.setdefault(root, []).append(view)
        self.crossing = self._crossing()
        self.width = [sum(self.takes[v] for v in alive) for alive in self.crossing]

    # --- schedules -----------------------------------------------------------------------------

    def evaluate(self, dropped: frozenset[ir.Value]) -> Candidate:
        """The candidate that drops these values and their views."""
        line = self.line(dropped)
        steps = [self.steps[node] for node in self.early]
        total = 0.0
        anew: set[object] = set()
        for item in line[len(steps) :]:
            again = isinstance(item, Again)
            node = item.node if isinstance(item, Again) else item
            step = self.steps[node]
            if not anew.isdisjoint(step.reads):
                step = step._replace(reads=[(v,) if v in anew else v for v in step.reads])
            if again:
                total += self.cost[node]
                anew.update(v for v in node.outputs if v in dropped)
                # a result that is saved already is released at once
                step = step._replace(gives=[(v,) if v in dropped else (v, None) for v in node.outputs])
            steps.append(step)
        return Candidate(dropped, max(use(steps, self.takes), default=0), total, line)

    def line(self, dropped: frozenset[ir.Value]) -> list[ir.Node | Again]:
        """The schedule in which each dropped value that the way back reads is made again right before."""
        nodes: list[ir.Node | Again] = list(self.early)
        made: set[ir.Value] = set()

        def missing(node: ir.Node) -> list[tuple[ir.Node, bool]]:
            wanted = (v for v in reads(node) if v in dropped and v not in made)
            return [(p, False) for v in wanted if (p := v.producer()) is not None]

        for node in self.order[self.turn + 1 :]:
            stack = missing(node) if dropped else []
            while stack:
                again, ready = stack.pop()
                gives = [v for v in again.outputs if v in dropped]
                if made.issuperset(gives):
                    continue
                if ready:
                    nodes.append(Again(again))
                    made.update(gives)
                else:
                    stack.append((again, True))
                    stack += missing(again)
            nodes.append(node)
        return nodes

    def _turn(self) -> int:
        """The index in the schedule at which most bytes are idle; the middle of a wide maximum."""
        last: dict[object, int] = {}
        change = [0] * (len(self.order) + 1)
        for i, node in enumerate(self.order):
            for v in dict.fromkeys(self.steps[node].reads):
                if v in last:
                    if i - last[v] > len(self.order) * WAIT:
                        change[last[v] + 1] += self.takes[v]
                        change[i] -= self.takes[v]
                    last[v] = i
            last |= {v: i for v in node.outputs if self.takes[v]}
        idle, now = [], 0
        for c in change[:-1]:
            now += c
            idle.append(now)
        most = max(idle, default=0)
        fullest = [i for i, n in enumerate(idle) if n == most]
        return fullest[len(fullest) // 2] if fullest else -1

    # --- candidates ----------------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        """Yield candidates; the first one drops nothing."""
        seen: set[frozenset[ir.Value]] = {frozenset()}
        yield self.evaluate(frozenset())
        total = sum(self.takes[v] for node in self.early for v in node.outputs)
        if not total:
            return
        smallest = max(total / 2**12, self.least, 1)
        ratio = max(total / smallest, 1.0) ** (1 / (BOUNDS - 1))
        for cheap in (True, False):
            for k in range(BOUNDS):
                dropped = self.cut(smallest * ratio**k, cheap)
                if dropped not in seen:
                    seen.add(dropped)
                    yield self.evaluate(dropped)

    def cut(self, bound: float, cheap: bool) -> frozenset[ir.Value]:
        """Values to drop: up to `bound` bytes between places where everything that crosses is kept."""
        dropped: dict[ir.Value, None] = {}
        since, taken = 0, 0
        added: list[tuple[int, int]] = []  # place and bytes, since the last cut
        for i, node in enumerate(self.early):
            if self._may_run_again(node, cheap):
                for v in node.outputs:
                    if self._may_drop(v):
                        dropped[v] = None
                        added.append((i, self.takes[v]))
                        taken += self.takes[v]
            if taken <= bound:
                continue
            low, up_to = since, 0
            for place, size in added:
                up_to += size
                if up_to >= bound / 2:
                    low = place
                    break
            at = min(range(low, i + 1), key=lambda j: (self.width[j], -j))
            for v in self.crossing[at]:
                dropped.pop(v, None)
            since = at + 1
            added = [(place, size) for place, size in added if place > at]
            taken = sum(size for _, size in added)
        return frozenset(w for v in dropped for w in (v, *self.views.get(v, ())))

    def _crossing(self) -> list[list[ir.Value]]:
        """For each early step, the values computed up to it and read by an early step after it."""
        until = {v: i for i, node in enumerate(self.early) for v in self.steps[node].reads}
        alive: dict[ir.Value, int] = {}
        values = []
        for i, node in enumerate(self.early):
            alive = {v: end for v, end in alive.items() if end > i}
            alive |= {v: until[v] for v in node.outputs if until.get(v, i) > i and self.takes[v] > self.least}
            values.append(list(alive))
        return values

    def _may_run_again(self, node: ir.Node, cheap: bool) -> bool:
        if node.domain or subgraphs(node) or not node.inputs or (cheap and traits_of(node).is_product):
            return False
        if node.op_type == "BatchNormalization" and any(v is None or v.producer() is None for v in statistics(node)):
            return False  # it overwrites its operand, so a second run needs its own copy
        return is_repeatable(node.op_type, "", self.opset)

    def _may_drop(self, v: ir.Value) -> bool:
        return self.takes[v] > self.least and not any(w in self.roots.outputs for w in self.views.get(v, ()))

    # --- improvement ---------------------------------------------------------------------------

    def improved(self, best: Candidate, budget: int) -> Candidate:
        """`best` with as many values saved as fit: those that save most work per byte first."""
        worth = {}
        for node in best.recomputed_nodes:
            taken = sum(self.takes[v] for v in node.outputs if v in best.dropped)
            if taken:
                worth[node] = self.cost[node] / taken
        for node in sorted(worth, key=worth.__getitem__, reverse=True)[:SECOND_LOOKS]:
            kept = {w for v in node.outputs for w in (v, *self.views.get(v, ()))}
            if kept & best.dropped:
                other = self.evaluate(best.dropped - kept)
                if other.peak <= budget and other.seconds < best.seconds:
                    best = other
        return best


def statistics(node: ir.Node) -> Sequence[ir.Value | None]:
    """The operands of a BatchNormalization in training mode that the runtime's kernel writes into."""
    return node.inputs[3:5] if node.attributes.get_int("training_mode", 0) else []
