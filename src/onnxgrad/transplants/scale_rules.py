"""Rules by which quantizers choose scales and zero points, read from a file and applied to other weights.

The rule of a file (|w|/127, |w|/64, the extreme over -8, (max - min)/255, …) follows from the ratio of its scales
to the weights that they were made from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

#: A scale is that of a rule if it is so near to it, relatively.
_SAME_RULE = 1e-3


@dataclass(frozen=True)
class Groups:
    """The elements of a weight that share a scale: all, a slice of an axis, or a block of one."""

    shape: tuple[int, ...]
    axis: int
    block: int
    scales: tuple[int, ...]

    def reduce(self, w: np.ndarray, function: Callable[..., np.ndarray]) -> np.ndarray:
        """`function` (np.max, …) of each group, in the shape of the scales."""
        if not self.block:
            axes = tuple(a for a in range(w.ndim) if a != self.axis % w.ndim)
            over = None if int(np.prod(self.scales)) == 1 else axes
            return np.asarray(function(w, axis=over)).reshape(self.scales)
        axis = self.axis % w.ndim
        blocks = -(-w.shape[axis] // self.block)
        room = [(0, blocks * self.block - n if i == axis else 0) for i, n in enumerate(w.shape)]
        parts = np.pad(w, room, constant_values=w.dtype == np.bool_).reshape(
            *w.shape[:axis], blocks, self.block, *w.shape[axis + 1 :]
        )
        return np.asarray(function(parts, axis=axis + 1)).reshape(self.scales)


def new_scales(
    groups: Groups, before: np.ndarray | None, after: np.ndarray, scale: np.ndarray, zero: np.ndarray,
    bounds: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The scales and zero points for `after`, by the rule that gave `scale` and `zero` for `before`."""
    middle = (bounds[0] + bounds[1] + 1) // 2
    rules = {_span: float(bounds[1] - bounds[0])}
    if (zero == middle).all():
        rules = {_magnitude: float(bounds[1] - middle), _extreme: float(bounds[0] - middle), **rules}
    scale64 = scale.astype(np.float64)
    rule, ratio = next(iter(rules.items()))
    least = (np.inf, np.inf)
    for candidate in rules if before is not None else ():
        extent = candidate(before.astype(np.float32), groups).astype(np.float64)  # type: ignore[union-attr]
        own = (extent != 0) & (scale64 != 0)
        ratios = extent[own] / scale64[own]
        middle_ratio = float(np.median(ratios)) if ratios.size else 0.0
        if not middle_ratio:  # all is zero, or of both signs
            continue
        usual = round(2 * middle_ratio) / 2
        is_usual = abs(middle_ratio - usual) < 1e-4
        error = float(np.mean(np.abs(ratios / middle_ratio - 1) > _SAME_RULE)), 0.0 if is_usual else 1.0
        if error < least:
            rule, ratio, least = candidate, usual if is_usual else middle_ratio, error
    extent = rule(after.astype(np.float32), groups).astype(np.float64)
    found = np.where(extent == 0, scale64, extent / ratio).astype(scale.dtype)
    points = zero.astype(np.float64)
    if rule is _span:
        low = np.minimum(groups.reduce(after.astype(np.float32), np.min), 0).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            points = np.nan_to_num(np.rint(bounds[0] - low / found.astype(np.float64)))
        points = np.clip(points, *bounds).reshape(zero.shape)
    if before is not None:  # groups that did not change keep what their file has
        same = groups.reduce(before == after, np.all)
        found = np.where(same, scale, found)
        points = np.where(same.reshape(zero.shape) if same.size == zero.size else same.all(), zero, points)
    return found, points.astype(zero.dtype)


def _magnitude(w: np.ndarray, groups: Groups) -> np.ndarray:
    """The largest magnitude of each group."""
    return groups.reduce(np.abs(w), np.max)


def _span(w: np.ndarray, groups: Groups) -> np.ndarray:
    """The length of the interval of each group, 0 included."""
    return np.maximum(groups.reduce(w, np.max), 0) - np.minimum(groups.reduce(w, np.min), 0)


def _extreme(w: np.ndarray, groups: Groups) -> np.ndarray:
    """The element of the largest magnitude of each group, with its sign."""
    high, low = groups.reduce(w, np.max), groups.reduce(w, np.min)
    return np.where(high > -low, high, low)
