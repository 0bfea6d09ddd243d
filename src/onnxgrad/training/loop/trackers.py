"""Experiment trackers, as callbacks: TensorBoard event files, MLflow runs. Each needs a package of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxgrad.errors import BadInput, printable
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.run import Run


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The measured entries of `record`, without counters."""
    return {k: v for k, v in record.items() if isinstance(v, float) and math.isfinite(v)}


class TensorBoard(Callback):
    """Writes event files: loss and learning rates every `every` steps, records of epochs, settings and provenance.

    Args:
        folder: for the event files of this run.
        every: steps between points.

    Raises:
        BadInput: the package tensorboardX is missing, or the folder cannot be written.
    """

    is_told_once = True

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise BadInput("TensorBoard files need tensorboardX: pip install 'onnxgrad[train]'") from error
        self.folder, self.every, self._make = Path(folder), every, SummaryWriter
        self._writer: Any = None

    def start(self, run: Run) -> None:
        """Open a file; entries that a resumed run repeats are removed."""
        try:
            self._writer = self._make(str(self.folder), purge_step=run.step_count or None)
        except OSError as error:
            raise BadInput(f"cannot write to {str(self.folder)!r}: {error.strerror or error}") from error
        for title in ("settings", "provenance"):
            table = "\n".join(f"| {k} | {printable(str(v))} |" for k, v in run.history.about.get(title, {}).items())
            self._writer.add_text(title, f"| | |\n|---|---|\n{table}", run.step_count)

    def step(self, run: Run, loss: float) -> None:
        """Write a point."""
        if run.step_count % self.every == 0:
            self._writer.add_scalar("step/loss", loss, run.step_count)
            for name, rate in run.rates.items():
                self._writer.add_scalar(f"step/{name}", rate, run.step_count)

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Write a point of everything."""
        for name, value in _numbers(record).items():
            self._writer.add_scalar(f"epoch/{name}", value, record["step"])
        self._writer.flush()

    def evaluation(self, run: Run, record: dict[str, Any]) -> None:
        """Write a point of everything."""
        self.epoch(run, record)

    def stop(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class MLflow(Callback):
    """Logs settings and the records of epochs to the MLflow run that is active, or to a new one.

    Args:
        experiment: its name; default: the one that is active.

    Raises:
        BadInput: the package mlflow is missing.
    """

    is_told_once = True

    def __init__(self, experiment: str | None = None) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise BadInput("logging to MLflow needs mlflow: pip install 'onnxgrad[mlflow]'") from error
        self._mlflow, self.experiment, self._own = mlflow, experiment, False

    def start(self, run: Run) -> None:
        """Begin a run, unless one is active."""
        if self._mlflow.active_run() is None:
            if self.experiment is not None:
                self._mlflow.set_experiment(self.experiment)
            self._mlflow.start_run()
            self._own = True
        if run.step_count == 0:
            self._mlflow.log_params({k: printable(str(v)) for k, v in run.history.about["settings"].items()})

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Log the measurements."""
        self._mlflow.log_metrics(_numbers(record), step=record["step"])

    def evaluation(self, run: Run, record: dict[str, Any]) -> None:
        """Log the measurements."""
        self.epoch(run, record)

    def stop(self) -> None:
        """End the tracker's run, if it was started here."""
        if self._own:
            self._mlflow.end_run()
            self._own = False
