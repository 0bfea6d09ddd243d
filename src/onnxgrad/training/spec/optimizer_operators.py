"""What the optimizer operators of the training domain mean, as standard operators.

Each tensor gets the shortest chain of threaded elementwise operators; what all tensors share (rates, bias
corrections) is computed once, on scalars and in double precision. Terms whose coefficient is 0 are not
written. Coefficients are taken at their shortest decimal: the float32 attribute 0.999 means 0.999, whose
distance to 1 the rounding to float32 would change by 1.3e-5.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.names import described
from onnxgrad.transforms.gradient_node import DOMAIN

Grouped = list[list[Var]]
DOUBLE = int(ir.DataType.DOUBLE)


def _coefficient(node: ir.Node, name: str, default: float | None = None) -> float:
    """A float attribute at its shortest decimal."""
    given = node.attributes.get(name)
    if given is None:
        if default is None:
            raise BadInput(f"{described(node)} lacks the attribute {name!r}")
        return default
    return float(str(np.float32(given.as_float())))


def _operands(builder: Builder, node: ir.Node, kinds: int) -> tuple[Var, Var, Grouped]:
    """R, T, and the tensors by kind: all X, then all G, then the states."""
    if any(v is None for v in node.inputs) or len(node.inputs) < 2 + kinds or (len(node.inputs) - 2) % kinds:
        has = f"{described(node)} has {len(node.inputs)} inputs"
        raise BadInput(f"{has}; it takes R, T and {kinds} per tensor")
    r, t, *rest = [Var(builder, v) for v in node.inputs if v is not None]
    n = len(rest) // kinds
    return r, t, [rest[k * n : (k + 1) * n] for k in range(kinds)]


def _plus_scaled(b: Builder, x: Var, factor: float, y: Var) -> Var:
    """x + factor·y"""
    if factor == 0:
        return x
    return x + (y if factor == 1 else b.Mul(y, factor))


def _like(b: Builder, scalar: Var, x: Var) -> Var:
    """A scalar (of shape [] or [1]) in the dtype of `x`, without an axis that could broadcast `x`."""
    scalar = b.cast_like(scalar, x)
    return scalar if scalar.shape == () else b.reshape(scalar, np.array([], np.int64))


def adam(b: Builder, node: ir.Node) -> Grouped:
    """V' = αV + (1-α)G, H' = βH + (1-β)G², X' = (1-p)·(X - R'·V'/(√H' + ε)), G including norm·X.

    R' = R·√(1-βᵀ)/(1-αᵀ), at T = 0 R.
    """
    alpha, beta = _coefficient(node, "alpha", 0.9), _coefficient(node, "beta", 0.999)
    epsilon, norm = _coefficient(node, "epsilon", 1e-6), _coefficient(node, "norm_coefficient", 0.0)
    post = _coefficient(node, "norm_coefficient_post", 0.0)
    r, t, (xs, gs, vs, hs) = _operands(b, node, 4)
    steps = b.Cast(t, to=DOUBLE)
    one = b.const(np.float64(1))
    correction = b.Div(
        b.Sqrt(one - b.Pow(b.const(np.float64(beta)), steps)), one - b.Pow(b.const(np.float64(alpha)), steps)
    )
    rate = b.Cast(r, to=DOUBLE) * b.Where(b.Greater(t, b.const(np.int64(0))), correction, one)
    new: Grouped = [[], [], []]
    for x, g, v, h in zip(xs, gs, vs, hs):
        whole = _plus_scaled(b, g, norm, x)
        v_new = b.Mul(v, alpha) + b.Mul(whole, 1 - alpha)
        h_new = b.Mul(h, beta) + b.Mul(whole * whole, 1 - beta)
        x_new = x - _like(b, rate, x) * (v_new / b.Add(b.Sqrt(h_new), epsilon))
        x_new = x_new if post == 0 else b.Mul(x_new, 1 - post)
        b.named(
            "Adam", [x_new, v_new, h_new], of=[x, g, v, h, _like(b, rate, x), None],
            norm=norm, alpha=alpha, alpha_rest=1 - alpha, beta=beta, beta_rest=1 - beta, epsilon=epsilon, post=1 - post,
        )  # fmt: skip
        for kind, value in zip(new, (x_new, v_new, h_new)):
            kind.append(value)
    return new


def momentum(b: Builder, node: ir.Node) -> Grouped:
    """V' = αV + β'G, X' = X - R·V' (nesterov: X - R·(G + αV')), G including norm·X.

    β' = 1 at T = 0, else β.
    """
    alpha, beta, norm = (_coefficient(node, name) for name in ("alpha", "beta", "norm_coefficient"))
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else ""
    if mode not in ("standard", "nesterov"):
        raise BadInput(f"{described(node)}: mode must be 'standard' or 'nesterov', not {mode!r}")
    r, t, (xs, gs, vs) = _operands(b, node, 3)
    new: Grouped = [[], []]
    for x, g, v in zip(xs, gs, vs):
        whole = _plus_scaled(b, g, norm, x)
        factor, step = None, whole
        if beta != 1:
            first = b.Where(b.Greater(t, b.const(np.int64(0))), b.const(beta, x.dtype), b.const(1, x.dtype))
            factor = _like(b, first, x)
            step = factor * whole
        v_new = _plus_scaled(b, step, alpha, v)
        direction = v_new if mode == "standard" else _plus_scaled(b, whole, alpha, v_new)
        x_new = x - _like(b, r, x) * direction
        if alpha:
            b.named(
                "Momentum", [x_new, v_new], of=[x, g, v, _like(b, r, x), factor],
                norm=norm, alpha=alpha, nesterov=float(mode == "nesterov"),
            )  # fmt: skip
        new[0].append(x_new)
        new[1].append(v_new)
    return new


def adagrad(b: Builder, node: ir.Node) -> Grouped:
    """H' = H + G², X' = X - R/(1 + T·decay)·G/(√H' + ε), G including norm·X."""
    epsilon, norm = _coefficient(node, "epsilon", 1e-6), _coefficient(node, "norm_coefficient", 0.0)
    decay = _coefficient(node, "decay_factor", 0.0)
    r, t, (xs, gs, hs) = _operands(b, node, 3)
    rate = b.Cast(r, to=DOUBLE)
    if decay:
        rate = rate / b.Add(b.Mul(b.Cast(t, to=DOUBLE), decay), 1.0)
    new: Grouped = [[], []]
    for x, g, h in zip(xs, gs, hs):
        whole = _plus_scaled(b, g, norm, x)
        h_new = h + whole * whole
        scaled = _like(b, rate if decay else r, x)
        x_new = x - scaled * (whole / b.Add(b.Sqrt(h_new), epsilon))
        b.named("Adagrad", [x_new, h_new], of=[x, g, h, scaled], norm=norm, epsilon=epsilon)
        new[0].append(x_new)
        new[1].append(h_new)
    return new


#: The operators of the training domain that update tensors.
OPTIMIZERS: dict[str, Callable[[Builder, ir.Node], Grouped]] = {
    "Adam": adam,
    "Momentum": momentum,
    "Adagrad": adagrad,
}

__all__ = ["DOMAIN", "OPTIMIZERS", "adagrad", "adam", "momentum"]
