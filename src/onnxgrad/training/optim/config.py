"""Configuration of optimizers: `Optimizer`, and `Group` for parameters with settings of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_whole
from onnxgrad.training.graph.trainable import matching
from onnxgrad.training.optim.optimizers import (
    DEFAULT_OPTIMIZER,
    SECOND_ORDER,
    Settings,
    check_optimizer,
    completed_settings,
    in_full,
)
from onnxgrad.training.optim.schedules import Schedule
from onnxgrad.training.option_strings import spelled


@dataclass(frozen=True, init=False)
class Group:
    """Parameters with settings of their own.

    Attributes:
        pattern: which weights: a name, a glob, ``type:Conv``, ``last:2`` (see `trainable`).
        frozen: they are not trained at all.
        settings: what differs from the optimizer: ``learning_rate``, ``weight_decay``, or any other setting of it.
    """

    pattern: str
    frozen: bool
    settings: Settings

    def __init__(self, pattern: str, /, *, frozen: bool = False, **settings: Any) -> None:
        if not isinstance(frozen, bool):
            raise BadInput(f"{pattern!r}: frozen must be true or false, not {frozen!r}")
        vars(self).update(pattern=pattern, frozen=frozen, settings=in_full(settings))

    @classmethod
    def of(cls, text: str) -> Group:
        """The group spelled ``pattern:rate=…,decay=…,frozen=true``; ``rate`` and ``decay`` are short names."""
        head, colon, tail = text.rpartition(":")
        pattern, given = (head, spelled(f":{tail}")[1]) if colon and "=" in tail else (text, {})
        if not given:
            raise BadInput(f"{text!r} is not written as pattern:rate=0.001,decay=0 or pattern:frozen=true")
        return cls(pattern, **given)


@dataclass(frozen=True, init=False)
class Optimizer:
    """An optimizer with its settings: the rule that turns gradients into new weights.

    Args:
        name: one of `optimizers.OPTIMIZERS` or `optimizers.SECOND_ORDER`, also spelled with settings, as
            ``adamw:betas=0.9,0.95``.
        groups: parameters with other settings, as `Group` or spelled; the first that matches counts.
        schedule: scales all learning rates, as a function of the number of steps.
        clip_norm: the largest norm of all gradients together.
        clip_value: the largest element of a gradient, which is clipped first.
        ema: the share that a step keeps of the average of each weight; None: no averages.
        swa: the step from which on weights are averaged, each counting the same (Izmailov et al. 2018); None: not.
        swa_every: steps between weights that are averaged.
        settings: of this optimizer: ``learning_rate``, ``weight_decay``, ``betas``, …; None stands for the default.

    Raises:
        BadInput: there is no such optimizer, setting or schedule, or a value is out of its range.
    """

    name: str
    settings: Settings
    groups: Sequence[Group]
    schedule: Schedule | None
    clip_norm: float | None
    clip_value: float | None
    ema: float | None
    swa: int | None
    swa_every: int

    def __init__(
        self,
        name: str = DEFAULT_OPTIMIZER,
        /,
        *,
        groups: Sequence[Group | str] | None = None,
        schedule: Schedule | str | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        ema: float | None = None,
        swa: int | None = None,
        swa_every: int = 1,
        **settings: Any,
    ) -> None:
        name, given = spelled(name)
        asked = {**in_full(given), **in_full({key: v for key, v in settings.items() if v is not None})}
        listed = [groups] if isinstance(groups, str) else groups or ()
        found = [g if isinstance(g, Group) else Group.of(g) for g in listed]
        check_optimizer(name, asked)
        if name in SECOND_ORDER:
            others = {
                "groups": found,
                "schedule": schedule,
                "clip_norm": clip_norm,
                "clip_value": clip_value,
                "ema": ema,
                "swa": swa,
            }
            if wrong := [key for key, value in others.items() if value]:
                raise BadInput(f"the optimizer {name!r} decides by the loss alone: it takes no {', '.join(wrong)}")
        for group in found:
            completed_settings(name, {**asked, **group.settings})
        for what, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if value is not None and not 0 < value < float("inf"):
                raise BadInput(f"{what} must be positive, not {value}")
        if ema is not None and not 0 <= ema < 1:
            raise BadInput(f"ema must be in [0, 1), not {ema}")
        check_whole(1, swa=swa, swa_every=swa_every)
        if ema is not None and swa is not None:
            raise BadInput("a model has one average of its weights: ema and swa exclude each other")
        schedule = Schedule.of(schedule) if isinstance(schedule, str) else schedule
        vars(self).update(name=name, settings=asked, groups=tuple(found), schedule=schedule)
        vars(self).update(clip_norm=clip_norm, clip_value=clip_value, ema=ema, swa=swa, swa_every=swa_every)

    @classmethod
    def of(cls, given: Optimizer | str, /, **settings: Any) -> Optimizer:
        """`given` itself, or the optimizer of that name with these `settings`."""
        if not isinstance(given, Optimizer):
            return cls(given, **settings)
        for key, value in settings.items():
            if value is not None:
                raise BadInput(f"{key} is a setting of the optimizer: write Optimizer({given.name!r}, …, {key}=…)")
        return given

    def owners(self, weights: Mapping[str, ir.Value], nodes: Sequence[ir.Node]) -> dict[str, int | None]:
        """The number of the group that each weight belongs to; without those of frozen groups."""
        owners: dict[str, int | None] = dict.fromkeys(weights)
        for k, group in reversed(list(enumerate(self.groups))):
            owners.update(dict.fromkeys(matching(group.pattern, weights, nodes), k))
        return {name: k for name, k in owners.items() if k is None or not self.groups[k].frozen}

    @property
    def takes_loss(self) -> bool:
        """True if the optimizer needs the loss as a function, not only its gradient."""
        return self.name in SECOND_ORDER

    def convention(self) -> str:
        """In words, where Adam adds its ε; empty for other optimizers."""
        if self.name not in ("adam", "adamw"):
            return ""
        torch = completed_settings(self.name, self.settings)["convention"] == "torch"
        return f"Adam adds its epsilon {'after the correction of bias (PyTorch)' if torch else 'before it (ONNX)'}"
