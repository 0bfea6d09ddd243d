"""Several processes of one command: which of them speaks, and what it says of an error that one or all of them have."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated

from onnxgrad.cli import panels
from onnxgrad.distributed import Lost
from onnxgrad.errors import OnnxGradError
from onnxgrad.training.parallel.joining import ranks_of
from onnxgrad.training.parallel.ranks import OnRank, Ranks

Distributed = Annotated[
    str | None,
    panels.run(
        "--distributed",
        help="Which ranks train together: torch (torchrun), mpi (mpiexec), or none. Default: those that a launcher has "
        "started. --batch-size is that of all of them.",
    ),
]

SyncEvery = Annotated[
    int,
    panels.run(
        "--sync-every",
        help="Processes that train together take so many steps on their own, and then an outer one together (DiLoCo).",
    ),
]
OuterRate = Annotated[
    float | None, panels.run("--outer-rate", help="Learning rate of the outer step of --sync-every. Default: 0.7.")
]
OuterMomentum = Annotated[
    float | None,
    panels.run("--outer-momentum", help="Nesterov momentum of the outer step of --sync-every. Default: 0.9."),
]
Compress = Annotated[
    str | None,
    panels.run("--compress", help="Send gradients between processes in fewer bytes, with error feedback: fp16."),
]
ShardOptimizer = Annotated[
    bool,
    panels.run(
        "--shard-optimizer",
        help="Processes that train together each keep their part of the optimizer's state (ZeRO-1), which takes that "
        "much less memory.",
    ),
]
SyncBatchNorm = Annotated[
    bool,
    panels.run(
        "--sync-batch-norm",
        help="BatchNormalization takes the statistics of the rows of all processes that train together, not of each.",
    ),
]

_ranks: Ranks | None = None


def joined(distributed: str | None) -> Ranks | None:
    """The ranks of the command; from now on only the first one prints, and what goes wrong is that of all of them."""
    global _ranks
    _ranks = ranks = ranks_of(distributed)
    if ranks is not None and not ranks.is_first:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for as long as the process lasts)
        warnings.showwarning = lambda *_, **__: None
    return ranks


def said(error: OnnxGradError) -> OnnxGradError | None:
    """What this process says of an error that ends it; None where another one says it."""
    if _ranks is None:
        return error
    try:
        with _ranks.continued():
            raise error
    except OnnxGradError as found:
        error = found
    if isinstance(error, Lost):
        return error if error.speaker else None
    return error if _ranks.is_first or isinstance(error, OnRank) else None
