"""What may listen to a run, and interfere: stop it early, keep the best weights, lower the rate, write things down.

A callback is told of the start, of every step, of every epoch and of the end. Whatever it has to remember goes into
the checkpoint, so that a run which resumes does what one without an interruption would have done.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary
from onnxgrad.training.loop.checkpoint import Checkpoint, replacing
from onnxgrad.training.loop.history import History, plain
from onnxgrad.training.loop.run import Run

#: What is better when it is larger; everything else when it is smaller.
LARGER_IS_BETTER = ("accuracy", "f1", "r2", "top", "exact")


class Callback:
    """Hears what a run does; what it does not override does nothing."""

    def start(self, run: Run) -> None:
        """The run begins, or goes on."""

    def step(self, run: Run, loss: float) -> None:
        """A step is done; `loss` is what it computed."""

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """An epoch is done and measured; what is added to `record` is kept with it."""

    def end(self, run: Run) -> None:
        """The run has come to its end (not: was interrupted, or failed)."""

    def stop(self) -> None:
        """The run is over, for whatever reason."""

    def state(self) -> dict[str, Any]:
        """What to remember in the checkpoint, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""

    def settings(self) -> dict[str, Any]:
        """What decides what it does, as JSON: a run that resumes must be told the same."""
        return {}


class Monitor:
    """The best value so far of one entry of the records of epochs.

    Args:
        of: the entry, ``validation_loss`` for instance.
        least: by how much a value must be better to count.
    """

    def __init__(self, of: str, least: float = 0.0) -> None:
        if least < 0:
            raise BadInput(f"an improvement must be at least 0, not {least}")
        self.of, self.least = of, least
        self.sign = -1.0 if any(word in of for word in LARGER_IS_BETTER) else 1.0
        self.best = math.inf
        self.waited = 0

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Take in an epoch; whether it is the best so far.

        Raises:
            BadInput: the record has no such entry.
        """
        if self.of not in record:
            numbers = [k for k, v in record.items() if isinstance(v, float)]
            hint = "; is there validation data?" if self.of.startswith("validation") else ""
            raise BadInput(f"an epoch has no {self.of!r}{hint}; it has {', '.join(numbers)}")
        value = self.sign * float(record[self.of])
        better = value < self.best - self.least or (self.best == math.inf and math.isfinite(value))
        if better:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        return better

    @property
    def value(self) -> float:
        """The best value."""
        return self.sign * self.best

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"best": None if math.isinf(self.best) else self.best, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.waited = int(state["waited"])


class _Monitoring(Callback):
    def __init__(self, monitor: str, least: float) -> None:
        self.monitor = Monitor(monitor, least)

    def state(self) -> dict[str, Any]:
        """Of the monitor."""
        return self.monitor.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Of the monitor."""
        self.monitor.load_state(state)

    def settings(self) -> dict[str, Any]:
        """Of the monitor."""
        return {"monitor": self.monitor.of, "least": self.monitor.least}


class EarlyStopping(_Monitoring):
    """Stop when `monitor` has not become better for `patience` epochs.

    Args:
        monitor: an entry of the records of epochs.
        patience: epochs to wait.
        least: by how much it must become better.
    """

    def __init__(self, monitor: str = "validation_loss", patience: int = 3, least: float = 0.0) -> None:
        super().__init__(monitor, least)
        if patience < 1:
            raise BadInput(f"patience must be at least 1, not {patience}")
        self.patience = patience

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Count."""
        if not self.monitor(record) and self.monitor.waited >= self.patience:
            run.finish(f"{self.monitor.of} has not become better for {self.patience} epochs")


class KeepBest(_Monitoring):
    """At the end, put back the weights of the epoch in which `monitor` was best.

    They lie beside the checkpoint, if there is one, in ``best.safetensors``; else in memory.
    """

    FILE = "best.safetensors"

    def __init__(self, monitor: str = "validation_loss", least: float = 0.0) -> None:
        super().__init__(monitor, least)
        self._kept: dict[str, np.ndarray] | None = None

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Keep the weights if they are the best."""
        if self.monitor(record):
            state = run.state()
            about = {"epoch": record["epoch"], "step": record["step"], self.monitor.of: record[self.monitor.of]}
            run.history.about["best"] = about
            if run.folder is None:
                self._kept = state
            else:
                Checkpoint(state, about, run.fingerprint).save(run.folder / self.FILE)

    def end(self, run: Run) -> None:
        """Put them back."""
        if self.monitor.best == math.inf:
            return
        kept = Checkpoint.load(run.folder / self.FILE).state if run.folder else self._kept
        if kept is not None:
            run.load_state(kept)


class Plateau(_Monitoring):
    """Multiply the rate by `factor` whenever `monitor` has not become better for `patience` epochs."""

    def __init__(
        self, monitor: str = "validation_loss", factor: float = 0.1, patience: int = 2, least: float = 0.0
    ) -> None:
        super().__init__(monitor, least)
        if not 0 < factor < 1 or patience < 1:
            raise BadInput(f"factor must lie between 0 and 1 and patience be at least 1, not {factor} and {patience}")
        self.factor, self.patience = factor, patience
        self.share = 1.0

    def start(self, run: Run) -> None:
        """Go on at the share reached."""
        run.rate_factors[id(self)] = self.share

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Count, and lower the rate."""
        if not self.monitor(record) and self.monitor.waited >= self.patience:
            self.share *= self.factor
            self.monitor.waited = 0
            run.rate_factors[id(self)] = self.share
        record["rate_factor"] = self.share

    def state(self) -> dict[str, Any]:
        """With the share reached."""
        return super().state() | {"share": self.share}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """With the share reached."""
        super().load_state(state)
        self.share = float(state["share"])

    def settings(self) -> dict[str, Any]:
        """With when it lowers the rate, and by how much."""
        return super().settings() | {"factor": self.factor, "patience": self.patience}


class Metrics(Callback):
    """Writes the history into a JSON file after every epoch and at the end, all or nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Write it."""
        run.history.write(self.path)

    def end(self, run: Run) -> None:
        """Write it once more."""
        run.history.write(self.path)


class Log(Callback):
    """A JSON line per step and per epoch, appended to a file as they happen.

    A run that resumes first drops the lines that the checkpoint does not know of: they come again.

    Args:
        path: of the file.
        every: steps between lines of steps; 0 for epochs alone.
    """

    def __init__(self, path: str | Path, every: int = 1) -> None:
        self.path, self.every = Path(path), every

    def start(self, run: Run) -> None:
        """Open the file."""
        old = [line for line in self._lines() if _is_behind(line, run)] if run.step_count else []
        with replacing(self.path) as file:
            file.write_text("".join(json.dumps(line) + "\n" for line in old), encoding="utf-8")
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {str(self.path)!r}: {error.strerror or error}") from error

    def _lines(self) -> list[dict[str, Any]]:
        found = []
        try:
            with open_ordinary(self.path) as file:
                for line in file.read().decode().splitlines():
                    found.append(json.loads(line))
        except (OSError, ValueError):  # no file yet, or a last line that was cut
            pass
        return found

    def step(self, run: Run, loss: float) -> None:
        """Write a line."""
        if self.every and run.step_count % self.every == 0:
            self._write({"step": run.step_count, "epoch": run.epoch + 1, "loss": loss})

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Write a line."""
        self._write(record)

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(plain(dict(line))) + "\n")
            self._file.flush()
        except OSError as error:
            raise BadInput(f"cannot write {str(self.path)!r}: {error.strerror or error}") from error

    def stop(self) -> None:
        """Close the file."""
        file = getattr(self, "_file", None)
        if file is not None:
            with suppress(OSError):  # what could not be written was told of
                file.close()


def _is_behind(line: Any, run: Run) -> bool:
    """Whether a line of a log tells of what a run that goes on has behind it: a step, or the end of an epoch."""
    if not isinstance(line, dict):
        return False
    if "seconds" in line:
        return line.get("epoch", 0) <= run.epoch
    return line.get("step", 0) <= run.step_count


class AtEnd(Callback):
    """Calls ``write(history, path)`` at the end of the run: a plot, a report."""

    def __init__(self, write: Callable[[History, Path], None], path: str | Path) -> None:
        self.write, self.path = write, Path(path)

    def end(self, run: Run) -> None:
        """Call it."""
        self.write(run.history, self.path)
