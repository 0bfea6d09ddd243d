"""One module per kind of competitor: ``prepare(workload folder, threads, variant) → Prepared``.

A module imports what it measures inside its functions, because each runs in an environment of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Prepared:
    """A competitor that is ready to be timed.

    Attributes:
        step: takes training step i, in order, and gives the loss before it.
        forward: evaluates the model on a batch; None if it is not measured.
        parts: seconds of the start-up, by what they were spent on.
        notes: what differs from the workload as it is defined.
    """

    step: Callable[[int], float]
    forward: Callable[[], None] | None = None
    parts: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Workload:
    """What is in the folder of a workload (see `benchmarks.training.workloads.export`)."""

    name: str
    folder: Path
    optimizer: str
    learning_rate: float
    parameters: list[str]
    x: np.ndarray
    y: np.ndarray

    @classmethod
    def read(cls, name: str, folder: Path) -> Workload:
        spec: dict[str, Any] = json.loads((folder / "spec.json").read_text())
        batches = np.load(folder / "batches.npz")
        return cls(name, folder, x=batches["x"], y=batches["y"], **spec)

    def weights(self) -> dict[str, np.ndarray]:
        """The initial weights and statistics, by their names in PyTorch."""
        return dict(np.load(self.folder / "weights.npz"))


class Unable(Exception):
    """The competitor cannot run the workload; the message is the precise reason."""
