"""A learning rate to begin with: the range test, which raises the rate step by step until the loss grows.

Smith 2017, "Cyclical learning rates for training neural networks", section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.figures import drawing
from onnxgrad.files import replacing
from onnxgrad.training.data import Data
from onnxgrad.training.data.streams import Stream
from onnxgrad.training.parallel.strategy import AnyMachine

#: The loss is smoothed by this factor, and the test ends where it has grown to so many times its least.
SMOOTHING, GROWN = 0.9, 4.0


@dataclass
class RateTest:
    """The result of a range test.

    Attributes:
        rates: of the steps that were taken.
        losses: smoothed, of the same steps.
        suggestion: the rate at which the loss fell fastest, over the logarithm of the rate.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    suggestion: float = math.nan

    def plot(self, path: Path) -> None:
        """Draw the losses over the rates into a PNG file."""
        with drawing() as new_figure, replacing(path) as file:
            figure = new_figure(figsize=(5, 3.6), layout="constrained")
            axes = figure.subplots()
            axes.plot(self.rates, self.losses)
            axes.axvline(self.suggestion, color="0.6", linestyle="--", label=f"{self.suggestion:.2g}")
            axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
            axes.legend()
            figure.savefig(file, format="png", dpi=120)


def range_test(
    machine: AnyMachine,
    loss: str,
    data: Data | Stream,
    *,
    lowest: float,
    highest: float,
    steps: int,
    batch_size: int,
    seed: int,
    sample: str = "each",
    part: tuple[int, int] = (0, 1),
) -> RateTest:
    """Take up to `steps` steps with rates from `lowest` to `highest`, in equal ratios; then restore state and rates.

    Raises:
        BadInput: the machine has not one learning rate, the range is none, or the loss never falls.
    """
    if len(machine.held) != 1:
        raise BadInput(f"a rate is looked for where there is one; the model has {len(machine.held)}")
    if not 0 < lowest < highest or steps < 10:
        raise BadInput(f"rates go up from a positive one in 10 steps or more, not {lowest} to {highest} in {steps}")
    (rate,) = machine.held.values()
    before, state = rate.copy(), machine.state()
    machine.whole = data.whole
    found = RateTest()
    mean = 0.0
    try:
        for step, batch in enumerate(_batches(data, batch_size, (seed, sample), steps, part)):
            rate[...] = lowest * (highest / lowest) ** (step / (steps - 1))
            value = float(machine.step(batch)[loss])
            mean = SMOOTHING * mean + (1 - SMOOTHING) * value
            smooth = mean / (1 - SMOOTHING ** (step + 1))
            if not math.isfinite(value) or (found.losses and smooth > GROWN * min(found.losses)):
                break
            found.rates.append(float(rate))
            found.losses.append(smooth)
    finally:
        rate[...] = before
        machine.load_state(state)
    best = int(np.argmin(found.losses)) if found.losses else 0
    if best < 2:
        raise BadInput(f"the loss does not fall at any rate from {lowest:g} on; try a lower one, or look at the data")
    slopes = np.gradient(found.losses[: best + 1], np.log(found.rates[: best + 1]))
    found.suggestion = found.rates[int(np.argmin(slopes))]
    return found


def _batches(data: Data | Stream, size: int, draw: tuple[int, str], count: int, part: tuple[int, int]) -> Iterator[Any]:
    """`count` batches, epoch after epoch: whole ones of rows by number, those of a stream as they come."""
    epoch = taken = 0
    while taken < count:
        before = taken
        for batch in _whole_epoch(data, size, draw, epoch, part):
            yield batch
            taken += 1
            if taken == count:
                return
        if taken == before:
            return
        epoch += 1


def _whole_epoch(
    data: Data | Stream, size: int, draw: tuple[int, str], epoch: int, part: tuple[int, int]
) -> Iterator[Any]:
    seed, sample = draw
    if isinstance(data, Stream):
        return (batch for batch, _ in data.batches(size, seed, epoch, (0, 0), part))
    size = data.fixed or min(size, len(data))
    order = data.order([seed, epoch], size, sample)
    return data.batches(size, order[: len(order) // size * size], 0, [seed, epoch], part)
