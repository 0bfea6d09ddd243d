"""The machine of a rank: gradients of its rows, sums over all ranks, the same update everywhere.

Between the two halves of a step (see `accumulate`) the buckets of all ranks are summed in place. A second, small sum
carries the other shared numbers: the denominator of the mean loss, the results, running statistics, and stop requests.
All of them are weighted by rows, so a batch means the same as in one process: with ranks that have fewer rows, or none,
with ignored labels and weighted classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onnxgrad.distributed import Collective
from onnxgrad.distributed.half_sums import HalfSums
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training.graph.dropout_masks import COUNT
from onnxgrad.training.graph.synchronized_norm import is_sum
from onnxgrad.training.parallel.staged import Staged
from onnxgrad.training.step.accumulate import Accumulating, SplitStep
from onnxgrad.training.step.step import Step

#: An odd number near 2³²/φ: multiples of it separate the seeds of ranks (Knuth, volume 3, section 6.4).
_GOLDEN = 0x9E3779B1


LOST = "compression_error"


def sums_of(collective: Collective, compress: str | None, like: np.ndarray) -> Callable[[np.ndarray], None]:
    """A function that replaces arrays such as `like` by their sums over ranks (see `Exchanges.compress`)."""
    if compress is None:
        return collective.all_reduce
    return HalfSums(collective, len(like), like.dtype)


class DataParallel(Accumulating):
    """The machine of a step that reads a part of each batch on this rank (see `onnxgrad.runtime.Machine`).

    Running statistics are means over ranks, weighted by rows. Counters are those of the last rank, which always has
    rows. The masks of Dropout differ between ranks, and those of rank 0 are those of one process.

    Args:
        split: the step.
        parts: into how many parts a rank cuts its rows.
        collective: the ranks.
        compress: "fp16" sends gradients as 16-bit numbers (see `HalfSums`); default: as they are.
        options: of ONNX Runtime, for both halves.

    Attributes:
        asked: True if this rank was asked to stop; the other ranks learn of it with the next step.
        stopping: True if any rank had been asked before the last step.
        due: True if a checkpoint is due on this rank; the other ranks learn of it with the next step.
        is_due: True if it was due on any rank before the last step.
        settings: of the exchange, by their names in messages.
    """

    def __init__(
        self,
        split: SplitStep,
        parts: int,
        collective: Collective,
        *,
        compress: str | None = None,
        options: Options | None = None,
    ) -> None:
        self.collective = collective
        super().__init__(split, parts, options=options)
        graph = split.gradient.model.graph
        for value in graph.outputs:
            if value.name in split.gradient.results and (value.shape is None or len(value.shape)):
                raise BadInput(f"ranks share results that are scalars; {value.name!r} is none")
        self.asked = self.stopping = self.due = self.is_due = False
        self._sum = sums_of(collective, compress, self.bucket.array)
        self.settings: dict[str, Any] = {
            "steps between exchanges": 1,
            "compression": compress or "none",
            "statistics of batches": "of all ranks" if isinstance(self.gradient, Staged) else "of each rank",
        }
        self._statistics = list(self.gradient.slots)

    def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One update from the rows of all ranks; `batch` has the rows of this one, possibly none."""
        rows = self.count_rows(batch)
        before = self._own_masks()
        sums, total = self.gradients(batch if rows else {})
        if not rows:
            self.bucket.array[...] = 0
        self._sum(self.bucket.array)
        names = self.gradient.results
        shared = np.array([self.asked, self.due, rows, total, bool(sums), *(float(sums.get(n, 0.0)) for n in names)])
        statistics = np.concatenate([self._summands(before, rows), np.zeros(0)])
        both = np.concatenate([shared, statistics])
        self.collective.all_reduce(both)
        asked, due, count, total, has_sums = (float(x) for x in both[:5])
        self.stopping, self.is_due = asked > 0, due > 0
        self._take(before, both[len(shared) :], count)
        found = dict(zip(names, (np.asarray(x) for x in both[5 : len(shared)]))) if has_sums else {}
        return self.means(found, total) | self.updated(total)

    def _computing(self, half: Step, options: Options | None, places: Mapping[str, np.ndarray]) -> Any:
        if any(is_sum(node) for node in half.model.graph):
            return Staged(half, self.collective, options, places)
        return super()._computing(half, options, places)

    def gradients(self, batch: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
        """Add up the gradients of all parts; a rank with fewer parts than others still joins the sums inside a step."""
        found = super().gradients(batch)
        if isinstance(self.gradient, Staged):
            for _ in range(self.parts - sum(1 for _ in self._cut(batch))):
                self.gradient.idle()
        return found

    def settle(self, total: float = 0.0) -> float:
        """Synchronize all ranks and the `extras`. `total`, a sum of losses, becomes the sum over all ranks."""
        if isinstance(self._sum, HalfSums):
            self._sum.settle()
        return total

    @property
    def is_settled(self) -> bool:
        """True if all ranks have the same state, `extras` included."""
        return not isinstance(self._sum, HalfSums)

    def extras(self) -> dict[str, np.ndarray]:
        """State in addition to that of the step, equal on all ranks after `settle`."""
        return {LOST: self._sum.carried} if isinstance(self._sum, HalfSums) else {}

    def load_extras(self, extras: Mapping[str, np.ndarray]) -> None:
        """Restore the extra state."""
        if isinstance(self._sum, HalfSums):
            self._sum.carry(extras.get(LOST, 0))

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace every tensor of state by a copy of the given one, and reset the `extras`."""
        super().load_state(state)
        DataParallel.load_extras(self, {})

    def _own_masks(self) -> dict[str, np.ndarray]:
        """The statistics before a step; the count of masks is moved to a seed of this rank."""
        now = self.gradient.now
        before = {name: now[name].copy() for name in self._statistics}
        for name in self._statistics:
            if name.rstrip("_") == COUNT and self.collective.rank:
                seed, step = divmod(int(now[name]), 1 << 32)
                seed = (seed + self.collective.rank * _GOLDEN) % (1 << 31)
                now[name][...] = (seed << 32) + step
        self._masks_from = {name: now[name].copy() for name in self._statistics if before[name].dtype.kind in "iu"}
        return before

    def _summands(self, before: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
        """The summands of this rank: statistics times its rows; of counters, the increment of the last rank."""
        now, is_last = self.gradient.now, self.collective.rank == self.collective.size - 1
        parts = [np.zeros(0)]
        for name in self._statistics:
            if name in self._masks_from:
                part = (now[name] - self._masks_from[name]).astype(np.float64) * is_last
            else:
                part = np.asarray(now[name], np.float64) * rows if rows else np.zeros(now[name].shape)
            parts.append(part.reshape(-1))
        return np.concatenate(parts)

    def _take(self, before: Mapping[str, np.ndarray], sums: np.ndarray, rows: float) -> None:
        """Set the statistics to those of all ranks."""
        now, at = self.gradient.now, 0
        for name, old in before.items():
            part = sums[at : at + old.size].reshape(old.shape)
            now[name][...] = old + part.astype(old.dtype) if name in self._masks_from else part / rows
            at += old.size
