"""Derivatives by differences, with the elements at which they mean nothing marked: kinks, jumps, edges, noise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

Arrays = dict[str, np.ndarray]
STEP = 1e-3


def derivative(along: Callable[[float], Arrays], step: float = STEP) -> tuple[Arrays, Arrays]:
    """d/ds of the arrays that `along` gives at s, at s = 0; and for each element whether it can be trusted.

    Central differences at four step sizes, extrapolated in pairs: two estimates of sixth order. An element
    is not trusted where these disagree, or where the slopes to the left and to the right would still
    differ at a step of zero.
    """
    middle = along(0.0)
    steps = [step, step / 2, step / 4]
    right, left = ([along(sign * h) for h in steps] for sign in (1, -1))
    values, trusted = {}, {}
    with np.errstate(all="ignore"):
        for name, y in middle.items():
            if any(np.shape(z[name]) != np.shape(y) for z in (*right, *left)):
                values[name], trusted[name] = np.zeros(np.shape(y)), np.zeros(np.shape(y), bool)
                continue
            slope_right = [(z[name] - y) / h for z, h in zip(right, steps)]
            slope_left = [(y - z[name]) / h for z, h in zip(left, steps)]
            central = [(a + b) / 2 for a, b in zip(slope_right, slope_left)]
            rough, fine = ((4 * b - a) / 3 for a, b in pairwise(central))
            noise = 1e-13 * np.abs(y) / step
            scale = np.abs(fine) + 1e-2 * np.max(np.abs(fine[np.isfinite(fine)]), initial=0.0)
            gaps = [np.abs(a - b) for a, b in zip(slope_right, slope_left)]
            kink = np.abs(2 * gaps[2] - gaps[1]) > 2e-6 * scale + 10 * noise  # the gap at a step of zero
            values[name] = fine
            trusted[name] = np.isfinite(fine) & (np.abs(fine - rough) <= 2e-6 * scale + 10 * noise) & ~kink
    return values, trusted


def excess(got: np.ndarray, want: np.ndarray, y: float, trusted: np.ndarray, tolerance: float = 1e-5) -> float:
    """The largest error of a trusted element, in tolerances; ∞ for a non-finite one. 0: no element."""
    scale = np.abs(want) + 1e-2 * np.max(np.abs(want[trusted]), initial=0.0)
    allowed = tolerance * scale + 1e-8 * max(1.0, y)
    with np.errstate(all="ignore"):
        off = np.where(trusted, np.abs(got - want) / allowed, 0.0)
    off = np.where(np.isnan(off), np.inf, off)
    return float(np.max(off, initial=0.0))
