"""Flush denormal numbers to zero while a step runs: processors take up to a hundred times as long for them.

Denormals arise in normal training: the moments of a weight without gradient decay until they are denormal, and stay so,
as rounding keeps the smallest ones. ONNX Runtime can flush them to zero on its own threads. The calling thread computes
as well, so it flushes for the time of the call too (`Flushing`); otherwise the numbers would depend on the thread.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

import numpy as np

#: A floating-point environment of x86-64 on Linux in words of 32 bits: that of the x87, then MXCSR.
_WORDS = 8
#: Results that are denormal are zeros (bit 15 of MXCSR), and so are operands (bit 6).
_FLUSH = 0x8040

_Environment = ctypes.c_uint32 * _WORDS


class Flushing:
    """A context in which denormal numbers are zeros, in the thread that enters it; for one thread at a time."""

    def __init__(self) -> None:
        libm = ctypes.PyDLL("libm.so.6")
        self._get, self._set = libm.fegetenv, libm.fesetenv
        self._before, self._now = _Environment(), _Environment()
        self._get(self._now)
        self._now[_WORDS - 1] |= _FLUSH

    def __enter__(self) -> None:
        self._get(self._before)
        self._set(self._now)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)


def flushing() -> Flushing | None:
    """A context that flushes denormals; None on platforms other than x86-64 under Linux."""
    return Flushing() if _works() else None


@functools.cache
def _works() -> bool:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    tiny = np.full(16, 1e-39, np.float32)
    try:
        with Flushing():
            gone = not np.any(tiny * np.float32(0.5))
    except (OSError, AttributeError):  # another C library
        return False
    return gone and bool(np.all(tiny * np.float32(0.5)))
