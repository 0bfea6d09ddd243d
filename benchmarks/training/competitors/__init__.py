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
    """The content of the folder of a workload (see `benchmarks.training.workloads.export`)."""

    name: str
    folder: Path
    optimizer: str
    learning_rate: float
    parameters: list[str]
    inputs: dict[str, np.ndarray]  #: batches by the name of the input, (batch, …)
    y: np.ndarray

    @classmethod
    def read(cls, name: str, folder: Path) -> Workload:
        spec: dict[str, Any] = json.loads((folder / "spec.json").read_text())
        batches = dict(np.load(folder / "batches.npz"))
        return cls(name, folder, y=batches.pop("y"), inputs=batches, **spec)

    @property
    def batches(self) -> list[dict[str, np.ndarray]]:
        """The inputs of each batch by name."""
        return [{name: x[i] for name, x in self.inputs.items()} for i in range(len(self.y))]

    @property
    def x(self) -> np.ndarray:
        """The batches of the only input. Raises Unable if there are two, which some competitors are not written for."""
        if len(self.inputs) > 1:
            raise Unable("the benchmark gives it models of one input only")
        return self.inputs["x"]

    def weights(self) -> dict[str, np.ndarray]:
        """The initial weights, statistics and other buffers, by their names in PyTorch."""
        return dict(np.load(self.folder / "weights.npz"))


class Unable(Exception):
    """The competitor cannot run the workload; the message is the precise reason."""
