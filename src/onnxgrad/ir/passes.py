"""Passes over a graph: optimizations that may fail without harm.

A pass does not change results, only their computation. So a pass that raises, or that leaves an invalid graph, is
skipped with a warning. The passes run on a copy, which is checked once, after all of them. If that check fails, they
run again with a check after each, and then without the one that failed. (`onnx_ir.passes` has sequences of passes, but
no pass that may decline or fail, and no reasons to report.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from onnxgrad.errors import PassWarning, warn_caller
from onnxgrad.ir.copies import copy_model
from onnxgrad.ir.graph import scopes
from onnxgrad.ir.invariants import fault_of, interface_of

S = TypeVar("S", contravariant=True)

#: Why a pass did nothing.
NO_SITE, LEFT_OUT = "nothing in the graph is of this form", "left out by without"


class Declined(Exception):
    """Raised by a pass that finds while running that it does not apply; it is skipped without a warning."""


@dataclass(frozen=True)
class Pass(Generic[S]):
    """An optimization of a graph.

    Attributes:
        name: the name in `Options(without=…)`.
        phase: the part of the work that it belongs to.
        what: what is written, in a line.
        where: in place of what.
        applies: returns True if a model has a place for the pass; changes nothing.
        apply: changes a model in place and returns the number of places.
        unless: returns why the pass is not tried in a setting; an empty string if it is.
        looks: True if `apply` changes only the setting, so that it needs no copy of the model.
    """

    name: str
    phase: str
    what: str
    where: str
    applies: Callable[[ir.Model, S], bool]
    apply: Callable[[ir.Model, S], Any]
    unless: Callable[[S], str] = lambda setting: ""
    looks: bool = False


@dataclass
class PassReport:
    """The outcome of a pass.

    Attributes:
        name, phase, what, where: as of the pass.
        places: the number of places that were changed; 0 if none was.
        nodes: the numbers of nodes before and after, where they were counted.
        reason: why nothing was changed; empty if something was.
    """

    name: str
    phase: str
    what: str
    where: str
    places: int = 0
    nodes: tuple[int, int] | None = None
    reason: str = ""


@dataclass
class Passed(Generic[S]):
    """A model after passes.

    Attributes:
        model: the model that was given, or a copy that passes have changed.
        setting: the setting that the passes have seen.
        reports: one for each pass, in order.
        failed: the passes that failed, and how.
    """

    model: ir.Model
    setting: S
    reports: list[PassReport] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def applied(self) -> list[str]:
        """The names of the passes that changed something."""
        return [r.name for r in self.reports if r.places]


class _Failure(Exception):
    """A pass that raised or left an invalid graph; without a name, an invalid graph after all passes."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason


def run_passes(
    model: ir.Model,
    passes: Sequence[Pass[S]],
    setting: Callable[[], S],
    without: Collection[str] = (),
    counted: bool = False,
) -> Passed[S]:
    """`model` after `passes`: itself if none of them applies, otherwise a copy that shares its tensors.

    Args:
        model: what the passes are for; it is not changed.
        passes: in the order in which they run.
        setting: makes what the passes read and note besides the model; called again for each attempt.
        without: names of passes to leave out.
        counted: count the nodes before and after each pass.
    """
    failed: dict[str, str] = {}
    declined: dict[str, str] = {}
    each = False
    while True:
        reasons = {name: f"failed: {reason}" for name, reason in failed.items()}
        attempt = _Attempt(model, setting(), {**reasons, **declined, **dict.fromkeys(without, LEFT_OUT)}, counted)
        try:
            attempt.run(passes, each)
        except _Declination as declination:
            declined[declination.name] = declination.reason
        except _Failure as failure:
            if fault := fault_of(model.graph, None):  # the model is invalid already: the runtime decides about it
                declined = dict.fromkeys((p.name for p in passes), f"the model itself is out of order: {fault}")
            elif failure.name:
                failed[failure.name] = failure.reason
            each = not failure.name
        else:
            return Passed(attempt.model, attempt.setting, attempt.reports, failed)


def warn_of(failed: Mapping[str, str]) -> None:
    """Warn of passes that failed and are skipped, with their names and errors."""
    for name, reason in failed.items():
        warn_caller(
            PassWarning(
                f"the optimization {name!r} failed on this model and is left out, which changes no result ({reason})"
                f"\n  hint: please report this with the model; without=[{name!r}] leaves it out without a warning",
                name,
            )
        )


class _Declination(_Failure):
    """A pass that found while running that it does not apply."""


class _Attempt(Generic[S]):
    """One run of passes, from the original on."""

    def __init__(self, model: ir.Model, setting: S, without: dict[str, str], counted: bool) -> None:
        self.original = self.model = model
        self.setting, self.without, self.counted = setting, without, counted
        self.reports: list[PassReport] = []

    def run(self, passes: Iterable[Pass[S]], each: bool) -> None:
        """Run `passes`; with a check after `each`, or only after the last one."""
        for p in passes:
            report = PassReport(p.name, p.phase, p.what, p.where)
            self.reports.append(report)
            report.reason = self.without.get(p.name, "")
            if report.reason:
                continue
            try:
                self._run_one(p, report)
            except Declined as declined:
                raise _Declination(p.name, str(declined) or NO_SITE) from None
            except Exception as error:
                raise _Failure(p.name, f"{type(error).__name__}: {error}") from error
            if each and self.model is not self.original:
                self._check(p.name)
        if not each and self.model is not self.original:
            self._check("")
        if not any(r.places for r, p in zip(self.reports, passes) if not p.looks):
            self.model = self.original

    def _run_one(self, p: Pass[S], report: PassReport) -> None:
        report.reason = p.unless(self.setting)
        if report.reason:
            return
        report.reason = NO_SITE
        if not p.applies(self.model, self.setting):
            return
        if self.model is self.original and not p.looks:
            self.model = copy_model(self.original)
        before = _count(self.model) if self.counted else 0
        report.places = int(p.apply(self.model, self.setting))
        if report.places:
            report.reason = ""
            report.nodes = (before, _count(self.model)) if self.counted else None

    def _check(self, name: str) -> None:
        fault = fault_of(self.model.graph, interface_of(self.original.graph))
        if fault:
            raise _Failure(name, fault)


def _count(model: ir.Model) -> int:
    return sum(len(graph) for graph in scopes(model.graph))
