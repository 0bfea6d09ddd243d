"""A memory pool for the large arrays that a tape keeps alive.

A tape holds every value until the backward pass and then frees them all at once. The allocator would return that much
memory to the operating system, and faulting it in again costs several times as much as the arithmetic. The pool keeps
it for the next tape. A block returns to the pool when the last view of it dies.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from typing import Any

import numpy as np

from onnxgrad.eager.core.released import release as release_values

#: Smaller arrays (in bytes) are left to numpy.
LARGE = 1 << 18
#: The capacity of the pool in bytes.
MOST = 1 << 29

_waiting: dict[int, list[np.ndarray]] = {}
_held = 0
_lock = threading.RLock()  # a block may die while its own thread is in here


class _Block:
    """The owner of a block while an array, or a view of it, uses it."""

    __slots__ = ("__array_interface__", "memory")

    def __init__(self, memory: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.memory = memory
        self.__array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (memory.ctypes.data, False),
            "version": 3,
        }

    def __del__(self) -> None:
        global _held
        with _lock:
            if _held + self.memory.nbytes <= MOST:
                _held += self.memory.nbytes
                _waiting.setdefault(self.memory.nbytes, []).append(self.memory)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array in C order, in memory of the pool."""
    global _held
    size = math.prod(shape) * dtype.itemsize
    with _lock:
        waiting = _waiting.get(size)
        memory = waiting.pop() if waiting else None
        if memory is not None:
            _held -= size
    return np.asarray(_Block(np.empty(size, np.uint8) if memory is None else memory, shape, dtype))


def release() -> None:
    """Return the free blocks of the pool to the allocator."""
    global _held
    with _lock:
        _waiting.clear()
        _held = 0


def computed(kernel: Any, *operands: np.ndarray) -> Any:
    """``kernel(*operands)``, in memory of the pool if the result is elementwise, large and like the largest operand."""
    first = operands[0]
    largest = max(operands, key=operator.attrgetter("size")) if len(operands) > 1 else first
    if largest.nbytes < LARGE or largest.dtype.kind != "f" or not isinstance(kernel, np.ufunc) or kernel.signature:
        return kernel(*operands)
    shape = largest.shape
    if any(x.shape != shape and not _fits(x.shape, shape) for x in operands):
        return kernel(*operands)
    if not _keeps(kernel, largest.dtype, *[x.dtype for x in operands]):
        return kernel(*operands)
    release_values()
    return kernel(*operands, out=empty(largest.shape, largest.dtype))


@functools.lru_cache(1024)
def _keeps(kernel: np.ufunc, dtype: np.dtype, *given: np.dtype) -> bool:
    """True if `kernel` returns `dtype` for operands of these dtypes."""
    return kernel.resolve_dtypes((*given, None))[-1] == dtype


def _fits(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """True if `shape` broadcasts to `into`."""
    return len(shape) <= len(into) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(into)))
