"""Thousands of ranks in one process: every rank is a thread, and one of them runs at a time.

The methods of `Collective` block, so what calls them can only be put aside whole: code under test is the code of real
ranks, which generators would make another one. A thread that waits costs some tens of kilobytes, and handing over to
the next one some twenty microseconds. Ranks run one after the other, each until it needs the others, in the order of
their numbers. Results, deaths and counts are therefore the same every time, and no two ranks fight for the lock of the
interpreter, which makes a thousand of them seven times slower.

Sums are taken in the order of the ranks. Bytes are counted as a ring sends them (Patarasuk and Yuan 2009): every rank
hands a block to its neighbour, N - 1 times for a half of an all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from onnxgrad.distributed.collective import Lost, blocks, check, check_received
from onnxgrad.errors import BadInput

R = TypeVar("R")
#: Bytes of address space for the stack of a rank: what a thread usually has, or less where there are very many.
_STACK, _SMALL, _MANY = 8 << 20, 1 << 20, 256


class Killed(BaseException):
    """Ends a rank that dies; nothing that catches errors catches it."""


class World:
    """`size` ranks, all in this process.

    Args:
        size: how many.
        deaths: which ranks die, and before which of their operations, counted from 0: the others get `Lost`.

    Attributes:
        sent: bytes that each rank has sent so far, int64[size].
        errors: what ended ranks that did not return, by rank.
        reasons: why ranks have left, of those that told.
    """

    def __init__(self, size: int, deaths: Mapping[int, int] | None = None) -> None:
        if size < 1 or any(not 0 <= rank < size for rank in deaths or {}):
            raise BadInput(f"a world has at least 1 rank, and those that die are among them, not {size} and {deaths}")
        self.size, self.deaths = size, dict(deaths or {})
        self.sent = np.zeros(size, np.int64)
        self.errors: dict[int, BaseException] = {}
        self._begin()

    def _begin(self) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        self._asked: dict[int, tuple[str, np.ndarray, Any, np.ndarray | None]] = {}  # by ranks that wait for the others
        self._ended: set[int] = set()
        self._over = threading.Event()
        self._lost: tuple[int, ...] = ()
        self._refused = ""
        self.reasons: dict[int, str] = {}

    @property
    def survivors(self) -> list[int]:
        """Ranks that were not killed, in order."""
        return [r for r in range(self.size) if not isinstance(self.errors.get(r), Killed)]

    def run(self, work: Callable[[Simulated], R]) -> list[R]:
        """Have every rank do `work`, each with its own collective.

        Returns:
            What it returned, by rank.

        Raises:
            Exception: what the first rank raised that failed by itself, or else `Lost`; `errors` has all of them.
        """
        self._begin()
        self.errors.clear()
        found: list[Any] = [None] * self.size
        before = threading.stack_size(_STACK if self.size <= _MANY else _SMALL)
        try:
            threads = [
                threading.Thread(target=self._rank, args=(r, work, found), name=f"rank {r}", daemon=True)
                for r in range(self.size)
            ]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        self._turns[0].release()
        self._over.wait()
        for thread in threads:
            thread.join()
        failed = [e for _, e in sorted(self.errors.items()) if not isinstance(e, Killed)]
        for error in sorted(failed, key=lambda e: isinstance(e, Lost)):
            raise error
        return found

    def _rank(self, rank: int, work: Callable[[Simulated], Any], found: list[Any]) -> None:
        self._turns[rank].acquire()
        try:
            found[rank] = work(Simulated(self, rank))
        except BaseException as error:
            self.errors[rank] = error
        self._ended.add(rank)
        self._next(rank)

    def _next(self, rank: int) -> None:
        """Hand over to the next rank that need not wait; if all do, they have their exchange, or learn who is gone."""
        if len(self._ended) == self.size:
            self._over.set()
            return
        if len(self._asked) + len(self._ended) == self.size:
            if self._ended:
                self._lost = tuple(sorted(self._ended))
            else:
                self._exchange()
            self._asked.clear()
        following = (r % self.size for r in range(rank + 1, rank + 1 + self.size))
        self._turns[next(r for r in following if r not in self._asked and r not in self._ended)].release()

    def ask(self, rank: int, operation: str, array: np.ndarray, how: Any, received: np.ndarray | None) -> None:
        """Wait until all ranks have come to this operation, and it is done."""
        if not self._lost and not self._refused:
            self._asked[rank] = (operation, array.reshape(-1), how, received)
            self._next(rank)
            self._turns[rank].acquire()
        if self._refused:
            raise BadInput(self._refused)
        if self._lost:
            raise self._who(rank)

    def _who(self, rank: int) -> Lost:
        """Who is gone, in the words of `TorchEngine`, to `rank`."""
        is_speaker = rank == min(set(range(self.size)) - set(self._lost))
        for gone in self._lost:
            if why := self.reasons.get(gone):
                return Lost(f"rank {gone} has stopped: {why}", self._lost, is_speaker)
        names = ", ".join(map(str, self._lost))
        which = f"rank {names} is" if len(self._lost) == 1 else f"ranks {names} are"
        return Lost(f"{which} gone or does not answer; the others cannot go on", self._lost, is_speaker)

    def _exchange(self) -> None:
        """Do what all ranks have asked for."""
        asked = [self._asked[rank] for rank in range(self.size)]
        said = [f"{what} {array.dtype}[{len(array)}] {how}" for what, array, how, _ in asked]
        other = next((rank for rank, text in enumerate(said) if text != said[0]), None)
        if other is not None:
            self._refused = f"ranks disagree on what to do: rank 0 {said[0]}, rank {other} {said[other]}"
            return
        operation, first, how, _ = asked[0]
        arrays = [one[1] for one in asked]
        if operation == "broadcast":
            for array in arrays:
                array[...] = arrays[how]
            self.sent[np.arange(self.size) != (how - 1) % self.size] += first.nbytes  # from neighbour to neighbour
            return
        bounds = blocks(len(first), self.size) if how is None else how
        sizes = np.diff(bounds) * first.itemsize
        if operation == "all_to_all":
            for rank, (*_, received) in enumerate(asked):
                if received is not None:
                    received[...] = [array[bounds[rank] : bounds[rank + 1]] for array in arrays]
            self.sent += sizes.sum() - sizes
            return
        if operation != "all_gather":
            with np.errstate(all="ignore"):
                total = np.add.reduce(arrays, axis=0, dtype=first.dtype)
            for rank, array in enumerate(arrays):
                low, high = bounds[rank : rank + 2] if operation == "reduce_scatter" else (0, len(total))
                array[low:high] = total[low:high]
            self.sent += sizes.sum() - sizes  # all blocks but the one that it ends up with
        else:
            total = np.concatenate([array[bounds[r] : bounds[r + 1]] for r, array in enumerate(arrays)])
            for array in arrays:
                array[...] = total
        if operation != "reduce_scatter":
            self.sent += sizes.sum() - np.roll(sizes, -1)  # all blocks but that of its neighbour


class Simulated:
    """The collective of one rank of a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.size = rank, world.size
        self._world: World | None = world
        self._count = 0

    def _ask(self, operation: str, array: np.ndarray, how: Any = None, received: np.ndarray | None = None) -> None:
        if self._world is None:
            raise BadInput("this rank has left: nothing can be exchanged any more")
        if self._world.deaths.get(self.rank) == self._count:
            raise Killed
        self._count += 1
        self._world.ask(self.rank, operation, array, how, received)

    def all_reduce(self, array: np.ndarray) -> None:
        """See `Collective`."""
        check(array, summed=True)
        self._ask("all_reduce", array)

    def reduce_scatter(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """See `Collective`."""
        check(array, bounds, self.size, summed=True)
        self._ask("reduce_scatter", array, list(bounds))

    def all_gather(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """See `Collective`."""
        check(array, bounds, self.size)
        self._ask("all_gather", array, list(bounds))

    def all_to_all(self, array: np.ndarray, bounds: Sequence[int], received: np.ndarray) -> None:
        """See `Collective`."""
        check_received(array, bounds, received, self.rank)
        self._ask("all_to_all", array, list(bounds), received)

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """See `Collective`."""
        check(array)
        if not 0 <= root < self.size:
            raise BadInput(f"there is no rank {root} among {self.size}")
        self._ask("broadcast", array, root)

    def barrier(self) -> None:
        """See `Collective`."""
        self._ask("barrier", np.zeros(0, np.uint8))

    def close(self, why: str = "") -> None:
        """See `Collective`."""
        if self._world is not None and why.strip():
            self._world.reasons[self.rank] = why.strip()
        self._world = None
