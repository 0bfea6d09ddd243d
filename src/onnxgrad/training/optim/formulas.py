"""Optimizers as their papers (or PyTorch) write them: one function per optimizer, from X, G and its states to new ones.

A formula is written over `o`: ``o.Sqrt(x)`` emits an operator, ``o.beta1`` is a setting, ``o.rate`` the learning rate
in the type of the tensor. `o.R` and `o.T` are the rate and the number of steps including this one as doubles: values
that all tensors share are computed from them once, in double precision, and cast by ``o.cast(…)``. State starts as
zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var

DOUBLE = ir.DataType.DOUBLE
Shape = tuple[int, ...]


class Formula:
    """The context of an optimizer's formula besides tensors: operators, settings, rate and time."""

    def __init__(
        self,
        b: Builder,
        settings: Mapping[str, Any],
        rate: Var,
        present: Callable[[], Var],
        dtype: ir.DataType,
        kept: Callable[[str, float, Callable[[Var], Var]], Var],
    ) -> None:
        self.b, self.settings, self.dtype, self.kept = b, settings, dtype, kept
        self._rate, self._present = rate, present

    def __getattr__(self, name: str) -> Any:
        if name in ("beta1", "beta2"):
            return self.settings["betas"][int(name[-1]) - 1]
        return self.settings[name] if name in self.settings else getattr(self.b, name)

    @property
    def R(self) -> Var:
        """The learning rate, a double."""
        return self.b.Cast(self._rate, to=int(DOUBLE))

    @property
    def T(self) -> Var:
        """The number of steps, this one included, a double."""
        return self.b.Cast(self._present(), to=int(DOUBLE))

    def power(self, base: float, exponent: Var) -> Var:
        """`base` to a double."""
        return self.b.Pow(self.b.const(np.float64(base)), exponent)

    def cast(self, scalar: Var) -> Var:
        """A scalar in the type of the tensor."""
        return scalar if scalar.dtype == self.dtype else self.b.Cast(scalar, to=int(self.dtype))

    @property
    def rate(self) -> Var:
        """The learning rate in the type of the tensor."""
        return self.cast(self._rate)

    def mixed(self, old: Var, new: Var, share: float) -> Var:
        """share·old + (1 - share)·new"""
        return self.b.Mul(old, float(share)) + self.b.Mul(new, 1 - share)

    def with_decay(self, x: Var, g: Var) -> Var:
        """G + λX: decay as a part of the gradient."""
        return g + self.b.Mul(x, self.weight_decay) if self.weight_decay else g

    def shrunk(self, x: Var) -> Var:
        """(1 - Rλ)·X: decay of the weights themselves, in double precision for those of doubles."""
        if not self.weight_decay:
            return x
        rate = self.rate if self.dtype == DOUBLE else self._rate
        return x * self.cast(self.b.Sub(1.0, self.b.Mul(rate, self.weight_decay)))

    def unbiased(self, v: Var, share: float) -> Var:
        """V/(1 - shareᵀ)"""
        return v / self.cast(1.0 - self.power(share, self.T))

    def moments(self) -> dict[str, float]:
        """The decay rates and ε, by the names that kernels of the Adam family use."""
        a, b = float(self.beta1), float(self.beta2)
        return {"alpha": a, "alpha_rest": 1 - a, "beta": b, "beta_rest": 1 - b, "epsilon": float(self.eps)}

    def rms(self, x: Var) -> Var:
        """√ of the mean of squares: a scalar."""
        return self.b.Sqrt(self.b.ReduceMean(x * x, keepdims=0))


def same(*names: str) -> Callable[[Mapping[str, Any], Shape], dict[str, Shape]]:
    """States with the shape of the tensor."""
    return lambda settings, shape: dict.fromkeys(names, shape)


def sgd(o: Formula, x: Var, g: Var) -> list[Var]:
    """X' = X - R·(G + λX)"""
    new = x - o.rate * o.with_decay(x, g)
    o.named("Sgd", [new], of=[x, g, o.rate], norm=o.weight_decay)
    return [new]


def adam(o: Formula, x: Var, g: Var, v: Var, h: Var) -> list[Var]:
    """G += λX; V' = β₁V + (1-β₁)G, H' = β₂H + (1-β₂)G²; X' = X - R/(1-β₁ᵀ)·V'/(√H'/√(1-β₂ᵀ) + ε)"""
    return _adam(o, x, g, v, h, o.weight_decay)


def adamw(o: Formula, x: Var, g: Var, v: Var, h: Var) -> list[Var]:
    """Adam with decoupled weight decay: X is shrunk by 1 - Rλ; the gradient gets no λX"""
    return _adam(o, o.shrunk(x), g, v, h, 0.0)


def _adam(o: Formula, x: Var, g: Var, v: Var, h: Var, decay: float) -> list[Var]:
    whole = o.with_decay(x, g) if decay else g
    v_new, h_new = o.mixed(v, whole, o.beta1), o.mixed(h, whole * whole, o.beta2)
    # With √(1-β₂ᵀ) multiplied into R and ε, a tensor has one division less.
    root = o.Sqrt(1.0 - o.power(o.beta2, o.T))
    rate, scale = o.cast(o.R * root / (1.0 - o.power(o.beta1, o.T))), o.cast(root)
    new = [x - rate * (v_new / o.Add(o.Sqrt(h_new), o.Mul(scale, o.eps))), v_new, h_new]
    o.named("Adam", new, of=[x, g, v, h, rate, scale], norm=decay, post=1.0, **o.moments())
    return new


def nadam(o: Formula, x: Var, g: Var, v: Var, h: Var) -> list[Var]:
    """μ_T = β₁(1 - 0.96^(Tψ)/2), Π = μ_1…μ_T; X' = X - R·((1-μ_T)/(1-Π)·G + μ_{T+1}/(1-Πμ_{T+1})·V')/(√Ĥ' + ε)"""
    whole = o.with_decay(x, g)
    v_new, h_new = o.mixed(v, whole, o.beta1), o.mixed(h, whole * whole, o.beta2)
    now, after = (
        o.Mul(1.0 - o.Mul(o.power(0.96, o.Mul(t, o.momentum_decay)), 0.5), o.beta1) for t in (o.T, o.Add(o.T, 1.0))
    )
    product = o.kept("momentum_product", 1.0, lambda old: old * now)
    share, ahead = o.cast(o.R * (1.0 - now) / (1.0 - product)), o.cast(o.R * after / (1.0 - product * after))
    root = o.cast(o.Sqrt(1.0 - o.power(o.beta2, o.T)))
    new = [x - (share * whole + ahead * v_new) / o.Add(o.Sqrt(h_new) / root, o.eps), v_new, h_new]
    o.named("NAdam", new, of=[x, g, v, h, share, root, ahead], norm=o.weight_decay, **o.moments())
    return new


def rmsprop(o: Formula, x: Var, g: Var, h: Var, *more: Var) -> list[Var]:
    """H' = αH + (1-α)G², X' = X - R·G/(√H' + ε); centered: √(H' - M'²); with momentum: V' = μV + G/…, X' = X - R·V'"""
    whole = o.with_decay(x, g)
    old, rest = [h, *more], list(more)
    h = o.mixed(h, whole * whole, o.alpha)
    states, square = [h], h
    if o.centered:
        mean = o.mixed(rest.pop(0), whole, o.alpha)
        square = o.Max(h - mean * mean, 0.0)
        states.append(mean)
    move = whole / o.Add(o.Sqrt(square), o.eps)
    if o.momentum:
        move = o.Mul(rest.pop(0), o.momentum) + move
        states.append(move)
    new = [x - o.rate * move, *states]
    name = "RMSProp" + "Centered" * bool(o.centered) + "Moving" * bool(o.momentum)
    shares = {"alpha": o.alpha, "alpha_rest": 1 - o.alpha, "momentum": o.momentum}
    o.named(name, new, of=[x, g, *old, o.rate], norm=o.weight_decay, epsilon=o.eps, **shares)
    return new


def rmsprop_states(settings: Mapping[str, Any], shape: Shape) -> dict[str, Shape]:
    """The state: the square; the mean if centered; the momentum if there is one."""
    wanted = {"square": True, "mean": settings["centered"], "momentum": settings["momentum"]}
    return {name: shape for name, on in wanted.items() if on}


def lion(o: Formula, x: Var, g: Var, v: Var) -> list[Var]:
    """X' = (1 - Rλ)X - R·sign(β₁V + (1-β₁)G), V' = β₂V + (1-β₂)G"""
    x = o.shrunk(x)
    new = [x - o.rate * o.Sign(o.mixed(v, g, o.beta1)), o.mixed(v, g, o.beta2)]
    shares = {"now": o.beta1, "now_rest": 1 - o.beta1, "later": o.beta2, "later_rest": 1 - o.beta2}
    o.named("Lion", new, of=[x, g, v, o.rate], norm=0.0, **shares)
    return new


def lamb(o: Formula, x: Var, g: Var, v: Var, h: Var) -> list[Var]:
    """u = V̂'/(√Ĥ' + ε) + λX, X' = X - R·‖X‖/‖u‖·u, the quotient 1 where a norm is 0"""
    v, h = o.mixed(v, g, o.beta1), o.mixed(h, g * g, o.beta2)
    u = o.with_decay(x, o.unbiased(v, o.beta1) / o.Add(o.Sqrt(o.unbiased(h, o.beta2)), o.eps))
    long, wide = o.ReduceL2(x, keepdims=0), o.ReduceL2(u, keepdims=0)
    both = o.And(long > 0.0, wide > 0.0)
    trust = o.Where(both, long / o.Where(both, wide, 1.0), 1.0)
    return [x - o.rate * trust * u, v, h]


def adafactor(o: Formula, x: Var, g: Var, *states: Var) -> list[Var]:
    """R' = βR + (1-β) row means of G², C' the same of columns, β = 1 - T^decay; u = G/√(R'C'/mean R')

    X' = X - max(ε₂, rms X)·min(R, 1/√T)/max(1, rms(u)/d)·u; vectors keep all of H' = βH + (1-β)G².
    """
    new = o.cast(o.Pow(o.T, o.b.const(np.float64(o.beta2_decay))))

    def decay(old: Var, now: Var) -> Var:
        return old + new * (now - old)

    tiny = float(np.finfo(x.dtype.numpy()).eps)  # type: ignore[union-attr]
    if x.rank > 1:
        rows = decay(states[0], o.ReduceMean(g * g, [-1], keepdims=1))
        columns = decay(states[1], o.ReduceMean(g * g, [-2], keepdims=1))
        square, kept = rows @ columns / o.Max(o.ReduceMean(rows, [-2], keepdims=1), tiny), [rows, columns]
    else:
        square = decay(states[0], g * g)
        kept = [square]
    u = g / o.Sqrt(o.Max(square, tiny * tiny))
    slow = o.cast(o.Min(o.R, 1.0 / o.Sqrt(o.T)))
    scale = o.Max(o.rms(x), o.least) * slow / o.Max(o.Div(o.rms(u), o.clip), 1.0)
    return [o.shrunk(x) - scale * u, *kept]


def adafactor_states(settings: Mapping[str, Any], shape: Shape) -> dict[str, Shape]:
    """Means over the last and over the second to last axis; of a vector the square of every element."""
    if len(shape) < 2:
        return {"square": shape}
    return {"rows": (*shape[:-1], 1), "columns": (*shape[:-2], 1, shape[-1])}


def muon(o: Formula, x: Var, g: Var, *states: Var) -> list[Var]:
    """V' = μV + (1-μ)G, X' = (1 - Rλ)X - R·s·orthogonal((1-μ)G + μV'); nesterov = false: orthogonal(V')

    Kernels are matrices [out, rest]; s = √max(1, rows/columns), or 0.2·√max(rows, columns) to match the size of the
    steps of AdamW ("match_rms_adamw"). Tensors with fewer than two axes follow AdamW.
    """
    if x.rank < 2:
        return adamw(o, x, g, *states)
    v = o.mixed(states[0], g, o.momentum)
    move = o.mixed(v, g, o.momentum) if o.nesterov else v
    shape = [int(d) for d in x.shape or ()]  # type: ignore[arg-type]
    rows, columns = shape[0], math.prod(shape[1:])
    flat = move if len(shape) == 2 else o.b.reshape(move, [rows, columns])
    u = _orthogonal(o, flat, rows > columns)
    u = u if len(shape) == 2 else o.b.reshape(u, shape)
    size = math.sqrt(max(1, rows / columns)) if o.adjust == "original" else 0.2 * math.sqrt(max(rows, columns))
    return [o.shrunk(x) - o.Mul(o.rate, size) * u, v]


def _orthogonal(o: Formula, x: Var, tall: bool) -> Var:
    """Five steps of X ← aX + (bXXᵀ + c(XXᵀ)²)X from X/‖X‖ on: Newton-Schulz towards UVᵀ of X = USVᵀ."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = o.Transpose(x, perm=[1, 0]) if tall else x
    x = x / o.Max(o.ReduceL2(x, keepdims=1), 1e-7)
    for _ in range(5):
        gram = x @ o.Transpose(x, perm=[1, 0])
        x = o.Mul(x, a) + (o.Mul(gram, b) + o.Mul(gram @ gram, c)) @ x
    return o.Transpose(x, perm=[1, 0]) if tall else x


def muon_states(settings: Mapping[str, Any], shape: Shape) -> dict[str, Shape]:
    """The momentum of matrices and kernels; those of AdamW for vectors."""
    return {"momentum": shape} if len(shape) > 1 else {"mean": shape, "square": shape}
