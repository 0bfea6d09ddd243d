"""Calibration: the gap between stated probabilities, intervals or sets and the observed frequencies.

A mean with its spread is read as a normal distribution; its interval is the central one of `CENTRAL`.
"""

from __future__ import annotations

import math

import numpy as np

from onnxgrad.training.metrics.running import NAN, Sums

BINS = 15
#: The share of a normal distribution within `WIDE` standard deviations.
CENTRAL, WIDE = 0.9, 1.6448536269514722


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Probabilities [rows, classes] of logits [rows, classes], or of log-odds [rows]."""
    if scores.ndim == 1:
        scores = np.stack([np.zeros_like(scores), scores], 1)
    odds = np.exp(scores - scores.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


class Calibration(Sums):
    """The expected calibration error: Σ over bins of the confidence, share of rows · |accuracy - mean confidence|.

    Guo et al. 2017, with 15 bins of equal width; the confidence is the largest probability.
    """

    SUMS = ("table",)

    def __init__(self) -> None:
        self.table: np.ndarray | None = None

    def add(self, scores: np.ndarray, labels: np.ndarray) -> None:
        """Add a batch."""
        odds = probabilities(np.asarray(scores, np.float64))
        sure, right = odds.max(1), odds.argmax(1) == labels
        bins = np.minimum((sure * BINS).astype(np.int64), BINS - 1)
        found = np.stack([np.bincount(bins, w, BINS) for w in (np.ones(len(sure)), sure, right.astype(np.float64))])
        self.table = found if self.table is None else self.table + found

    def result(self) -> float:
        """The error of all batches so far."""
        if self.table is None or not self.table[0].any():
            return NAN
        rows, sure, right = self.table
        return float(np.abs(right - sure).sum() / rows.sum())


def brier(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Σ over classes of (p - 1 of the true class)², of each row (Brier 1950)."""
    odds = probabilities(np.asarray(scores, np.float64))
    odds[np.arange(len(labels)), labels] -= 1
    return (odds**2).sum(1)


def temperature(scores: np.ndarray, labels: np.ndarray) -> float:
    """The number T that minimizes the log loss of scores/T, by Newton's method on 1/T, in which it is convex."""
    z = np.asarray(scores, np.float64)
    z = np.stack([np.zeros_like(z), z], 1) if z.ndim == 1 else z
    z = z - np.maximum(z.max(1, keepdims=True), -1e300)
    z = np.where(np.isfinite(z), z, -1e4)  # of a probability of 0
    own, inverse = z[np.arange(len(labels)), labels], 1.0
    for _ in range(200):
        odds = probabilities(inverse * z)
        mean = (odds * z).sum(1)
        slope, bend = (mean - own).mean(), ((odds * z**2).sum(1) - mean**2).mean()
        step = slope / max(bend, 1e-12)
        moved = min(max(inverse - step, inverse / 4), inverse * 4)  # separable labels have no minimum
        if abs(moved - inverse) < 1e-12 * inverse or not 1e-4 < moved < 1e4:
            break
        inverse = moved
    return float(1 / inverse)


def gaussian_nll(parts: np.ndarray, t: np.ndarray) -> np.ndarray:
    """-log of the normal density at labels [rows, size], for means and spreads [rows, size, 2]."""
    mean, spread = parts[..., 0], np.maximum(parts[..., 1], 1e-12)
    return 0.5 * np.log(2 * math.pi) + np.log(spread) + 0.5 * ((t - mean) / spread) ** 2


def central(parts: np.ndarray) -> np.ndarray:
    """The central intervals [rows, size, 2] of means and spreads."""
    mean, spread = parts[..., 0], parts[..., 1]
    return np.stack([mean - WIDE * spread, mean + WIDE * spread], -1)


def is_inside(ends: np.ndarray, t: np.ndarray) -> np.ndarray:
    """True where labels [rows, size] are between the ends [rows, size, 2]."""
    return (ends[..., 0] <= t) & (t <= ends[..., 1])


def is_member(sets: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """True where the label is in the set of its row, [rows, classes] of booleans."""
    return np.take_along_axis(sets.astype(bool), labels.reshape(-1, 1).astype(np.int64), 1)[:, 0]
