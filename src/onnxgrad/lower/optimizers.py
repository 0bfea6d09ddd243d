"""The optimizers of ai.onnx.preview.training, written out: a step through them is as differentiable as the rest.

Each updates n tensors at once: operands R, T, X₁ … Xₙ, G₁ … Gₙ and so many of each state, outputs X₁ … Xₙ and so many
of each state. The formulas are those of the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.lower.registry import attribute, lowering

DOMAIN = "ai.onnx.preview.training"
Update = Callable[..., Sequence[Var]]


def _each(b: Builder, node: ir.Node, states: int, update: Update) -> list[Var | None]:
    """`update` of (R, T, X, G, *states) for each tensor, its results by kind."""
    rate, count, *rest = (b.var(v) for v in node.inputs if v is not None)
    n = len(rest) // (2 + states)
    norm = float(attribute(b, node, "norm_coefficient") or 0.0)
    found = []
    for i in range(n):
        x, g, *held = rest[i::n]
        r = b.cast_like(rate, x)
        found.append(update(r, count, x, g + x * norm if norm else g, *held))
    return [result[kind] for kind in range(1 + states) for result in found]


@lowering("Adagrad", domain=DOMAIN)
def adagrad(b: Builder, node: ir.Node) -> Sequence[Var | None]:
    """H' = H + ĝ², X' = X - r·ĝ/(√H' + ε) with ĝ = g + λX, r = R/(1 + T·decay)"""
    decay, epsilon = (float(attribute(b, node, k)) for k in ("decay_factor", "epsilon"))

    def update(rate: Var, count: Var, x: Var, g: Var, h: Var) -> Sequence[Var]:
        squares = h + g * g
        r = rate / (b.cast_like(count, x) * decay + 1.0) if decay else rate
        return x - r * g / (b.Sqrt(squares) + epsilon), squares

    return _each(b, node, 1, update)


@lowering("Adam", domain=DOMAIN)
def adam(b: Builder, node: ir.Node) -> Sequence[Var | None]:
    """V' = αV + (1-α)ĝ, H' = βH + (1-β)ĝ², X' = (1-λ')·(X - r·V'/(√H' + ε)) with ĝ = g + λX, r = R·√(1-βᵀ)/(1-αᵀ)"""
    alpha, beta, epsilon = (float(attribute(b, node, k)) for k in ("alpha", "beta", "epsilon"))
    after = 1.0 - float(attribute(b, node, "norm_coefficient_post") or 0.0)

    def update(rate: Var, count: Var, x: Var, g: Var, v: Var, h: Var) -> Sequence[Var]:
        mean, squares = v * alpha + g * (1 - alpha), h * beta + g * g * (1 - beta)
        t = b.cast_like(b.Max(count, b.const(1)), x)  # the first step, T = 0, is not adjusted
        left = [1.0 - b.Pow(b.const(k, x.dtype), t) for k in (alpha, beta)]
        r = b.Where(b.Greater(count, 0), rate * b.Sqrt(left[1]) / left[0], rate)
        moved = x - r * mean / (b.Sqrt(squares) + epsilon)
        return moved * after if after != 1 else moved, mean, squares

    return _each(b, node, 2, update)


@lowering("Momentum", domain=DOMAIN)
def momentum(b: Builder, node: ir.Node) -> Sequence[Var | None]:
    """V' = αV + β'·ĝ, X' = X - R·V', or X - R·(ĝ + α·V') by Nesterov, with ĝ = g + λX and β' = 1 where T = 0, else β"""
    alpha, beta = (float(attribute(b, node, k)) for k in ("alpha", "beta"))
    nesterov = attribute(b, node, "mode") == "nesterov"

    def update(rate: Var, count: Var, x: Var, g: Var, v: Var) -> Sequence[Var]:
        share = b.Where(b.Greater(count, 0), b.const(beta, x.dtype), b.const(1.0, x.dtype))
        velocity = v * alpha + share * g
        return x - rate * (g + velocity * alpha if nesterov else velocity), velocity

    return _each(b, node, 1, update)
