"""Settings that hold inside a ``with`` block, for the thread or task that has entered it.

Each public context manager (`custom_rules`, `straight_through`, `checkpointing`, `without_lowerings`) has one, in the
module that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class ScopedSetting(Generic[T]):
    """One value, which a ``with`` block changes."""

    def __init__(self, name: str, default: T) -> None:
        self._variable: ContextVar[T] = ContextVar(name, default=default)

    @property
    def value(self) -> T:
        """The value that holds now."""
        return self._variable.get()

    @contextmanager
    def changed(self, value: T) -> Iterator[None]:
        """Hold `value` within the ``with`` block."""
        token = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(token)
