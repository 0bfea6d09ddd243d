"""Steps with exchanges of sums in the middle: stages run one after the other, and pass on their results.

The runtime writes summands to, and reads results from, the same buffers. A rank without rows contributes zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from onnxgrad.distributed import Collective
from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import named_values
from onnxgrad.ir.passes import warn_of
from onnxgrad.runtime import Options
from onnxgrad.runtime.denormals import flushing
from onnxgrad.runtime.failures import one_line
from onnxgrad.runtime.feeds import feed
from onnxgrad.runtime.kernels import KERNELS
from onnxgrad.runtime.protocol import Slot
from onnxgrad.runtime.resident import Owner, check_state
from onnxgrad.runtime.session import create
from onnxgrad.runtime.tensors import aligned, ort_value
from onnxgrad.training.parallel.stages import Stage, last_readers, stages, with_own_kernels
from onnxgrad.training.step.step import Step


class Staged:
    """The machine of a step with sums over ranks in it (see `onnxgrad.runtime.Machine`).

    Args:
        step: without learning rates.
        collective: the ranks.
        options: how ONNX Runtime runs each stage.
        places: as in `Resident`: outputs, with the arrays that they are written to.

    Attributes:
        slots, reads, results: as of `Resident`.
        now: the arrays that hold the state until the next step.
    """

    def __init__(
        self, step: Step, collective: Collective, options: Options | None, places: Mapping[str, np.ndarray]
    ) -> None:
        options = (options or Options()).resolve_target()
        self.collective, self.results = collective, list(step.results)
        self._flushing = None if options.denormals else flushing()
        self.slots = {n: Slot(t.input, t.output, t.initial.numpy()) for n, t in step.state.items()}
        self.now = {n: np.array(s.first) for n, s in self.slots.items()}
        self.reads, self._owners = {n: t.numpy() for n, t in step.reads.items()}, dict[str, Owner]()
        model = with_own_kernels(step.model, options)
        try:
            found = self._open(model, options)
        except BadInput as error:
            model = with_own_kernels(step.model, replace(options, without=(*options.without, KERNELS.name)))
            found = self._open(model, options)  # raises if the step itself is refused
            warn_of({KERNELS.name: str(error)})
        self._last = last_readers(found)
        values = named_values(model.graph)
        self._sums = [np.zeros(0)] * len(found)
        self._at: dict[str, Any] = {name: ort_value(array) for name, array in places.items()}
        for number, stage in enumerate(found):
            if not stage.summed:
                continue
            sizes = [int(np.prod(values[name].shape.numpy())) for name in stage.summed]  # type: ignore[union-attr]
            ends = np.cumsum([0, *sizes]).tolist()
            self._sums[number] = aligned((ends[-1],), np.dtype(np.float64))
            for (given, got), low, high in zip(stage.summed.items(), ends, ends[1:]):
                self._at[given] = self._at[got] = ort_value(self._sums[number][low:high])

    def _open(self, model: ir.Model, options: Options) -> list[Stage]:
        """The stages of `model`, each with a session."""
        found = stages(model)
        with self._flushing or nullcontext():
            self._sessions = [create(stage.model, options, self._flushing is not None) for stage in found]
        return found

    def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Take one step. Returns the results by name.

        Raises:
            BadInput: the runtime refuses the batch or fails on it.
        """
        held = dict(self._at)
        held |= {name: ort_value(np.ascontiguousarray(feed(name, array))) for name, array in batch.items()}
        held |= {slot.input: ort_value(self.now[name]) for name, slot in self.slots.items()}
        held |= {
            n: ort_value(self._owners[n].now[n] if n in self._owners else array) for n, array in self.reads.items()
        }
        kept = {*self.results, *(slot.output for slot in self.slots.values())}
        for number, session in enumerate(self._sessions):
            for name, value in self._run(session, held).items():
                held[name] = value
            for name in [n for n in held if n not in kept and n not in self._at and self._last.get(n, -1) <= number]:
                del held[name]
            if len(self._sums[number]):
                self.collective.all_reduce(self._sums[number])
        for name, slot in self.slots.items():
            np.copyto(self.now[name], held[slot.output].numpy())
        return {name: held[name].numpy() for name in self.results}

    def _run(self, session: onnxruntime.InferenceSession, held: Mapping[str, Any]) -> dict[str, Any]:
        """Run a stage. Returns its outputs, except those written to buffers."""
        binding = session.io_binding()
        for value in session.get_inputs():
            binding.bind_ortvalue_input(value.name, held[value.name])
        free = [value.name for value in session.get_outputs() if value.name not in self._at]
        for name in free:
            binding.bind_output(name, "cpu")
        for value in session.get_outputs():
            if value.name in self._at:
                binding.bind_ortvalue_output(value.name, self._at[value.name])
        try:
            with self._flushing or nullcontext():
                session.run_with_iobinding(binding)
        except Exception as error:
            raise BadInput(f"ONNX Runtime failed: {one_line(error)}") from error
        return dict(zip(free, binding.get_outputs()))

    def idle(self) -> None:
        """Take part in the sums of the others' step, without rows."""
        for sums in self._sums:
            sums[...] = 0
            if len(sums):
                self.collective.all_reduce(sums)

    def read_from(self, owners: Mapping[str, Owner]) -> None:
        """Read state that other machines own (see `Resident`)."""
        for name, owner in owners.items():
            check_state({name: owner.now[name]}, {name: self.reads[name]})
        self._owners |= owners

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state."""
        return {name: array.copy() for name, array in self.now.items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace every tensor of state by a copy of the one given."""
        check_state(state, self.now)
        for name, array in self.now.items():
            np.copyto(array, state[name])
