"""Launch detection: launchers of ranks set environment variables that describe the group.

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

#: Engines that can connect ranks, by name.
ENGINES: dict[str, Callable[[], Collective]] = {"torch": TorchEngine, "mpi": MPIEngine, "none": Alone}

#: Variables of ``torchrun`` without which ranks cannot find each other.
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Variables of launchers of MPI (Open MPI, MPICH and Intel MPI, MVAPICH): number of ranks, rank, ranks on this machine.
_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
_HINT = "\n  hint: start ranks by torchrun or mpiexec; to train in one process, unset "


@dataclass(frozen=True)
class Launch:
    """The launch of this process, as read from the environment.

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
    """Read from the variables of the environment how this process was started.

    Raises:
        BadInput: a variable of a launcher is missing, is no number, or contradicts another.
    """
    torch, mpi = _torch(environment), _mpi(environment)
    if mpi.size > 1 and not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return mpi
    if torch.size > 1:
        for name in _TORCH:
            if not environment.get(name):
                raise BadInput(f"WORLD_SIZE is {torch.size} in the environment, and {name} is missing{_HINT}WORLD_SIZE")
    return torch


def _torch(environment: Mapping[str, str]) -> Launch:
    size, rank = (_number(environment, name) for name in ("WORLD_SIZE", "RANK"))
    local, local_rank = (_number(environment, name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    _check_rank("RANK", rank, "WORLD_SIZE", size)
    _check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE" if local else "WORLD_SIZE", local or size)
    if _number(environment, "MASTER_PORT") > 65535:
        raise BadInput(f"MASTER_PORT is {environment['MASTER_PORT']} in the environment, and ports end at 65535")
    restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return Launch("torch", size) if size > 1 else Launch()
    job = environment.get("TORCHELASTIC_RUN_ID", "none")
    return Launch("torch" if size > 1 else "none", max(size, 1), max(local, 1), restarts, "" if job == "none" else job)


def _mpi(environment: Mapping[str, str]) -> Launch:
    found = [[_number(environment, name) for name in names] for names in _MPI]
    size, local = (max(numbers[i] for numbers in found) for i in (0, 2))
    if "PMIX_RANK" in environment or "PMI_RANK" in environment:  # of srun, whose own variables give the size
        size = max(size, _number(environment, "SLURM_NTASKS"))
    for (size_name, rank_name, _), (own_size, rank, _) in zip(_MPI, found):
        _check_rank(rank_name, rank, size_name, own_size or size)
    return Launch("mpi", size, max(1, local)) if size > 1 else Launch()


def _check_rank(name: str, rank: int, size_name: str, size: int) -> None:
    if rank and rank >= size:
        count = f"{size_name} is {size}" if size else f"{size_name} is missing"
        raise BadInput(f"{name} is {rank} in the environment, and {count}: ranks count from 0{_HINT}{name}")


_joined: dict[str, Collective] = {}


def join(engine: str | None = None) -> Collective:
    """The ranks of this process, connected at the first call; those of one engine are joined once.

    Args:
        engine: one of `ENGINES`; default: what the environment tells.

    Raises:
        UnknownName: there is no such engine.
        BadInput: it is not installed, the ranks do not find each other, or `launched` refuses the environment.
    """
    name = launched().engine if engine is None else engine
    if name not in ENGINES:
        raise UnknownName(name, ENGINES, "engine of ranks")
    if name == "torch" and not set(_TORCH) <= os.environ.keys():
        raise BadInput("ranks of torch.distributed are started by torchrun: torchrun --nproc-per-node 2 -m onnxgrad …")
    if name not in _joined:
        _joined[name] = ENGINES[name]()
    return _joined[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    """The value of a variable; 0 if it is missing or empty."""
    text = environment.get(name, "")
    if not text:
        return 0
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    if not is_number or (int(text) == 0 and name.endswith(("SIZE", "LOCALNRANKS", "NTASKS", "PORT"))):
        raise BadInput(f"{name} is {text[:40]!r} in the environment, which is no number of a launcher{_HINT}{name}")
    return int(text)
