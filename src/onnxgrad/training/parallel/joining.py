"""Join the processes of a run, and divide the processors of a machine among them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeVar

from onnxgrad.distributed import Collective, join, launched
from onnxgrad.runtime import Options
from onnxgrad.training.parallel.ranks import Ranks, SingleRank

P = ParamSpec("P")
R = TypeVar("R")


def ranks_of(distributed: Ranks | Collective | str | None) -> Ranks:
    """Join the process group.

    Args:
        distributed: ranks, a `Collective`, an engine name, or None to read the launcher's environment variables.

    Raises:
        UnknownName: there is no such engine. BadInput: it is not installed, or the ranks do not find each other.
    """
    if isinstance(distributed, Ranks):
        return distributed
    if distributed is None or isinstance(distributed, str):
        if distributed is None and launched().engine == "none":
            return SingleRank()
        distributed = join(distributed)
    return Ranks(distributed) if distributed.size > 1 else SingleRank()


def on_all_ranks(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method of a trainer that all ranks call: an error before they agree is raised on all of them."""

    @wraps(method)
    def called(*args: P.args, **given: P.kwargs) -> R:
        ranks: Ranks = args[0].strategy.ranks  # type: ignore[attr-defined]
        with ranks.settling():
            return method(*args, **given)

    return called


def processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divide_processors(options: Options) -> Options:
    """Set the threads of this rank to its share of the processors of its machine, unless the caller has set them.

    ``torchrun`` leaves all processors to every rank. Launchers of MPI can bind each rank to some of them.
    """
    launch = launched()
    mine = processors()
    is_bound = launch.engine == "mpi" and mine < (os.cpu_count() or 1)
    if options.threads is not None or launch.local < 2 or is_bound:
        return options
    return replace(options, threads=max(1, mine // launch.local))
