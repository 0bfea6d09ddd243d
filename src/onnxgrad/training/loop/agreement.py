"""What the ranks of a run must agree on before its first step: all that decides its numbers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import onnxruntime

from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.run import Run
from onnxgrad.training.parallel.ranks import digest
from onnxgrad.training.parallel.sharded import Sharded, common_state


def agreement(run: Run, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """It, as JSON, by what to call it in messages."""
    source = run.step.source
    draws = source is not None and any(info.initialization_binding for info in source.infos)
    return {
        **{what.replace("_", " "): value for what, value in run.drawing.items()},
        **run.settings,
        "epochs": run.epochs,
        "model": run.fingerprint,
        "weights": ""
        if draws
        else digest(common_state(run.machine)),  # the first rank's, where each may have drawn others
        "kernels": run.target,
        "state of the optimizer": "shared out" if isinstance(run.machine, Sharded) else "on every rank",
        "callbacks": [
            [type(c).__name__, c.settings(), getattr(c, "patience", None)] for c in callbacks if not c.is_told_once
        ],
        "version of onnxgrad": sys.modules["onnxgrad"].__version__,
        "version of ONNX Runtime": onnxruntime.__version__,
    }
