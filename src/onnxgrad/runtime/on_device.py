"""A step graph with state in the memory of a device: two sets of tensors alternate as input and output.

The equivalent of `Resident` for providers with memory of their own. The next state is written into bound outputs, so no
tensor of state crosses the bus in a step, only the batch, the rates, and the requested results. A batch may be on the
device already: tensors of other libraries are passed by DLPack without a copy.

The tests run it with the host as the device, and with a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime

from onnxgrad.errors import BadInput
from onnxgrad.runtime.failures import one_line
from onnxgrad.runtime.feeds import feed
from onnxgrad.runtime.options import Options
from onnxgrad.runtime.protocol import Slot, StepGraph
from onnxgrad.runtime.resident import StepRunner, check_slots, check_state
from onnxgrad.runtime.session import create
from onnxgrad.runtime.tensors import array_of

#: The devices of providers that have memory of their own, as ONNX Runtime calls these.
DEVICES = {"CUDAExecutionProvider": "cuda", "TensorrtExecutionProvider": "cuda"}

Tensor: TypeAlias = onnxruntime.OrtValue


class OnDevice:
    """A machine whose state is on a device (see `Machine`).

    Args:
        step: the compiled step.
        options: how to run it; its first provider says which device, with the setting ``device_id`` for one of several.
        device: name and number of the device, where that is to be another; ("cpu", 0) is the host.

    Attributes:
        held: the learning rates, as arrays on the host: the next step reads changes made to them.

    Raises:
        BadInput: there is no such device in this ONNX Runtime, or it runs out of memory.
    """

    whole: Collection[str] = ()

    def __init__(
        self, step: StepGraph, *, options: Options | None = None, device: tuple[str, int] | None = None
    ) -> None:
        options = (options or Options()).resolve_target()
        number = options.provider_settings[0].get("device_id", "0")
        if not number.isdecimal():
            raise BadInput(f"device_id is the number of a device, not {number!r}")
        self.device = device or (DEVICES.get(options.provider, "cpu"), int(number))
        self.slots = {n: Slot(t.input, t.output, t.initial.numpy()) for n, t in step.state.items()}
        check_slots(step.model, self.slots, step.results)
        self.results = list(step.results)
        self.session = create(step.model, options)
        self.held, self.reads = ({n: t.numpy().copy() for n, t in some.items()} for some in (step.rates, step.reads))
        taken = {s.input for s in self.slots.values()} | self.held.keys() | self.reads.keys()
        self.batch = [v.name for v in self.session.get_inputs() if v.name not in taken]
        self._state = tuple({n: self._room(s.first) for n, s in self.slots.items()} for _ in range(2))
        for name, slot in self.slots.items():
            self._fill(self._state[0][name], slot.first)
        self._now = 0
        self._fed: dict[str, Tensor] = {}
        renewed = {s.output: n for n, s in self.slots.items()}
        #: results that are state as well: an output has one binding, so they are read from the state
        self._shared = {name: renewed[name] for name in self.results if name in renewed}
        self._own = [name for name in self.results if name not in self._shared]
        self._bindings = tuple(self._bind(read, 1 - read) for read in range(2))

    def _room(self, like: np.ndarray) -> Tensor:
        try:
            return Tensor.ortvalue_from_shape_and_type(list(like.shape), like.dtype.type, *self.device)
        except Exception as error:
            place = ":".join(map(str, self.device))
            raise BadInput(f"ONNX Runtime has no room for {like.nbytes} bytes on {place}: {one_line(error)}") from error

    @staticmethod
    def _fill(tensor: Tensor, array: np.ndarray) -> None:
        if array.size:
            tensor.update_inplace(np.ascontiguousarray(array))

    def _bind(self, read: int, write: int) -> onnxruntime.IOBinding:
        binding = self.session.io_binding()
        for name in self._own:
            binding.bind_output(name, "cpu")
        for name, slot in self.slots.items():
            binding.bind_ortvalue_input(slot.input, self._state[read][name])
            binding.bind_ortvalue_output(slot.output, self._state[write][name])
        for name, array in self.reads.items():
            binding.bind_cpu_input(name, array)
        return binding

    def step(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Take one step. Returns the results by name, on the host.

        Args:
            batch: arrays, or tensors with ``__dlpack__`` (OrtValue, torch, cupy, jax), which are read where they lie.

        Raises:
            BadInput: the runtime refuses the batch or fails on it; the state is then as before the step.
        """
        binding = self._bindings[self._now]
        for name in self._own:  # or the runtime insists on the shapes of the last batch
            binding.bind_output(name, "cpu")
        for name, array in self.held.items():  # a host buffer is copied when it is bound, not when the step runs
            binding.bind_cpu_input(name, array)
        for name in self.batch:
            binding.bind_ortvalue_input(name, self._tensor(name, batch[name]))
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:
            raise BadInput(f"ONNX Runtime failed: {one_line(error)}") from error
        self._now = 1 - self._now
        results = dict(zip(self._own, (array_of(v) for v in binding.get_outputs()[: len(self._own)])))
        return results | {name: self._state[self._now][slot].numpy() for name, slot in self._shared.items()}

    def _tensor(self, name: str, given: Any) -> Tensor:
        """A tensor of the batch on the device: the given one, or a copy in the buffer of the last one of its size."""
        if isinstance(given, onnxruntime.OrtValue):
            return given
        if not isinstance(given, np.ndarray):
            if not hasattr(given, "__dlpack__"):
                raise BadInput(f"the batch has a {type(given).__name__} for {name!r}; it takes arrays, or DLPack")
            try:
                return Tensor.from_dlpack(given)
            except Exception as error:
                raise BadInput(f"the tensor for {name!r} cannot be taken by DLPack: {one_line(error)}") from error
        array = feed(name, given)
        tensor = self._fed.get(name)
        if tensor is None or tuple(tensor.shape()) != array.shape or tensor.element_type() != _element(array):
            tensor = self._fed[name] = self._room(array)
        self._fill(tensor, array)
        return tensor

    def tensors(self) -> dict[str, Tensor]:
        """The state on the device, by name, until the next step; each tensor has ``__dlpack__``."""
        return dict(self._state[self._now])

    @property
    def now(self) -> dict[str, np.ndarray]:
        """The same as `state`."""
        return self.state()

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state, on the host."""
        return {n: t.numpy().copy() for n, t in self._state[self._now].items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace every tensor of state by a copy of the one given.

        Raises:
            BadInput: a tensor is missing, unknown, or of another dtype or shape; then none is replaced.
        """
        check_state(state, {n: s.first for n, s in self.slots.items()})
        for name, tensor in self._state[self._now].items():
            self._fill(tensor, state[name])


def _element(array: np.ndarray) -> int:
    return int(ir.DataType.from_numpy(array.dtype))


def runner(step: StepGraph, options: Options) -> StepRunner | OnDevice:
    """The machine of `step`: on the device of the first provider, if it has memory of its own, else on the host.

    State of a type that numpy lacks (bfloat16) stays on the host, from where it crosses the bus at every step.
    """
    kinds: Sequence[np.dtype] = [t.initial.dtype.numpy() for t in step.state.values()]
    if options.provider in DEVICES and all(k.isbuiltin == 1 for k in kinds):
        return OnDevice(step, options=options)
    return StepRunner(step, options=options)
