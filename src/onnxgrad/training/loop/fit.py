"""The loop around a step: epochs, learning rates, validation, checkpoints and callbacks.

Everything that decides the inputs of a step is a function of the seed and the epoch, so a run resumed from a checkpoint
takes the same steps, bit for bit, as one that was never interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import numpy as np

from onnxgrad.errors import BadInput, TrainingError, UnknownName
from onnxgrad.files import lock_folder, make_folder
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.match import not_none
from onnxgrad.training.data.fields import is_uncounted
from onnxgrad.training.data.streams import Stream
from onnxgrad.training.graph.dropout_masks import COUNT, first_count
from onnxgrad.training.loop.agreement import agreement
from onnxgrad.training.loop.history import Curve
from onnxgrad.training.loop.interruption import Interrupted, interruptible
from onnxgrad.training.loop.listeners import watched
from onnxgrad.training.loop.own_losses import check_on_first_batch
from onnxgrad.training.loop.provenance import provenance
from onnxgrad.training.loop.resume import resume, save
from onnxgrad.training.loop.run import Run
from onnxgrad.training.measure import METRICS
from onnxgrad.training.optim.schedules import Schedule
from onnxgrad.training.parallel.ranks import OnRank


@contextmanager
def open_run(run: Run, resuming: bool, accept_changes: bool = False) -> Iterator[None]:
    """Lock the checkpoint's folder and handle signals; the run starts, or resumes at its checkpoint."""
    strategy = run.strategy
    _check_monitors(run)
    strategy.forget_stop()
    if run.folder is None:
        with interruptible(strategy.ask_to_stop, strategy.has_several):
            _begin(run, resuming, accept_changes)
            yield
        return
    made = not run.folder.exists()
    if not resuming:
        make_folder(run.folder)
    elif not run.folder.is_dir():
        raise BadInput(f"there is no checkpoint {str(run.checkpoint)!r}")
    try:
        with lock_folder(run.folder), interruptible(strategy.ask_to_stop, strategy.has_several):
            _begin(run, resuming, accept_changes)
            yield
    finally:
        if made:
            with suppress(OSError):
                run.folder.rmdir()  # if nothing came to be in it


def _begin(run: Run, resuming: bool, accept_changes: bool) -> None:
    strategy = run.strategy
    strategy.ranks.agree(lambda: agreement(run))
    resuming = strategy.ranks.first(lambda: resuming)  # which may depend on the first one
    if resuming:
        resume(run, accept_changes)
        return
    strategy.begin()
    _seed_masks(run)
    if strategy.shares_state:
        _save_first(run)
    else:
        strategy.ranks.first(lambda: _save_first(run))


def _save_first(run: Run) -> None:
    if run.keeps:  # a place that cannot be written shows now, not after the first epoch
        save(run)


def _seed_masks(run: Run) -> None:
    """Derive the masks of Dropout from the seed, unless the model stores their state."""
    held = run.step.state.get(COUNT)
    if held is not None and not held.initial.numpy():
        run.machine.load_state({**run.machine.now, COUNT: first_count(run.seed)})


def take_epochs(run: Run) -> None:
    """Take all remaining epochs."""
    run.history.about["provenance"] = provenance(run.target)
    run.machine.whole = run.data.whole
    try:
        with run.strategy.ranks.agreeing():
            for callback in run.callbacks:
                callback.start(run)
        while run.epoch < run.epochs and not run.position.finished:
            _take_epoch(run)
        run.history.about["finished"] = True
        if run.position.finished:
            run.history.about["stopped"] = run.position.finished
        for callback in run.callbacks:
            callback.end(run)
        run.strategy.end()
    finally:
        for callback in run.callbacks:
            callback.stop()
        if isinstance(run.data, Stream):
            run.data.close()


def _check_monitors(run: Run) -> None:
    """Raise UnknownName, before the first step, for a callback that monitors a metric that no epoch measures."""
    names = watched(run.callbacks)
    if not names or any(not type(c).__module__.startswith("onnxgrad.") for c in run.callbacks):
        return  # a callback of the caller's own may add to the record of an epoch
    known = ["loss", *run.terms, "seconds", "steps_per_second", "rate_factor", *run.rates]
    if run.validation is not None:
        some = run.validation.select(np.arange(min(len(run.validation), 256)), run.validation.name)
        measured = run.trainer.evaluation(run.strategy.inference_state(), some, metrics=run.metrics)
        known += [f"validation_{what}" for what in measured]
    for name in names:
        if name in known:
            continue
        meant = f"validation_{name.removeprefix('val_')}"
        if meant.removeprefix("validation_").partition(":")[0] in METRICS and run.validation is not None:
            raise BadInput(f"no entry of an epoch named {name!r}; did you mean {meant!r}?")
        hint = "\n  hint: give validation data" if "validation_loss" not in known else ""
        raise BadInput(f"{UnknownName(name, known, 'entry of an epoch')}{hint}")


def _take_epoch(run: Run) -> None:
    at = run.position
    begin = saved = time.monotonic()
    before, stopped = at.seconds, False
    if at.row:  # an epoch may be resumed behind its last step, whose rate is recorded
        _set_rate(run, run.step_count - 1)
    for batch, size in run.batches():
        _set_rate(run, run.step_count)
        if not at.step:
            check_on_first_batch(run, batch)
        run.strategy.announce_save(run.folder is not None and time.monotonic() - saved > run.checkpoint_seconds)
        found = run.machine.step(batch)
        loss, terms = float(found[run.step.loss]), {name: float(found[name]) for name in run.terms}
        at.step += 1
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {at.step} (epoch {at.epoch + 1}); {_remedy(run, batch)}{_last_good(run)}"
            )
        at.row += size
        at.total += loss * size
        at.history.curve.add(loss)
        for name, value in terms.items():
            at.terms[name] = at.terms.get(name, 0.0) + value * size
            at.history.terms.setdefault(name, Curve()).add(value)
        for callback in run.callbacks:
            callback.step(run, loss)
        now = time.monotonic()
        at.seconds = before + now - begin
        if run.evaluate_every is not None and at.step % run.evaluate_every == 0:
            _evaluate_between(run)
            begin += time.monotonic() - now  # which is no time of steps
            if stopped := bool(at.finished):
                break
        if run.strategy.is_stopping:
            _interrupt(run)
        if run.strategy.can_save(run.keeps and now - saved > run.checkpoint_seconds):
            save(run)
            saved = time.monotonic()
    if not at.row and isinstance(run.data, Stream):
        if at.finished:
            return
        raise BadInput(f"{run.data.name} has no rows in epoch {at.epoch + 1}")
    _end_epoch(run, at.row if stopped or isinstance(run.data, Stream) else run.rows)
    if run.strategy.is_stopping:
        _interrupt(run)


def _evaluate_between(run: Run) -> None:
    """Measure validation data between two steps."""
    at = run.position
    _settle(run)
    record = {"epoch": at.epoch + 1, "step": at.step, "loss": at.total / at.row, **_validate(run)}
    at.history.evaluations.append(record)
    for callback in run.callbacks:
        callback.evaluation(run, record)
    _decide_together(run)


def _decide_together(run: Run) -> None:
    """End the run on all ranks where a callback ends it on the first."""
    position = run.position
    position.finished = run.strategy.ranks.first(lambda: position.finished)


def _validate(run: Run) -> dict[str, float]:
    if run.validation is None:
        return {}
    strategy, size = run.strategy, run.batch_size if run.trainer.task.name else max(run.batch_size, 256)
    measured = run.trainer.evaluation(
        strategy.inference_state(), run.validation, size, run.metrics, strategy.ranks.collective
    )
    return {f"validation_{what}": value for what, value in measured.items()}


def _settle(run: Run) -> None:
    """Make the state equal on all ranks."""
    run.position.total = run.strategy.settle(run.position.total)


def _end_epoch(run: Run, rows: int) -> None:
    at = run.position
    _settle(run)
    _check_finite(run)
    run.strategy.ranks.check_equal(run.strategy.common_state(), at.step)
    record = {
        "epoch": at.epoch + 1,
        "step": at.step,
        "loss": at.total / rows,
        **{name: value / rows for name, value in at.terms.items()},
        "seconds": at.seconds,
        "steps_per_second": -(-rows // run.batch_size) / at.seconds if at.seconds else 0.0,
        **run.rates,
    }
    between = at.history.evaluations
    if run.evaluate_every is None:
        record |= _validate(run)
    else:
        if at.epoch + 1 == run.epochs and not (between and between[-1]["step"] == at.step):
            _evaluate_between(run)  # the last state is measured in any case
        if between and between[-1]["step"] == at.step:
            record |= {k: v for k, v in between[-1].items() if k.startswith("validation_")}
    record = run.strategy.ranks.first(lambda: record)  # callbacks decide from the same numbers, from seconds too
    at.history.epochs.append(record)
    at.epoch += 1
    at.begin_epoch()
    for callback in run.callbacks:
        callback.epoch(run, record)
    _decide_together(run)
    if run.keeps:
        save(run)


def _set_rate(run: Run, finished: int) -> None:
    """Feed the learning rates of the step behind so many `finished` ones."""
    if not run.schedule and not run.rate_factors:
        return
    held = run.machine.held
    if not held:
        raise BadInput("the model has no learning rate that could follow a schedule")
    factor = math.prod(run.rate_factors.values())
    if isinstance(run.schedule, Schedule):
        factor *= run.schedule(finished)
    elif run.schedule:
        factor *= run.schedule(finished / not_none(run.steps))
    for name, array in held.items():
        array[...] = run.step.rates[name].numpy() * factor


def _check_finite(run: Run) -> None:
    state = run.machine.now
    for name, tensor in run.step.state.items():
        if tensor.initial.dtype in FLOATS and name in state and not np.isfinite(state[name]).all():
            if not np.isfinite(tensor.initial.numpy()).all():
                continue  # a mask, or a bound, that was infinite from the start
            raise (OnRank if name in run.strategy.places() else TrainingError)(
                f"{name!r} is not finite after step {run.step_count} (epoch {run.epoch + 1}); "
                f"try a smaller learning rate{_last_good(run)}"
            )


def _remedy(run: Run, batch: Mapping[str, np.ndarray]) -> str:
    """A remedy for a loss of `batch` that is no number; the learning rate is not the cause at the first step."""
    for field in run.trainer.fields:
        if is_uncounted(labels := np.asarray(batch.get(field.name, ())), field):
            return (
                f"all labels of the batch are {labels.flat[0]}, which the loss ignores: leave out such rows, or take "
                "larger batches (batch_size), or reduction=sum"
            )
    if run.step_count > 1:
        return "try a smaller learning rate"
    for name, held in run.step.model.graph.initializers.items():
        tensor = held.const_value
        if tensor is not None and tensor.dtype in FLOATS and np.isnan(tensor.numpy()).any():
            return f"the weight {name!r} of the model holds nan"
    return "nothing was trained yet: look at how large the data, the labels and the weights are"


def _last_good(run: Run) -> str:
    return f"; the last good checkpoint is {str(run.checkpoint)!r}" if run.kept else ""


def _interrupt(run: Run) -> None:
    _settle(run)
    if run.keeps:
        save(run)
    raise Interrupted(run.step_count, run.checkpoint)
