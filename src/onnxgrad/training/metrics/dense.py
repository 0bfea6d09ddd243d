"""Metrics of depth and of key points, as numbers of each pixel or point."""

from __future__ import annotations

import numpy as np

from onnxgrad.errors import BadInput

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
    seen = np.asarray(t[..., 2] > 0)
    low = np.where(seen[..., None], t[..., :2], np.inf).min(1)
    high = np.where(seen[..., None], t[..., :2], -np.inf).max(1)
    area = FILLED * np.prod(np.where(seen.any(axis=1, keepdims=True), high - low, 0.0), axis=1)
    spread = np.square(2 * np.array(sigmas_of(t.shape[1])))
    squared = np.square(y - t[..., :2]).sum(2)
    similar = np.asarray(np.exp(-squared / (2 * spread * (area[:, None] + 1e-9))))
    return similar[seen]


def peaks(maps: np.ndarray) -> np.ndarray:
    """x and y of the largest cell of each heat map: [rows, K, 2] of [rows, K, H, W]."""
    best = maps.reshape(*maps.shape[:2], -1).argmax(2)
    return np.stack([best % maps.shape[3], best // maps.shape[3]], axis=2).astype(np.float64)
