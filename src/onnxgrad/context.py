"""What holds for every derivation inside a ``with`` block: one record, which each room reads its own field of.

Public context managers (`custom_rules`, `straight_through`, `checkpointing`) are thin: they change the record. It is
held by one `ContextVar`, so that threads and tasks do not see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Operator = tuple[str, str]  # domain, operator or function


@dataclass
class Attempt:
    """A derivation that leaves large local functions functions.

    Attributes:
        kept: Whether it kept one that what is differentiated depends on; if it fails, inlining may help.
    """

    kept: bool = False


@dataclass(frozen=True)
class Context:
    """What applies to a derivation without being passed from call to call.

    Attributes:
        rules: The user's own rules, by domain and operator; they come before all others. A local
            function that has one stays a function.
        subgraphs: The sub-graphs that have such a rule and therefore become functions (`match_subgraphs.Cut`).
        straight_through: The operators whose straight-through estimator stands for their derivative.
        every: Which states of an iteration reverse mode saves: those of every k-th step, about √T of T ("sqrt"), or
            (None) all that it needs of every step.
        attempt: The attempt under way to keep local functions; None: inline them all.
        without: The lowerings that rules do not choose (`ir.lowerings`).
        calls: The table of local functions that shape inference asks about calls (`ir.infer.calls.Calls`).
    """

    rules: Mapping[Operator, Any] = field(default_factory=dict)
    subgraphs: tuple[Any, ...] = ()
    straight_through: frozenset[str] = frozenset()
    every: int | str | None = None
    attempt: Attempt | None = None
    without: frozenset[str] = frozenset()
    calls: Any = None


_current: ContextVar[Context | None] = ContextVar("context", default=None)
_DEFAULT = Context()


def current() -> Context:
    """What applies now."""
    return _current.get() or _DEFAULT


@contextmanager
def changed(**fields: Any) -> Iterator[None]:
    """Within the ``with`` block, `fields` of the record have these values."""
    token = _current.set(Context(**(vars(current()) | fields)))
    try:
        yield
    finally:
        _current.reset(token)
