"""Who has started this process: a launcher of ranks leaves variables in the environment, which say which one it was.

``torchrun`` sets ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``; ``mpiexec`` those of its library. A launcher of one rank
is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onnxgrad.distributed.collective import Alone, Collective
from onnxgrad.distributed.mpi_engine import MPIEngine
from onnxgrad.distributed.torch_engine import TorchEngine
from onnxgrad.errors import BadInput, UnknownName

#: How ranks may be connected, by the name of what connects them.
ENGINES: dict[str, Callable[[], Collective]] = {"torch": TorchEngine, "mpi": MPIEngine, "none": Alone}

#: Variables that say how many ranks there are, of launchers of MPI: Open MPI, MPICH and Intel MPI, MVAPICH.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_MPI_LOCAL = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        engine: one of `ENGINES`.
        size: how many ranks there are.
        local: how many of them on this machine, as far as the launcher tells.
        restarts: how often the launcher has started them anew after one had failed.
        job: what the launcher calls all that it starts, anew or first; empty if it does not say.
    """

    engine: str = "none"
    size: int = 1
    local: int = 1
    restarts: int = 0
    job: str = ""


def launched(environment: Mapping[str, str] = os.environ) -> Launch:
    """What the environment tells."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        size, local, restarts = (
            _number(environment, name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        )
        job = environment.get("TORCHELASTIC_RUN_ID", "none")
        job = "" if job == "none" else job
        return Launch("torch" if size > 1 else "none", max(size, 1), max(local, 1), restarts, job)
    size = max(_number(environment, name) for name in _MPI_SIZES)
    if "PMIX_RANK" in environment or "PMI_RANK" in environment:  # of srun, which says the rest in words of its own
        size = max(size, _number(environment, "SLURM_NTASKS"))
    if size < 2:
        return Launch()
    return Launch("mpi", size, max(1, *(_number(environment, name) for name in _MPI_LOCAL)))


_joined: dict[str, Collective] = {}


def join(engine: str | None = None) -> Collective:
    """The ranks of this process, connected at the first call; those of one engine are joined once.

    Args:
        engine: one of `ENGINES`; default: what the environment tells.

    Raises:
        UnknownName: there is no such engine.
        BadInput: it is not installed, or the ranks do not find each other.
    """
    name = launched().engine if engine is None else engine
    if name not in ENGINES:
        raise UnknownName(name, ENGINES, "engine of ranks")
    if name == "torch" and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise BadInput("ranks of torch.distributed are started by torchrun: torchrun --nproc-per-node 2 -m onnxgrad …")
    if name not in _joined:
        _joined[name] = ENGINES[name]()
    return _joined[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0
