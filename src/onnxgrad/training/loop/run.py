"""The loop around a step: epochs, validation, checkpoints, callbacks, and stopping cleanly.

Everything that decides what a step sees is a function of the seed and the epoch, so a run that goes on
from a checkpoint takes the same steps, bit for bit, as one that was never interrupted.
"""

from __future__ import annotations

import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxgrad.errors import BadInput, TrainingError
from onnxgrad.files import alone
from onnxgrad.ir.builder import FLOATS
from onnxgrad.training.data import Data
from onnxgrad.training.graph.dropout_masks import COUNT, first_count
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint, check_state_fits
from onnxgrad.training.loop.history import History
from onnxgrad.training.metadata import SCHEDULED
from onnxgrad.training.optim.schedules import Schedule as StepSchedule

if TYPE_CHECKING:
    from onnxgrad.training.loop.trainer import Trainer

#: Which share of its learning rate a step takes: a function of how much of the run is behind it (0 to 1), or a
#: schedule of `onnxgrad.training.optim.schedules`, a function of the steps that were taken.
Schedule = Callable[[float], float] | StepSchedule


_ACCEPT = "\n  hint: --accept-changes (in Python accept_changes=True) goes on with what it is told now"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP, after the step at hand was finished and the state was kept."""

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        self.step = step
        self.checkpoint = checkpoint
        kept = f"; the checkpoint is {str(checkpoint)!r}" if checkpoint else "; no checkpoint was asked for"
        super().__init__(f"interrupted after step {step}{kept}")


def _refuse_second_schedule(trainer: Trainer) -> None:
    """Raise BadInput if the step graph scales its learning rate by a schedule itself: the factors would multiply."""
    spelled = (t.metadata_props.get(SCHEDULED) for t in trainer.step.rates.values())
    own = next((s for s in spelled if s), None)
    if own is not None:
        raise BadInput(
            f"the model scales its learning rate by a schedule of its own ({own}), and would by this one as well\n"
            "  hint: leave `schedule` out of one of the two, `attach` or `fit`"
        )


def _said(schedule: Schedule) -> str:
    """What to compare of a schedule; of a function nothing is known."""
    return str(schedule) if isinstance(schedule, StepSchedule) else "a function"


class Run:
    """One call of `Trainer.fit`, as callbacks see it.

    Attributes:
        trainer: whose run it is.
        epoch: epochs that are behind it.
        epochs: how many it will take.
        steps: how many steps it will take.
        folder: of the checkpoint, if there is one.
        rate_factors: the learning rate is multiplied by each of them; whoever has one puts it under a key of its own.
    """

    def __init__(
        self,
        trainer: Trainer,
        data: Data,
        validation: Data | None,
        *,
        epochs: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        schedule: Schedule | str | None,
        folder: Path | None,
        checkpoint_seconds: float,
        callbacks: Sequence[Callback],
        accept_changes: bool = False,
    ) -> None:
        self.accept_changes = accept_changes
        self.trainer, self.data, self.validation = trainer, data, validation
        self.epochs, self.batch_size, self.seed, self.shuffle = epochs, batch_size, seed, shuffle
        self.folder, self.callbacks = folder, list(callbacks)
        self.checkpoint = None if folder is None else folder / FILE
        self.checkpoint_seconds = checkpoint_seconds
        self.rows = len(data)
        if data.whole and trainer.accumulate > 1:
            name = min(data.whole)
            raise BadInput(f"the input {name!r} has no batch axis, so batches cannot be cut; leave `accumulate` out")
        fixed = data.fixed
        if fixed is not None:
            self.batch_size = fixed
            self.rows = len(data) // fixed * fixed
            if not self.rows:
                raise BadInput(f"the model takes batches of exactly {fixed} rows; the data have {len(data)}")
        self.per_epoch = -(-self.rows // self.batch_size)
        self.steps = self.epochs * self.per_epoch
        self._planned = "constant" if schedule is None else schedule if isinstance(schedule, str) else _said(schedule)
        self.schedule = StepSchedule.of(schedule, self.steps) if isinstance(schedule, str) else schedule
        if self.schedule not in (None, StepSchedule("constant")):
            _refuse_second_schedule(trainer)
        self.epoch, self.row = 0, 0
        self.total, self.seconds = 0.0, 0.0
        self.rate_factors: dict[int, float] = {}
        self.finished = ""  # why the run ends before its last epoch
        self._kept = False  # whether there is a checkpoint of this run
        self._interrupted = False

    # --- what callbacks may ask for ------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Steps taken so far."""
        return self.trainer.step_count

    @property
    def history(self) -> History:
        """What was measured so far."""
        return self.trainer.history

    @property
    def fingerprint(self) -> str:
        """Of the step graph."""
        return self.trainer.fingerprint

    def finish(self, why: str) -> None:
        """End the run after this epoch, for this reason."""
        self.finished = why

    # --- the loop ------------------------------------------------------------------------------

    @property
    def drawing(self) -> dict[str, Any]:
        """What decides which rows a step sees, beside its number."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "rows": len(self.data),
        }

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What else decides the numbers of a run, beside the step graph; by what to call it in messages."""
        trainer = self.trainer
        rates = {name: float(tensor.numpy()) for name, tensor in trainer.step.rates.items()}
        return {
            "training data": self.data.fingerprint,
            "classes": self.data.classes and list(self.data.classes),
            "validation data": self.validation and self.validation.fingerprint,
            "learning rate": rates[next(iter(rates))] if len(rates) == 1 else rates,
            "schedule": self._planned,
            "accumulated parts": trainer.accumulate,
        }

    def __call__(self, resume: bool) -> History:
        """All of it."""
        trainer = self.trainer
        trainer.history = History(about={"settings": {**self.drawing, "epochs": self.epochs}})
        trainer.step_count = 0
        if self.folder is None:
            with self._interruptible():
                return self._all(resume)
        made = not self.folder.exists()
        if not resume:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(f"cannot keep a checkpoint in {str(self.folder)!r}: {error.strerror}") from error
        elif not self.folder.is_dir():
            raise BadInput(f"there is no checkpoint {str(self.checkpoint)!r}")
        try:
            with alone(self.folder), self._interruptible():
                return self._all(resume)
        finally:
            if made:
                with suppress(OSError):
                    self.folder.rmdir()  # if nothing came to be in it

    def _all(self, resume: bool) -> History:
        trainer = self.trainer
        if resume:
            self._resume()
        else:
            self._seed_masks()
        if self.checkpoint and not resume:
            self._save(trainer.state())  # a place that cannot be written shows now, not after the first epoch
        try:
            for callback in self.callbacks:
                callback.start(self)
            while self.epoch < self.epochs and not self.finished:
                self._run_epoch()
            self.history.about["finished"] = True
            if self.finished:
                self.history.about["stopped"] = self.finished
            for callback in self.callbacks:
                callback.end(self)
        finally:
            for callback in self.callbacks:
                callback.stop()
        return trainer.history

    def _seed_masks(self) -> None:
        """Have the masks of Dropout follow from the seed, unless the model says where they stand."""
        state = self.trainer.state()
        if COUNT in state and not self.trainer.initial[COUNT]:
            state[COUNT] = first_count(self.seed)
            self.trainer.machine.load_state(state)

    def _run_epoch(self) -> None:
        trainer, history = self.trainer, self.history
        order = np.arange(len(self.data))
        if self.shuffle:
            order = self.data.order([self.seed, self.epoch], self.batch_size)
        order = order[: self.rows]
        begin = saved = time.monotonic()
        kept = self.seconds
        loss_name, machine = trainer.step.loss, trainer.machine
        for batch in self.data.batches(self.batch_size, order, self.row):
            self._set_rate()
            loss = float(machine.step(batch)[loss_name])
            trainer.step_count += 1
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss} at step {trainer.step_count} (epoch {self.epoch + 1}); "
                    f"{self._remedy()}{self._last_good()}"
                )
            size = self.data.count(batch) if batch else self.batch_size
            self.row += size
            self.total += loss * size
            history.curve.add(loss)
            for callback in self.callbacks:
                callback.step(self, loss)
            now = time.monotonic()
            self.seconds = kept + now - begin
            if self._interrupted:
                self._interrupt()
            if now - saved > self.checkpoint_seconds and self.checkpoint:
                self._save(trainer.state())
                saved = time.monotonic()
        self._end_epoch()
        if self._interrupted:
            self._interrupt()

    def _end_epoch(self) -> None:
        trainer = self.trainer
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
        self.history.epochs.append(record)
        self.epoch, self.row = self.epoch + 1, 0
        self.total, self.seconds = 0.0, 0.0
        for callback in self.callbacks:
            callback.epoch(self, record)
        if self.checkpoint:
            self._save(state)

    def _set_rate(self) -> None:
        if not self.schedule and not self.rate_factors:
            return
        held = self.trainer.machine.held
        if not held:
            raise BadInput("the model has no learning rate that could follow a schedule")
        factor = math.prod(self.rate_factors.values())
        if isinstance(self.schedule, StepSchedule):
            factor *= self.schedule(self.step_count)
        elif self.schedule:
            factor *= self.schedule(self.step_count / self.steps)
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
            "settings": self.settings,
            "finished": self.finished,
            "callbacks": [[type(c).__name__, c.state(), c.settings()] for c in self.callbacks if c.state()],
            "history": self.history.to_json(),
        }
        Checkpoint(state, run, self.fingerprint).save(self.checkpoint, keep=True)
        self._kept = True

    def _resume(self) -> None:
        if self.checkpoint is None:
            raise BadInput("to resume, say in which folder the checkpoint is")
        found = Checkpoint.load(self.checkpoint)
        check_state_fits(found, self.trainer.initial, self.checkpoint)
        self._kept = True
        classes = found.run.get("settings", {}).get("classes")
        if classes and self.accept_changes:  # what the outputs mean is no matter of choice
            self._number(classes)
        try:
            moved = self._compare(found)
            self._go_on(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"the checkpoint {str(self.checkpoint)!r} does not say where its run stood") from error
        if moved:  # the rest of an epoch of other batches is none: that epoch begins anew
            self.row, self.total, self.seconds = 0, 0.0, 0.0

    def _number(self, classes: Any) -> None:
        if not isinstance(classes, list) or not all(isinstance(n, str) for n in classes):
            raise BadInput(f"the checkpoint {str(self.checkpoint)!r} does not say which classes it tells apart")
        for data in (self.data, self.validation):
            if data is not None:
                data.number(classes)
        if self.data.classes:
            self.trainer.classes = self.data.classes
        self.__dict__.pop("settings", None)

    def _compare(self, found: Checkpoint) -> bool:
        """Whether the batches are others than those of the run that is resumed.

        Raises:
            BadInput: something else is, too, and nobody has said that it may be.
        """
        before = {**found.run["drawing"], **found.run.get("settings", {})}
        now = {**self.drawing, **self.settings}
        if not (before.get("validation data") and now["validation data"]):
            del now["validation data"]  # measured from now on, or no more
        changes = [
            (what.replace("_", " "), before[what], new)
            for what, new in now.items()
            if what in before and before[what] != new
        ]
        if not self.accept_changes:
            for what, old, new in changes:
                raise self._other(f"other {what}" if what.endswith("data") else f"{what} {old}, not {new}")
            if found.step_graph != self.fingerprint:
                raise BadInput(
                    f"the checkpoint {str(self.checkpoint)!r} belongs to another training step: the model, the loss, "
                    f"the optimizer or its settings are not those that it was written with{_ACCEPT}"
                )
        return any(what in ("seed", "shuffle", "batch size", "rows", "training data") for what, _, _ in changes)

    def _other(self, what: str) -> BadInput:
        return BadInput(
            f"the checkpoint {str(self.checkpoint)!r} was written with {what}; a run that resumes must be told the "
            f"same{_ACCEPT}"
        )

    def _go_on(self, found: Checkpoint) -> None:
        trainer = self.trainer
        self._resume_callbacks(found.run["callbacks"])
        trainer.machine.load_state(found.state)
        trainer.step_count = found.run["step"]
        about = trainer.history.about
        trainer.history = History.of_json(found.run["history"])
        trainer.history.about |= about
        self.epoch, self.row = found.run["epoch"], found.run["row"]
        self.total, self.seconds = found.run["total"], found.run["seconds"]
        self.finished = found.run["finished"]

    def _resume_callbacks(self, kept: Sequence[Sequence[Any]]) -> None:
        remembering = [c for c in self.callbacks if c.state()]
        had = [str(name) for name, *_ in kept]
        if had != [type(c).__name__ for c in remembering] and not self.accept_changes:
            raise BadInput(
                f"the checkpoint {str(self.checkpoint)!r} was written by a run with other callbacks "
                f"({', '.join(had) or 'none'}); a run that resumes must be told the same"
            )
        for callback in remembering:
            name = type(callback).__name__
            if name not in had:
                continue
            _, state, *settings = kept[had.index(name)]
            had[had.index(name)] = ""
            if settings not in ([], [callback.settings()]) and not self.accept_changes:
                raise self._other(f"{name} {settings[0]}, not {callback.settings()}")
            callback.load_state(state)

    def _check_finite(self, state: dict[str, np.ndarray]) -> None:
        for name, tensor in self.trainer.step.state.items():
            if tensor.initial.dtype in FLOATS and not np.isfinite(state[name]).all():
                if not np.isfinite(self.trainer.initial[name]).all():
                    continue  # a mask, or a bound, that was infinite from the start
                raise TrainingError(
                    f"{name!r} is not finite after step {self.step_count} (epoch {self.epoch + 1}); "
                    f"try a smaller learning rate{self._last_good()}"
                )

    def _remedy(self) -> str:
        """What to do about a loss that is no number; at the first step no learning rate can be to blame."""
        if self.step_count > 1:
            return "try a smaller learning rate"
        for name, held in self.trainer.step.model.graph.initializers.items():
            tensor = held.const_value
            if tensor is not None and tensor.dtype in FLOATS and np.isnan(tensor.numpy()).any():
                return f"the weight {name!r} of the model holds nan"
        return "nothing was trained yet: look at how large the data, the labels and the weights are"

    def _last_good(self) -> str:
        return f"; the last good checkpoint is {str(self.checkpoint)!r}" if self._kept else ""

    # --- stopping ------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        if self.checkpoint:
            self._save(self.trainer.state())
        raise Interrupted(self.step_count, self.checkpoint)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGHUP ask the run to stop after the step at hand; a second one stops it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        asking = [signal.SIGINT, signal.SIGTERM]
        if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:  # else nohup wants it to go on
            asking.append(hangup)

        def ask(signum: int, frame: Any) -> None:
            restore()
            self._interrupted = True

        old = {number: signal.signal(number, ask) for number in asking}

        def restore() -> None:
            for number, handler in old.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

        try:
            yield
        finally:
            restore()
