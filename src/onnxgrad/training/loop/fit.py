"""The loop around a step: epochs, learning rates, validation, checkpoints and callbacks.

Everything that decides what a step sees is a function of the seed and the epoch, so a run that goes on
from a checkpoint takes the same steps, bit for bit, as one that was never interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import numpy as np

from onnxgrad.errors import BadInput, TrainingError, UnknownName
from onnxgrad.files import alone
from onnxgrad.ir.builder import FLOATS
from onnxgrad.training.graph.dropout_masks import COUNT, first_count
from onnxgrad.training.loop.agreement import agreement
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.evaluation import Evaluation
from onnxgrad.training.loop.interruption import Interrupted, interruptible
from onnxgrad.training.loop.listeners import watched
from onnxgrad.training.loop.provenance import provenance
from onnxgrad.training.loop.resume import resume, save
from onnxgrad.training.loop.run import Run
from onnxgrad.training.measure import METRICS
from onnxgrad.training.optim.schedules import Schedule
from onnxgrad.training.parallel.machine import DataParallel
from onnxgrad.training.parallel.ranks import OnRank
from onnxgrad.training.parallel.sharded import Sharded, common_state, inference_state


class Fit:
    """The loop of a run: to be opened, then called.

    Args:
        run: what is asked for, and where it stands.
        callbacks: hear what it does.
        evaluation: how validation data are measured; None if there are none.
        checkpoint_seconds: between checkpoints within an epoch.
    """

    def __init__(
        self, run: Run, callbacks: Sequence[Callback], evaluation: Evaluation | None, checkpoint_seconds: float
    ) -> None:
        self.run, self.callbacks, self.evaluation = run, list(callbacks), evaluation
        self.checkpoint_seconds = checkpoint_seconds
        self._interrupted = False

    @contextmanager
    def opened(self, resuming: bool, accept_changes: bool = False) -> Iterator[None]:
        """Hold the folder of the checkpoint and listen to signals; the run stands where it begins, or goes on."""
        run = self.run
        self._check_monitors()
        if run.folder is None:
            with interruptible(self._ask, run.ranks is not None):
                self._begin(resuming, accept_changes)
                yield
            return
        made = not run.folder.exists()
        if not resuming:
            try:
                run.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(f"cannot keep a checkpoint in {str(run.folder)!r}: {error.strerror}") from error
        elif not run.folder.is_dir():
            raise BadInput(f"there is no checkpoint {str(run.checkpoint)!r}")
        try:
            with alone(run.folder), interruptible(self._ask, run.ranks is not None):
                self._begin(resuming, accept_changes)
                yield
        finally:
            if made:
                with suppress(OSError):
                    run.folder.rmdir()  # if nothing came to be in it

    def _begin(self, resuming: bool, accept_changes: bool) -> None:
        run = self.run
        if run.ranks is not None:
            run.ranks.agree(agreement(run, self.callbacks))
            resuming = run.ranks.first(lambda: resuming)  # which may depend on what the first one has kept
        if resuming:
            resume(run, self.callbacks, accept_changes)
            return
        if isinstance(run.machine, Sharded):
            if run.machine.is_new:
                run.take_state({name: t.numpy() for name, t in run.machine.first.items()})
        elif run.ranks is not None:
            run.load_state(run.ranks.shared(run.state()))
        self._seed_masks()
        if run.ranks is None or isinstance(run.machine, Sharded):
            self._save_first()
        else:
            run.ranks.first(self._save_first)

    def _save_first(self) -> None:
        if self.run.keeps:  # a place that cannot be written shows now, not after the first epoch
            self._save()

    def _seed_masks(self) -> None:
        """Have the masks of Dropout follow from the seed, unless the model says where they stand."""
        held = self.run.step.state.get(COUNT)
        if held is not None and not held.initial.numpy():
            self.run.machine.load_state({**self.run.machine.now, COUNT: first_count(self.run.seed)})

    def __call__(self) -> None:
        """Take all epochs that are left."""
        run = self.run
        run.history.about["provenance"] = provenance(run.target)
        try:
            with nullcontext() if run.ranks is None else run.ranks.agreeing():
                for callback in self.callbacks:
                    callback.start(run)
            while run.epoch < run.epochs and not run.position.finished:
                self._epoch()
            run.history.about["finished"] = True
            if run.position.finished:
                run.history.about["stopped"] = run.position.finished
            for callback in self.callbacks:
                callback.end(run)
            if run.ranks is not None and not isinstance(
                run.machine, Sharded
            ):  # the first rank may have put others back
                run.load_state(run.ranks.shared(run.state()))
        finally:
            for callback in self.callbacks:
                callback.stop()

    def _check_monitors(self) -> None:
        """Raise UnknownName for a callback that watches what no epoch will have, before the first step."""
        run = self.run
        names = watched(self.callbacks)
        if not names or any(not type(c).__module__.startswith("onnxgrad.") for c in self.callbacks):
            return  # a callback of the caller's own may add to the record of an epoch
        known = ["loss", "seconds", "steps_per_second", "rate_factor", *run.rates]
        if run.validation is not None and self.evaluation is not None:
            some = run.validation.select(np.arange(min(len(run.validation), 256)), run.validation.name)
            measured = self.evaluation(inference_state(run.machine), some, metrics=run.metrics)
            known += [f"validation_{what}" for what in measured]
        for name in names:
            if name in known:
                continue
            meant = f"validation_{name.removeprefix('val_')}"
            if meant.removeprefix("validation_").partition(":")[0] in METRICS and run.validation is not None:
                raise BadInput(f"no entry of an epoch named {name!r}; did you mean {meant!r}?")
            hint = "\n  hint: give validation data" if "validation_loss" not in known else ""
            raise BadInput(f"{UnknownName(name, known, 'entry of an epoch')}{hint}")

    def _epoch(self) -> None:
        run, at = self.run, self.run.position
        order = np.arange(len(run.data))
        if run.shuffle:
            order = run.data.order([run.seed, at.epoch], run.batch_size, run.sample)
        order = order[: run.rows]
        begin = saved = time.monotonic()
        before, stopped = at.seconds, False
        part = (0, 1) if run.ranks is None else (run.ranks.rank, run.ranks.size)
        for batch in run.data.batches(run.batch_size, order, at.row, [run.seed, at.epoch], part):
            self._set_rate()
            if isinstance(run.machine, Sharded):
                run.machine.due = run.folder is not None and time.monotonic() - saved > self.checkpoint_seconds
            loss = float(run.machine.step(batch)[run.step.loss])
            at.step += 1
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss} at step {at.step} (epoch {at.epoch + 1}); {self._remedy()}{self._last_good()}"
                )
            size = min(run.batch_size, len(order) - at.row)
            at.row += size
            at.total += loss * size
            at.history.curve.add(loss)
            for callback in self.callbacks:
                callback.step(run, loss)
            now = time.monotonic()
            at.seconds = before + now - begin
            if run.evaluate_every is not None and at.step % run.evaluate_every == 0:
                self._evaluate_between()
                begin += time.monotonic() - now  # which is no time of steps
                if stopped := bool(at.finished):
                    break
            if self._is_to_stop():
                self._interrupt()
            if self._is_to_save(now - saved):
                self._save()
                saved = time.monotonic()
        self._end_epoch(at.row if stopped else run.rows)
        if self._interrupted and run.ranks is None:  # several ranks hear of it with the next step
            self._interrupt()

    def _is_to_stop(self) -> bool:
        """Whether this process was asked to, or any of the ranks before the last step."""
        machine = self.run.machine
        return machine.stopping if isinstance(machine, DataParallel) else self._interrupted

    def _is_to_save(self, seconds: float) -> bool:
        """Whether it is time for a checkpoint; where each rank writes its part, the first one has told them all."""
        machine = self.run.machine
        if isinstance(machine, Sharded):
            return machine.is_due
        is_settled = machine.is_settled if isinstance(machine, DataParallel) else True
        return self.run.keeps and is_settled and seconds > self.checkpoint_seconds

    def _evaluate_between(self) -> None:
        """Measure validation data between two steps."""
        run, at = self.run, self.run.position
        self._settle()
        record = {"epoch": at.epoch + 1, "step": at.step, "loss": at.total / at.row, **self._validated()}
        at.history.evaluations.append(record)
        for callback in self.callbacks:
            callback.evaluated(run, record)
        self._decide_together()

    def _decide_together(self) -> None:
        """End the run on all ranks where a callback ends it on the first."""
        run = self.run
        if run.ranks is not None:
            run.position.finished = run.ranks.first(lambda: run.position.finished)

    def _validated(self) -> dict[str, float]:
        run = self.run
        if run.validation is None or self.evaluation is None:
            return {}
        ranks = None if run.ranks is None else run.ranks.collective
        measured = self.evaluation(
            inference_state(run.machine), run.validation, max(run.batch_size, 256), run.metrics, ranks
        )
        return {f"validation_{what}": value for what, value in measured.items()}

    def _settle(self) -> None:
        """Have all ranks hold the same, where they do not at every step."""
        if isinstance(self.run.machine, DataParallel):
            self.run.position.total = self.run.machine.settle(self.run.position.total)

    def _end_epoch(self, rows: int) -> None:
        run, at = self.run, self.run.position
        self._settle()
        self._check_finite()
        if run.ranks is not None:
            run.ranks.check_equal(common_state(run.machine), at.step)
        record = {
            "epoch": at.epoch + 1,
            "step": at.step,
            "loss": at.total / rows,
            "seconds": at.seconds,
            "steps_per_second": -(-rows // run.batch_size) / at.seconds if at.seconds else 0.0,
            **run.rates,
        }
        between = at.history.evaluations
        if run.evaluate_every is None:
            record |= self._validated()
        else:
            if at.epoch + 1 == run.epochs and not (between and between[-1]["step"] == at.step):
                self._evaluate_between()  # the last state is measured in any case
            if between and between[-1]["step"] == at.step:
                record |= {k: v for k, v in between[-1].items() if k.startswith("validation_")}
        if run.ranks is not None:  # callbacks decide from the same numbers everywhere, from seconds too
            record = run.ranks.first(lambda: record)
        at.history.epochs.append(record)
        at.epoch += 1
        at.begin_epoch()
        for callback in self.callbacks:
            callback.epoch(run, record)
        self._decide_together()
        if run.keeps:
            self._save()

    def _set_rate(self) -> None:
        run = self.run
        if not run.schedule and not run.rate_factors:
            return
        held = run.machine.held
        if not held:
            raise BadInput("the model has no learning rate that could follow a schedule")
        factor = math.prod(run.rate_factors.values())
        if isinstance(run.schedule, Schedule):
            factor *= run.schedule(run.step_count)
        elif run.schedule:
            factor *= run.schedule(run.step_count / run.steps)
        for name, array in held.items():
            array[...] = run.step.rates[name].numpy() * factor

    def _check_finite(self) -> None:
        state = self.run.machine.now
        for name, tensor in self.run.step.state.items():
            if tensor.initial.dtype in FLOATS and name in state and not np.isfinite(state[name]).all():
                if not np.isfinite(tensor.initial.numpy()).all():
                    continue  # a mask, or a bound, that was infinite from the start
                is_own = isinstance(self.run.machine, Sharded) and name in self.run.machine.shares.kept
                raise (OnRank if is_own else TrainingError)(
                    f"{name!r} is not finite after step {self.run.step_count} (epoch {self.run.epoch + 1}); "
                    f"try a smaller learning rate{self._last_good()}"
                )

    def _remedy(self) -> str:
        """What to do about a loss that is no number; at the first step no learning rate can be to blame."""
        if self.run.step_count > 1:
            return "try a smaller learning rate"
        for name, held in self.run.step.model.graph.initializers.items():
            tensor = held.const_value
            if tensor is not None and tensor.dtype in FLOATS and np.isnan(tensor.numpy()).any():
                return f"the weight {name!r} of the model holds nan"
        return "nothing was trained yet: look at how large the data, the labels and the weights are"

    def _last_good(self) -> str:
        return f"; the last good checkpoint is {str(self.run.checkpoint)!r}" if self.run.kept else ""

    def _save(self) -> None:
        save(self.run, self.callbacks)

    def _ask(self) -> None:
        self._interrupted = True
        if isinstance(self.run.machine, DataParallel):
            self.run.machine.asked = True

    def _interrupt(self) -> None:
        self._settle()
        if self.run.keeps:
            self._save()
        raise Interrupted(self.run.step_count, self.run.checkpoint)
