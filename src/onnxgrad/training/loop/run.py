"""A run of training: its settings, its position, and the interface of callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, warn_caller, warn_renamed
from onnxgrad.training.data import Data
from onnxgrad.training.data.streams import Stream
from onnxgrad.training.loop.checkpoint import FILE
from onnxgrad.training.loop.history import History
from onnxgrad.training.loop.loop_recipe import LoopRecipe
from onnxgrad.training.loop.trained import Trained
from onnxgrad.training.metadata import SCHEDULED
from onnxgrad.training.optim.schedules import Schedule
from onnxgrad.training.parallel.ranks import Ranks
from onnxgrad.training.parallel.strategy import AnyMachine
from onnxgrad.training.step.step import Step


@dataclass
class Position:
    """The position of a run; with the state, it suffices to continue.

    Attributes:
        step: steps taken.
        epoch: epochs finished.
        row: rows of the present epoch that were seen.
        total: sum of the losses of these rows.
        terms: the same of each term of the loss, if there are several.
        seconds: what they took.
        finished: why the run ends before its last epoch.
        history: what was measured.
    """

    step: int = 0
    epoch: int = 0
    row: int = 0
    total: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    finished: str = ""
    history: History = field(default_factory=History)

    def begin_epoch(self) -> None:
        """At the first row of the present epoch."""
        self.row, self.total, self.seconds, self.terms = 0, 0.0, 0.0, {}


def _refuse_second_schedule(step: Step) -> None:
    """Raise BadInput if the step graph scales its learning rate by a schedule itself: the factors would multiply."""
    spelled = (t.metadata_props.get(SCHEDULED) for t in step.rates.values())
    own = next((s for s in spelled if s), None)
    if own is not None:
        raise BadInput(
            f"the model scales its learning rate by a schedule of its own ({own}), and would by this one as well\n"
            "  hint: leave `schedule` out of one of the two, `attach` or `fit`"
        )


class Run:
    """One call of `Trainer.fit`, as callbacks see it.

    Attributes:
        trainer: the trainer whose `fit` this is.
        step: the step, compiled.
        strategy: how processes share its work.
        machine: the step with the state that this process has of it.
        fingerprint: a digest of the step.
        parts: into how many a batch is cut.
        data, validation: rows to train on, and to measure after every epoch.
        callbacks: hear what the run does.
        epochs: how many epochs it takes.
        steps: how many steps it takes.
        sample: which rows an epoch takes.
        metrics: names of what is measured of validation data; None: what is usual.
        evaluate_every: steps between measurements of validation data; None: after every epoch.
        checkpoint_seconds: between checkpoints within an epoch.
        folder: the folder of the checkpoint, if there is one and this process writes it.
        keeps: True if there is a checkpoint, and this process writes it or a part of it.
        state_folder: the folder into which this process writes it.
        checkpoint: its file.
        kept: True if a checkpoint of this run was written.
        ranks: the processes of the run, if there are several; each has a part of every batch.
        rate_factors: the learning rate is multiplied by each of them; each callback with a factor has its own key.
        position: steps, epochs and rows so far, and the history.
    """

    def __init__(
        self,
        trainer: Trained,
        data: Data | Stream,
        validation: Data | None,
        loop: LoopRecipe,
        *,
        callbacks: Sequence[Callback],
        metrics: Sequence[str] | None,
    ) -> None:
        self.trainer, self.callbacks = trainer, callbacks
        self.step, self.strategy, self.parts = trainer.step, trainer.strategy, trainer.accumulate
        self.fingerprint = trainer.fingerprint
        self.data, self.validation, self.metrics, self.sample = data, validation, metrics, loop.sample
        self.epochs, self.batch_size, self.seed, self.shuffle = loop.epochs, loop.batch_size, loop.seed, loop.shuffle
        self.evaluate_every, self.checkpoint_seconds = loop.evaluate_every, loop.checkpoint_seconds
        folder = None if loop.checkpoint is None else Path(loop.checkpoint)
        self.folder = folder if self.is_writer else None
        self.checkpoint = None if self.folder is None else self.folder / FILE
        self.state_folder = folder if self.is_writer or self.strategy.shares_state else None
        self.keeps = self.state_folder is not None
        self.kept = False
        streamed = isinstance(data, Stream)
        self.rows = 0 if isinstance(data, Stream) else len(data)
        uncut = [n for n in data.whole if not data.columns[n].whole]
        if uncut and (self.parts > 1 or self.strategy.has_several):
            name, what = min(uncut), "leave `accumulate` out" if self.parts > 1 else "train it in one process"
            raise BadInput(f"the input {name!r} has no batch axis, so batches cannot be cut; {what}")
        fixed = data.fixed
        if fixed is not None:
            self.batch_size = fixed
            if not isinstance(data, Stream):
                self.rows = len(data) // fixed * fixed
                if not self.rows:
                    raise BadInput(f"the model takes batches of exactly {fixed} rows; the data have {len(data)}")
        self.steps_per_epoch = data.known_steps if isinstance(data, Stream) else -(-self.rows // self.batch_size)
        self.steps = None if self.steps_per_epoch is None else self.epochs * self.steps_per_epoch
        schedule = loop.schedule
        if streamed and self.steps is None and callable(schedule) and not isinstance(schedule, Schedule):
            raise BadInput(
                "the length of the stream is not known, and a schedule that is a function takes the share of the run\n"
                "  hint: steps_per_epoch= (--steps-per-epoch) says when an epoch ends"
            )
        self.schedule = Schedule.of(schedule, self.steps) if isinstance(schedule, str) else schedule
        if isinstance(data, Stream) and not data.is_repeatable and self.epochs > 1 and data.steps_per_epoch is None:
            raise BadInput(
                f"{data.name} is an iterator, which can be read once, and there are {self.epochs} epochs\n"
                "  hint: hand over a function that returns it (lambda: rows()), or a list, or steps_per_epoch="
            )
        if self.schedule not in (None, Schedule("constant")):
            _refuse_second_schedule(self.step)
        # of a function nothing is known that could be compared
        self._planned = "constant" if schedule is None else "a function"
        if isinstance(schedule, (str, Schedule)):
            self._planned = str(schedule)
        self.rate_factors: dict[int, float] = {}
        self.position = Position()
        self.history.about["settings"] = {**self.drawing, "epochs": self.epochs}

    # --- the interface for callbacks ------------------------------------------------------------

    @property
    def is_writer(self) -> bool:
        """True if this process writes files: the first of several ranks does."""
        return self.trainer.is_writer

    @property
    def machine(self) -> AnyMachine:
        """The step with the state that this process has of it."""
        return self.trainer.machine

    @property
    def ranks(self) -> Ranks | None:
        """The processes of the run, if there are several."""
        return self.trainer.ranks

    @property
    def target(self) -> str:
        """The target of the machine, "portable" or "native" (see `onnxgrad.runtime.Options`)."""
        return self.trainer.options.target

    @property
    def terms(self) -> Sequence[str]:
        """The results of the step that are terms of the loss, if there are several."""
        return () if self.step.source is None else [n for n in self.step.source.terms if n in self.step.results]

    @property
    def epoch(self) -> int:
        """Epochs finished so far."""
        return self.position.epoch

    @property
    def step_count(self) -> int:
        """Steps taken so far."""
        return self.position.step

    @property
    def history(self) -> History:
        """The measurements so far."""
        return self.position.history

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates of the last step, by their names in the model, without those scheduled in the graph."""
        return {name: float(array) for name, array in self.machine.held.items() if array.ndim == 0}

    def state(self) -> dict[str, np.ndarray]:
        """A copy of every tensor of state. Ranks that have shared it out put it together: all of them call this."""
        return self.trainer.state()

    def inference_state(self) -> dict[str, np.ndarray]:
        """A copy of the inference model's state; at the end of an epoch or of the run, any rank may call this."""
        return {name: array.copy() for name, array in self.strategy.inference_state().items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state`; with sharded state, all ranks call this."""
        self.strategy.load_state(state.items())

    def take_state(self, state: Mapping[str, np.ndarray] | None) -> None:
        """Continue from the `state` of the first rank, if it passes one; all ranks call this."""
        ranks = self.strategy.ranks
        if ranks.first(lambda: state is not None):
            if state is None or not ranks.is_first:  # which gives only names, dtypes and shapes
                state = {name: t.initial.numpy() for name, t in self.step.state.items()}
            self.strategy.load_state(ranks.broadcast_each(state))

    def finish(self, why: str) -> None:
        """End the run after this epoch, for this reason."""
        self.position.finished = why

    def batches(self) -> Iterator[tuple[dict[str, np.ndarray], int]]:
        """The rest of the batches of the present epoch, each with its number of rows on all ranks."""
        at, data, part = self.position, self.data, self.strategy.part
        if isinstance(data, Stream):
            yield from data.batches(self.batch_size, self.seed, at.epoch, (at.row, at.step), part)
            if data.exhausted:
                self.finish("the stream ended")
            return
        order = np.arange(len(data))
        if self.shuffle:
            order = data.order([self.seed, at.epoch], self.batch_size, self.sample)
        order = order[: self.rows]
        row = at.row
        for batch in data.batches(self.batch_size, order, row, [self.seed, at.epoch], part):
            size = min(self.batch_size, len(order) - row)
            row += size
            yield batch, size

    # --- inputs that decide its numbers --------------------------------------------------------

    @property
    def drawing(self) -> dict[str, Any]:
        """The settings that decide, with the number of a step, which rows it reads."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "batch_size": self.batch_size,
            "rows": None if isinstance(self.data, Stream) else len(self.data),
            "sample": self.sample,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """The other settings that decide the numbers of a run, beside the step graph, by their names in messages."""
        rates = {name: float(tensor.numpy()) for name, tensor in self.step.rates.items()}
        return {
            "training data": self.data.fingerprint,
            "classes": self.data.classes and list(self.data.classes),
            "validation data": self.validation and self.validation.fingerprint,
            "learning rate": rates[next(iter(rates))] if len(rates) == 1 else rates,
            "augmentation": str(self.data.augment or ""),
            "schedule": self._planned,
            "accumulated parts": self.parts,
            **self.strategy.settings,
        }


class Callback:
    """The hooks of a run. Override the ones you need; by default, each does nothing.

    Attributes:
        is_told_once: of several ranks (see `onnxgrad.distributed`), only the first one has this callback: it writes or
            prints. Callbacks that decide are on all of them, and decide from the same numbers.
    """

    is_told_once = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Warn of a method called as in other libraries (``on_epoch_end``), which a run does not call."""
        super().__init_subclass__(**kwargs)
        if "evaluated" in vars(cls):
            warn_renamed(f"the hook {cls.__name__}.evaluated", "evaluation")
            cls.evaluation = vars(cls)["evaluated"]  # type: ignore[method-assign]
        for name in [n for n in vars(cls) if n.startswith("on_")]:
            warn_caller(
                f"{cls.__name__}.{name} is not called; a callback has start, step, evaluation, epoch, end and stop"
            )

    def start(self, run: Run) -> None:
        """The run starts or resumes."""

    def step(self, run: Run, loss: float) -> None:
        """A step is done; `loss` is its loss."""

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """An epoch is done and measured. Entries added to `record` are kept in the history."""

    def evaluation(self, run: Run, record: dict[str, Any]) -> None:
        """Validation data were measured between two steps, where that is done at every so many (`evaluate_every`)."""

    def end(self, run: Run) -> None:
        """The run has finished: it was neither interrupted nor did it fail."""

    def stop(self) -> None:
        """The run is over, also when it was interrupted or failed."""

    def state(self) -> dict[str, Any]:
        """The callback's part of a checkpoint, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""

    def settings(self) -> dict[str, Any]:
        """The settings as JSON. A run resumes only with the same settings."""
        return {}
