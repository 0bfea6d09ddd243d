"""A warning about a detector whose predictions are paired with no object any more."""

from __future__ import annotations

from typing import Any

from onnxgrad.errors import warn_caller
from onnxgrad.training.loop.run import Callback, Run


class WarnUnpaired(Callback):
    """Warn, once, after an epoch in which no object was paired with a prediction: the term of boxes is exactly zero.

    Predictions that overlap no object are paired with none by TaskAligned. The loss falls to zero then, and nothing
    is learned.
    """

    def __init__(self) -> None:
        self.warned = False

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Look at the term of boxes."""
        if record.get("box_loss") == 0 and not self.warned and run.is_writer:
            self.warned = True
            warn_caller(
                f"epoch {record['epoch']}: no prediction was paired with an object, so none is learned (box_loss 0)\n"
                "  hint: a smaller learning rate, a warm-up (schedule=cosine:warmup=100), larger pictures, or weights "
                "that were trained before"
            )
