"""Optimizers by name: settings, state, and the equivalent operator of the training domain, if any.

If there is one (Momentum, Adagrad; Adam with ``convention="onnx"``), a training model uses it, and any runtime of the
specification understands it; the others are written out by their formulas. The operator Adam adds ε to √H before the
correction of bias, PyTorch and optax add it afterwards. Its T is the count *including* the present step: then its bias
correction is the usual one from the first step on (with the count of finished steps, the first would have none).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxgrad.errors import BadInput
from onnxgrad.ir import Var
from onnxgrad.training.optim import formulas as f
from onnxgrad.training.option_strings import completed, looked_up, one_of

Settings = Mapping[str, Any]

#: The optimizer of a call, a command or a recipe that names none.
DEFAULT_OPTIMIZER = "adam"


@dataclass(frozen=True)
class OperatorNode:
    """A node of the training domain: its type, its attributes, whether its T includes the present step.

    `shrinks`: the weights passed to it were shrunk by 1 - Rλ before.
    """

    type: str
    attributes: Mapping[str, Any]
    present: bool = False
    shrinks: bool = False


@dataclass(frozen=True)
class OptimizerRule:
    """One optimizer in (init, update) form.

    Attributes:
        update: from the tensor, its gradient and its states to the new tensor and the new states.
        settings: its settings with their defaults.
        states: the shape of each state, which begins as zeros, by what the name of the tensor is followed by.
        operator: the operator that says the same for these settings, if there is one.
        source: of the formula, a paper or a library.
    """

    update: Callable[..., list[Var]]
    settings: Settings
    states: Callable[[Settings, f.Shape], dict[str, f.Shape]] = field(default=f.same())
    operator: Callable[[Settings], OperatorNode | None] = lambda settings: None
    source: str = ""


def _momentum(mode: str) -> Callable[[Settings], OperatorNode]:
    return lambda s: OperatorNode(
        "Momentum", {"alpha": s["momentum"], "beta": 1.0, "norm_coefficient": s["weight_decay"], "mode": mode}
    )


def _adam(s: Settings) -> OperatorNode | None:
    if s["convention"] == "torch":
        return None
    alpha, beta = s["betas"]
    attributes = {"alpha": alpha, "beta": beta, "epsilon": s["eps"], "norm_coefficient": s["weight_decay"]}
    return OperatorNode("Adam", attributes, present=True)


def _adamw(s: Settings) -> OperatorNode | None:
    found = _adam({**s, "weight_decay": 0.0})
    return None if found is None else OperatorNode(found.type, found.attributes, True, shrinks=bool(s["weight_decay"]))


def _adagrad(s: Settings) -> OperatorNode:
    return OperatorNode("Adagrad", {"epsilon": s["eps"], "decay_factor": 0.0, "norm_coefficient": s["weight_decay"]})


def _of_operator(*_: Any) -> list[Var]:
    raise AssertionError("an operator says it for all settings")


def _settings(learning_rate: float, weight_decay: float = 0.0, **more: Any) -> Settings:
    return {"learning_rate": learning_rate, "weight_decay": weight_decay, **more}


_BETAS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
_ADAM: dict[str, Any] = {**_BETAS, "convention": "torch"}
_MOMENTS = f.same("mean", "square")

OPTIMIZERS: dict[str, OptimizerRule] = {
    "sgd": OptimizerRule(f.sgd, _settings(0.01), source="Robbins and Monro 1951"),
    "momentum": OptimizerRule(
        _of_operator, _settings(0.01, momentum=0.9), f.same("momentum"), _momentum("standard"), "Polyak 1964"
    ),
    "nesterov": OptimizerRule(
        _of_operator, _settings(0.01, momentum=0.9), f.same("momentum"), _momentum("nesterov"), "Nesterov 1983"
    ),
    "rmsprop": OptimizerRule(
        f.rmsprop,
        _settings(0.01, alpha=0.99, eps=1e-8, momentum=0.0, centered=False),
        f.rmsprop_states,
        source="Tieleman and Hinton 2012; Graves 2013",
    ),
    "adagrad": OptimizerRule(
        _of_operator, _settings(0.01, eps=1e-10), f.same("square"), _adagrad, "Duchi, Hazan and Singer 2011"
    ),
    "adam": OptimizerRule(f.adam, _settings(0.001, **_ADAM), _MOMENTS, _adam, "Kingma and Ba 2015"),
    "adamw": OptimizerRule(f.adamw, _settings(0.001, 0.01, **_ADAM), _MOMENTS, _adamw, "Loshchilov and Hutter 2019"),
    "nadam": OptimizerRule(f.nadam, _settings(0.002, **_BETAS, momentum_decay=0.004), _MOMENTS, source="Dozat 2016"),
    "lion": OptimizerRule(f.lion, _settings(1e-4, betas=(0.9, 0.99)), f.same("momentum"), source="Chen et al. 2023"),
    "lamb": OptimizerRule(
        f.lamb, _settings(0.001, 0.01, betas=(0.9, 0.999), eps=1e-6), _MOMENTS, source="You et al. 2020"
    ),
    "adafactor": OptimizerRule(
        f.adafactor,
        _settings(0.01, beta2_decay=-0.8, least=1e-3, clip=1.0),
        f.adafactor_states,
        source="Shazeer and Stern 2018, as PyTorch has it",
    ),
    "muon": OptimizerRule(
        f.muon,
        _settings(0.001, 0.1, momentum=0.95, nesterov=True, adjust="original", betas=(0.9, 0.95), eps=1e-8),
        f.muon_states,
        source="Jordan et al. 2024",
    ),
}


#: Methods that take the loss as a function (see `second_order`), with their settings.
SECOND_ORDER: dict[str, Settings] = {
    "lm": {"learning_rate": 1.0, "damping": 1.0, "iterations": 50, "tolerance": 0.01},
    "lbfgs": {"learning_rate": 1.0, "history": 10, "iterations": 20},
}


#: Short names of settings, for command lines.
SHORT = {"rate": "learning_rate", "lr": "learning_rate", "decay": "weight_decay"}


def setting_names() -> list[str]:
    """The names of all settings that some optimizer has, and their short names."""
    found = [n for rule in OPTIMIZERS.values() for n in rule.settings]
    return list(dict.fromkeys([*found, *(n for s in SECOND_ORDER.values() for n in s), *SHORT]))


def in_full(given: Settings) -> dict[str, Any]:
    """Settings with short names under their full ones. Raises BadInput where both are given."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = SHORT.get(key, key)
        if name in found:
            raise BadInput(f"{name} is given twice")
        found[name] = value
    return found


def optimizer_named(name: str, asked: Settings) -> tuple[OptimizerRule, Settings]:
    """The optimizer called `name` with all of its settings; BadInput where one does not belong to it."""
    rule = looked_up("optimizer", name, OPTIMIZERS)
    return rule, completed_settings(name, asked)


def check_optimizer(name: str, asked: Settings) -> None:
    """Refuse a `name` that no optimizer has, and settings that do not belong to it."""
    looked_up("optimizer", name, {**OPTIMIZERS, **SECOND_ORDER})
    completed_settings(name, asked)


def completed_settings(name: str, asked: Settings) -> Settings:
    """All settings of the optimizer `name`, with defaults for those that are not `asked` for (or None)."""
    defaults = SECOND_ORDER[name] if name in SECOND_ORDER else OPTIMIZERS[name].settings
    given = {key: value for key, value in asked.items() if value is not None}
    settings = completed(f"the optimizer {name!r}", defaults, given, "setting")
    for setting in ("learning_rate", "weight_decay", "eps", "least", "damping", "tolerance"):
        value = settings.get(setting, 0)
        if not 0 <= value < float("inf"):
            raise BadInput(f"{setting} must be a number ≥ 0, not {value}")
    for setting in ("iterations", "history"):
        if (count := settings.get(setting, 1)) < 1 or count != int(count):
            raise BadInput(f"{setting} must be a number from 1 on, not {count}")
    shares: dict[str, Any] = {key: settings[key] for key in ("momentum", "alpha") if key in settings}
    if "betas" in settings:
        betas = settings["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or any(isinstance(x, str) for x in betas):
            raise BadInput(f"betas must be two numbers, not {betas!r}")
        shares |= {"betas": max(betas) if min(betas) >= 0 else min(betas)}
    for setting, value in shares.items():
        if not 0 <= value < 1:
            raise BadInput(f"{setting} must be in [0, 1), not {value}")
    if "convention" in settings:
        one_of("convention", settings["convention"], ("onnx", "torch"))
    if "adjust" in settings:
        one_of("adjust", settings["adjust"], ("original", "match_rms_adamw"))
    if "clip" in settings and not settings["clip"] > 0:
        raise BadInput(f"clip must be positive, not {settings['clip']}")
    return settings
