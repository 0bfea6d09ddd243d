"""Collective operations of ranks: the protocol of an engine, the engine of one rank, and its errors.

All ranks call the same methods in the same order with arrays of the same dtype and number of elements. An array is the
memory where the data lie: a C-contiguous, writable numpy array, which is changed in place and not copied. (Buffers of
`onnxgrad.runtime.Resident` are such arrays; ``torch.from_numpy`` and MPI take their memory as it is.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from onnxgrad.errors import BadInput, TrainingError
from onnxgrad.wording import tensor_text

#: Types that can be summed over ranks.
SUMMED = ("float32", "float64", "int32", "int64", "uint8")


class Lost(TrainingError):
    """A rank is gone, or does not answer: nothing can be exchanged any more.

    Attributes:
        ranks: which ones, as far as is known.
        speaker: True if this rank tells the user; the others stop in silence.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), speaker: bool = True) -> None:
        super().__init__(message)
        self.ranks, self.speaker = tuple(ranks), speaker


class Collective(Protocol):
    """A process group: `size` ranks, numbered from 0; this process has number `rank`.

    All ranks call every method but `close`, in the same order. A method raises `Lost` if a rank is gone or has not come
    within the timeout of the engine, and `BadInput` for an array that cannot be exchanged (see `check`).
    """

    rank: int
    size: int

    def all_reduce(self, array: np.ndarray) -> None:
        """Replace `array`, of any shape and a dtype of `SUMMED`, by its sum over all ranks: equal bits on all of them.

        In which order the ranks are added is the engine's business, and the same every time.
        """

    def reduce_scatter(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Replace the own block of `array` by its sum over all ranks; the other blocks become undefined.

        Args:
            array: one axis, of a dtype of `SUMMED`.
            bounds: ``size + 1`` ascending positions from 0 to ``len(array)``; block r is
                ``array[bounds[r] : bounds[r + 1]]``, and may be empty (see `blocks`).
        """

    def all_gather(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Replace every block of `array` by the block of its own rank.

        Args:
            array: one axis, of any dtype of fixed size; its own block holds what this rank gives.
            bounds: as in `reduce_scatter`.
        """

    def all_to_all(self, array: np.ndarray, bounds: Sequence[int], received: np.ndarray) -> None:
        """Send every rank its own block of `array`.

        Args:
            array: one axis, of any dtype of fixed size; it is not changed.
            bounds: as in `reduce_scatter`; block r is for rank r.
            received: [size, length of the own block]: what the ranks gave, in their order.
        """

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Replace `array`, of any shape and any dtype of fixed size, by the array of rank `root`."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def close(self, why: str = "") -> None:
        """Leave. Nothing can be exchanged afterwards; closing once more does nothing.

        Args:
            why: what went wrong here, for those who still wait for this rank: their `Lost` says it, if the engine can.
        """


class Alone:
    """The collective of a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, array: np.ndarray) -> None:
        """Check the array; the sum over one rank is the array itself."""
        check(array, summed=True)

    def reduce_scatter(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Check the array; the sum over one rank is the array itself."""
        check(array, bounds, size=1, summed=True)

    def all_gather(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Check the array, which is complete already."""
        check(array, bounds, size=1)

    def all_to_all(self, array: np.ndarray, bounds: Sequence[int], received: np.ndarray) -> None:
        """Copy the own block."""
        check_received(array, bounds, received, 0)
        received[0] = array

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Do nothing but check `array`."""
        check(array)

    def barrier(self) -> None:
        """Return at once: there is no other rank."""

    def close(self, why: str = "") -> None:
        """Do nothing: there is no group to leave."""


def blocks(length: int, size: int) -> list[int]:
    """The `bounds` that divide `length` elements among `size` ranks, as evenly as can be: blocks differ by 1 at most.

    >>> blocks(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [length * rank // size for rank in range(size + 1)]


def check(array: np.ndarray, bounds: Sequence[int] | None = None, size: int = 1, *, summed: bool = False) -> None:
    """Raise BadInput for an array that ranks cannot exchange in place.

    Args:
        array: what is to be exchanged.
        bounds: where its blocks begin and end, if it is divided.
        size: the number of ranks, for `bounds`.
        summed: it is to be summed, so its dtype is one of `SUMMED`.
    """
    if not (array.flags.c_contiguous and array.flags.writeable and array.dtype.isnative):
        raise BadInput("an array that ranks exchange is contiguous, writable and in the byte order of the machine")
    if array.dtype.hasobject:
        raise BadInput("ranks exchange numbers, no Python objects")
    if summed and array.dtype.name not in SUMMED:
        raise BadInput(f"ranks sum arrays of {', '.join(SUMMED)}; this one is {array.dtype.name}")
    if bounds is None:
        return
    ends = list(bounds)
    if array.ndim != 1 or len(ends) != size + 1 or ends != sorted(ends) or (ends[0], ends[-1]) != (0, len(array)):
        raise BadInput(f"{size + 1} ascending bounds divide an array of one axis, from 0 to {array.size}, not {ends}")


def check_received(array: np.ndarray, bounds: Sequence[int], received: np.ndarray, rank: int) -> None:
    """Raise BadInput unless `received` has a place for the block of each rank that is for `rank`."""
    size = len(bounds) - 1
    check(array, bounds, size)
    check(received)
    shape = (size, bounds[rank + 1] - bounds[rank])
    if (received.shape, received.dtype) != (shape, array.dtype):
        raise BadInput(
            f"rank {rank} is given {tensor_text(array.dtype, shape)}, not {tensor_text(received.dtype, received.shape)}"
        )
