"""Ranks by torch.distributed: gloo over the memory of arrays, for ``torchrun`` or any launcher with its variables.

The connections of a process that dies break, so waiting ranks get an error at once; but gloo names an address, not a
rank. So every rank writes a heartbeat to the store of the rendezvous each second. A rank whose connection broke closes
its own connections, so that the next rank gets an error too, and looks for the rank without a heartbeat.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np

from onnxgrad.distributed.collective import Lost, check, check_received
from onnxgrad.errors import BadInput, needs_package

#: Seconds between signs of life, and after how many without one a rank is taken for gone.
BEAT, SILENCE = 1.0, 2.5
#: Seconds after which a rank that waits for others to start prints a message.
QUIET = 5.0


class TorchEngine:
    """The ranks of torch.distributed (see `Collective`).

    A process group that the program has made itself is used; else one is made from the variables ``RANK``,
    ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        timeout: seconds to wait for the other ranks in an exchange.
        joining: seconds to wait until all ranks have started.

    Raises:
        BadInput: there is no PyTorch, or one without torch.distributed, or the ranks do not find each other.
    """

    def __init__(self, timeout: float = 1800.0, joining: float = 600.0) -> None:
        with needs_package("ranks of torchrun need PyTorch", "torch"):
            import torch
            import torch.distributed as dist
            from torch.distributed import PrefixStore
        if not dist.is_available() or not dist.is_gloo_available():
            raise BadInput("this PyTorch was built without torch.distributed or without gloo")
        self._torch, self._dist, self.timeout = torch, dist, timeout
        wait = timedelta(seconds=timeout)
        try:
            self._is_ours = not dist.is_initialized()
            if self._is_ours:
                store, self.rank, self.size = _meet(joining, wait)
                dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=wait)
                self._group: Any = dist.group.WORLD
            else:
                store = dist.distributed_c10d._get_default_store()
                self._group = dist.new_group(backend="gloo", timeout=wait)
                self.rank, self.size = dist.get_rank(), dist.get_world_size()
        except BadInput:
            raise
        except (RuntimeError, ValueError) as error:
            raise BadInput(f"the ranks do not find each other: {str(error).splitlines()[0]}") from error
        self._store = PrefixStore("onnxgrad", store)
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="sign of life", daemon=True)
        self._beating.start()
        atexit.register(self.close)  # threads of gloo that outlive the interpreter abort the process

    # --- exchanging ----------------------------------------------------------------------------

    def all_reduce(self, array: np.ndarray) -> None:
        """Sum `array` over all ranks in place, by torch.distributed.all_reduce."""
        check(array, summed=True)
        if array.size and self.size > 1:
            self._heard(lambda: [self._dist.all_reduce(self._tensor(array), group=self._group, async_op=True)])

    def reduce_scatter(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Reduce by pairs of ranks: gloo's own reduce_scatter is an all-reduce, which sends twice as much."""
        check(array, bounds, self.size, summed=True)
        parts = [array[low:high] for low, high in pairwise(bounds)]
        own = parts[self.rank]
        received = np.empty_like(own)
        for distance in range(1, self.size):
            to, of = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self._heard(lambda: self._swap(parts[to], to, received, of))  # noqa: B023  (called at once)
            own += received

    def _swap(self, sent: np.ndarray, to: int, received: np.ndarray, of: int) -> list[Any]:
        works = []
        if len(sent):
            works.append(self._dist.isend(self._tensor(sent), to, group=self._group))
        if len(received):
            works.append(self._dist.irecv(self._tensor(received), of, group=self._group))
        return works

    def all_gather(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Broadcast every rank's block to all, which also works for blocks of different sizes."""
        check(array, bounds, self.size)
        blocks = [self._bytes(array[low:high]) for low, high in pairwise(bounds)]
        self._heard(
            lambda: [
                self._dist.broadcast(block, rank, group=self._group, async_op=True)
                for rank, block in enumerate(blocks)
                if block.numel()
            ]
        )

    def all_to_all(self, array: np.ndarray, bounds: Sequence[int], received: np.ndarray) -> None:
        """Exchange blocks by pairs of ranks."""
        check_received(array, bounds, received, self.rank)
        parts = [array[low:high].view(np.uint8) for low, high in pairwise(bounds)]
        received[self.rank] = array[bounds[self.rank] : bounds[self.rank + 1]]
        for distance in range(1, self.size):
            to, of = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            place = received[of].view(np.uint8)
            self._heard(lambda: self._swap(parts[to], to, place, of))  # noqa: B023  (called at once)

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Copy `array` of rank `root` to all ranks, by torch.distributed.broadcast."""
        check(array)
        if array.size:
            block = self._bytes(array)
            self._heard(lambda: [self._dist.broadcast(block, root, group=self._group, async_op=True)])

    def barrier(self) -> None:
        """Wait for all ranks, by torch.distributed.barrier."""
        self.all_reduce(np.zeros(1, np.int32))

    def close(self, why: str = "") -> None:
        """Leave the group: publish the reason in the store, disconnect, and stop the heartbeat."""
        if self._over.is_set():
            return
        self._over.set()
        with suppress(RuntimeError):  # the store may be gone before this rank
            self._store.set(f"left/{self.rank}", why or " ")
        self._disconnect()
        self._beating.join(timeout=2 * BEAT)

    def _tensor(self, array: np.ndarray) -> Any:
        return self._torch.from_numpy(array)

    def _bytes(self, array: np.ndarray) -> Any:
        """The memory of `array` as bytes: PyTorch does not know every dtype that numpy does."""
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8))

    # --- missing ranks -------------------------------------------------------------------------

    def _beat(self) -> None:
        count = 0
        while not self._over.is_set():
            with suppress(RuntimeError):
                self._store.set(f"beat/{self.rank}", str(count))
            count += 1
            self._over.wait(BEAT)

    def _heard(self, begin: Callable[[], list[Any]]) -> None:
        """Wait for the operations that `begin` starts. Raises Lost if one fails."""
        if self._over.is_set():
            raise Lost(f"rank {self.rank} has left the others")
        works: list[Any] = []
        try:
            works += begin()
            while works:
                works.pop().wait()
            return
        except RuntimeError as error:
            failed = str(error).strip().split("\n")[0]
        works.clear()  # waiting operations, and the traceback of an error, keep connections open
        self._disconnect()
        lost = self._who(failed)
        self.close()
        raise lost

    def _who(self, failed: str) -> Lost:
        """The error that names the missing ranks, as seen by the remaining ones."""
        try:
            before, left = self._signs(), self._departed()
            if not any(why.strip() for why in left.values()):
                self._over.wait(SILENCE)
            after, left = self._signs(), self._departed()
        except RuntimeError:  # the store cannot be reached
            return Lost("the machine of rank 0, where the ranks meet, is gone or does not answer", [0])
        silent = [r for r in range(self.size) if r not in left and before[r] == after[r] and r != self.rank]
        alive = [r for r in range(self.size) if r == self.rank or not (r in silent or left.get(r, "").strip())]
        speaker = self.rank == min(alive)
        stopped = {r: why.strip() for r, why in left.items() if why.strip()}
        if stopped:
            rank, why = next(iter(stopped.items()))
            return Lost(f"rank {rank} has stopped: {why}", sorted(stopped), speaker)
        if silent:
            which = f"rank {silent[0]} is" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))} are"
            return Lost(f"{which} gone or does not answer; the others cannot go on", silent, speaker)
        return Lost(f"the ranks do not reach each other any more: {failed}", speaker=speaker)

    def _signs(self) -> list[bytes]:
        found = []
        for rank in range(self.size):
            key = f"beat/{rank}"
            found.append(self._store.get(key) if self._store.check([key]) else b"")
        return found

    def _departed(self) -> dict[int, str]:
        keys = {rank: f"left/{rank}" for rank in range(self.size)}
        return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

    def _disconnect(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        with suppress(RuntimeError, ValueError):
            self._dist.destroy_process_group(None if self._is_ours else group)


def _meet(joining: float, wait: timedelta) -> tuple[Any, int, int]:
    """Wait until all ranks have joined. Returns the store of the rendezvous, the rank, and the number of ranks.

    Raises:
        BadInput: `joining` seconds are over.
    """
    from torch.distributed import PrefixStore, rendezvous

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    waiting = _Waiting(f"rank {rank} of {size}", f"{host}:{port} (MASTER_ADDR, MASTER_PORT)", joining)
    if rank > 0:  # PyTorch itself prints much while it cannot connect
        while not _is_reachable(host, port):
            waiting.go_on("rank 0, which does not answer")
    # a world of one: the store is available at once, and arrivals are counted here
    store, *_ = next(rendezvous("env://", world_size=1, timeout=wait))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives the ranks of the last one
    store = PrefixStore(f"onnxgrad/{attempt}/{size}", store)
    store.add("here", 1)
    while (here := store.add("here", 0)) < size:
        waiting.go_on(f"the others: {here} of {size} ranks are there")
    return store, rank, size


class _Waiting:
    """The patience of a rank that waits for others to start: one warning, then an error."""

    def __init__(self, who: str, where: str, seconds: float) -> None:
        self.who, self.where, self.seconds = who, where, seconds
        self._began, self._is_quiet = time.monotonic(), True

    def go_on(self, what: str) -> None:
        """Sleep for a moment. Raises BadInput once the time is over."""
        waited = time.monotonic() - self._began
        if waited > self.seconds:
            raise BadInput(
                f"{self.who} has waited {self.seconds:.0f} s at {self.where} for {what}\n"
                "  hint: start all ranks by torchrun or mpiexec; to train in one process, unset WORLD_SIZE"
            )
        if self._is_quiet and waited > QUIET:
            self._is_quiet = False
            warnings.warn(
                f"{self.who} waits at {self.where} for {what}; it gives up after {self.seconds:.0f} s", stacklevel=4
            )
        time.sleep(min(0.2, 0.002 + waited / 10))


def _is_reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
