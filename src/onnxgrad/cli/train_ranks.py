"""Printing by several processes of one command: one of them prints, and reports the error of one or all of them."""

from __future__ import annotations

import os
import sys
import warnings

from onnxgrad.distributed import Lost
from onnxgrad.errors import OnnxGradError
from onnxgrad.training.parallel.joining import ranks_of
from onnxgrad.training.parallel.ranks import OnRank, Ranks, SingleRank

_ranks: Ranks = SingleRank()


def join_ranks(distributed: str | None) -> Ranks:
    """Join the ranks of the command; from now on only the first one prints, and an error is that of all of them."""
    global _ranks
    _ranks = ranks = ranks_of(distributed)
    if not ranks.is_first:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for as long as the process lasts)
        warnings.showwarning = lambda *_, **__: None
    return ranks


def error_to_print(error: OnnxGradError) -> OnnxGradError | None:
    """The error that this process prints before it ends; None if another process prints it."""
    try:
        with _ranks.continued():
            raise error
    except OnnxGradError as found:
        error = found
    if isinstance(error, Lost):
        return error if error.speaker else None
    return error if _ranks.is_first or isinstance(error, OnRank) else None
