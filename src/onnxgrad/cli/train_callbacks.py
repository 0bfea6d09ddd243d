"""What ``onnxgrad train`` measures, watches and writes down: its flags."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from onnxgrad.cli import panels
from onnxgrad.cli.console import console
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.run import Run
from onnxgrad.training.measure import METRICS

MetricNames = Annotated[
    str | None,
    panels.run(
        "--metrics",
        help=f"What to measure of validation data, with commas between: {', '.join(METRICS)}. Default: what is usual.",
    ),
]
EvaluateEvery = Annotated[
    int | None,
    panels.run("--evaluate-every", metavar="STEPS", help="Measure after so many steps, not after every epoch."),
]
HistoryFile = Annotated[Path | None, panels.output("--history", help="JSON file for losses and metrics.")]
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
Keep = Annotated[
    int | None,
    panels.run("--keep", metavar="K", help="As --keep-best; the K best states stay beside the checkpoint."),
]
Monitored = Annotated[
    str, panels.run("--monitor", help="For --patience and --keep-best: loss, validation_loss, validation_auc, …")
]


class Notes(Callback):
    """Prints `lines` on stderr when the run begins: nothing precedes the error of a run that cannot."""

    is_told_once = True

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def start(self, run: Run) -> None:
        """Print them."""
        for line in self.lines:
            console(sys.stderr).print(line, markup=False, highlight=False, soft_wrap=True)
