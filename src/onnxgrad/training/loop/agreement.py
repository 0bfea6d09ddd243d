"""Settings on which the ranks of a run must agree before its first step: all that decides its numbers."""

from __future__ import annotations

import sys
from typing import Any

import onnxruntime

from onnxgrad.training.loop.run import Run
from onnxgrad.training.parallel.ranks import digest


def agreement(run: Run) -> dict[str, Any]:
    """JSON values by their names in messages."""
    source = run.step.source
    draws = source is not None and any(info.initialization_binding for info in source.infos)
    return {
        **{what.replace("_", " "): value for what, value in run.drawing.items()},
        **run.settings,
        "epochs": run.epochs,
        "model": run.fingerprint,
        # where each rank may have drawn other weights, those of the first one count
        "weights": "" if draws else digest(run.strategy.common_state()),
        "kernels": run.target,
        "state of the optimizer": "shared out" if run.strategy.shares_state else "on every rank",
        "callbacks": [
            [type(c).__name__, c.settings(), getattr(c, "patience", None)] for c in run.callbacks if not c.is_told_once
        ],
        "version of onnxgrad": sys.modules["onnxgrad"].__version__,
        "version of ONNX Runtime": onnxruntime.__version__,
    }
