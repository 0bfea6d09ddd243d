"""The recipe of the loop over the data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onnxgrad.keywords import check_kind, check_whole
from onnxgrad.settings import setting
from onnxgrad.training.optim.schedules import SCHEDULES, RateSchedule

File = str | os.PathLike


@dataclass(frozen=True)
class LoopRecipe:
    """The loop over the data, and its checkpoint."""

    panel: ClassVar[str] = "Run"

    epochs: int = setting(
        1, "How often every row is seen, counted from the beginning of the run, also when it resumes.", command=10
    )
    batch_size: int = setting(32, "Rows per step. A model with a fixed batch size takes that one.", least=1)
    steps_per_epoch: int | None = setting(
        None, "Of a stream: an epoch ends after so many steps, and goes on where the last one ended.", metavar="STEPS"
    )
    seed: int = setting(0, "Decides the order of the rows, and which are held out.")
    shuffle: bool = setting(
        True, "Take the rows of every epoch in a new order, or in that of the data.", off="--no-shuffle"
    )
    sample: str = setting(
        "each", "Rows of an epoch: each, every row once, or balanced, each class as often as the others.", panel="Data"
    )
    schedule: RateSchedule | str | None = setting(
        None,
        f"Of the learning rate: {', '.join(SCHEDULES)} or plateau. Options: 'cosine:warmup=100'; total is the whole "
        "run if not given. Default: constant.",
        python="Also a Schedule(…), or a function of the share of the run that is behind it.",
        kind=str,
        panel="Optimizer",
    )
    evaluate_every: int | None = setting(None, "Measure after so many steps, not after every epoch.", metavar="STEPS")
    checkpoint: File | None = setting(
        None,
        "Folder for the checkpoint, which is replaced after every epoch and when the run is interrupted. The command's "
        "default: OUTPUT with the suffix .checkpoint.",
        kind=Path,
    )
    checkpoint_seconds: float = setting(
        60.0, "Seconds between checkpoints within an epoch; 0: after every step.", least=0
    )
    resume: bool = setting(False, "Go on from the checkpoint, exactly.")
    accept_changes: bool = setting(
        False,
        "Resume with other data or settings than those of the checkpoint; if the batches are others, the epoch at hand "
        "begins anew.",
    )

    def __post_init__(self) -> None:
        check_whole(1, epochs=self.epochs, batch_size=self.batch_size, evaluate_every=self.evaluate_every)
        check_whole(1, steps_per_epoch=self.steps_per_epoch)
        check_whole(0, seed=self.seed)
        check_kind("checkpoint", self.checkpoint, (str, os.PathLike), "a path")
