"""Progress of a run: a progress bar on a terminal, plain lines elsewhere; and its plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxgrad.figures import drawing, plain
from onnxgrad.files import replacing
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.history import History
from onnxgrad.training.loop.run import Run

if TYPE_CHECKING:
    from rich.console import Console


def speed(steps_per_second: float) -> str:
    """The speed in steps per second, or in seconds per step for slow steps."""
    return f"{steps_per_second:.0f} steps/s" if steps_per_second >= 1 else f"{1 / steps_per_second:.1f} s/step"


class Lines(Callback):
    """One line per epoch, and one every few seconds while an epoch lasts."""

    is_told_once = True
    PERIOD = 10.0

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self, run: Run) -> None:
        """Remember when it began."""
        self._done = run.step_count
        self._begin = time.monotonic()
        self._next = self._begin + self.PERIOD

    def step(self, run: Run, loss: float) -> None:
        """Print a line if the last one is old."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.PERIOD
        per_second = (run.step_count - self._done) / (now - self._begin)
        of, left = "", ""
        if run.steps is not None:
            of, left = f"/{run.steps}", f"  {(run.steps - run.step_count) / per_second:.0f} s left"
        self._print(
            f"epoch {run.epoch + 1}/{run.epochs}  step {run.step_count}{of}  loss {number(loss)}  "
            f"{speed(per_second)}{left}"
        )

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Print its line."""
        self._next = time.monotonic() + self.PERIOD
        self._print(epoch_line(record, run.epochs))

    def evaluation(self, run: Run, record: dict[str, Any]) -> None:
        """Print its line."""
        self._print(epoch_line(record, run.epochs))

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)


def number(loss: float) -> str:
    """A loss in a few characters."""
    return f"{loss:.4f}" if 1e-3 <= abs(loss) < 1e5 or not loss else f"{loss:.3g}"


#: Scores that are shares, and shown in percent.
SHARES = ("accuracy", "f1", "f1_macro", "top5", "exact", "cer", "wer")


def measured(found: Mapping[str, Any]) -> str:
    """Scores in words, the loss last."""
    scores = [f"{k} {v:7.2%}" if k in SHARES else f"{k} {number(v)}" for k, v in found.items() if k != "loss"]
    return "  ".join([*scores, f"loss {number(found['loss'])}"])


def epoch_line(record: dict[str, Any], epochs: int) -> str:
    """One epoch in words, or one measurement between two steps."""
    rate = record.get("steps_per_second")
    parts = [f"epoch {record['epoch']}/{epochs}", *([f"step {record['step']}"] if rate is None else [])]
    parts.append(f"loss {number(record['loss'])}")
    held_out = {k.removeprefix("validation_"): v for k, v in record.items() if k.startswith("validation_")}
    if held_out:
        parts.append(f"validation loss {number(held_out.pop('loss'))}")
        parts += [f"{k} {v:.2%}" if k in SHARES else f"{k} {number(v)}" for k, v in held_out.items()]
    return "  ".join([*parts, *([speed(rate)] if rate else [])])


def interactive() -> bool:
    """True on a terminal or in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def curves(history: History, title: str = "") -> Any:
    """A figure of the loss and of all measurements on the validation data, over the steps.

    Raises:
        BadInput: the package matplotlib is missing.
    """
    ends = [e["step"] for e in history.epochs]
    records = [*history.evaluations, *history.epochs]
    measured = dict.fromkeys(k for e in records for k in e if k.startswith("validation_"))
    panels = [("loss", "validation_loss"), *((k[11:], k) for k in measured if k != "validation_loss")]
    with drawing() as new_figure:
        figure = new_figure(figsize=(5 * min(len(panels), 3), 3.6 * -(-len(panels) // 3)), layout="constrained")
        grid = figure.subplots(-(-len(panels) // 3), min(len(panels), 3), squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes, (what, key) in zip(grid, panels):
            if what == "loss":
                axes.plot(history.curve.steps, history.curve.means, color="0.75", label="training, per step")
                axes.plot(ends, [e["loss"] for e in history.epochs], label="training, per epoch")
            points = history.measured(key)
            if points:
                axes.plot(*zip(*points), label="validation", marker="o" if len(points) == 1 else None)
            if what == "loss" and min(history.curve.means, default=0) > 0:
                axes.set_yscale("log")
            axes.set_xlabel("step")
            axes.set_ylabel(plain(what.replace("_", " ")))
            axes.grid(alpha=0.3)
            axes.legend()
        if title:
            figure.suptitle(plain(title))
        return figure


def plot(history: History, path: Path, title: str = "") -> None:
    """Draw `curves` into a PNG file, all or nothing."""
    figure = curves(history, title)
    with replacing(path) as file, drawing():
        figure.savefig(file, format="png", dpi=120)
