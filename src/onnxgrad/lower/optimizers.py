"""The optimizers of ai.onnx.preview.training: the one place where their formulas are written.

This module serves three purposes: the operators of a training step, the derivative of a step, and the function bodies
for other runtimes. An operator updates n tensors at once: operands R, T, X₁ … Xₙ, G₁ … Gₙ and n of each state; outputs
X₁ … Xₙ and n of each state. Each tensor gets the shortest chain of threaded elementwise operators. Values that all
tensors share (rates, bias corrections) are computed once, on scalars in double precision.

A coefficient is a number or, in a function body, a double variable. Terms whose coefficient is the number 0 are not
written. A training step takes numbers at their shortest decimal: to it the float32 attribute 0.999 means 0.999, whose
distance to 1 the rounding to float32 would change by 1.3e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.names import described
from onnxgrad.lower.registry import lowering

DOMAIN = "ai.onnx.preview.training"
DOUBLE = int(ir.DataType.DOUBLE)
#: The operands of an operator for each tensor: X, G and the states.
KINDS = {"Adagrad": ("X", "G", "H"), "Adam": ("X", "G", "V", "H"), "Momentum": ("X", "G", "V")}

Coefficient = float | Var


def coefficients(op_type: str) -> dict[str, float | None]:
    """The float attributes of an optimizer and their defaults; None for a required one."""
    attributes = onnx.defs.get_schema(op_type, 1, DOMAIN).attributes
    floats = sorted(name for name, a in attributes.items() if a.type == onnx.defs.OpSchema.AttrType.FLOAT)
    return {name: None if attributes[name].required else attributes[name].default_value.f for name in floats}


@dataclass(frozen=True)
class _Scalars:
    """The scalars of an update formula: R, T and coefficients, with casts to the dtype of the tensor."""

    b: Builder
    rate: Var
    count: Var
    given: Mapping[str, Any]
    tensor: Var

    @property
    def generic(self) -> bool:
        """True in a function body, whose tensors have the dtype of the caller's tensors."""
        return any(isinstance(c, Var) for c in self.given.values())

    def double(self, scalar: Coefficient) -> Var:
        """A scalar in double precision."""
        one = self.b.const(np.float64(1))
        return self.b.cast_like(scalar, one) if isinstance(scalar, Var) else self.b.const(np.float64(scalar))

    def cast(self, scalar: Coefficient) -> Var:
        """A scalar (of shape [] or [1]) in the dtype of the tensor, without an axis that could broadcast it."""
        if not isinstance(scalar, Var):
            scalar = self.b.const(scalar, ir.DataType.DOUBLE if self.generic else self.tensor.dtype)
        flat = scalar if scalar.shape == () else self.b.reshape(scalar, np.array([], np.int64))
        return self.b.CastLike(flat, self.tensor) if self.generic else self.b.cast_like(flat, self.tensor)

    def later(self, factor: Var) -> Var:
        """`factor` where T > 0, else 1."""
        return self.b.Where(self.b.Greater(self.count, self.b.const(np.int64(0))), factor, self.double(1))

    def scaled(self, x: Var, factor: Coefficient) -> Var:
        """factor·x"""
        return self.b.Mul(x, self.cast(factor))

    def plus(self, x: Var, factor: Coefficient, y: Var) -> Var:
        """x + factor·y"""
        if factor == 0:
            return x
        return x + (y if factor == 1 else self.scaled(y, factor))

    def named(self, name: str, outputs: Sequence[Var], of: Sequence[Var | None], **numbers: Any) -> None:
        """Name the part for kernels, which take numbers."""
        if not self.generic:
            self.b.named(name, outputs, of=of, **numbers)


def _adam(o: _Scalars, x: Var, g: Var, v: Var, h: Var) -> list[Var]:
    """V' = αV + (1-α)G, H' = βH + (1-β)G², X' = (1-p)·(X - R'·(V'/(√H' + ε))), G including norm·X.

    R' = R·√(1-βᵀ)/(1-αᵀ), at T = 0 R.
    """
    b, alpha, beta, norm, epsilon, post = (
        o.b, *(o.given[k] for k in ("alpha", "beta", "norm_coefficient", "epsilon", "norm_coefficient_post"))
    )  # fmt: skip
    steps = o.double(o.count)
    correction = b.Sqrt(1.0 - b.Pow(o.double(beta), steps)) / (1.0 - b.Pow(o.double(alpha), steps))
    rate = o.double(o.rate) * o.later(correction)
    whole = o.plus(g, norm, x)
    v_new = o.scaled(v, alpha) + o.scaled(whole, 1 - alpha)
    h_new = o.scaled(h, beta) + o.scaled(whole * whole, 1 - beta)
    x_new = x - o.cast(rate) * (v_new / b.Add(b.Sqrt(h_new), o.cast(epsilon)))
    x_new = x_new if post == 0 else o.scaled(x_new, 1 - post)
    o.named(
        "Adam", [x_new, v_new, h_new], [x, g, v, h, o.cast(rate), None],
        norm=norm, alpha=alpha, alpha_rest=1 - alpha, beta=beta, beta_rest=1 - beta, epsilon=epsilon, post=1 - post,
    )  # fmt: skip
    return [x_new, v_new, h_new]


def _momentum(o: _Scalars, x: Var, g: Var, v: Var) -> list[Var]:
    """V' = αV + β'G, X' = X - R·V' (nesterov: X - R·(G + αV')), G including norm·X; β' = 1 at T = 0, else β."""
    alpha, beta, norm, mode = (o.given[k] for k in ("alpha", "beta", "norm_coefficient", "mode"))
    whole = o.plus(g, norm, x)
    factor = None if beta == 1 else o.cast(o.later(o.double(beta)))
    v_new = o.plus(whole if factor is None else factor * whole, alpha, v)
    move = v_new if mode == "standard" else o.plus(whole, alpha, v_new)
    move = o.b.Where(mode, move, v_new) if isinstance(mode, Var) else move
    x_new = x - o.cast(o.rate) * move
    if alpha:
        of = [x, g, v, o.cast(o.rate), factor]
        o.named("Momentum", [x_new, v_new], of, norm=norm, alpha=alpha, nesterov=float(mode == "nesterov"))
    return [x_new, v_new]


def _adagrad(o: _Scalars, x: Var, g: Var, h: Var) -> list[Var]:
    """H' = H + G², X' = X - R/(1 + T·decay)·(G/(√H' + ε)), G including norm·X."""
    decay, epsilon, norm = (o.given[k] for k in ("decay_factor", "epsilon", "norm_coefficient"))
    rate = o.double(o.rate) / o.b.Add(o.b.Mul(o.double(o.count), decay), 1.0) if decay else o.rate
    whole = o.plus(g, norm, x)
    h_new = h + whole * whole
    x_new = x - o.cast(rate) * (whole / o.b.Add(o.b.Sqrt(h_new), o.cast(epsilon)))
    o.named("Adagrad", [x_new, h_new], [x, g, h, o.cast(rate)], norm=norm, epsilon=epsilon)
    return [x_new, h_new]


_FORMULAS: dict[str, Callable[..., list[Var]]] = {"Adagrad": _adagrad, "Adam": _adam, "Momentum": _momentum}


def updated(
    b: Builder, op_type: str, operands: Sequence[Var], given: Mapping[str, Any], shortest: bool = False
) -> list[Var]:
    """The outputs of an optimizer on `operands` R, T, X, G and states.

    Args:
        b: where they are written.
        op_type: the optimizer.
        operands: as the operator's own.
        given: its coefficients, as numbers or variables; and its mode, which as a variable is whether it is nesterov.
        shortest: whether float32 numbers stand for their shortest decimals.
    """
    rate, count, *tensors = operands
    n = len(tensors) // len(KINDS[op_type])
    given = {**coefficients(op_type), **given}
    if shortest:
        given = {k: float(str(np.float32(c))) if isinstance(c, float) else c for k, c in given.items()}
    found = [
        _FORMULAS[op_type](_Scalars(b, rate, count, given, of_one[0]), *of_one)
        for of_one in (tensors[i::n] for i in range(n))
    ]
    return [new for kind in zip(*found) for new in kind]


def update(b: Builder, node: ir.Node, shortest: bool = False) -> list[Var]:
    """A node of an optimizer, written out (see `updated`)."""
    settings = {name: a.value for name, a in node.attributes.items()}
    kinds, operands = len(KINDS[node.op_type]), [b.var(v) for v in node.inputs if v is not None]
    for name, default in coefficients(node.op_type).items():
        if default is None and name not in settings:
            raise BadInput(f"{described(node)} lacks the attribute {name!r}")
    if node.op_type == "Momentum" and settings.get("mode") not in ("standard", "nesterov"):
        raise BadInput(f"{described(node)}: mode must be 'standard' or 'nesterov', not {settings.get('mode')!r}")
    if len(operands) < len(node.inputs) or len(operands) < 2 + kinds or (len(operands) - 2) % kinds:
        raise BadInput(f"{described(node)} has {len(node.inputs)} inputs; it takes R, T and {kinds} per tensor")
    return updated(b, node.op_type, operands, settings, shortest)


def _register_formula(op_type: str) -> None:
    """Register `update` for an operator under the formula of that operator."""

    def lowered(b: Builder, node: ir.Node, *_: Var | None) -> list[Var]:
        return update(b, node)

    lowered.__doc__ = _FORMULAS[op_type].__doc__
    lowering(op_type, domain=DOMAIN)(lowered)


for _op_type in KINDS:
    _register_formula(_op_type)
