"""Names of a package that are imported on first use, with the collector of garbage paused."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_collection(all_stay: bool = False) -> Iterator[None]:
    """Pause the collector of cyclic garbage for the whole process, until the end of an import or a derivation.

    Both make many objects that stay, and little garbage: without the pause, a derivation of a long graph takes up to
    1.8 times as long. Objects without cycles are freed as ever. The objects of an import `all_stay`: the collector
    takes them for old ones at once, where it would search all of them first, a tenth of the time of the import.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if all_stay and not gc.get_freeze_count():  # what a program has frozen stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def import_later(package: str, names: Mapping[str, Iterable[str]]) -> tuple[Callable[[str], Any], list[str]]:
    """Return the ``__getattr__`` and the ``__all__`` of `package`, whose modules define `names`."""
    modules = {name: f"{package}.{module}" for module, defined in names.items() for name in defined}

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with without_collection(all_stay=True):
            value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return import_name, sorted(modules)
