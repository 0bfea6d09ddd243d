"""Metrics accumulated over batches and ranks, as a few sums wherever these suffice.

`add` reads the scores and the labels of a batch (see `onnxgrad.training.metrics.registry` for their forms), `result` is
the metric of all batches: NaN without any. The `sums` of another rank are added by `join`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

NAN = float("nan")


class Running(Protocol):
    """A metric over the batches so far."""

    def add(self, scores: Any, labels: Any) -> None:
        """Add a batch."""

    def result(self) -> float:
        """The metric of all batches so far."""

    def sums(self) -> dict[str, Any]:
        """The sums so far, as JSON and arrays."""

    def join(self, sums: Mapping[str, Any]) -> None:
        """Add the `sums` of another metric of this kind."""


class Sums:
    """A metric whose sums are attributes that `+` joins; None before the first batch."""

    SUMS: ClassVar[tuple[str, ...]] = ()

    def sums(self) -> dict[str, Any]:
        """The sums so far."""
        return {name: getattr(self, name) for name in self.SUMS}

    def join(self, sums: Mapping[str, Any]) -> None:
        """Add the `sums` of another one."""
        for name in self.SUMS:
            own, other = getattr(self, name), sums[name]
            if other is not None:
                setattr(self, name, other if own is None else own + other)


class Mean(Sums):
    """The mean of one or more numbers per row, and a final function of it.

    Args:
        rows: those numbers.
        then: of their mean, such as its root.
    """

    SUMS = ("total", "count")

    def __init__(self, rows: Callable[[Any, Any], np.ndarray], then: Callable[[float], Any] = float) -> None:
        self.rows, self.then = rows, then
        self.total, self.count = 0.0, 0

    def add(self, scores: Any, labels: Any) -> None:
        """Add a batch."""
        found = np.asarray(self.rows(scores, labels))
        self.total += float(found.sum(dtype=np.float64))
        self.count += found.size

    def result(self) -> float:
        """The metric of all batches so far."""
        return float(self.then(self.total / self.count)) if self.count else NAN


class Tally(Sums):
    """A function of three counts per class, or per label of rows of several: right, predicted and actual.

    Args:
        of: the metric of the three arrays, [classes] or [labels].
    """

    SUMS = ("table",)

    def __init__(self, of: Callable[[np.ndarray, np.ndarray, np.ndarray], float]) -> None:
        self.of = of
        self.table: np.ndarray | None = None

    def add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        """Scores [rows, classes]; or log-odds [rows], of the classes 0 and 1; or [rows, labels], as the labels are."""
        predicted = scores.argmax(1) if scores.ndim > labels.ndim else (scores > 0).astype(np.int64)
        if labels.ndim > 1:
            found = np.stack([part.sum(0) for part in (predicted * labels, predicted, labels)])
        else:
            size = scores.shape[1] if scores.ndim > 1 else 2
            parts = (labels[predicted == labels], predicted, labels)
            found = np.stack([np.bincount(p, minlength=size) for p in parts])
        self.table = found if self.table is None else self.table + found

    def result(self) -> float:
        """The metric of all batches so far."""
        return NAN if self.table is None or not self.table[2].any() else float(self.of(*self.table))


class Whole(Sums):
    """A metric of all scores and labels at once, such as one of their ranks."""

    SUMS = ("parts",)

    def __init__(self, of: Callable[[np.ndarray, np.ndarray], float]) -> None:
        self.of = of
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        """Keep a batch."""
        self.parts.append((np.array(scores), np.array(labels)))

    def result(self) -> float:
        """The metric of all batches so far."""
        if not any(len(labels) for _, labels in self.parts):
            return NAN
        return self.of(*(np.concatenate(p) for p in zip(*self.parts)))


class Explained(Sums):
    """R²: 1 minus the share of the variance that is left.

    The variance is that of each element of a row over all rows, so that differences between elements explain nothing.
    """

    SUMS = ("squared",)

    def __init__(self) -> None:
        self.rows, self.squared = 0, 0.0
        self.mean: np.ndarray | None = None
        self.spread: np.ndarray | None = None

    def add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        """Add predictions and labels, [rows, size] each."""
        y, t = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
        self.squared += float(((y - t) ** 2).sum())
        self._join_spread(len(t), t.mean(0), ((t - t.mean(0)) ** 2).sum(0))

    def _join_spread(self, m: int, mean: np.ndarray, spread: np.ndarray) -> None:
        """Chan, Golub, LeVeque 1983: means and sums of squares of parts, joined without cancellation."""
        n = self.rows
        if self.mean is None or self.spread is None:
            self.mean, self.spread = mean, spread
        elif mean.shape == self.mean.shape:
            self.spread = self.spread + spread + (mean - self.mean) ** 2 * (n * m / (n + m))
            self.mean = self.mean + (mean - self.mean) * (m / (n + m))
        else:  # rows of several sizes have no variance per element
            self.spread = np.zeros(())
        self.rows += m

    def sums(self) -> dict[str, Any]:
        """The sums so far."""
        return super().sums() | {"rows": self.rows, "mean": self.mean, "spread": self.spread}

    def join(self, sums: Mapping[str, Any]) -> None:
        """Add the `sums` of another one."""
        super().join(sums)
        if sums["rows"]:
            self._join_spread(sums["rows"], sums["mean"], sums["spread"])

    def result(self) -> float:
        """The metric of all batches so far."""
        variance = 0.0 if self.spread is None else float(self.spread.sum())
        return 1 - self.squared / variance if variance else NAN


class Edits(Sums):
    """The sum of edit distances over the sum of the lengths of the labels.

    Args:
        units: cuts a sequence into the units that are compared; default: its symbols.
    """

    SUMS = ("errors", "length", "rows")

    def __init__(self, units: Callable[[np.ndarray], Sequence[Any]] = list) -> None:
        self.units = units
        self.errors = self.length = self.rows = 0

    def add(self, scores: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> None:
        """Sequences of symbols, found and wanted."""
        for found, wanted in zip(scores, labels):
            goal = self.units(wanted)
            self.errors += edit_distance(self.units(found), goal)
            self.length += len(goal)
            self.rows += 1

    def result(self) -> float:
        """The metric of all batches so far."""
        return self.errors / max(self.length, 1) if self.rows else NAN


def edit_distance(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The fewest insertions, deletions and replacements that make `b` of `a` (Levenshtein 1966)."""
    numbers: dict[Any, int] = {}
    goal = np.array([numbers.setdefault(s, len(numbers)) for s in b], np.int64)
    row = np.arange(len(b) + 1)
    steps = np.arange(len(b) + 1)
    for i, symbol in enumerate(a, 1):
        after = np.minimum(row[1:] + 1, row[:-1] + (goal != numbers.get(symbol, -1)))
        # insertions run along the row: the least of the costs to the left, plus the distance
        row = np.minimum.accumulate(np.concatenate([[i], after]) - steps) + steps
    return int(row[-1])
