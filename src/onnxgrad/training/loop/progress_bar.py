"""A progress bar on a terminal, which is imported for runs that show their progress only."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.progress import Lines, epoch_line, number, speed
from onnxgrad.training.loop.run import Run


class Bar(Callback):
    """A progress bar with epoch, loss, steps per second and the time that is left."""

    is_told_once = True
    PERIOD = 0.1  # seconds between updates, so that the cost does not depend on the speed of steps

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            _Speed(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._next = 0.0

    def start(self, run: Run) -> None:
        """Show the bar."""
        where = f"{run.epoch + 1}/{run.epochs}"
        self.task = self.progress.add_task("", total=run.steps, completed=run.step_count, epoch=where, loss="-")
        self.progress.start()

    def step(self, run: Run, loss: float) -> None:
        """Move the bar."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.PERIOD
            where = f"{run.epoch + 1}/{run.epochs}"
            self.progress.update(self.task, completed=run.step_count, epoch=where, loss=number(loss))

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Leave a line above the bar."""
        self.progress.update(self.task, completed=record["step"])
        self.console.print(epoch_line(record, run.epochs), highlight=False)

    def evaluation(self, run: Run, record: dict[str, Any]) -> None:
        """Leave a line above the bar."""
        self.console.print(epoch_line(record, run.epochs), highlight=False)

    def stop(self) -> None:
        """Remove the bar."""
        self.progress.stop()


class _Speed(ProgressColumn):
    def render(self, task: Any) -> Text:
        found = task.finished_speed or task.speed
        return Text(speed(found) if found else "")


def reporter(console: Console | None = None) -> Callback:
    """A bar on a terminal, lines elsewhere, on standard error; standard output is for results."""
    console = console or Console(stderr=True, markup=False, emoji=False)
    return Bar(console) if console.is_terminal else Lines(console)
