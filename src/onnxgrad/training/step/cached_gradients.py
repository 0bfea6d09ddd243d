"""Parts of a batch for a loss of all its rows: cached gradients (Gao et al. 2021, arXiv:2101.06983).

The loss compares rows, or is a function of the caller, which need not be a mean over rows. Every part is run forward to
its predictions. The loss of all of them is taken, with its derivatives by each, the seeds. Then every part is run
again, forward and back from its seeds, so activations of one part at a time are stored. Gradients of parts add up to
that of the batch, exactly. Both runs of a part draw the same masks of Dropout. Parts may be those of several processes
(see `onnxgrad.training.parallel.compared_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from onnxgrad.ir.graph import named_values, stand_in
from onnxgrad.ir.match import not_none
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.training.graph.whole_batch import ALL, DOMAIN, OWN
from onnxgrad.training.step.accumulate import SUM, Accumulating, SplitStep
from onnxgrad.training.step.memory_budget import in_good_order
from onnxgrad.training.step.step import Step, prune_step


@dataclass(kw_only=True)
class CachedStep(SplitStep):
    """A step in two halves, the first of which has its loss cut out.

    Attributes:
        predict: part → its predictions; moves running statistics as `gradient` does.
        loss: predictions of all rows, batch → results of the loss, seeds.
        seeds: the input of `gradient` that takes the part of each seed, by the name of the result of `loss`.
        gathered: the input of `loss` that takes each prediction of all parts, by the name of the result of `predict`.
    """

    predict: Step
    loss: Step
    seeds: Mapping[str, str]
    gathered: Mapping[str, str]


def cut_at_predictions(split: SplitStep) -> CachedStep:
    """`split`, of a `Source` with ``compared`` predictions, cut between these and the loss."""
    step = split.gradient
    gathered, seeds = (
        {
            not_none(node.inputs[0]).name or "": node.outputs[0].name or ""
            for node in step.model.graph
            if (node.domain, node.op_type) == (DOMAIN, kind)
        }
        for kind in (ALL, OWN)
    )
    statistics = {n: t for n, t in step.state.items() if t.kind == "statistic"}
    found = [name for name in step.results if name != SUM]
    return CachedStep(
        **{f.name: getattr(split, f.name) for f in fields(split) if f.name != "gradient"},
        gradient=_part(replace(step, results=[SUM], loss=""), list(seeds.values())),
        predict=_part(replace(step, state=statistics, results=list(gathered), loss="")),
        loss=_part(replace(step, state={}, results=[*found, *seeds]), list(gathered.values())),
        seeds=seeds,
        gathered=gathered,
    )


def _part(step: Step, given: Sequence[str] = ()) -> Step:
    """The part of `step` that computes its state and results, from the values called `given`."""
    model = step.model.clone()
    graph, values = model.graph, named_values(model.graph)
    graph.inputs.extend([stand_in(values[name]) for name in given])
    values = named_values(graph)
    ends = [*(t.output for t in step.state.values()), *step.results]
    part = prune_step(replace(step, model=model, batch=[*step.batch, *given]), [values[name] for name in ends])
    graph.opset_imports.pop(DOMAIN, None)
    in_good_order(model)
    return part


class CachedGradients(Accumulating):
    """The machine of a `CachedStep`: its parts add up to the batch though its loss compares their rows.

    Args:
        split: the step.
        parts: into how many parts a batch is cut.
        others: of the next class, where this one is mixed with that of a rank.
        options: of ONNX Runtime.
    """

    def __init__(self, split: CachedStep, parts: int, *others: Any, options: Options | None = None) -> None:
        super().__init__(split, parts, *others, options=options)
        self._gathered, self._seeds = split.gathered, split.seeds
        self.predict = self._computing(split.predict, options, {})
        self.loss = StepRunner(split.loss, options=options, owner=self.update)
        self._read = set(split.loss.batch)
        self.results = [*(name for name in split.loss.results if name not in split.seeds), *self.results]
        self._found: dict[str, np.ndarray] = {}
        self._seeds_of_parts: list[dict[str, np.ndarray]] = []

    def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One update; results are those of the loss of all rows."""
        return {**super().step(batch), **self._found}

    def gradients(self, batch: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
        """Write the gradients of the batch to the bucket, and keep the results of the loss of all rows."""
        statistics = self.gradient.now
        self.predict.load_state({name: statistics[name] for name in self.predict.slots})  # the same masks again
        self._seeds_of_parts = []
        parts = [{n: np.array(a) for n, a in self.predict.step(part).items()} for part in self._cut(batch)]
        rows = {given: np.concatenate([p[name] for p in parts]) for name, given in self._gathered.items() if parts}
        fixed = {n: a for n, a in batch.items() if n in self.whole}
        read = {n: a for n, a in batch.items() if n in self._read and n not in fixed}
        everything, own = self.gather_rows({**read, **rows})
        found = self.loss.step({**{n: a for n, a in fixed.items() if n in self._read}, **everything})
        self._found = {n: np.array(a) for n, a in found.items() if n not in self._seeds}
        self._seeds_of_parts = [{} for _ in parts]
        ends = {sum(sizes): np.cumsum(sizes) for n in self._gathered if (sizes := [len(p[n]) for p in parts])}
        for name, given in self._seeds.items():
            seeds = found[name][own]
            for part, seed in zip(self._seeds_of_parts, np.split(seeds, ends[len(seeds)][:-1]) if parts else ()):
                part[given] = seed
        return super().gradients(batch if parts else {})

    def _cut(self, batch: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """The parts of a batch, with their seeds when these are known."""
        for k, part in enumerate(super()._cut(batch)):
            yield {**part, **(self._seeds_of_parts[k] if self._seeds_of_parts else {})}

    def gather_rows(self, rows: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], slice]:
        """`rows` with those of other processes, and the place of the own ones."""
        return rows, slice(None)
