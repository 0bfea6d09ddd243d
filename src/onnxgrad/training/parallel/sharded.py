"""The machine of a rank that stores only its part of the optimizer's state (ZeRO-1): 1/N of the memory.

Rajbhandari et al. 2020, arXiv 1910.02054: gradients are summed so that each rank has the sum of its part of the flat
bucket (reduce-scatter); it updates that part of the weights with its part of the state; then all ranks exchange their
weights (all-gather). Together both send as much as an all-reduce, 2(N-1)/N of the bucket. State that is not sharded,
the count of steps and running statistics, is the same on all ranks as without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onnxgrad.distributed import Collective
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner, share
from onnxgrad.runtime.resident import check_state
from onnxgrad.runtime.tensors import aligned
from onnxgrad.training.optim.averages import averages
from onnxgrad.training.parallel.machine import DataParallel
from onnxgrad.training.parallel.own_update import own_update
from onnxgrad.training.parallel.shares import Shares
from onnxgrad.training.step.accumulate import BUCKET, TOTAL, SplitStep
from onnxgrad.training.step.pieces import Bucket
from onnxgrad.training.step.step import Step


class Sharded(DataParallel):
    """The machine of a rank that has its part of the optimizer's state (see `onnxgrad.runtime.Machine`).

    `state` and `load_state` are for this rank's part: weights and replicated state are complete; sharded state has only
    tensors that this rank has a part of, as vectors unless the part is the whole. `gather` and `load_whole` are for the
    complete state.

    Args:
        split: the step, its bucket in the order of `shares`.
        parts, collective, options: as of `DataParallel`.
        shares: the parts of all ranks.

    Attributes:
        optimizer_bytes: of the state that this rank keeps of what is shared out.
        first: the state before the first step, whole.
        is_new: True until the first step or the first state that is loaded.
    """

    def __init__(
        self, split: SplitStep, parts: int, collective: Collective, shares: Shares, *, options: Options | None = None
    ) -> None:
        self.shares, self.collective = shares, collective
        self.optimizer_bytes = shares.bytes(collective.rank)
        self.first = {n: t.initial for half in (split.gradient, split.update) for n, t in half.state.items()}
        del self.first[BUCKET], self.first[TOTAL]
        source = split.update.source
        averaged = [] if source is None else averages(source).values()
        self._averages = {n: self.first[n].numpy() for n in averaged if n in shares.ends}
        self._is_settled = self.is_new = True
        self._sums: dict[str, np.ndarray] = {}
        self._adding: StepRunner | None = None
        self._place_weights()
        super().__init__(split, parts, collective, options=options)
        share(self.gradient, self.update, *([] if self._adding is None else [self._adding]))
        self._sum = lambda bucket: collective.reduce_scatter(bucket, shares.bounds)

    def _place_weights(self) -> None:
        """Have all weights in one array of bytes, in which each rank has a block."""
        starts, self._bounds = self.shares.places
        self._bytes = aligned((self._bounds[-1],), np.dtype(np.uint8))
        self._weights = {}
        for name, start in starts.items():
            first = self.first[name].numpy()
            self._weights[name] = self._bytes[start : start + first.nbytes].view(first.dtype).reshape(first.shape)
            np.copyto(self._weights[name], first)

    def _computing(self, half: Step, options: Options | None, places: Mapping[str, np.ndarray]) -> Any:
        """The machine that computes gradients reads weights at their places."""
        weights = {name: held for name, held in self._weights.items() if name in half.reads}
        half = replace(half, reads={name: t for name, t in half.reads.items() if name not in weights})
        return super()._computing(half, options, {**places, **weights})

    def _updating(self, split: SplitStep, options: Options | None) -> StepRunner:
        """The machine that makes the own part of an update from the own part of the bucket."""
        own = own_update(split, self.shares, self.collective.rank)
        low, high = self.shares.bounds[self.collective.rank :][:2]
        self._own_bucket = self.bucket.array[low:high]
        pieces = Bucket.cut(self._own_bucket, self.shares.shapes(split.pieces, self.collective.rank))
        places = {given: pieces[name] for name, given in own.pieces.items()}
        if own.sums is not None:
            read = {v.name for v in own.sums.model.graph.inputs}
            self._adding = StepRunner(own.sums, options=options, places={n: a for n, a in places.items() if n in read})
        self._sums = {n: own.update.reads[n].numpy().copy() for n in self.shares.sums if n in own.update.reads}
        own.update.reads = {n: t for n, t in own.update.reads.items() if n not in self._sums}
        return StepRunner(own.update, options=options, places=places | self._sums)

    def updated(self, total: float) -> dict[str, np.ndarray]:
        """Update the own part, and have the weights of all ranks."""
        if not self.summed:
            with np.errstate(all="ignore"):  # a mean over nothing is no number
                self._own_bucket /= total
        if self.shares.sums:
            found = {} if self._adding is None else self._adding.step({})
            added = np.array([float(found.get(name, 0.0)) for name in self.shares.sums])
            self.collective.all_reduce(added)
            for name, value in zip(self.shares.sums, added):
                if name in self._sums:
                    self._sums[name][...] = value
        results, self.is_new = self.update.step({}), False
        for name, held in self._weights.items():
            if name in self.update.slots:
                self._part_of(name, held)[...] = self.update.now[name].reshape(-1)
        self.collective.all_gather(self._bytes, self._bounds)
        self._is_settled = not self._averages
        return results

    def settle(self, total: float = 0.0) -> float:
        """Have the averages of weights whole on all ranks; `total` is that of all already."""
        if not self._is_settled:
            self._averages = self.gather(self._averages)
            self._is_settled = True
        return total

    # --- state ---------------------------------------------------------------------------------

    def _part_of(self, name: str, whole: np.ndarray) -> np.ndarray:
        """The part of this rank, flat."""
        low, high = self.shares.part(name, self.collective.rank)
        return whole.reshape(-1)[low:high]

    @property
    def now(self) -> dict[str, np.ndarray]:
        """Every tensor of state until the next step, or this rank's part of it."""
        return super().now | self._weights

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the tensors in `state` by copies of the given ones."""
        check_state(state, self.now)
        weights = {name: self._part_of(name, state[name]) for name in self._weights}
        self.update.load_state(
            {n: weights[n].reshape(a.shape) if n in weights else state[n] for n, a in self.update.now.items()}
        )
        self.gradient.load_state({n: state.get(n, a) for n, a in self.gradient.now.items()})
        for name, held in self._weights.items():
            np.copyto(held, state[name])
        self._is_settled, self.is_new = not self._averages, False

    def gather(self, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Tensors of state, assembled from the parts of all ranks, which all call it; default: all of them."""
        own, found = self.now, dict[str, np.ndarray]()
        for name in sorted(self.first if names is None else names):
            first = self.first[name].numpy()
            if name in self.shares.kept:
                found[name] = np.zeros(first.shape, first.dtype)
                if name in own:
                    self._part_of(name, found[name])[...] = own[name].reshape(-1)
                self.collective.all_gather(found[name].reshape(-1), self.shares.ends[name])
            else:
                found[name] = own[name].copy()
        return found

    def load_whole(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Continue from complete tensors of state; only one is needed in memory at a time."""
        rank, own, averaged = self.collective.rank, dict[str, np.ndarray](), dict[str, np.ndarray]()
        for name, array in tensors:
            if name not in self.first:
                raise BadInput(f"state {name!r} is unknown here")
            check_state({name: array}, {name: self.first[name].numpy()})
            if name in self._averages:
                averaged[name] = array
            if name not in self.shares.kept:
                own[name] = array
            elif np.diff(self.shares.part(name, rank)):
                own[name] = self._part_of(name, array).reshape(self.update.now[name].shape).copy()
        self.load_state(own)
        self._averages, self._is_settled = averaged, True

    def inference_state(self) -> dict[str, np.ndarray]:
        """The tensors that the inference model needs, whole: weights, statistics and averages.

        All ranks call it after a step, if weights are averaged; else, and once they have settled, any of them may.
        """
        self.settle()
        return self.common_state() | dict(self._averages)

    def common_state(self) -> dict[str, np.ndarray]:
        """The state that all ranks have whole, not copied: valid until the next step."""
        kept = set(self.shares.kept)
        return {n: a for n, a in self.now.items() if n not in kept}
