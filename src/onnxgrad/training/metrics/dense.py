"""Metrics of depth, of key points, and of anomaly maps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxgrad.errors import BadInput, needs_package
from onnxgrad.training.metrics.boxes import AREAS, OnePrecision

#: Deviations of the key points of a person in COCO (nose, eyes, ears, shoulders, …, ankles), times 10.
PERSON = (0.26, 0.25, 0.25, 0.35, 0.35, 0.79, 0.79, 0.72, 0.72, 0.62, 0.62, 1.07, 1.07, 0.87, 0.87, 0.89, 0.89)
#: The share of the box around the key points that an object fills, where its area is not known (MMPose).
FILLED = 0.53


def relative_errors(y: np.ndarray, t: np.ndarray) -> np.ndarray:
    """|y - t| / t where t > 0."""
    known = t > 0
    return np.asarray(np.abs(y[known] - t[known]) / t[known])


def are_near(y: np.ndarray, t: np.ndarray) -> np.ndarray:
    """True where t > 0 and the ratio of both is below 1.25; only of t > 0."""
    known = np.asarray(t) > 0
    y, t = np.asarray(y)[known], np.asarray(t)[known]
    return np.asarray((y < 1.25 * t) & (t < 1.25 * y))


def sigmas_of(count: int | None) -> tuple[float, ...]:
    """The deviations of key points that are used by default: those of COCO's persons for 17, else 1 / count."""
    if count is None:
        raise BadInput("oks: the number of key points is not known\n  hint: give a deviation of each: sigmas=0.05,…")
    return tuple(s / 10 for s in PERSON) if count == len(PERSON) else (1 / count,) * count


def point_similarity(y: np.ndarray, t: np.ndarray) -> np.ndarray:
    """exp(-d²/(8·σ²·area)) of each key point that is labelled, for points [rows, K, 2] and labels [rows, K, 3]."""
    similar, seen = _similarities(y, t)
    return similar[seen]


def _similarities(y: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The similarity of each key point [rows, K], and True for those that are labelled."""
    seen = np.asarray(t[..., 2] > 0)
    low = np.where(seen[..., None], t[..., :2], np.inf).min(1)
    high = np.where(seen[..., None], t[..., :2], -np.inf).max(1)
    area = FILLED * np.prod(np.where(seen.any(axis=1, keepdims=True), high - low, 0.0), axis=1)
    spread = np.square(2 * np.array(sigmas_of(t.shape[1])))
    squared = np.square(np.where(seen[..., None], y[..., :2] - t[..., :2], 0)).sum(2)
    return np.exp(-squared / (2 * spread * (area[:, None] + 1e-9))), seen


def peaks(maps: np.ndarray) -> np.ndarray:
    """x, y and the value of the largest cell of each heat map: [rows, K, 3] of [rows, K, H, W]."""
    flat = maps.reshape(*maps.shape[:2], -1)
    best = flat.argmax(2)
    value = np.take_along_axis(flat, best[..., None], 2)[..., 0]
    return np.stack([best % maps.shape[3], best // maps.shape[3], value], axis=2).astype(np.float64)


class PointPrecision(OnePrecision):
    """The average precision of objects by the similarity of their key points, as COCO defines it.

    Each row is an object, whose prediction has a score: the mean value of the peaks of its heat maps, or 1. Rows
    without a labelled point do not count.

    Args:
        name: of a metric of `onnxgrad.training.metrics.boxes`: map50_95, map50 or map75.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, ["object"])

    def add(self, y: np.ndarray, t: np.ndarray) -> None:
        """Add points [rows, K, 2 or 3], and labels [rows, K, 3]."""
        similar, seen = _similarities(y, t)
        no = np.zeros((len(AREAS), 1), bool)
        for s, known, points in zip(similar, seen, y):
            if known.any():
                score = np.array([points[:, 2].mean() if points.shape[1] > 2 else 1.0])
                self.all.add_matches(0, np.array([[s[known].mean()]]), score, no, no[0], no)


def region_overlap(scores: np.ndarray, labels: np.ndarray, limit: float = 0.3) -> float:
    """AU-PRO: the area under the curve of the overlap of regions up to a false positive rate, divided by that rate.

    At each threshold, the overlap is the mean over the connected regions of all labels (of 8 neighbours) of the share
    of a region that scores more; the rate is that of all pixels outside of regions (Bergmann et al. 2021). Between
    thresholds, the curve is straight. NaN without regions, or without other pixels.

    Args:
        scores: [rows, H, W].
        labels: likewise, 1 in regions.
        limit: of the false positive rate.
    """
    with needs_package("au_pro needs SciPy", "scipy"):
        from scipy.ndimage import label as connected
    weights, count = np.zeros(labels.shape), 0
    for mask, target in zip(labels > 0, weights):
        regions, found = connected(mask, np.ones((3, 3)))
        target[mask] = 1 / np.bincount(regions.ravel())[regions[mask]]
        count += found
    normal = (labels <= 0).ravel()
    if not count or not normal.any():
        return float("nan")
    order = np.argsort(-scores.ravel(), kind="stable")
    last = np.flatnonzero(np.diff(scores.ravel()[order], append=np.nan) != 0)  # of equal scores
    rate = np.append(0, np.cumsum(normal[order])[last] / normal.sum())
    overlap = np.append(0, np.cumsum(weights.ravel()[order])[last] / count)
    inner = rate < limit
    ends = np.interp(limit, rate, overlap)  # rate reaches 1
    return float(np.trapezoid(np.append(overlap[inner], ends), np.append(rate[inner], limit)) / limit)


def of_pictures(of: Callable[[np.ndarray, np.ndarray], float]) -> Callable[[np.ndarray, np.ndarray], float]:
    """`of` the largest score of each picture, and 1 for pictures with a region."""
    return lambda scores, labels: of(scores.max((1, 2)), np.asarray((labels > 0).any((1, 2)), np.int64))


def of_pixels(of: Callable[[np.ndarray, np.ndarray], float]) -> Callable[[np.ndarray, np.ndarray], float]:
    """`of` all pixels of maps."""
    return lambda scores, labels: of(scores.ravel(), (labels > 0).ravel().astype(np.int64))
