"""Scores: what is said of predictions beside their loss, added up over batches.

Each is a running sum: `add` takes the predictions and the labels of a batch, `result` says what they amount to.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Score(Protocol):
    """A running score."""

    def add(self, prediction: np.ndarray, label: np.ndarray) -> None:
        """Take in a batch."""

    def result(self) -> dict[str, float]:
        """What it amounts to; empty if there was nothing to count."""


class Classes:
    """Scores of classes against class numbers: accuracy, F1 (the mean over classes), and the share among the best five.

    F1 of a class is 2·tp / (2·tp + fp + fn); classes that neither occur nor are predicted do not count.

    Args:
        axis: of the classes.
        ignored: the label that does not count.
    """

    def __init__(self, axis: int = 1, ignored: int | None = None) -> None:
        self.axis, self.ignored = axis, ignored
        self.hits = self.among_best = self.count = 0
        self.classes = 0
        self.table = np.zeros((3, 0), np.int64)  # true positives, predicted, actual; per class

    def add(self, prediction: np.ndarray, label: np.ndarray) -> None:
        """Prediction [N, C, …] (classes along `axis`), label [N, …]."""
        scores = np.moveaxis(prediction, self.axis, -1)
        self.classes = scores.shape[-1]
        if not self.table.shape[1]:
            self.table = np.zeros((3, self.classes), np.int64)
        counts = np.ones(label.shape, bool) if self.ignored is None else label != self.ignored
        scores, label = scores[counts], label[counts]
        best = scores.argmax(-1)
        self.count += label.size
        self.hits += int((best == label).sum())
        if self.classes > 5:
            own = np.take_along_axis(scores, label[:, None], -1)
            self.among_best += int(((scores > own).sum(-1) < 5).sum())
        for row, found in zip(self.table, (label[best == label], best, label)):
            row += np.bincount(found, minlength=self.classes)[: self.classes]

    def result(self) -> dict[str, float]:
        """accuracy, f1, and top5 where there are more than five classes."""
        if not self.count:
            return {}
        right, predicted, actual = self.table
        seen = predicted + actual > 0
        found = {
            "accuracy": self.hits / self.count,
            "f1": float((2 * right[seen] / (predicted + actual)[seen]).mean()),
        }
        return found | ({"top5": self.among_best / self.count} if self.classes > 5 else {})


class Binary:
    """Logits against 0 and 1: accuracy, and F1 of the ones."""

    def __init__(self) -> None:
        self.right = self.count = self.ones = self.said = self.actual = 0

    def add(self, prediction: np.ndarray, label: np.ndarray) -> None:
        """Both of one shape."""
        said, actual = prediction > 0, label > 0.5
        self.count += label.size
        self.right += int((said == actual).sum())
        self.ones += int((said & actual).sum())
        self.said += int(said.sum())
        self.actual += int(actual.sum())

    def result(self) -> dict[str, float]:
        """accuracy and f1."""
        if not self.count:
            return {}
        either = self.said + self.actual
        return {"accuracy": self.right / self.count, "f1": 2 * self.ones / either if either else 1.0}


class Numbers:
    """Numbers against numbers: the mean absolute error, and R², 1 minus the share of the variance that is left.

    The variance is that of each element of a row over all rows, so that what differs between elements explains nothing.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.absolute = self.squared = 0.0
        self.size = 0
        self.mean: np.ndarray | None = None
        self.spread: np.ndarray | None = None

    def add(self, prediction: np.ndarray, label: np.ndarray) -> None:
        """Both of one shape, [N, …]."""
        y, t = np.asarray(prediction, np.float64), np.asarray(label, np.float64)
        self.absolute += float(np.abs(y - t).sum())
        self.squared += float(((y - t) ** 2).sum())
        self.size += t.size
        # Chan, Golub, LeVeque 1983: means and sums of squares of parts, joined without cancellation
        n, m = self.rows, len(t)
        mean, spread = t.mean(0), ((t - t.mean(0)) ** 2).sum(0)
        if self.mean is None or self.spread is None:
            self.mean, self.spread = mean, spread
        elif mean.shape == self.mean.shape:
            self.spread = self.spread + spread + (mean - self.mean) ** 2 * (n * m / (n + m))
            self.mean = self.mean + (mean - self.mean) * (m / (n + m))
        else:  # rows of several sizes have no variance per element
            self.spread = np.zeros(())
        self.rows += m

    def result(self) -> dict[str, float]:
        """mae, and r2 where the labels vary."""
        if not self.size:
            return {}
        variance = 0.0 if self.spread is None else float(self.spread.sum())
        return {"mae": self.absolute / self.size} | ({"r2": 1 - self.squared / variance} if variance else {})


class Sequences:
    """Scores of symbols over time against label sequences (CTC, decoded greedily): exact matches and the error rate.

    The best symbol of every time step, repetitions merged and blanks dropped (Graves et al. 2006, best path), is
    compared with the labels; ``cer`` is the sum of edit distances over the sum of label lengths.

    Args:
        blank: the symbol that stands for nothing; it and negative numbers are padding in labels.
        time: the axis of time, 1 of [N, T, C] or 0 of [T, N, C].
    """

    def __init__(self, blank: int = 0, time: int = 1) -> None:
        self.blank, self.time = blank, time
        self.exact = self.rows = self.errors = self.symbols = 0

    def decoded(self, prediction: np.ndarray) -> list[np.ndarray]:
        """The symbols of every row."""
        best = np.moveaxis(prediction.argmax(-1), self.time, 1)
        changed = np.ones(best.shape, bool)
        changed[:, 1:] = best[:, 1:] != best[:, :-1]
        return [row[keep] for row, keep in zip(best, changed & (best != self.blank))]

    def add(self, prediction: np.ndarray, label: np.ndarray) -> None:
        """Prediction [N, T, C] (or [T, N, C]), label [N, L], padded."""
        for found, wanted in zip(self.decoded(prediction), label):
            wanted = wanted[(wanted >= 0) & (wanted != self.blank)]
            distance = edit_distance(found, wanted)
            self.exact += distance == 0
            self.rows += 1
            self.errors += distance
            self.symbols += len(wanted)

    def result(self) -> dict[str, float]:
        """exact and cer."""
        if not self.rows:
            return {}
        return {"exact": self.exact / self.rows, "cer": self.errors / max(self.symbols, 1)}


def edit_distance(a: np.ndarray, b: np.ndarray) -> int:
    """The fewest insertions, deletions and replacements that make `b` of `a` (Levenshtein 1966)."""
    row = np.arange(len(b) + 1)
    steps = np.arange(len(b) + 1)
    for i, symbol in enumerate(a, 1):
        after = np.minimum(row[1:] + 1, row[:-1] + (b != symbol))
        # insertions run along the row: the least of what is left of here, plus the way from there
        row = np.minimum.accumulate(np.concatenate([[i], after]) - steps) + steps
    return int(row[-1])
