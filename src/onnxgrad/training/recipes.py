"""Optimizers as a training model states them: which operator, which attributes, which state.

SGD and the decoupled weight decay of AdamW have no operator in the training domain; they are written with
standard ones. Adam is given the count *including* the present step as its T: then its bias correction is
the usual one from the first step on (with the count of finished steps, the first would have none).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.training.info import DOMAIN

Groups = list[list[Var]]


@dataclass(frozen=True)
class Hyper:
    """Settings of an optimizer; ``None`` stands for its default, or for one that it does not have.

    The `convention` of Adam is where ε stands: "onnx" before the correction of bias, "torch" after it.
    """

    learning_rate: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    convention: str | None = None


@dataclass(frozen=True)
class Recipe:
    """One optimizer.

    Attributes:
        write: ``(builder, hyper, rate, finished, present, xs, gs, *states)`` → the new xs, then the new
            states; `finished` and `present` count the steps without and with this one.
        defaults: the settings it has.
        states: what it keeps per tensor, as suffixes of names.
        counts: whether it needs to know how many steps there were.
        operator: whether it is an operator of the training domain, which takes float32 and float64 only.
    """

    write: Callable[..., Groups]
    defaults: Hyper
    states: tuple[str, ...] = ()
    counts: bool = False
    operator: bool = True


def _emit(b: Builder, op_type: str, r: Var, t: Var, groups: Sequence[Sequence[Var]], **attributes: Any) -> Groups:
    """An optimizer operator on X, G and states, all X first; returns new X and new states."""
    xs = groups[0]
    operands = [x for group in groups for x in group]
    outputs = b.emit(op_type, r, t, *operands, domain=DOMAIN, outputs=len(xs) * (len(groups) - 1), **attributes)
    for out, like in zip(outputs, [x for k, group in enumerate(groups) if k != 1 for x in group]):
        out.value.type, out.value.shape = like.value.type, like.value.shape
    return [list(outputs[k * len(xs) : (k + 1) * len(xs)]) for k in range(len(groups) - 1)]


def _rate_for(b: Builder, r: Var, x: Var) -> Var:
    return b.cast_like(r, x)


def _sgd(b: Builder, h: Hyper, r: Var, finished: Var, present: Var, xs: list[Var], gs: list[Var]) -> Groups:
    """X' = X - R·(G + decay·X)"""
    decayed = [g + b.Mul(x, h.weight_decay) if h.weight_decay else g for x, g in zip(xs, gs)]
    return [[x - _rate_for(b, r, x) * g for x, g in zip(xs, decayed)]]


def _momentum(mode: str) -> Callable[..., Groups]:
    def write(b: Builder, h: Hyper, r: Var, finished: Var, present: Var, *groups: list[Var]) -> Groups:
        return _emit(
            b, "Momentum", r, finished, groups,
            alpha=h.momentum, beta=1.0, norm_coefficient=h.weight_decay, mode=mode,
        )  # fmt: skip

    return write


def _adam(b: Builder, h: Hyper, r: Var, finished: Var, present: Var, *groups: list[Var]) -> Groups:
    assert h.betas is not None
    if h.convention == "torch":
        return _torch_adam(b, h, r, present, groups)
    return _emit(
        b, "Adam", r, present, groups,
        alpha=h.betas[0], beta=h.betas[1], epsilon=h.eps, norm_coefficient=h.weight_decay,
    )  # fmt: skip


def _torch_adam(b: Builder, h: Hyper, r: Var, present: Var, groups: Sequence[list[Var]]) -> Groups:
    """V' = αV + (1-α)G, H' = βH + (1-β)G², X' = X - R/(1-αᵀ)·V'/(√H'/√(1-βᵀ) + ε), as PyTorch has it.

    No operator of the training domain means this, so it is written out. What tensors share is in double precision.
    """
    assert h.betas is not None
    assert h.eps is not None
    alpha, beta = h.betas
    double = int(ir.DataType.DOUBLE)
    t, one = b.Cast(present, to=double), b.const(np.float64(1))
    rate = b.Cast(r, to=double) / (one - b.Pow(b.const(np.float64(alpha)), t))
    root = b.Sqrt(one - b.Pow(b.const(np.float64(beta)), t))
    new: Groups = [[], [], []]
    for x, g, v, s in zip(*groups):
        g = g + b.Mul(x, h.weight_decay) if h.weight_decay else g
        v_new = b.Mul(v, alpha) + b.Mul(g, 1 - alpha)
        s_new = b.Mul(s, beta) + b.Mul(g * g, 1 - beta)
        x_new = x - b.cast_like(rate, x) * (v_new / b.Add(b.Sqrt(s_new) / b.cast_like(root, x), h.eps))
        for kind, value in zip(new, (x_new, v_new, s_new)):
            kind.append(value)
    return new


def _adamw(b: Builder, h: Hyper, r: Var, finished: Var, present: Var, xs: list[Var], *groups: list[Var]) -> Groups:
    """Adam from (1 - R·decay)·X on"""
    if h.weight_decay:
        shrink = 1.0 - b.Mul(r, h.weight_decay)
        xs = [x * _rate_for(b, shrink, x) for x in xs]
    return _adam(b, replace(h, weight_decay=0.0), r, finished, present, xs, *groups)


def _adagrad(b: Builder, h: Hyper, r: Var, finished: Var, present: Var, *groups: list[Var]) -> Groups:
    return _emit(b, "Adagrad", r, finished, groups, epsilon=h.eps, decay_factor=0.0, norm_coefficient=h.weight_decay)


RECIPES: dict[str, Recipe] = {
    "sgd": Recipe(_sgd, Hyper(0.01, 0.0), operator=False),
    "momentum": Recipe(_momentum("standard"), Hyper(0.01, 0.0, momentum=0.9), ("momentum",), True),
    "nesterov": Recipe(_momentum("nesterov"), Hyper(0.01, 0.0, momentum=0.9), ("momentum",), True),
    "adam": Recipe(_adam, Hyper(0.001, 0.0, betas=(0.9, 0.999), eps=1e-8, convention="onnx"), ("mean", "square"), True),
    "adamw": Recipe(
        _adamw, Hyper(0.001, 0.01, betas=(0.9, 0.999), eps=1e-8, convention="onnx"), ("mean", "square"), True
    ),
    "adagrad": Recipe(_adagrad, Hyper(0.01, 0.0, eps=1e-10), ("square",), True),
}


def recipe_named(name: str, asked: Hyper) -> tuple[Recipe, Hyper]:
    """The optimizer called `name` with all of its settings; BadInput where one does not belong to it."""
    if name not in RECIPES:
        raise BadInput(f"there is no optimizer {name!r}; there are: {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    settings = dict(vars(recipe.defaults))
    for setting, value in vars(asked).items():
        if value is None:
            continue
        if settings[setting] is None:
            has = ", ".join(s for s, default in settings.items() if default is not None)
            raise BadInput(f"the optimizer {name!r} has no setting {setting!r}; it has: {has}")
        settings[setting] = value
    hyper = Hyper(**settings)
    for setting in ("learning_rate", "weight_decay", "eps"):
        value = getattr(hyper, setting)
        if value is not None and not 0 <= value < float("inf"):
            raise BadInput(f"{setting} must be a number ≥ 0, not {value}")
    for setting, number in (("momentum", hyper.momentum), *(("betas", x) for x in hyper.betas or ())):
        if number is not None and not 0 <= number < 1:
            raise BadInput(f"{setting} must be in [0, 1), not {number}")
    if hyper.convention not in (None, "onnx", "torch"):
        raise BadInput(f"convention must be 'onnx' or 'torch', not {hyper.convention!r}")
    return recipe, hyper
