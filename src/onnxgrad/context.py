"""What holds for every derivation inside a ``with`` block: one record, which each room reads its own field of.

Public context managers (`custom_rules`, `straight_through`, `checkpointing`) are thin: they add to the record. It is
one `ContextVar`, so that threads and tasks do not see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

Operator = tuple[str, str]  # domain, operator or function


@dataclass(frozen=True)
class Context:
    """The options of a derivation that no call passes on.

    Attributes:
        rules: The user's own rules, by domain and operator; they come before all others. A local
            function that has one stays a function.
        subgraphs: The sub-graphs that have such a rule and therefore become functions (`match_subgraphs.Cut`).
        straight_through: The operators whose straight-through estimator stands for their derivative.
    """

    rules: Mapping[Operator, Any] = field(default_factory=dict)
    subgraphs: tuple[Any, ...] = ()
    straight_through: frozenset[str] = frozenset()


_current: ContextVar[Context | None] = ContextVar("context", default=None)
_DEFAULT = Context()


def current() -> Context:
    """The options that hold now."""
    return _current.get() or _DEFAULT


@contextmanager
def changed(**fields: Any) -> Iterator[None]:
    """Within the ``with`` block, `fields` of the record are other ones."""
    token = _current.set(replace(current(), **fields))
    try:
        yield
    finally:
        _current.reset(token)
