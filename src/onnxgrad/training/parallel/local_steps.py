"""Local steps between exchanges: ranks train separately, and then move by the mean of their displacements (DiLoCo).

Douillard et al. 2023, arXiv 2311.08105: each rank takes some steps of its own optimizer on its rows. The negative mean
displacement of all ranks' weights is the gradient of an outer step, gradient descent with Nesterov's momentum from the
common starting point. The state of the inner optimizers stays on its rank; it is averaged when a run settles: at the
end of an epoch, and before any measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from onnxgrad.distributed import Collective
from onnxgrad.ir.builder import FLOATS
from onnxgrad.runtime import Options
from onnxgrad.training.parallel.exchanges import Exchanges
from onnxgrad.training.parallel.machine import DataParallel, sums_of
from onnxgrad.training.parallel.ranks import OnRank
from onnxgrad.training.step.accumulate import BUCKET, TOTAL, SplitStep

VELOCITY = "outer_momentum"


class LocalSteps(DataParallel):
    """The machine of a rank that exchanges nothing but once in some steps (see `onnxgrad.runtime.Machine`).

    Results of a step are those of the rows of this rank. A rank without rows takes no step.

    Args:
        split, parts, collective, options: as of `DataParallel`; what is compressed are the ways of weights.
        exchange: the number of steps between two exchanges, and the rate and the momentum of the outer step.
    """

    def __init__(
        self,
        split: SplitStep,
        parts: int,
        collective: Collective,
        exchange: Exchanges,
        *,
        options: Options | None = None,
    ) -> None:
        super().__init__(split, parts, collective, options=options)
        self.every, self.rate, self.momentum = exchange.sync_every, exchange.rate, exchange.momentum
        state = {n: t for half in (split.gradient, split.update) for n, t in half.state.items()}
        held = {n: t for n, t in state.items() if n not in (BUCKET, TOTAL)}
        self._moving = [n for n, t in held.items() if t.kind == "parameter"]
        self._meant = [n for n, t in held.items() if t.kind != "parameter" and t.initial.dtype in FLOATS]
        self._counting = [n for n, t in held.items() if t.initial.dtype not in FLOATS]
        self._results = dict.fromkeys(self.results, np.zeros(()))
        self._start()
        self._sum = sums_of(collective, exchange.compress, self._from)
        self.settings |= {
            "steps between exchanges": self.every,
            "compression": exchange.compress or "none",
            "outer rate": self.rate,
            "outer momentum": self.momentum,
        }

    def _start(self) -> None:
        """Start from the current weights, with no momentum."""
        self._from = self._flat(self._moving, self.bucket.array.dtype)
        self._velocity = np.zeros_like(self._from)
        self._taken, self._is_settled = 0, True

    def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A step of this rank; after the last one before an exchange, that and an outer step as well."""
        rows = self.count_rows(batch)
        before = self._own_masks()
        sums, total = self.gradients(batch) if rows else ({}, 0.0)
        for name, begun in self._masks_from.items():
            self.gradient.now[name][...] += before[name] - begun
        if sums:
            results = self.means(sums, total) | self.updated(total)
            self._results = {name: np.array(value) for name, value in results.items()}
            loss = float(self._results[self.results[0]])
            if not math.isfinite(loss):  # which the others do not see
                raise OnRank(f"the loss is {loss} on its own rows; try a smaller learning rate")
        self._taken, self._is_settled = self._taken + 1, False
        if self._taken == self.every:
            self._exchange()
        return self._results

    def settle(self, total: float = 0.0) -> float:
        """Synchronize all ranks. `total`, a sum of losses of own rows, becomes the mean over ranks."""
        if self._is_settled:
            return total
        if self._taken:
            self._exchange()
        self._is_settled = True
        size = self.collective.size
        both = np.concatenate([self._flat(self._meant, np.float64), [total]])
        self.collective.all_reduce(both)
        self._write(self._meant, both / size)
        for name in self._counting:  # the last rank has rows at every step
            self.collective.broadcast(self._place(name), size - 1)
        return super().settle(float(both[-1] / size))

    def _exchange(self) -> None:
        """The outer step."""
        way = self._from - self._flat(self._moving, self._from.dtype)
        self._sum(way)
        asked = np.array([self.asked], np.float64)
        self.collective.all_reduce(asked)
        self.stopping = bool(asked[0])
        slope = way / self.collective.size
        self._velocity = self.momentum * self._velocity + slope
        self._write(self._moving, self._from - self.rate * (self.momentum * self._velocity + slope))
        self._from = self._flat(self._moving, self._from.dtype)
        self._taken = 0

    @property
    def is_settled(self) -> bool:
        """True if all ranks have the same state."""
        return self._is_settled

    def extras(self) -> dict[str, np.ndarray]:
        """State in addition to that of the step, equal on all ranks after `settle`."""
        return super().extras() | {VELOCITY: self._velocity}

    def load_extras(self, extras: Mapping[str, np.ndarray]) -> None:
        """Restore the extra state."""
        super().load_extras(extras)
        if VELOCITY in extras:
            self._velocity = np.array(extras[VELOCITY])

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace every tensor of state by a copy of the one given, and begin there, at rest."""
        super().load_state(state)
        self._start()

    # --- state as one array --------------------------------------------------------------------

    def _place(self, name: str) -> np.ndarray:
        return (self.update if name in self.update.slots else self.gradient).now[name]

    def _flat(self, names: list[str], dtype: np.typing.DTypeLike) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *(self._place(n).reshape(-1).astype(dtype) for n in names)])

    def _write(self, names: list[str], values: np.ndarray) -> None:
        at = 0
        for name in names:
            place = self._place(name)
            place[...] = values[at : at + place.size].reshape(place.shape)
            at += place.size
