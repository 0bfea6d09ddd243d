"""Who listens to a run, as the settings of `Trainer.fit` and the flags of ``onnxgrad train`` ask for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from onnxgrad.errors import BadInput
from onnxgrad.training.loop.callbacks import AtEnd, Callback, EarlyStopping, KeepBest, Log, Metrics, Monitor, Plateau
from onnxgrad.training.loop.progress import check_plot, interactive, reporter
from onnxgrad.training.loop.progress import plot as draw
from onnxgrad.training.loop.report_pictures import WritesReport
from onnxgrad.training.loop.run import RateSchedule
from onnxgrad.training.loop.trackers import MLflow, TensorBoard
from onnxgrad.training.optim.schedules import SCHEDULES, Schedule
from onnxgrad.training.option_strings import completed, looked_up, spelled

File = str | os.PathLike


def watchers(monitor: str, patience: int | None, keep_best: bool, keep: int | None, validation: bool) -> list[Callback]:
    """What acts on `monitor`: early stopping, and keeping the best weights.

    Raises:
        BadInput: `monitor` is of validation data, and there are none.
    """
    found: list[Callback] = [] if patience is None else [EarlyStopping(monitor, patience)]
    if keep_best or keep is not None:
        found.append(KeepBest(monitor, keep=1 if keep is None else keep))
    if found and monitor.startswith("validation") and not validation:
        raise BadInput(
            f"{monitor} is watched, and there are no validation data\n"
            "  hint: give --validation or --validation-split, or --monitor loss (in Python validation=, monitor='loss')"
        )
    return found


def loggers(log: File | None, tensorboard: File | None, mlflow: str | None) -> list[Callback]:
    """What writes down how it goes. Raises BadInput where a package that one of them needs is missing."""
    found: list[Callback] = [] if log is None else [Log(Path(log))]
    if tensorboard is not None:
        found.append(TensorBoard(Path(tensorboard)))
    if mlflow is not None:
        found.append(MLflow(mlflow))
    return found


def writers(history: File | None, plot: File | None, report: File | None, progress: bool | None) -> list[Callback]:
    """What is shown, and what is written in the end."""
    found: list[Callback] = [] if history is None else [Metrics(Path(history))]
    if interactive() if progress is None else progress:
        found.append(reporter())
    if plot is not None or report is not None:
        check_plot()
    if plot is not None:
        found.append(AtEnd(draw, Path(plot)))
    if report is not None:
        found.append(WritesReport(Path(report)))
    return found


def rate_plan(
    schedule: RateSchedule | str | None, validation: bool
) -> tuple[RateSchedule | str | None, list[Callback]]:
    """`schedule` without the plateaus that it may be spelled as, and the callbacks that stand for them.

    Raises:
        BadInput: there is none of that name, or its options do not fit.
    """
    if schedule is not None and not isinstance(schedule, str) and not callable(schedule):
        raise BadInput(f"a schedule is a name, a Schedule or a function, not a {type(schedule).__name__}")
    if not isinstance(schedule, str):
        return schedule, []
    name, options = spelled(schedule)
    looked_up("schedule", name, {**SCHEDULES, "plateau": None})
    if name != "plateau":
        Schedule.of(schedule, total=10**6)
        return (None if schedule == "constant" else schedule), []
    monitor = "validation_loss" if validation else "loss"
    defaults = {"monitor": monitor, "factor": 0.1, "patience": 2, "least": 0.0}
    return None, [Plateau(**completed("the schedule 'plateau'", defaults, options))]


def watched(callbacks: Sequence[Callback]) -> list[str]:
    """The entries of records that `callbacks` watch."""
    return [m.of for c in callbacks if isinstance(m := getattr(c, "monitor", None), Monitor)]
