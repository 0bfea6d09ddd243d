"""A step graph on ONNX Runtime with resident state: two sets of buffers alternate as input and output.

Binding the next value of a parameter to the memory of its present one is silently wrong: the runtime may order nodes
arbitrarily, so a node may read the parameter after the optimizer has overwritten it. Hence there are two sets of
buffers for all state, A and B, and two fixed bindings: one reads A and writes B, the other reads B and writes A. A step
runs one of them and swaps; nothing is copied or allocated. For a tensor that is updated after all of its readers have
run (`same_memory`, `kernels.in_place`), A and B are one buffer.

The buffers are private, because some operators write into their inputs (BatchNormalization in training
mode does so with its running statistics).

Batch arrays are bound in place. An array is not bound again for the next batch, so a caller that fills the same arrays
for every batch has no overhead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import onnx_ir as ir
import onnxruntime

from onnxgrad.errors import BadInput
from onnxgrad.ir.shapes import allows
from onnxgrad.runtime.denormals import flushing
from onnxgrad.runtime.failures import one_line
from onnxgrad.runtime.feeds import feed
from onnxgrad.runtime.kernels import overwrites
from onnxgrad.runtime.options import Options
from onnxgrad.runtime.protocol import Slot, StepGraph
from onnxgrad.runtime.same_memory import SameMemory
from onnxgrad.runtime.session import create, give_back
from onnxgrad.runtime.tensors import aligned, ort_value
from onnxgrad.wording import tensor_text

#: State of as many bytes, or a graph of as many nodes, is worth a search for garbage graphs (10 to 60 ms) before the
#: first step; more state is worth one before the session is created as well.
_MUCH, _MORE = 1 << 22, 1 << 25
MANY = 400


class Owner(Protocol):
    """An object with state that machines read."""

    @property
    def now(self) -> Mapping[str, np.ndarray]:
        """The arrays of the state, by name, valid until the next step."""


class Resident:
    """A machine on ONNX Runtime (see `Machine`).

    Args:
        model: the step graph; its inputs are those of `slots` and the batch, nothing else.
        slots: the state, by name. Initial values are copied.
        results: outputs to hand back at every step.
        options: how to run it.
        held: further inputs that seldom change (learning rates), with their values.
        reads: further inputs that are the state of other machines (see `share`), with the values that they start from.
        places: further inputs and outputs, with the arrays of the caller's that they are bound to: what is read there
            is what it holds then, and what is written is for a caller that looks.
        owned: further inputs that are the state of other machines, which are read there and never copied.

    Attributes:
        held: the arrays that are bound for `held`; the next step reads changes made to them.
        reads: the same for `reads`; not looked at for what another machine shares.
    """

    whole: Collection[str] = ()

    def __init__(
        self,
        model: ir.Model,
        slots: Mapping[str, Slot],
        results: Sequence[str] = (),
        options: Options | None = None,
        held: Mapping[str, np.ndarray] | None = None,
        reads: Mapping[str, np.ndarray] | None = None,
        places: Mapping[str, np.ndarray] | None = None,
        owned: Mapping[str, Owner] | None = None,
    ) -> None:
        check_slots(model, slots, results)
        size = sum(s.initial.nbytes for s in slots.values())
        if size >= _MORE:
            give_back(old=True)
        options = (options or Options()).resolve_target()
        self._flushing = None if options.denormals else flushing()
        with self._flushing or nullcontext():
            renewed, overwritten, shared = {s.input: s.output for s in slots.values()}, set[str](), SameMemory()
            self.session = create(model, options, self._flushing is not None, renewed, overwritten, shared)
        self.held = {name: _copied(array) for name, array in (held or {}).items()}
        self.reads = {name: _copied(array) for name, array in (reads or {}).items()}
        self.reads |= {name: owner.now[name] for name, owner in (owned or {}).items()}
        self._places = dict(places or {})
        taken = {s.input for s in slots.values()} | self.held.keys() | self.reads.keys() | self._places.keys()
        self.batch = [v.name for v in self.session.get_inputs() if v.name not in taken]
        self.results = list(results)
        first = {n: _copied(s.first) for n, s in slots.items()}
        one = overwritten | shared.inputs
        second = {n: a if slots[n].input in one else aligned(a.shape, a.dtype) for n, a in first.items()}
        self._buffers = first, second
        #: the given model without initial values, which may be large and are not stored twice
        self.slots = {n: dataclasses.replace(s, initial=self._buffers[0][n]) for n, s in slots.items()}
        self._now = 0
        self._overwrites = overwrites() if overwritten else None
        self._shared_memory = shared
        self._is_torn = False
        self._owners: dict[str, Owner] = dict(owned or {})
        self._bound: tuple[dict[str, np.ndarray], ...] = ({}, {})
        self._fixed: dict[str, np.ndarray] = {}
        self._loose: list[tuple[int, str]] = []
        declared = {v.name: v for v in model.graph.outputs}
        renewed = {s.output: n for n, s in slots.items()}
        #: results that are state as well: an output has one binding, so they are read from the state
        self._shared = {name: renewed[name] for name in self.results if name in renewed}
        for position, name in enumerate(n for n in self.results if n not in self._shared):
            value = declared[name]
            if value.shape is not None and value.dtype is not None and value.shape.is_static():
                self._fixed[name] = aligned(tuple(value.shape.numpy()), value.dtype.numpy())
            else:
                self._loose.append((position, name))
        self._bindings = tuple(self._bind(read, 1 - read) for read in range(2))
        self._leaves_garbage = size >= _MUCH or len(model.graph) >= MANY

    def _bind(self, read: int, write: int) -> onnxruntime.IOBinding:
        binding = self.session.io_binding()
        for name in self.results:  # first: their positions among the bound outputs are those of `_loose`
            if name in self._fixed:
                binding.bind_ortvalue_output(name, ort_value(self._fixed[name]))
            elif name not in self._shared:
                binding.bind_output(name, "cpu")
        for name, slot in self.slots.items():
            binding.bind_ortvalue_input(slot.input, ort_value(self._buffers[read][name]))
            binding.bind_ortvalue_output(slot.output, ort_value(self._buffers[write][name]))
        outputs = {v.name for v in self.session.get_outputs()}
        for name, array in (self.held | self.reads | self._places).items():
            bind = binding.bind_ortvalue_output if name in outputs else binding.bind_ortvalue_input
            bind(name, ort_value(array))
        return binding

    def step(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Take one step. Returns the results by name, valid until the next step.

        Raises:
            BadInput: the runtime refuses the batch or fails on it; the state is then as before the step, unless the
                message says that a part of it had been overwritten (it was memory that was missing, say).
        """
        self._check_whole()
        if self._leaves_garbage:  # the caller that has built the graph may have dropped it by now
            self._leaves_garbage = False
            give_back()
        binding, bound = self._bindings[self._now], self._bound[self._now]
        for name, owner in self._owners.items():
            array = owner.now[name]
            if bound.get(name) is not array:
                binding.bind_ortvalue_input(name, ort_value(array))
                bound[name] = array
        for name in self.batch:
            array = batch[name]
            if bound.get(name) is not array:
                flat = feed(name, array)
                flat = flat if flat.flags.c_contiguous else np.ascontiguousarray(flat)
                binding.bind_ortvalue_input(name, ort_value(flat))
                if flat is array:  # a copy made here would go stale when the caller refills his array
                    bound[name] = array
                else:
                    bound.pop(name, None)
        for _, name in self._loose:  # or the runtime insists on the shapes of the last batch
            binding.bind_output(name, "cpu")
        so_far = 0 if self._overwrites is None else self._overwrites.value
        try:
            with self._flushing or nullcontext():
                self.session.run_with_iobinding(binding)
        except Exception as error:
            counted = self._overwrites is not None and self._overwrites.value != so_far
            self._is_torn = counted or self._shared_memory.may_have_changed(str(error))
            lost = ", when a part of the state had been updated" if self._is_torn else ""
            raise BadInput(f"ONNX Runtime failed{lost}: {one_line(error)}") from error
        self._now = 1 - self._now
        results = dict(self._fixed)
        for name, slot in self._shared.items():
            results[name] = self._buffers[self._now][slot]
        if self._loose:
            values = binding.get_outputs_as_ortvaluevector()
            results |= {name: values[position].numpy() for position, name in self._loose}
        return results

    @property
    def now(self) -> Mapping[str, np.ndarray]:
        """The arrays of the state, by name, until the next step, which reads changes made to them.

        Raises:
            BadInput: a step has left it half updated.
        """
        self._check_whole()
        return self._buffers[self._now]

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state. Raises BadInput if a step has left it half updated."""
        return {n: a.copy() for n, a in self.now.items()}

    def read_from(self, owners: Mapping[str, Owner]) -> None:
        """Read these of `reads` from the buffers of the steps that own them, as they are then.

        Raises:
            BadInput: an owner has one with another dtype or shape.
        """
        for name, owner in owners.items():
            check_state({name: owner.now[name]}, {name: self.reads[name]})
        self._owners = {**self._owners, **owners}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace every tensor of state by a copy of the one given.

        Raises:
            BadInput: a tensor is missing, unknown, or of another dtype or shape; then none is replaced.
        """
        check_state(state, self._buffers[0])
        for name, buffer in self._buffers[self._now].items():
            np.copyto(buffer, state[name])
        self._is_torn = False

    def _check_whole(self) -> None:
        if self._is_torn:
            raise BadInput("a step failed when a part of the state had been updated: load a state before going on")


class StepRunner(Resident):
    """The machine of a compiled step (see `onnxgrad.training.compile_step`).

    Its `held` inputs are the learning rates of the step: ``runner.held["learning_rate"][...] = 1e-4``. State of an
    `owner`, another machine, is read in place (see `share`).
    """

    def __init__(
        self,
        step: StepGraph,
        *,
        threads: int | None = None,
        options: Options | None = None,
        places: Mapping[str, np.ndarray] | None = None,
        owner: Owner | None = None,
    ) -> None:
        options = options or Options()
        if threads is not None:
            options = dataclasses.replace(options, threads=threads)
        if step.recomputes:
            options = options.for_a_plan()
        slots = {n: Slot(t.input, t.output, t.initial) for n, t in step.state.items()}
        rates = {n: t.numpy() for n, t in step.rates.items()}
        owned = {} if owner is None else {n: owner for n in step.reads if n in owner.now}
        reads = {n: t.numpy() for n, t in step.reads.items() if n not in owned}
        super().__init__(step.model, slots, step.results, options, rates, reads, places, owned)


def share(*machines: Resident) -> None:
    """Let several machines share one state: each reads the buffers of the machine that updates them.

    ::

        steps = compile_entries(model)
        discriminator, generator = (StepRunner(step) for step in steps.values())
        share(discriminator, generator)

    Raises:
        BadInput: two of them update the same tensor, or one reads it with another dtype or shape.
    """
    owners: dict[str, Resident] = {}
    for machine in machines:
        for name in machine.slots:
            if owners.setdefault(name, machine) is not machine:
                raise BadInput(f"two of the machines update the state {name!r}")
    for machine in machines:
        machine.read_from({name: owners[name] for name in machine.reads if name in owners})


def _copied(array: np.ndarray) -> np.ndarray:
    copy = aligned(array.shape, array.dtype if array.dtype.isnative else array.dtype.newbyteorder("="))
    np.copyto(copy, array)
    return copy


def check_state(state: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> None:
    """Raise BadInput unless `state` has the names, dtypes and shapes of `like`."""
    for name in sorted(state.keys() ^ like.keys()):
        raise BadInput(f"state {name!r} is {'unknown here' if name in state else 'missing'}")
    for name, expected in like.items():
        array = state[name]
        if array.dtype != expected.dtype or array.shape != expected.shape:
            wanted = tensor_text(expected.dtype, expected.shape)
            raise BadInput(f"state {name!r} is {tensor_text(array.dtype, array.shape)}, not {wanted}")


def check_slots(model: ir.Model, slots: Mapping[str, Slot], results: Sequence[str]) -> None:
    """Raise BadInput unless slots and results fit the declared inputs and outputs of `model`."""
    inputs = {v.name: v for v in model.graph.inputs}
    outputs = {v.name: v for v in model.graph.outputs}
    ends_of = {"input": [s.input for s in slots.values()], "output": [s.output for s in slots.values()]}
    for side, ends in ends_of.items():
        twice = {e for e in ends if ends.count(e) > 1} if len(set(ends)) < len(ends) else ()
        for end in sorted(twice):
            raise BadInput(f"two tensors of state are bound to the {side} {end!r} of the step graph")
    for name, slot in slots.items():
        dtype, shape = slot.type
        for end, there, side in ((slot.input, inputs, "input"), (slot.output, outputs, "output")):
            if end not in there:
                raise BadInput(f"state {name!r} is bound to {end!r}, which is no {side} of the step graph")
            value = there[end]
            same_type = value.dtype is None or value.dtype.numpy() == dtype
            if not same_type or not allows(value.shape, shape):
                start = tensor_text(dtype, shape)
                raise BadInput(
                    f"state {name!r} starts as {start}, but the {side} {end!r} of the step graph is "
                    f"{tensor_text(value.dtype, value.shape)}"
                )
    for name in results:
        if name not in outputs:
            raise BadInput(f"result {name!r} is no output of the step graph")
