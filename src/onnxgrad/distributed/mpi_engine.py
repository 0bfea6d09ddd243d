"""Ranks by MPI: mpi4py over the memory of arrays, as ``mpiexec`` (or Slurm's ``srun``) starts them.

When a process dies, the launcher ends the others and reports the one that died.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from onnxgrad.distributed.collective import Lost, check, check_received
from onnxgrad.errors import BadInput


class MPIEngine:
    """The ranks of ``MPI.COMM_WORLD``, or of another communicator of mpi4py (see `Collective`).

    Args:
        communicator: a duplicate of it is used, so that nothing meets messages of the program's own.

    Raises:
        BadInput: there is no mpi4py, or no MPI library that it could load.
    """

    def __init__(self, communicator: Any = None) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise BadInput(f"ranks of MPI need mpi4py: pip install 'onnxgrad[mpi]' ({error})") from error
        self._mpi = MPI
        self._comm: Any = (MPI.COMM_WORLD if communicator is None else communicator).Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # which mpi4py raises
        sys.excepthook = self._abort
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def all_reduce(self, array: np.ndarray) -> None:
        """Sum `array` over all ranks in place, by MPI_Allreduce."""
        check(array, summed=True)
        with self._heard() as comm:
            comm.Allreduce(self._mpi.IN_PLACE, array, self._mpi.SUM)

    def reduce_scatter(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Sum over all ranks, each keeping its block, by MPI_Reduce_scatter."""
        check(array, bounds, self.size, summed=True)
        counts = np.diff(bounds).tolist()
        with self._heard() as comm:
            comm.Reduce_scatter(self._mpi.IN_PLACE, array, counts, self._mpi.SUM)
        low, high = bounds[self.rank], bounds[self.rank + 1]
        if low:  # MPI leaves it at the beginning
            array[low:high] = array[: high - low].copy() if high - low > low else array[: high - low]

    def all_gather(self, array: np.ndarray, bounds: Sequence[int]) -> None:
        """Collect the blocks of all ranks in place, by MPI_Allgatherv."""
        check(array, bounds, self.size)
        size = array.dtype.itemsize
        counts = [n * size for n in np.diff(bounds).tolist()]
        starts = [low * size for low in bounds[:-1]]
        with self._heard() as comm:
            comm.Allgatherv(self._mpi.IN_PLACE, [array.view(np.uint8), counts, starts, self._mpi.BYTE])

    def all_to_all(self, array: np.ndarray, bounds: Sequence[int], received: np.ndarray) -> None:
        """Send block i of `array` to rank i, by MPI_Alltoallv."""
        check_received(array, bounds, received, self.rank)
        item = array.dtype.itemsize
        sent = [n * item for n in np.diff(bounds).tolist()]
        starts = [low * item for low in bounds[:-1]]
        own = received.shape[1] * item
        places = [rank * own for rank in range(self.size)]
        with self._heard() as comm:
            comm.Alltoallv(
                [array.view(np.uint8), sent, starts, self._mpi.BYTE],
                [received.reshape(-1).view(np.uint8), [own] * self.size, places, self._mpi.BYTE],
            )

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Copy `array` of rank `root` to all ranks, by MPI_Bcast."""
        check(array)
        with self._heard() as comm:
            comm.Bcast([array.reshape(-1).view(np.uint8), self._mpi.BYTE], root)

    def barrier(self) -> None:
        """Wait for all ranks, by MPI_Barrier."""
        with self._heard() as comm:
            comm.Barrier()

    def close(self, why: str = "") -> None:
        """Finalize MPI. A rank that leaves with a reason aborts the others: MPI has no partial exit."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        if why.strip():
            atexit.register(comm.Abort, 2)  # after this rank has printed its messages

    def _abort(self, *error: Any) -> None:
        """Abort all ranks after an uncaught error of this one; they would wait for it forever."""
        sys.__excepthook__(*error)
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(1)

    @contextmanager
    def _heard(self) -> Iterator[Any]:
        if self._comm is None:
            raise Lost(f"rank {self.rank} has left the others")
        try:
            yield self._comm
        except self._mpi.Exception as error:
            raise Lost(f"MPI failed: {error}") from error
