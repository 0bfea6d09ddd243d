"""The states at the start of each step of an iteration, saved for the backward pass.

The primal iteration stacks states of fixed shape. States of a Loop whose shape may change between steps go into a
sequence, which a second Loop fills; so do the elements of sequences and optionals.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.control_flow.iteration import Iteration, ScanAxis, loop, stack_outputs
from onnxgrad.control_flow.reverse_iteration import StepInput
from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Var, containers, same_shape
from onnxgrad.ir.match import not_none
from onnxgrad.ir.subgraphs import formal, give
from onnxgrad.rules.op import Op


def saved_state(op: Op, i: int, inner: ir.Value) -> StepInput:
    """State `i` at the start of each step, read as `inner`, last step first."""
    it = Iteration.of(op.node)
    state, first = it.states[i], it.initial[i]
    if isinstance(state.type, ir.OptionalType) and not isinstance(state.type.elem_type, ir.TensorType):
        raise NotDifferentiable(
            f"its derivative stores the state {state.name!r} of each step in a sequence, and ONNX has no sequences of "
            "optional sequences\n  hint: carry the sequence itself, or read it before the loop"
        )
    if not isinstance(state.type, ir.TensorType):
        flat, lengths = _collect_states(op, i)
        return StepInput(inner, flat, ScanAxis(0, backwards=True), in_sequence=True, lengths=lengths)
    if it.lead and not same_shape(op.builder.var(state), op.builder.var(first)):
        return StepInput(inner, _collect_states(op, i)[0], ScanAxis(0, backwards=True), in_sequence=True)
    for k, (value, slot) in enumerate(zip(it.slice_results, it.outs)):
        maker = value.producer()
        if maker is not None and maker.op_type == "Identity" and maker.inputs[0] is state and slot == ScanAxis():
            return StepInput(inner, op.node.outputs[it.count + k], ScanAxis(0, backwards=True))
    return StepInput(inner, stack_outputs(op, state), ScanAxis(0, backwards=True))


def _collect_states(op: Op, i: int) -> tuple[ir.Value, ir.Value | None]:
    """The sequence of the values of state `i` at the start of each step.

    Where it was a sequence itself, or an optional: all the elements one after the other, and how many each step had.
    """
    o = op.builder
    b, it = Iteration.of(op.node).copy(o)
    state, body = it.states[i], it.body
    nested = not isinstance(state.type, ir.TensorType)
    kind = ir.SequenceType(state.type.elem_type if nested else state.type)  # type: ignore[union-attr, arg-type]
    so_far = formal(b, ir.Value(name="", type=kind), "tape")
    if isinstance(state.type, ir.OptionalType):
        has = b.OptionalHasElement(b.var(state))
        count = b.Cast(has, to=int(ir.DataType.INT64))
        longer = containers.either(
            b,
            has,
            lambda w: w.SequenceInsert(w.var(so_far.value), w.OptionalGetElement(w.var(state))),
            lambda w: w.var(so_far.value),
        )
    elif nested:
        count = b.SequenceLength(b.var(state))
        longer = containers.extend_sequence(b, so_far, b.var(state), b.const(0), count)
    else:
        longer = b.SequenceInsert(so_far, b.var(state))
    longer.value.type = kind
    head = list(body.outputs[:1])
    kept = it.states_for([*head, state])
    give(b, [*head, *(it.following[k] for k in kept), longer, *([count] if nested else [])])
    lead = list(body.inputs[:2])
    states = [it.states[k] for k in kept]
    body.inputs[:] = [*lead, *states, so_far.value]
    empty = o.SequenceEmpty(dtype=int(not_none(state.dtype)))
    first = [Var(o, it.initial[k]) for k in kept]
    results = loop(o, body, op.node.inputs[0], op.node.inputs[1], [*first, empty])
    return results[len(kept)].value, results[-1].value if nested else None
