"""Experiment trackers, as callbacks: TensorBoard, MLflow, Weights & Biases. Each needs a package of its own.

A tracker has three methods: `Tracker.open` begins its record, `Tracker.log` writes measurements at a step, and
`Tracker.close` ends the record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxgrad.errors import needs_package, printable
from onnxgrad.files import writing
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.run import Run


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The measured entries of `record`, without counters."""
    return {k: v for k, v in record.items() if isinstance(v, float) and math.isfinite(v)}


class Tracker(Callback):
    """A record of a run in another tool: derive from it, and override `open`, `log` and `close`.

    Attributes:
        every: steps between points of the loss and the learning rates; 0: measurements of epochs alone.
    """

    is_told_once = True
    every = 0

    def open(self, step: int, about: Mapping[str, Mapping[str, str]]) -> None:
        """Begin or continue a record.

        Args:
            step: steps taken so far: not 0 for a run that is resumed, whose later entries are repeated.
            about: ``settings`` and ``provenance`` of the run, as text by name.
        """

    def log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Write measurements `values` at `step`; `kind` is ``step`` or ``epoch``."""
        raise NotImplementedError

    def close(self) -> None:
        """End the record; also called if the run failed, or if it was not opened."""

    def start(self, run: Run) -> None:
        """Open the record."""
        known = {title: run.history.about.get(title, {}) for title in ("settings", "provenance")}
        self.open(run.step_count, {t: {k: printable(str(v)) for k, v in d.items()} for t, d in known.items()})

    def step(self, run: Run, loss: float) -> None:
        """Log the loss and the learning rates."""
        if self.every and run.step_count % self.every == 0:
            self.log("step", {"loss": loss, **run.rates}, run.step_count)

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Log the measurements."""
        self.log("epoch", _numbers(record), record["step"])

    def evaluation(self, run: Run, record: dict[str, Any]) -> None:
        """Log the measurements."""
        self.epoch(run, record)

    def stop(self) -> None:
        """Close the record."""
        self.close()


class TensorBoard(Tracker):
    """Writes event files: loss and learning rates every `every` steps, records of epochs, settings and provenance.

    Args:
        folder: for the event files of this run.
        every: steps between points.

    Raises:
        BadInput: the package tensorboardX is missing, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        with needs_package("TensorBoard files need tensorboardX", "train"):
            from tensorboardX import SummaryWriter
        self.folder, self.every, self._make = Path(folder), every, SummaryWriter
        self._writer: Any = None

    def open(self, step: int, about: Mapping[str, Mapping[str, str]]) -> None:
        """Open a file; entries that a resumed run repeats are removed."""
        with writing(self.folder):
            self._writer = self._make(str(self.folder), purge_step=step or None)
        for title, values in about.items():
            table = "\n".join(f"| {k} | {v} |" for k, v in values.items())
            self._writer.add_text(title, f"| | |\n|---|---|\n{table}", step)

    def log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Write a point of each value."""
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)
        if kind == "epoch":
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class MLflow(Tracker):
    """Logs settings and the records of epochs to the MLflow run that is active, or to a new one.

    Args:
        experiment: its name; default: the one that is active.

    Raises:
        BadInput: the package mlflow is missing.
    """

    def __init__(self, experiment: str | None = None) -> None:
        with needs_package("logging to MLflow needs mlflow", "mlflow"):
            import mlflow
        self._mlflow, self.experiment, self._own = mlflow, experiment, False

    def open(self, step: int, about: Mapping[str, Mapping[str, str]]) -> None:
        """Begin a run, unless one is active."""
        if self._mlflow.active_run() is None:
            if self.experiment is not None:
                self._mlflow.set_experiment(self.experiment)
            self._mlflow.start_run()
            self._own = True
        if step == 0:
            self._mlflow.log_params(dict(about["settings"]))

    def log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Log the measurements."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the tracker's run, if it was started here."""
        if self._own:
            self._mlflow.end_run()
            self._own = False


class WandB(Tracker):
    """Logs settings and the records of epochs to the Weights & Biases run that is active, or to a new one.

    The environment variable ``WANDB_MODE=offline`` keeps the run in the folder ``wandb``; ``wandb sync`` uploads it.

    Args:
        project: its name; default: that of the settings of wandb.
        every: steps between points of the loss and the learning rates.
        init: further arguments of ``wandb.init``, such as ``dir`` and ``mode``.

    Raises:
        BadInput: the package wandb is missing.
    """

    def __init__(self, project: str | None = None, every: int = 10, **init: Any) -> None:
        with needs_package("logging to Weights & Biases needs wandb", "wandb"):
            import wandb
        self._wandb, self.every, self.init = wandb, every, {"project": project, **init}
        self._run: Any = None

    def open(self, step: int, about: Mapping[str, Mapping[str, str]]) -> None:
        """Begin a run, unless one is active."""
        active = self._wandb.run
        self._run = self._wandb.init(**self.init) if active is None else None
        (active or self._run).config.update({**about["settings"], **about["provenance"]}, allow_val_change=True)

    def log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Log the measurements."""
        self._wandb.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._run is not None:
            self._run.finish()
            self._run = None
