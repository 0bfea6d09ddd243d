"""Metrics of embeddings and of similarities: the rank of a row's nearest relative, the correlation of ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxgrad.training.metrics.running import NAN


def first_ranks(rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The rank of the nearest row of the same group by the cosine, from 1, for each row that has such a row.

    Args:
        rows: embeddings [rows, size].
        groups: which rows belong together, [rows].
    """
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    found = []
    for start in range(0, len(unit), 1024):
        cosines = unit[start : start + 1024] @ unit.T
        places = np.arange(len(cosines))
        cosines[places, start + places] = -np.inf
        same = groups[start : start + 1024, None] == groups[None]
        same[places, start + places] = False
        best = np.where(same, cosines, -np.inf).max(1)
        ranks = 1 + ((cosines > best[:, None]) & ~same).sum(1)
        found.append(ranks[same.any(1)])
    return np.concatenate(found)


def of_ranks(of: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], float]:
    """The mean of a function of the first ranks; NaN if no group has two rows."""

    def mean(rows: np.ndarray, groups: np.ndarray) -> float:
        ranks = first_ranks(rows.astype(np.float64), groups)
        return float(np.mean(of(ranks))) if len(ranks) else NAN

    return mean


def spearman(scores: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of the ranks of scores and labels, [rows, size] each; ties have their mean rank."""
    y, t = (_ranks(np.asarray(a, np.float64).ravel()) for a in (scores, labels))
    y, t = y - y.mean(), t - t.mean()
    norm = np.sqrt((y @ y) * (t @ t))
    return float(y @ t / norm) if norm else NAN


def _ranks(x: np.ndarray) -> np.ndarray:
    _, inverse, repeats = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(repeats) - (repeats - 1) / 2)[inverse.ravel()]
