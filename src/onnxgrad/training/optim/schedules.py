"""Schedules: by which factor the learning rate is scaled at step T, the number of finished steps.

Each is one formula, written once: over variables of a graph, so that a step graph schedules itself, and over numbers,
so that a loop in Python can feed the rate. With `warmup` steps in front the factor rises linearly from 1/warmup to 1,
and T counts from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.training.option_strings import completed, looked_up, spelled

DOUBLE = int(ir.DataType.DOUBLE)


class _Numbers:
    """The operators that formulas use, on numbers."""

    Cos, Sqrt, Floor, Pow = (staticmethod(f) for f in (np.cos, np.sqrt, np.floor, np.power))
    Min, Max, Where, Less = (staticmethod(f) for f in (np.minimum, np.maximum, np.where, np.less))


@dataclass(frozen=True)
class ScheduleFunction:
    """A schedule: ``factor(o, t, **options)``, and its options with their defaults (None: required)."""

    factor: Callable[..., Any]
    options: Mapping[str, Any]


SCHEDULES: dict[str, ScheduleFunction] = {}


def _schedule(name: str, **options: Any) -> Callable[[Any], Any]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        SCHEDULES[name] = ScheduleFunction(function, options)
        return function

    return register


@_schedule("constant")
def constant(o, t):  # type: ignore[no-untyped-def]
    """1"""
    return t * 0.0 + 1.0


@_schedule("step", size=None, gamma=0.1)
def step(o, t, size, gamma):  # type: ignore[no-untyped-def]
    """γ^⌊T/size⌋"""
    return o.Pow(gamma, o.Floor(t / size))


@_schedule("exponential", gamma=None)
def exponential(o, t, gamma):  # type: ignore[no-untyped-def]
    """γ^T"""
    return o.Pow(gamma, t)


@_schedule("linear", total=None, start=1.0, end=0.0)
def linear(o, t, total, start, end):  # type: ignore[no-untyped-def]
    """start + (end - start)·min(T/total, 1)"""
    return o.Min(t / total, 1.0) * (end - start) + start


@_schedule("polynomial", total=None, power=1.0, end=0.0)
def polynomial(o, t, total, power, end):  # type: ignore[no-untyped-def]
    """end + (1 - end)·(1 - min(T/total, 1))^power"""
    return o.Pow(o.Min(t / total, 1.0) * -1.0 + 1.0, power) * (1 - end) + end


@_schedule("cosine", total=None, end=0.0)
def cosine(o, t, total, end):  # type: ignore[no-untyped-def]
    """end + (1 - end)·(1 + cos π·min(T/total, 1))/2"""
    return _half_cosine(o, o.Min(t / total, 1.0), 1.0, end)


@_schedule("one_cycle", total=None, rise=0.3, start=0.04, end=4e-6)
def one_cycle(o, t, total, rise, start, end):  # type: ignore[no-untyped-def]
    """Along half a cosine from start to 1 over the share `rise` of the steps, then down to end"""
    top = rise * total - 1  # the last step has number total - 1
    up = _half_cosine(o, o.Min(t / top, 1.0), start, 1.0)
    down = _half_cosine(o, o.Min((t - top) / (total - 1 - top), 1.0), 1.0, end)
    return o.Where(o.Less(t, top), up, down)


@_schedule("inverse_sqrt", scale=1.0)
def inverse_sqrt(o, t, scale):  # type: ignore[no-untyped-def]
    """1/√(1 + T/scale)"""
    return 1.0 / o.Sqrt(t / scale + 1.0)


def _half_cosine(o: Any, progress: Any, first: float, last: float) -> Any:
    return (o.Cos(progress * math.pi) + 1.0) * ((first - last) / 2) + last


@dataclass(frozen=True)
class Schedule:
    """A schedule with its options; a call with the number of finished steps returns a factor.

    >>> Schedule.of("linear:total=4,warmup=2")(0), Schedule.of("linear:total=4,warmup=2")(4)
    (0.5, 0.5)
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    warmup: int = 0

    @classmethod
    def of(cls, text: str, total: int | None = None) -> Schedule:
        """The schedule spelled ``name:key=value,…``; a required `total` that is missing is that of the run.

        Raises:
            BadInput: there is no such schedule or option, or one that is required is missing.
        """
        name, given = spelled(text)
        formula = looked_up("schedule", name, SCHEDULES)
        options = completed(f"the schedule {name!r}", {**formula.options, "warmup": 0}, given)
        warmup = options.pop("warmup")
        if "total" in options and options["total"] is None and total is not None:
            options["total"] = max(total - warmup, 1)
        for key, value in options.items():
            if value is None:
                raise BadInput(f"the schedule {name!r} needs {key}\n  hint: write {name}:{key}=100")
            if isinstance(value, (str, bool, tuple)) or not value >= 0:
                raise BadInput(f"the schedule {name!r}: {key} must be a number ≥ 0, not {value!r}")
        _check(name, options, warmup)
        return cls(name, options, warmup)

    def __str__(self) -> str:
        given = {**self.options, **({"warmup": self.warmup} if self.warmup else {})}
        return ":".join(filter(None, [self.name, ",".join(f"{k}={v:g}" for k, v in given.items())]))

    def __call__(self, finished: int) -> float:
        """The factor after so many steps."""
        return float(self._factor(_Numbers, np.float64(finished)))

    def write(self, b: Builder, finished: Var) -> Var:
        """The factor as a double scalar of a graph, given the number of finished steps."""
        return self._factor(b, b.Cast(finished, to=DOUBLE))

    def _factor(self, o: Any, t: Any) -> Any:
        formula = SCHEDULES[self.name]
        if not self.warmup:
            return formula.factor(o, t, **self.options)
        later = formula.factor(o, o.Max(t - self.warmup, 0.0), **self.options)
        return o.Where(o.Less(t, float(self.warmup)), (t + 1.0) / self.warmup, later)


def _check(name: str, options: Mapping[str, Any], warmup: Any) -> None:
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise BadInput(f"the schedule {name!r}: warmup must be a number of steps, not {warmup!r}")
    for key in ("total", "size", "scale"):
        if key in options and not options[key] > 0:
            raise BadInput(f"the schedule {name!r}: {key} must be positive, not {options[key]}")
    if name == "one_cycle" and not 1 < options["rise"] * options["total"] < options["total"]:
        raise BadInput(
            f"the schedule 'one_cycle' rises over {options['rise']:g} of {options['total']} steps, which leaves no "
            "steps to rise or to fall"
        )


#: The share of its learning rate that a step takes: a function of the share of the run that is behind it (0 to 1), or a
#: `Schedule`, a function of the number of steps taken.
RateSchedule = Callable[[float], float] | Schedule
