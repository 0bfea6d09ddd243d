"""Kernels for those who did not ask for them (target "auto"): taken where they are there, else built once, aside.

Nothing here fails: where there is no compiler, or it fails, or the cache cannot be written, the operators of the graph
run. What the compiler reads are the sources of this package, for every model.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import onnxruntime

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput
from onnxgrad.files import lock_folder
from onnxgrad.runtime.kernels import prebuilt
from onnxgrad.runtime.kernels.build import Order, order_library

#: A training run waits so long for the compiler, in seconds; it takes two to ten.
LONGEST = 120.0
#: Where a build has failed, none is tried again so soon, in seconds.
_LATER = 86400.0

_started: set[Path] = set()
_starting = threading.Lock()


def find_library(wait: bool = False) -> Path | None:
    """The library of kernels if it is there, and this process can load it; None if not, or not yet.

    Args:
        wait: if it is not there, build it now. Else it is built aside, for sessions to come.
    """
    if (found := prebuilt.library()) is not None:
        return found if prebuilt.is_proven() and _loads(found) else None
    try:
        order = order_library()
        if not order.is_there():
            _build(order, wait)
            if not order.is_there():
                return None
    except BadInput:
        return None
    return order.place if _loads(order.place) else None


def _build(order: Order, wait: bool) -> None:
    """Build it, or have it built; not where that has failed lately, or has no prospects."""
    if _failed_lately(order.place) or not _can_be_written(order.place):
        return
    if wait:
        _build_or_note(order)
        return
    with _starting:
        if order.place in _started:
            return
        _started.add(order.place)
    if getattr(sys, "frozen", False) or not sys.executable:  # it is no Python that could be started
        return
    package = Path(__file__).parents[3]
    compiler, *words = order.command
    compiler = os.path.abspath(compiler) if os.path.dirname(compiler) else compiler
    said = json.dumps([str(order.place), str(order.sources), [compiler, *words]])
    script = f"import sys; sys.path.append({str(package)!r}); from {__name__} import build_aside; build_aside({said!r})"
    with suppress(OSError):
        subprocesses.start(["-c", script])


def build_aside(said: str) -> None:
    """Build the library for `_build`, in a process of low priority, unless another process does."""
    place, sources, command = json.loads(said)
    order = Order(Path(place), Path(sources), tuple(command))
    os.nice(10)
    try:
        with order.writing(), lock_folder(order.place.parent):
            if not order.is_there():
                _build_or_note(order)
    except BadInput:  # another one is at it, or nothing can be written
        return


def _build_or_note(order: Order) -> None:
    try:
        order.build(LONGEST)
    except BadInput as error:
        note = _note(order.place)
        with suppress(OSError):
            note.unlink(missing_ok=True)
            with note.open("x") as file:
                file.write(str(error))


def _note(place: Path) -> Path:
    """The file that notes why a library could not be built."""
    return place.with_suffix(".failed")


def _failed_lately(place: Path) -> bool:
    try:
        return time.time() - os.lstat(_note(place)).st_mtime < _LATER
    except OSError:
        return False


def _can_be_written(place: Path) -> bool:
    """True if the library can be written: the first existing folder above it is writable."""
    there = next(folder for folder in place.parents if folder.exists())
    return os.access(there, os.W_OK | os.X_OK)


@functools.cache
def _loads(place: Path) -> bool:
    """True if ONNX Runtime loads the library, in this process."""
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(place))
    except Exception:  # ONNX Runtime's exceptions share no base but this one
        return False
    return True
