"""A thread-safe LRU cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from onnxgrad._later import without_collection


class Cache:
    """The `most` last used values, by key; safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self._held: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._most = most
        self.made = 0

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value for `key`, from `make` if it is not cached."""
        if (value := self.peek(key)) is not None:
            return value
        with without_collection():
            made = make()
        with self._lock:
            self.made += 1
            self._held[key] = made
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        return made

    def peek(self, key: Any) -> Any:
        """The value for `key`, or None."""
        with self._lock:
            value = self._held.get(key)
            if value is not None:
                self._held.move_to_end(key)
            return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
