"""Callbacks of a run, as its recipe asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxgrad.errors import BadInput
from onnxgrad.figures import import_matplotlib
from onnxgrad.training.loop.callbacks import AtEnd, Callback, EarlyStopping, KeepBest, Log, Metrics, Monitor, Plateau
from onnxgrad.training.loop.progress import interactive
from onnxgrad.training.loop.progress import plot as draw
from onnxgrad.training.loop.recipe import LogRecipe, WatchRecipe
from onnxgrad.training.loop.report_pictures import WritesReport
from onnxgrad.training.loop.samples import Samples
from onnxgrad.training.loop.trackers import MLflow, TensorBoard, WandB
from onnxgrad.training.optim.schedules import SCHEDULES, RateSchedule, Schedule
from onnxgrad.training.option_strings import completed, looked_up, spelled


def watchers(asked: WatchRecipe, validation: bool) -> list[Callback]:
    """Callbacks that act on `asked.monitor`: early stopping, and keeping the best weights.

    Raises:
        BadInput: the monitor is of validation data, and there are none.
    """
    monitor = asked.monitor
    found: list[Callback] = [] if asked.patience is None else [EarlyStopping(monitor, asked.patience)]
    if asked.keep_best or asked.keep is not None:
        found.append(KeepBest(monitor, keep=1 if asked.keep is None else asked.keep))
    if found and monitor.startswith("validation") and not validation:
        raise BadInput(
            f"{monitor} is watched, and there are no validation data\n"
            "  hint: give --validation or --validation-split, or --monitor loss (in Python validation=, monitor='loss')"
        )
    return found


def loggers(asked: LogRecipe) -> list[Callback]:
    """Callbacks that record a run. Raises BadInput where a package that one of them needs is missing."""
    found: list[Callback] = [] if asked.log is None else [Log(Path(asked.log))]
    if asked.tensorboard is not None:
        found.append(TensorBoard(Path(asked.tensorboard)))
    if asked.mlflow is not None:
        found.append(MLflow(asked.mlflow))
    if asked.wandb is not None:
        found.append(WandB(asked.wandb))
    if asked.sample_prompts:
        found.append(Samples(asked.sample_prompts))
    return found


def shows_progress(asked: LogRecipe) -> bool:
    """True if the run is shown on standard error."""
    return interactive() if asked.progress is None else asked.progress


def writers(asked: LogRecipe) -> list[Callback]:
    """Callbacks that show progress, and write files at the end."""
    found: list[Callback] = [] if asked.history is None else [Metrics(Path(asked.history))]
    if shows_progress(asked):
        from onnxgrad.training.loop.progress_bar import reporter

        found.append(reporter())
    if asked.plot is not None or asked.report is not None:
        import_matplotlib()
    if asked.plot is not None:
        found.append(AtEnd(draw, Path(asked.plot)))
    if asked.report is not None:
        found.append(WritesReport(Path(asked.report)))
    return found


def rate_plan(
    schedule: RateSchedule | str | None, validation: bool
) -> tuple[RateSchedule | str | None, list[Callback]]:
    """`schedule` without plateaus in its spelling, and the callbacks that implement these.

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
