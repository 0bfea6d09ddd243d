"""Which ranks a trainer is one of, and what each of them may take of its machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from onnxgrad.distributed import Collective, join, launched
from onnxgrad.runtime import Options
from onnxgrad.training.parallel.exchanges import Exchanges
from onnxgrad.training.parallel.local_steps import LocalSteps
from onnxgrad.training.parallel.machine import DataParallel
from onnxgrad.training.parallel.ranks import Ranks
from onnxgrad.training.parallel.sharded import Sharded
from onnxgrad.training.parallel.shares import Shares, arrangement
from onnxgrad.training.step.accumulate import Accumulating, SplitStep

P = ParamSpec("P")
R = TypeVar("R")


def ranks_of(distributed: Ranks | Collective | str | None) -> Ranks | None:
    """The ranks of a collective, or of the engine of this name; default: those that the environment tells of.

    One rank is none: what it would do is done without any engine.

    Raises:
        UnknownName: there is no such engine. BadInput: it is not installed, or the ranks do not find each other.
    """
    if isinstance(distributed, Ranks):
        return distributed
    if distributed is None or isinstance(distributed, str):
        if distributed is None and launched().engine == "none":
            return None
        distributed = join(distributed)
    return Ranks(distributed) if distributed.size > 1 else None


def machine_of(
    split: SplitStep, parts: int, ranks: Ranks | None, exchange: Exchanges, options: Options
) -> Accumulating:
    """What runs a step in two halves, of which each of several ranks has its rows, cut into so many parts."""
    if ranks is None:
        return Accumulating(split, parts, options=options)
    if exchange.shard_optimizer:
        return Sharded(split, parts, ranks.collective, Shares(split, ranks.size), options=options)
    if exchange.sync_every > 1:
        return LocalSteps(split, parts, ranks.collective, exchange, options=options)
    return DataParallel(split, parts, ranks.collective, compress=exchange.compress, options=options)


def arrangement_of(ranks: Ranks | None, exchange: Exchanges) -> Callable[[SplitStep], Sequence[str]] | None:
    """What tells in which order the machine of these ranks needs the bucket (see `split_step`), if it matters."""
    return None if ranks is None or not exchange.shard_optimizer else partial(arrangement, ranks.size)


def together(method: Callable[P, R]) -> Callable[P, R]:
    """A method of what has `ranks` that all of them call: what goes wrong before they agree is raised on all."""

    @wraps(method)
    def called(*args: P.args, **given: P.kwargs) -> R:
        ranks: Ranks | None = args[0].ranks  # type: ignore[attr-defined]
        with nullcontext() if ranks is None else ranks.settling():
            return method(*args, **given)

    return called


def processors() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sharing(options: Options) -> Options:
    """`options` with the threads of a rank among others on its machine, unless somebody has said how many it takes.

    ``torchrun`` leaves all processors to every rank. Launchers of MPI bind ranks to some, where they are told to.
    """
    launch = launched()
    mine = processors()
    is_bound = launch.engine == "mpi" and mine < (os.cpu_count() or 1)
    if options.threads is not None or launch.local < 2 or is_bound:
        return options
    return replace(options, threads=max(1, mine // launch.local))
