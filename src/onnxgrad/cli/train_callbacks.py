"""Who listens to a run of ``onnxgrad train``: flags, and the callbacks that they stand for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from onnxgrad.cli import panels
from onnxgrad.cli.console import console
from onnxgrad.errors import BadInput
from onnxgrad.training.loop.callbacks import Callback, EarlyStopping, KeepBest, Log
from onnxgrad.training.loop.run import Run
from onnxgrad.training.loop.trackers import MLflow, TensorBoard

MetricsFile = Annotated[Path | None, panels.output("--metrics", help="JSON file for losses and scores.")]
PlotFile = Annotated[Path | None, panels.output("--plot", help="PNG file for the curves.")]
ReportFile = Annotated[Path | None, panels.output("--report", help="HTML file with settings, scores and curves.")]
LogFile = Annotated[Path | None, panels.output("--log", help="JSON lines: every step and every epoch, as they happen.")]
TensorBoardFolder = Annotated[Path | None, panels.output("--tensorboard", help="Folder for TensorBoard event files.")]
MLflowExperiment = Annotated[str | None, panels.output("--mlflow", help="Log to this MLflow experiment.")]
Patience = Annotated[
    int | None, panels.run("--patience", help="Stop when --monitor has not become better for so many epochs.")
]
KeepBestFlag = Annotated[
    bool, panels.run("--keep-best", help="Save the weights of the epoch in which --monitor was best.")
]
Monitored = Annotated[
    str, panels.run("--monitor", help="For --patience and --keep-best: loss, validation_loss, validation_accuracy, …")
]


class Notes(Callback):
    """Prints `lines` on stderr when the run begins: nothing precedes the error of a run that cannot."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def start(self, run: Run) -> None:
        """Print them."""
        for line in self.lines:
            console(sys.stderr).print(line, markup=False, highlight=False, soft_wrap=True)


def listeners(
    *,
    log: Path | None,
    tensorboard: Path | None,
    mlflow: str | None,
    patience: int | None,
    keep_best: bool,
    monitor: str,
    validation: bool,
) -> list[Callback]:
    """The callbacks that the flags stand for.

    Raises:
        BadInput: a package that one of them needs is missing, or what it would watch is not measured.
    """
    if (patience is not None or keep_best) and monitor.startswith("validation") and not validation:
        flag = "--keep-best" if keep_best else "--patience"
        raise BadInput(f"{flag} watches {monitor}: give --validation, or --monitor loss")
    found: list[Callback] = []
    if patience is not None:
        found.append(EarlyStopping(monitor, patience))
    if keep_best:
        found.append(KeepBest(monitor))
    if log is not None:
        found.append(Log(log))
    if tensorboard is not None:
        found.append(TensorBoard(tensorboard))
    if mlflow is not None:
        found.append(MLflow(mlflow))
    return found
