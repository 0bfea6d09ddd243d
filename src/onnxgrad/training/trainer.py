"""The loop around a step: epochs, validation, checkpoints, and stopping cleanly.

Everything that decides what a step sees is a function of the seed and the epoch, so a run that goes on
from a checkpoint takes the same steps, bit for bit, as one that was never interrupted.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, TrainingError
from onnxgrad.ir.builder import FLOATS
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.training.checkpoint import FILE, Checkpoint, check_state_fits, fingerprint
from onnxgrad.training.data import Data, Field
from onnxgrad.training.evaluation import Evaluation
from onnxgrad.training.info import AnyTrainingModel
from onnxgrad.training.metrics import History
from onnxgrad.training.report import Reporter, Silent, check_plot, plot
from onnxgrad.training.step import Step, compile_step

#: What `onnxgrad.training.data.open_data` can open, or data that were opened.
AnyData = Any
#: Which share of its learning rate a step takes, as a function of how much of the run is behind it (0 to 1).
Schedule = Callable[[float], float]


def cosine(progress: float) -> float:
    """From the full rate down to nothing along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Schedule | None] = {"constant": None, "cosine": cosine}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the step at hand was finished and the state was kept."""

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        self.step = step
        self.checkpoint = checkpoint
        kept = f"; the checkpoint is {str(checkpoint)!r}" if checkpoint else "; no checkpoint was asked for"
        super().__init__(f"interrupted after step {step}{kept}")


class Trainer:
    """Trains a model that carries training information.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model`` with a TrainingInfoProto (see `attach`),
            or a compiled `Step`.
        entry: which of its training entries, if it has several.
        evaluation: how to measure validation data; default: what the training information says.
        options: how ONNX Runtime runs the step.

    Attributes:
        machine: the step with its state.
        step_count: steps taken so far.
        history: what was measured so far.
    """

    def __init__(
        self,
        model: AnyTrainingModel | Step,
        *,
        entry: int | None = None,
        evaluation: Evaluation | None = None,
        options: Options | None = None,
    ) -> None:
        self.step = model if isinstance(model, Step) else compile_step(model, entry=entry)
        if not self.step.loss:
            raise BadInput("the training information has no loss: no Gradient, and no output that updates nothing")
        self.options = options or Options()
        self.machine = StepRunner(self.step, options=self.options)
        self._why_not = ""
        self._evaluation = evaluation or self._default_evaluation()
        self.step_count = 0
        self.history = History()
        inputs = {v.name: v for v in self.step.model.graph.inputs}
        field = self._evaluation.field if self._evaluation else Field.of
        self.fields = [field(inputs[name]) for name in self.step.batch]
        self._initial = {name: t.initial.numpy() for name, t in self.step.state.items()}
        self._fingerprint = fingerprint(self.step.model)

    def _default_evaluation(self) -> Evaluation | None:
        try:
            return Evaluation.of(self.step, self.options)
        except BadInput as error:  # which matters only to those who want to evaluate
            self._why_not = str(error)
            return None

    @property
    def evaluation(self) -> Evaluation:
        """How validation data are measured. Raises BadInput if they cannot be."""
        if self._evaluation is None:
            raise BadInput(self._why_not)
        return self._evaluation

    # --- what the caller may ask for -----------------------------------------------------------

    def data(self, data: AnyData, what: str = "the data") -> Data:
        """`data` as rows for this step. Raises BadInput if they do not fit."""
        if isinstance(data, Data):
            return data
        return Data(data, self.fields, repr(os.fspath(data)) if isinstance(data, (str, os.PathLike)) else what)

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state."""
        return self.machine.state()

    def inference_model(self) -> Any:
        """The inference model with the weights as they are now, an ``onnx_ir.Model``."""
        return self.step.inference_model(self.machine.state())

    def evaluate(self, data: AnyData, batch_size: int = 256) -> dict[str, float]:
        """Loss and accuracy of the inference model, with the weights as they are now, over `data`."""
        rows = self.data(data, "the validation data")
        return self.evaluation(self.machine.state(), rows, batch_size)

    def fit(
        self,
        data: AnyData,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        validation: AnyData | None = None,
        seed: int = 0,
        shuffle: bool = True,
        schedule: Schedule | None = None,
        checkpoint: str | os.PathLike | None = None,
        resume: bool = False,
        checkpoint_seconds: float = 60.0,
        metrics: str | os.PathLike | None = None,
        plot: str | os.PathLike | None = None,
        reporter: Reporter | None = None,
    ) -> History:
        """Train for `epochs` epochs.

        Args:
            data: an ``.npz`` file, or arrays by name (see `onnxgrad.training.data`).
            epochs: how often every row is seen, counted from the beginning of the run, also when it resumes.
            batch_size: rows per step; the last step of an epoch takes what is left. A model with a fixed
                batch size takes that one, and leaves the rest out (other rows in every epoch).
            validation: held-out data, measured after every epoch.
            seed: decides the order of the rows.
            shuffle: whether the rows are drawn in a new random order in every epoch.
            schedule: see `Schedule`; default: the same rate all the time.
            checkpoint: folder for the checkpoint, which is replaced after every epoch, at every
                `checkpoint_seconds`, and when the run is interrupted.
            resume: go on from the checkpoint in that folder, exactly.
            metrics: JSON file to write after every epoch.
            plot: PNG file with the curves, written at the end.
            reporter: shows what is going on; default: nobody.

        Raises:
            BadInput: data, options or a checkpoint that do not fit.
            TrainingError: the loss or the weights are no longer finite; the last checkpoint is good.
            Interrupted: Ctrl-C; the state was kept.
        """
        for what, n, least in (("epochs", epochs, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            if n < least:
                raise BadInput(f"{what} must be at least {least}, not {n}")
        run = _Run(self, self.data(data, "the training data"), epochs, batch_size, seed, shuffle)
        if validation is not None and self._evaluation is None:
            raise BadInput(self._why_not)
        run.validation = None if validation is None else self.data(validation, "the validation data")
        run.schedule = schedule
        run.reporter = reporter or Silent()
        run.checkpoint = None if checkpoint is None else Path(checkpoint) / FILE
        run.checkpoint_seconds = checkpoint_seconds
        run.metrics = None if metrics is None else Path(metrics)
        run.plot = None if plot is None else Path(plot)
        return run(resume)


class _Run:
    """One call of `fit`."""

    validation: Data | None
    schedule: Schedule | None
    reporter: Reporter
    checkpoint: Path | None
    checkpoint_seconds: float
    metrics: Path | None
    plot: Path | None

    def __init__(self, trainer: Trainer, data: Data, epochs: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.trainer, self.data, self.epochs, self.seed, self.shuffle = trainer, data, epochs, seed, shuffle
        self.batch_size, self.rows = batch_size, len(data)
        for f in trainer.fields:
            if f.batch is not None:
                self.batch_size = f.batch
                self.rows = len(data) // f.batch * f.batch
                if not self.rows:
                    raise BadInput(f"the model takes batches of exactly {f.batch} rows; the data have {len(data)}")
        self.per_epoch = -(-self.rows // self.batch_size)
        self.epoch, self.row = 0, 0
        self.total, self.seconds = 0.0, 0.0
        self.stop = False

    @property
    def drawing(self) -> dict[str, Any]:
        """What decides which rows a step sees, beside its number."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "rows": len(self.data),
        }

    def __call__(self, resume: bool) -> History:
        if self.plot:
            check_plot()
        trainer = self.trainer
        trainer.history = History(about={"settings": {**self.drawing, "epochs": self.epochs}})
        trainer.step_count = 0
        if resume:
            self._resume()
        elif self.checkpoint:
            self._save(trainer.state())  # a place that cannot be written shows now, not after the first epoch
        self.reporter.start(self.epochs * self.per_epoch, trainer.step_count, self.epochs)
        try:
            with self._interruptible():
                while self.epoch < self.epochs:
                    self._run_epoch()
        finally:
            self.reporter.stop()
        trainer.history.about["finished"] = True
        self._write()
        if self.plot:
            plot(trainer.history, self.plot)
        return trainer.history

    def _run_epoch(self) -> None:
        trainer, history = self.trainer, self.trainer.history
        order = np.arange(len(self.data))
        if self.shuffle:
            order = self.data.order([self.seed, self.epoch], self.batch_size)
        order = order[: self.rows]
        begin = time.monotonic()
        saved = begin
        kept = self.seconds
        loss_name, machine = trainer.step.loss, trainer.machine
        total = self.epochs * self.per_epoch
        for batch in self.data.batches(self.batch_size, order, self.row):
            if self.schedule:
                self._set_rate(self.schedule(trainer.step_count / total))
            loss = float(machine.step(batch)[loss_name])
            trainer.step_count += 1
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss} at step {trainer.step_count} (epoch {self.epoch + 1}); "
                    f"try a smaller learning rate{self._last_good()}"
                )
            size = len(next(iter(batch.values()))) if batch else self.batch_size
            self.row += size
            self.total += loss * size
            history.curve.add(loss)
            self.reporter.step(trainer.step_count, self.epoch, loss)
            now = time.monotonic()
            self.seconds = kept + now - begin
            if self.stop:
                self._interrupt()
            if now - saved > self.checkpoint_seconds and self.checkpoint:
                self._save(trainer.state())
                saved = time.monotonic()
        state = trainer.state()
        self._check_finite(state)
        record = {
            "epoch": self.epoch + 1,
            "step": trainer.step_count,
            "loss": self.total / self.rows,
            "seconds": self.seconds,
            "steps_per_second": self.per_epoch / self.seconds if self.seconds else 0.0,
        }
        if self.validation:
            measured = trainer.evaluation(state, self.validation, max(self.batch_size, 256))
            record |= {f"validation_{what}": value for what, value in measured.items()}
        history.epochs.append(record)
        self.epoch, self.row = self.epoch + 1, 0
        self.total, self.seconds = 0.0, 0.0
        if self.checkpoint:
            self._save(state)
        self._write()
        self.reporter.epoch(record, self.epochs)
        if self.stop:
            self._interrupt()

    def _set_rate(self, factor: float) -> None:
        held = self.trainer.machine.held
        if not held:
            raise BadInput("the model has no learning rate that could follow a schedule")
        for name, array in held.items():
            array[...] = self.trainer.step.rates[name].numpy() * factor

    # --- keeping -------------------------------------------------------------------------------

    def _save(self, state: dict[str, np.ndarray]) -> None:
        assert self.checkpoint is not None
        run = {
            "step": self.trainer.step_count,
            "epoch": self.epoch,
            "row": self.row,
            "total": self.total,
            "seconds": self.seconds,
            "drawing": self.drawing,
            "history": self.trainer.history.to_json(),
        }
        Checkpoint(state, run, self.trainer._fingerprint).save(self.checkpoint)

    def _resume(self) -> None:
        if self.checkpoint is None:
            raise BadInput("to resume, say in which folder the checkpoint is")
        found = Checkpoint.load(self.checkpoint)
        trainer = self.trainer
        check_state_fits(found, trainer._initial, trainer._fingerprint, self.checkpoint)
        for what, value in self.drawing.items():
            old = found.run["drawing"].get(what)
            if old != value:
                raise BadInput(
                    f"the checkpoint {str(self.checkpoint)!r} was written with {what.replace('_', ' ')} "
                    f"{old}, not {value}; a run that resumes must draw its rows as before"
                )
        trainer.machine.load_state(found.state)
        trainer.step_count = found.run["step"]
        about = trainer.history.about
        trainer.history = History.of_json(found.run["history"])
        trainer.history.about |= about
        self.epoch, self.row = found.run["epoch"], found.run["row"]
        self.total, self.seconds = found.run["total"], found.run["seconds"]

    def _write(self) -> None:
        if self.metrics:
            self.trainer.history.write(self.metrics)

    def _check_finite(self, state: dict[str, np.ndarray]) -> None:
        for name, tensor in self.trainer.step.state.items():
            if tensor.initial.dtype in FLOATS and not np.isfinite(state[name]).all():
                if not np.isfinite(self.trainer._initial[name]).all():
                    continue  # a mask, or a bound, that was infinite from the start
                raise TrainingError(
                    f"{name!r} is not finite after step {self.trainer.step_count} (epoch {self.epoch + 1}); "
                    f"try a smaller learning rate{self._last_good()}"
                )

    def _last_good(self) -> str:
        return f"; the last good checkpoint is {str(self.checkpoint)!r}" if self.checkpoint else ""

    # --- stopping ------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        if self.checkpoint:
            self._save(self.trainer.state())
        raise Interrupted(self.trainer.step_count, self.checkpoint)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C asks the run to stop after the step at hand; a second one stops it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(signum: int, frame: Any) -> None:
            signal.signal(signal.SIGINT, old)
            self.stop = True

        old = signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, old)
