"""Scan and Loop: a step of the derivative is the derivative of a step."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.control_flow.loop_jvp import push
from onnxgrad.control_flow.loop_vjp import pull
from onnxgrad.control_flow.segments import in_segments
from onnxgrad.ir import Var
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import rule


def _push(op: Op, tangents: object) -> list[Var | None]:
    return push(op)


@rule("Scan", jvp=_push, rewrite=in_segments)
def scan(op: Op, g: object) -> dict[ir.Value, Var]:
    """(sₜ₊₁, yₜ) = f(sₜ, xₜ, c): last step first, (sₜ̄, xₜ̄, c̄ₜ) = (∂f)ᵀ(sₜ₊₁̄, yₜ̄); c̄ = Σ c̄ₜ"""
    return pull(op, g)


@rule("Loop", jvp=_push, rewrite=in_segments)
def loop(op: Op, g: object) -> dict[ir.Value, Var]:
    """(sₜ₊₁, yₜ) = f(t, sₜ, c) while a condition holds: as for Scan, over the steps that were made"""
    return pull(op, g)
