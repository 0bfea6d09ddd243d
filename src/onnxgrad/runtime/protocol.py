"""The one protocol: a machine is a pure step function with its state inside.

The step graph is ``(state, batch) → (state', results)``. A `Slot` is the pair of a graph output and the input whose
next value it is; a `Machine` stores the current value of every slot and advances it by steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx_ir as ir


@dataclass(frozen=True)
class Slot:
    """One tensor of state: its graph input, the output that replaces it, and its initial value."""

    input: str
    output: str
    initial: np.ndarray | ir.TensorProtocol

    @property
    def first(self) -> np.ndarray:
        """The first value: of a tensor of a model another copy each time, which callers should not keep."""
        return self.initial if isinstance(self.initial, np.ndarray) else self.initial.numpy()

    @property
    def type(self) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and the shape of its values, of which none is read."""
        if isinstance(self.initial, np.ndarray):
            return self.initial.dtype, self.initial.shape
        return self.initial.dtype.numpy(), tuple(map(int, self.initial.shape))  # type: ignore[arg-type]


class _Tensor(Protocol):
    @property
    def input(self) -> str: ...
    @property
    def output(self) -> str: ...
    @property
    def initial(self) -> ir.TensorProtocol: ...


class StepGraph(Protocol):
    """A compiled step for a runtime: the graph, its state, its rates, its results."""

    @property
    def model(self) -> ir.Model:
        """The step graph."""

    @property
    def state(self) -> Mapping[str, _Tensor]:
        """The tensors of state."""

    @property
    def rates(self) -> Mapping[str, ir.TensorProtocol]:
        """Inputs that are neither state nor batch, with their values."""

    @property
    def reads(self) -> Mapping[str, ir.TensorProtocol]:
        """Inputs that are the state of other steps, with their initial values."""

    @property
    def results(self) -> Sequence[str]:
        """The outputs to return."""

    @property
    def recomputes(self) -> bool:
        """True if the step recomputes values to stay within a budget of memory."""


class Machine(Protocol):
    """A step graph with its state.

    Attributes:
        whole: inputs without rows; a machine that cuts a batch gives them to each part.
    """

    whole: Collection[str]

    def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Take one step. Returns the results by name, valid until the next step."""

    @property
    def now(self) -> Mapping[str, np.ndarray]:
        """Every tensor of state, read-only and valid until the next step; from a device, a copy on the host."""

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state, by the name of its slot."""

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace every tensor of state by a copy of the one given."""
