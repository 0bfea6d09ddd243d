"""Callbacks: early stopping, keeping the best weights, lowering the rate on a plateau, logs.

A callback is called at the start, after every step and epoch, and at the end. Its state is stored in the checkpoint, so
that a resumed run continues exactly like an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary, replacing, writing
from onnxgrad.training.loop.checkpoint import Checkpoint
from onnxgrad.training.loop.history import History, plain
from onnxgrad.training.loop.run import Callback, Run
from onnxgrad.training.metrics.registry import larger_is_better


class Monitor:
    """The best value so far of one entry of the epoch records.

    Args:
        of: the entry, such as ``validation_loss``.
        least: the smallest improvement that counts.
    """

    def __init__(self, of: str, least: float = 0.0) -> None:
        if least < 0:
            raise BadInput(f"an improvement must be at least 0, not {least}")
        self.of, self.least = of, least
        self.sign = -1.0 if larger_is_better(of) else 1.0
        self.best = math.inf
        self.waited = 0

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Record an epoch. Returns True if it is the best so far.

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
        """The best value and the epochs since, as JSON."""
        return {"best": None if math.isinf(self.best) else self.best, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        best, waited = state["best"], state["waited"]
        if not (best is None or math.isfinite(best)) or not isinstance(waited, int):
            raise ValueError("a monitor has a finite best value and counts epochs")
        self.best, self.waited = math.inf if best is None else float(best), waited


class _Monitoring(Callback):
    def __init__(self, monitor: str, least: float) -> None:
        self.monitor = Monitor(monitor, least)

    def watch(self, run: Run, record: dict[str, Any]) -> None:
        """Record a measurement."""
        raise NotImplementedError

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Record the epoch, unless the monitored metric is measured between epochs."""
        if run.evaluate_every is None or not self.monitor.of.startswith("validation_"):
            self.watch(run, record)

    def evaluation(self, run: Run, record: dict[str, Any]) -> None:
        """Record the measurement."""
        if self.monitor.of.startswith("validation_"):
            self.watch(run, record)

    def state(self) -> dict[str, Any]:
        """The state of the monitor."""
        return self.monitor.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the monitor."""
        self.monitor.load_state(state)

    def settings(self) -> dict[str, Any]:
        """The settings of the monitor."""
        return {"monitor": self.monitor.of, "least": self.monitor.least}


class EarlyStopping(_Monitoring):
    """Stop when `monitor` has not improved for `patience` epochs.

    Args:
        monitor: an entry of the records of epochs.
        patience: epochs to wait; measurements, where validation data are measured between epochs.
        least: by how much it must become better.
    """

    def __init__(self, monitor: str = "validation_loss", patience: int = 3, least: float = 0.0) -> None:
        super().__init__(monitor, least)
        if patience < 1:
            raise BadInput(f"patience must be at least 1, not {patience}")
        self.patience = patience

    def watch(self, run: Run, record: dict[str, Any]) -> None:
        """Count the epochs, or the measurements, without improvement."""
        if not self.monitor(record) and self.monitor.waited >= self.patience:
            what = "epochs" if "seconds" in record else "measurements"
            run.finish(f"{self.monitor.of} has not become better for {self.patience} {what}")


class Pruning(_Monitoring):
    """Report `monitor` to a search for settings, and stop when the search gives this run up.

    Args:
        report: is called with the value and the number of the epoch (the step, where validation data are measured
            between epochs); a true result ends the run.
        monitor: an entry of the records of epochs.

    Attributes:
        pruned: True if the run was given up.
    """

    def __init__(self, report: Callable[[float, int], Any], monitor: str = "validation_loss") -> None:
        super().__init__(monitor, 0.0)
        self.report, self.pruned = report, False

    def watch(self, run: Run, record: dict[str, Any]) -> None:
        """Report the value."""
        self.monitor(record)
        if self.report(float(record[self.monitor.of]), record["epoch" if "seconds" in record else "step"]):
            self.pruned = True
            run.finish(f"the search gave it up at {self.monitor.of} {record[self.monitor.of]:.6g}")


class KeepBest(_Monitoring):
    """At the end, put back the weights of the epoch in which `monitor` was best.

    They are stored beside the checkpoint, if there is one, in ``best.safetensors``; else in memory.

    Args:
        monitor: an entry of the records of epochs.
        least: by how much it must become better.
        keep: so many of the best states stay beside the checkpoint, in ``best-120.safetensors`` for that of step 120;
            `Trainer.restore` takes one of them.
    """

    FILE = "best.safetensors"

    def __init__(self, monitor: str = "validation_loss", least: float = 0.0, keep: int = 1) -> None:
        super().__init__(monitor, least)
        if keep < 1:
            raise BadInput(f"keep must be at least 1, not {keep}")
        self.keep = keep
        self.ranked: list[dict[str, Any]] = []
        self._kept: dict[str, np.ndarray] | None = None

    def start(self, run: Run) -> None:
        """Reset the state of an earlier run."""
        if not run.is_writer:
            return
        if self.keep > 1 and run.folder is None:
            raise BadInput(f"to keep {self.keep} states, say in which folder the checkpoint is")
        if self.keep > 1 and run.folder is not None:
            known = {entry["file"] for entry in self.ranked}
            for file in run.folder.glob("best-*.safetensors"):
                if file.name not in known and re.fullmatch(r"best-\d+\.safetensors", file.name):
                    file.unlink()

    def watch(self, run: Run, record: dict[str, Any]) -> None:
        """Save the weights if they are the best, or among the best."""
        best = self.monitor(record)
        about = {"epoch": record["epoch"], "step": record["step"], self.monitor.of: record[self.monitor.of]}
        among = self.keep > 1 and self._rank(run, about)
        if not (best or among):
            return
        state = run.state()
        if not run.is_writer:
            return
        if among and run.folder is not None:
            Checkpoint(state, about, run.fingerprint).save(run.folder / _best_file(about))
        if best:
            run.history.about["best"] = about
            if run.folder is None:
                self._kept = state
            else:
                Checkpoint(state, about, run.fingerprint).save(run.folder / self.FILE)

    def _rank(self, run: Run, about: dict[str, Any]) -> bool:
        """True if the state described by `about` is among the best; files of states that no longer are get deleted."""
        of, sign = self.monitor.of, self.monitor.sign
        if not math.isfinite(about[of]):
            return False
        entry = {**about, "file": _best_file(about)}
        ranked = sorted([*self.ranked, entry], key=lambda e: sign * e[of])  # stable: of two alike the earlier one stays
        for gone in ranked[self.keep :]:
            if gone is not entry and run.folder is not None:
                (run.folder / gone["file"]).unlink(missing_ok=True)
        self.ranked = ranked[: self.keep]
        run.history.about["kept"] = self.ranked
        return entry in self.ranked

    def end(self, run: Run) -> None:
        """Restore the best weights."""
        if self.monitor.best == math.inf:
            return
        run.take_state(Checkpoint.load(run.folder / self.FILE).state if run.folder else self._kept)

    def state(self) -> dict[str, Any]:
        """The state of the monitor, and which states are kept."""
        return super().state() | ({"ranked": self.ranked} if self.keep > 1 else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the ranking. Raises ValueError for files elsewhere: dropped states get deleted."""
        super().load_state(state)
        ranked = [dict(entry) for entry in state.get("ranked", ())]
        for entry in ranked:
            is_ours = isinstance(entry["step"], int) and entry["file"] == _best_file(entry)
            if not is_ours or not math.isfinite(entry[self.monitor.of]):
                raise ValueError("a kept state is in a file beside the checkpoint, and has a finite value")
        self.ranked = ranked

    def settings(self) -> dict[str, Any]:
        """The settings of the monitor, and the number of kept states."""
        return super().settings() | ({"keep": self.keep} if self.keep > 1 else {})


def _best_file(about: Mapping[str, Any]) -> str:
    return f"best-{about['step']}.safetensors"


class Plateau(_Monitoring):
    """Multiply the rate by `factor` whenever `monitor` has not improved for `patience` epochs."""

    def __init__(
        self, monitor: str = "validation_loss", factor: float = 0.1, patience: int = 2, least: float = 0.0
    ) -> None:
        super().__init__(monitor, least)
        if not 0 < factor < 1 or patience < 1:
            raise BadInput(f"factor must lie between 0 and 1 and patience be at least 1, not {factor} and {patience}")
        self.factor, self.patience = factor, patience
        self.share = 1.0

    def start(self, run: Run) -> None:
        """Apply the factor reached so far."""
        run.rate_factors[id(self)] = self.share

    def watch(self, run: Run, record: dict[str, Any]) -> None:
        """Count the epochs without improvement; lower the rate after `patience` of them."""
        if not self.monitor(record) and self.monitor.waited >= self.patience:
            self.share *= self.factor
            self.monitor.waited = 0
            run.rate_factors[id(self)] = self.share
        record["rate_factor"] = self.share

    def state(self) -> dict[str, Any]:
        """The state of the monitor, and the factor reached so far."""
        return super().state() | {"share": self.share}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the monitor and the factor reached so far."""
        super().load_state(state)
        self.share = float(state["share"])
        if not 0 < self.share <= 1:
            raise ValueError("the factor of a rate lies between 0 and 1")

    def settings(self) -> dict[str, Any]:
        """The settings of the monitor, with `patience` and `factor`."""
        return super().settings() | {"factor": self.factor, "patience": self.patience}


class Metrics(Callback):
    """Writes the history to a JSON file after every epoch and at the end, atomically."""

    is_told_once = True

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

    A resumed run first removes the lines after its checkpoint: they are written again.

    Args:
        path: of the file.
        every: steps between lines of steps; 0 for epochs alone.
    """

    is_told_once = True

    def __init__(self, path: str | Path, every: int = 1) -> None:
        self.path, self.every = Path(path), every

    def start(self, run: Run) -> None:
        """Open the file."""
        old = [line for line in self._lines() if _is_behind(line, run)] if run.step_count else []
        with replacing(self.path) as file:
            file.write_text("".join(json.dumps(line) + "\n" for line in old), encoding="utf-8")
        with writing(self.path):
            self._file = self.path.open("a", encoding="utf-8")

    def _lines(self) -> list[dict[str, Any]]:
        found = []
        try:
            with open_ordinary(self.path) as file:
                for line in file.read().decode().splitlines():
                    found.append(json.loads(line))
        except ValueError:  # no file yet, or a last line that was cut
            pass
        return found

    def step(self, run: Run, loss: float) -> None:
        """Write a line."""
        if self.every and run.step_count % self.every == 0:
            self._write({"step": run.step_count, "epoch": run.epoch + 1, "loss": loss})

    def epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Write a line."""
        self._write(record)

    def evaluation(self, run: Run, record: dict[str, Any]) -> None:
        """Write a line."""
        self._write(record)

    def _write(self, line: Mapping[str, Any]) -> None:
        with writing(self.path):
            self._file.write(json.dumps(plain(dict(line))) + "\n")
            self._file.flush()

    def stop(self) -> None:
        """Close the file."""
        file = getattr(self, "_file", None)
        if file is not None:
            with suppress(OSError):  # a failed write was reported
                file.close()


def _is_behind(line: Any, run: Run) -> bool:
    """True if a line of the log is of a step or epoch that the resumed run has already done."""
    if not isinstance(line, dict):
        return False
    if "seconds" in line:
        return line.get("epoch", 0) <= run.epoch
    return line.get("step", 0) <= run.step_count


class AtEnd(Callback):
    """Calls ``write(history, path)`` at the end of the run: a plot, a report."""

    is_told_once = True

    def __init__(self, write: Callable[[History, Path], None], path: str | Path) -> None:
        self.write, self.path = write, Path(path)

    def end(self, run: Run) -> None:
        """Call it."""
        self.write(run.history, self.path)
