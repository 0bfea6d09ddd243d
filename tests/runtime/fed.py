"""A slow and simple twin of the machines that keep state: it feeds everything through numpy at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.runtime import Slot
from onnxgrad.runtime.resident import check_slots, check_state


class Fed:
    """A machine that hands all state to `session` and takes it back at every step (see `Machine`)."""

    def __init__(self, session: Any, model: ir.Model, slots: Mapping[str, Slot], results: Sequence[str] = ()) -> None:
        check_slots(model, slots, results)
        self.session = session
        self.slots = dict(slots)
        self.results = list(results)
        self._state = {n: s.first.copy() for n, s in slots.items()}

    def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Take one step; the results by name."""
        # copies, because an operator may write into what it is fed
        feeds = {s.input: self._state[n].copy() for n, s in self.slots.items()}
        feeds |= {k: v.copy() for k, v in batch.items()}
        found = self.session.run(feeds, [s.output for s in self.slots.values()] + self.results)
        self._state = {n: found[s.output] for n, s in self.slots.items()}
        return {name: found[name] for name in self.results}

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state."""
        return {n: a.copy() for n, a in self._state.items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace every tensor of state by a copy of the one given."""
        check_state(state, {n: s.first for n, s in self.slots.items()})
        self._state = {n: state[n].copy() for n in self.slots}
