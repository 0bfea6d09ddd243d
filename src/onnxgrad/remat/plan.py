"""Fit a graph into a memory budget: residuals are saved as far as they fit, the others are recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrad.ir.execution_order import execution_order, orders
from onnxgrad.ir.graph import reads
from onnxgrad.remat.budget import OverBudget, megabytes
from onnxgrad.remat.choose import Candidate, Chooser
from onnxgrad.remat.emit import Rewriter
from onnxgrad.remat.schedule import reorder, settle
from onnxgrad.remat.value_sizes import sizes

#: How much tighter the schedule is made, in turn, if the graph that is written does not keep to it.
TIGHTER = (1.0, 0.95, 0.9, 0.8, 0.7, 0.55, 0.4)
#: How many of the tightest schedules are written before a budget is given up.
LAST_RESORTS = 4


@dataclass(frozen=True)
class Plan:
    """A plan of the values that a graph saves and recomputes.

    Attributes:
        budget: bytes that were asked for.
        plain: predicted peak of bytes if everything is kept.
        predicted: predicted peak of bytes with this plan.
        extra: estimated work that is done twice, as a share of all work.
        kept: residuals (values of the way forward that the way back reads) that are kept, with their bytes.
        recomputed: values that are computed anew, with their bytes.
        nodes: how many nodes run twice.
        dims: the sizes of dimensions that it was made for.
    """

    budget: int
    plain: int
    predicted: int
    extra: float = 0.0
    kept: Mapping[str, int] = field(default_factory=dict)
    recomputed: Mapping[str, int] = field(default_factory=dict)
    nodes: int = 0
    dims: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        kept, anew = (
            f"{len(values)} {what} ({megabytes(sum(values.values()))})"
            for what, values in (("kept", self.kept), ("recomputed", self.recomputed))
        )
        return (
            f"{megabytes(self.predicted)} predicted within {megabytes(self.budget)} ({megabytes(self.plain)} without "
            f"recomputing); residuals: {kept}, {anew}; {self.extra:.0%} more work"
        )


def fit_budget(
    model: ir.Model,
    budget: int,
    dims: Mapping[str, int],
    forward: Sequence[str] = (),
    advice: str = "",
) -> Plan:
    """Rewrite the graph of `model` such that the results of its nodes use at most `budget` bytes at a time.

    Inputs, outputs and initializers do not count, nor does the workspace of kernels. The rewritten graph has the same
    results.

    Args:
        model: its graph is changed, unless it meets the budget as it is.
        budget: bytes.
        dims: sizes of symbolic dimensions of inputs.
        forward: names of values that the way back starts from, if they are known.
        advice: what else to do where the budget cannot be met.

    Raises:
        BadInput: the budget cannot be met (the message says what can), or a dimension has no size.
    """
    first = _Attempt(model, dims, forward)
    if first.predicted <= budget:
        model.graph = first.model.graph
        return first.plan(budget, None)
    ranked = [(c, start) for start in first.orders(model) for c in start.chooser.candidates()]
    ranked.sort(key=lambda found: (found[0].seconds, found[0].peak))
    reached = first.predicted
    for share in TIGHTER:
        fitting = [found for found in ranked if found[0].peak <= budget * share]
        if not fitting:
            break
        best, start = fitting[0]
        attempt, plan = start.with_schedule(model, start.chooser.improved(best, int(budget * share)), budget)
        if plan.predicted <= budget:
            model.graph = attempt.model.graph
            return plan
    for best, start in sorted(ranked, key=lambda found: found[0].peak)[:LAST_RESORTS]:
        attempt, plan = start.with_schedule(model, best, budget)
        if plan.predicted <= budget:
            model.graph = attempt.model.graph
            return plan
        reached = min(reached, plan.predicted)
    raise OverBudget(
        f"intermediate results use at least {megabytes(reached)} at a time ({megabytes(first.predicted)} if nothing "
        f"is recomputed), which is more than the {megabytes(budget)} asked for{advice}",
        reached,
    )


class _Attempt:
    """A copy of a model, to write one schedule into.

    Its nodes are in the order of least memory; or in the order of `like`, another copy.
    """

    def __init__(
        self,
        model: ir.Model,
        dims: Mapping[str, int],
        forward: Sequence[str],
        like: _Attempt | None = None,
        order: Sequence[int] = (),
    ) -> None:
        self.model, self.dims, self.names = model.clone(), dims, forward
        graph = self.model.graph
        nodes = list(graph)
        if like is None:
            self.size = sizes(self.model, dims)
            self.predicted = self.plain = settle(graph, self.size)
            place = {node: i for i, node in enumerate(nodes)}
            self.order: Sequence[int] = [place[node] for node in graph]
        else:
            known = {v.name: size for v, size in like.size.items()}
            self.size = {v: known[v.name] for node in graph for v in node.outputs}
            self.plain, self.order = like.plain, order
            reorder(graph, [nodes[i] for i in order])
        self.opset = self.model.opset_imports.get("", 18)
        named = {v.name: v for node in graph for v in node.outputs}
        self.forward = [named[name] for name in forward if name in named]
        self.chooser = Chooser(execution_order(graph), self.size, graph.outputs, self.opset, self.forward)

    def orders(self, model: ir.Model) -> Iterator[_Attempt]:
        """Yield this attempt, and one for each other order in which the nodes can run."""
        yield self
        place = {node: i for i, node in enumerate(model.graph)}
        seen = {tuple(self._run)}
        for order in orders(model.graph):
            other = _Attempt(model, self.dims, self.names, self, [place[node] for node in order])
            run = tuple(other._run)
            if run not in seen:
                seen.add(run)
                yield other

    @property
    def _run(self) -> list[str | None]:
        return [node.outputs[0].name for node in self.chooser.order if node.outputs]

    def with_schedule(self, model: ir.Model, best: Candidate, budget: int) -> tuple[_Attempt, Plan]:
        """Another one, into which `best` was written, and its plan."""
        other = _Attempt(model, self.dims, self.names, self, self.order)
        other.write(best)
        return other, other.plan(budget, best)

    def write(self, best: Candidate) -> None:
        """Write the schedule of `best`, a candidate for the same model, into this one."""
        here = {v.name: v for node in self.model.graph for v in node.outputs}
        dropped = frozenset(here[v.name] for v in best.dropped)
        self.best = self.chooser.evaluate(dropped)
        self.extra = self.best.seconds / self.chooser.seconds
        self.residuals = self._residuals()
        rewriter = Rewriter(self.model.graph, self.size, self.chooser.turn, self.best.peak)
        self.predicted = rewriter.write(self.best.line, dropped)

    def _residuals(self) -> list[ir.Value]:
        early = set(self.chooser.early)
        late = (v for node in self.chooser.order if node not in early for v in reads(node))
        return [v for v in dict.fromkeys(late) if v.producer() in early and self.chooser.takes[v] > self.chooser.least]

    def plan(self, budget: int, best: Candidate | None) -> Plan:
        """The `Plan` of the chosen candidate."""
        residuals = self._residuals() if best is None else self.residuals
        dropped = frozenset() if best is None else self.best.dropped
        again = dict.fromkeys(
            v for node in (self.best.recomputed_nodes if best else ()) for v in node.outputs if v in dropped
        )
        return Plan(
            budget,
            self.plain,
            self.predicted,
            self.extra if best else 0.0,
            {v.name or "": self.size[v] for v in residuals if v not in again},
            {v.name or "": self.size[v] for v in again if self.chooser.takes[v]},
            len(self.best.recomputed_nodes) if best else 0,
            dict(self.dims),
        )
