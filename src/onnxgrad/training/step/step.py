"""A step graph with the roles of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.ir.cleanup import finish
from onnxgrad.ir.graph import values_read
from onnxgrad.ir.passes import PassReport
from onnxgrad.remat import Plan
from onnxgrad.training.spec.training_info import Source, updated
from onnxgrad.wording import tensor_text


@dataclass
class StateTensor:
    """One tensor that a step reads and replaces.

    Attributes:
        name: the initializer of the training model that it is.
        input: the graph input of the step by which it enters.
        output: the graph output by which its next value leaves; never the same value as an input.
        initial: what the training model says it is at first.
        kind: ``parameter`` (a Gradient is taken with respect to it), ``statistic`` (another tensor of the
            inference graph, or the count of `dropout_masks`: it moves with every batch), ``optimizer`` (a float of the
            algorithm) or ``counter`` (an integer of it).
    """

    name: str
    input: str
    output: str
    initial: ir.TensorProtocol
    kind: str


@dataclass(repr=False)
class Step:
    """A step graph with the roles of its inputs and outputs.

    Attributes:
        model: inputs: `batch`, one per state tensor, `rates`; outputs: one per state tensor, then those
            of `results` that are not state as well.
        state: every tensor that is updated, by the name of its initializer in the training model.
        batch: the graph inputs that are fed with data: inputs and labels of the model that the step reads.
        results: graph outputs to look at: the loss first, then the extra outputs that were asked for; the
            same again for every further entry.
        loss: the result that is minimized; empty if the algorithm has none.
        rates: further graph inputs, scalars to feed at every step (learning rates), with the values that
            the training model gives them; a schedule feeds others.
        reads: further graph inputs, the state that the step reads and that only other entries update, with
            what the training model says it is at first.
        plan: what is kept and what is computed anew, where the step has a budget of memory.
        passes: the optimizations of the graph while it was compiled.
        fingerprint: a digest of what is computed, the same for every target and budget of memory (see `step_digest`).
    """

    model: ir.Model
    state: dict[str, StateTensor]
    batch: list[str]
    results: list[str]
    loss: str
    rates: dict[str, ir.TensorProtocol] = field(default_factory=dict)
    reads: dict[str, ir.TensorProtocol] = field(default_factory=dict)
    plan: Plan | None = None
    source: Source | None = field(default=None, repr=False)
    passes: list[PassReport] = field(default_factory=list, repr=False)
    fingerprint: str = ""

    def __repr__(self) -> str:
        trained = [t for t in self.state.values() if t.kind == "parameter"]
        numbers = sum(t.initial.size for t in trained)
        return (
            f"<Step of {len(self.model.graph)} nodes: feeds {', '.join(self.batch)}; gives {', '.join(self.results)}; "
            f"trains {len(trained)} tensors of {numbers:,} numbers, and keeps {len(self.state) - len(trained)} more>"
        )

    @property
    def recomputes(self) -> bool:
        """True if the step recomputes values to stay within a budget of memory."""
        return self.plan is not None and self.plan.nodes > 0

    def inference_model(self, state: Mapping[str, np.ndarray]) -> ir.Model:
        """The inference model, with the tensors of `state` in it; others keep their values.

        Tensors that belong to an algorithm (of the optimizer) are ignored, so a whole training state may
        be given, that of other entries included.

        Raises:
            BadInput: a tensor that the step does not have, or one of another dtype or shape.
        """
        assert self.source is not None, "the step was not compiled from a training model"
        model, known = self.source.inference(), updated(self.source.infos)
        for name, array in state.items():
            if name not in known and name in self.state:
                continue  # the count of `dropout_masks`, which no model holds
            if name not in known:
                raise UnknownName(name, known, "state tensor")
            held = model.graph.initializers.get(name)
            if held is None or held.const_value is None:
                continue
            old, new = held.const_value, ir.tensor(np.asarray(array, order="C"), name=name)
            if (new.dtype, new.shape) != (old.dtype, old.shape):
                raise BadInput(
                    f"{name!r} is {tensor_text(old.dtype, old.shape)}, not {tensor_text(new.dtype, new.shape)}"
                )
            held.const_value = new
        return model


def prune_step(step: Step, outputs: Iterable[ir.Value]) -> Step:
    """Prune the graph of `step`, in place, to what computes `outputs`, without the inputs that nothing reads.

    Returns:
        The step with those of its batch, its rates, and the state that it only reads, that are left. State that it
        updates stays an input in any case. Inputs are in the order batch, state, reads, rates, others.
    """
    graph = step.model.graph
    graph.outputs[:] = list(dict.fromkeys(outputs))
    finish(graph)
    read, state = values_read(graph), [t.input for t in step.state.values()]
    inputs = {v.name or "": v for v in graph.inputs if v in read or v.name in state}
    batch = [name for name in step.batch if name in inputs]
    reads = {name: t for name, t in step.reads.items() if name in inputs and name not in state}
    rates = {name: t for name, t in step.rates.items() if name in inputs}
    graph.inputs[:] = [inputs[name] for name in dict.fromkeys([*batch, *state, *reads, *rates, *inputs])]
    return replace(step, batch=batch, reads=reads, rates=rates)
