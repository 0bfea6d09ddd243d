"""Scan and Loop: a step of the derivative is the derivative of a step."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.control_flow.iteration import Iteration
from onnxgrad.control_flow.loop_jvp import push
from onnxgrad.control_flow.loop_vjp import pull
from onnxgrad.control_flow.segments import in_segments
from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Var
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import rule
from onnxgrad.rules.rule import Term


def _push(op: Op, tangents: object) -> list[Var | None]:
    _check_types(op.node)
    return push(op)


def _check_types(node: ir.Node) -> None:
    """Check that each state of an iteration keeps its type.

    Raises:
        NotDifferentiable: a state becomes a value of another kind (an optional sequence becomes a sequence).
    """
    it = Iteration.of(node)
    for state, after in zip(it.states, it.following):
        if state.type is not None and after.type is not None and type(state.type) is not type(after.type):
            raise NotDifferentiable(
                f"the state {state.name!r} is {_kind(state)}, and each step makes {_kind(after)} of it\n"
                f"  hint: begin the iteration with {_kind(after)}"
            )


def _kind(value: ir.Value) -> str:
    kinds: dict[object, str] = {
        ir.OptionalType: "an optional",
        ir.SequenceType: "a sequence",
        ir.TensorType: "a tensor",
    }
    return kinds.get(type(value.type), "a value of another type")


@rule("Scan", jvp=_push, rewrite=in_segments)
def scan(op: Op, g: object) -> dict[ir.Value, Term]:
    """(sₜ₊₁, yₜ) = f(sₜ, xₜ, c): last step first, (sₜ̄, xₜ̄, c̄ₜ) = (∂f)ᵀ(sₜ₊₁̄, yₜ̄); c̄ = Σ c̄ₜ"""
    _check_types(op.node)
    return pull(op, g)


@rule("Loop", jvp=_push, rewrite=in_segments)
def loop(op: Op, g: object) -> dict[ir.Value, Term]:
    """(sₜ₊₁, yₜ) = f(t, sₜ, c) while a condition holds: as for Scan, over the steps that were made"""
    _check_types(op.node)
    return pull(op, g)
