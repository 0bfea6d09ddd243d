"""Widths under a budget: where a channel costs much and matters little, it goes first.

The damage of narrowing one layer is measured: the change of the outputs with a quarter, a half and three quarters of
its channels at zero. Layers then lose an eighth of their channels at a time, always that with the least damage for what
it saves, until the model is within the budget. For milliseconds, models along this way are built and timed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrad.training.pruning.channels import Width
from onnxgrad.training.pruning.costs import Cost

#: Shares of the channels of a layer whose damage is measured.
SHARES = (0.25, 0.5, 0.75)
_CHUNKS = 8


@dataclass
class Sensitivity:
    """The damage of narrowing one layer.

    Attributes:
        width: the channels.
        order: their numbers, those that go first in front.
        damage: the relative change of the outputs for each of `SHARES`.
        least: how many channels stay in any case.
    """

    width: Width
    order: np.ndarray
    damage: Sequence[float]
    least: int = 1

    def at(self, share: float) -> float:
        """The damage for a share of the channels, never less than for a smaller one."""
        known = np.maximum.accumulate([0.0, *self.damage, 4 * max(self.damage, default=0.0) + 1e-12])
        return float(np.interp(share, [0.0, *SHARES, 1.0], known))


def ways_down(layers: Sequence[Sensitivity], cost: Cost, size: int, multiple: int) -> Iterator[list[int]]:
    """Steps towards smaller models: the sets that each of them removes.

    Args:
        layers: the layers that can be narrowed.
        cost: the quantity to save.
        size: the number of sets.
        multiple: widths above it stay multiples of it.
    """
    gone = np.zeros(size, bool)
    counts = [0] * len(layers)

    def following(k: int) -> int:
        """The number of channels that layer k has lost after its next step; 0 if there is none."""
        all_of = len(layers[k].order)
        step = max(1, all_of // _CHUNKS)
        left = all_of - counts[k] - step
        if layers[k].width.kind == "channels" and all_of > multiple > 1:
            left = left // multiple * multiple
        return all_of - left if left >= layers[k].least and all_of - left > counts[k] else 0

    def price(k: int) -> float | None:
        target = following(k)
        if not target:
            return None
        trial = gone.copy()
        trial[layers[k].order[:target]] = True
        saved = cost(gone) - cost(trial)
        damage = layers[k].at(target / len(layers[k].order)) - layers[k].at(counts[k] / len(layers[k].order))
        return None if saved <= 0 else damage / saved

    heap = [(p, k) for k in range(len(layers)) if (p := price(k)) is not None]
    heapq.heapify(heap)
    while heap:
        known, k = heapq.heappop(heap)
        now = price(k)
        if now is None:
            continue
        if now > known * (1 + 1e-9) and heap and now > heap[0][0]:
            heapq.heappush(heap, (now, k))  # other layers are narrower by now, so that it saves less
            continue
        target = following(k)
        step = layers[k].order[counts[k] : target].tolist()
        gone[step], counts[k] = True, target
        yield step
        if (again := price(k)) is not None:
            heapq.heappush(heap, (again, k))


def first_within(steps: Sequence[list[int]], amount: Callable[[list[int]], float], most: float) -> list[int] | None:
    """The sets of the fewest steps with which the amount is at most `most`; None if not even all of them suffice."""
    low, high = 0, len(steps)
    if amount([one for step in steps for one in step]) > most:
        return None
    while low < high:
        middle = (low + high) // 2
        if amount([one for step in steps[:middle] for one in step]) <= most:
            high = middle
        else:
            low = middle + 1
    return [one for step in steps[:high] for one in step]


def give_back(removed: list[int], layers: Sequence[Sensitivity], amount: Callable[[list[int]], float], most: float
              ) -> list[int]:  # fmt: skip
    """`removed` without the sets that the budget has room for, the last first: steps of small layers overshoot."""
    layer_of = {int(one): k for k, layer in enumerate(layers) for one in layer.order}
    kept, full = list(removed), set[int]()
    for one in reversed(removed):
        if layer_of[one] in full:
            continue
        less = [other for other in kept if other != one]
        if amount(less) <= most:
            kept = less
        else:
            full.add(layer_of[one])
    return kept
