"""Float64 evaluators of the operators that interpolate or pool at computed points, point by point.

The reference evaluator's GridSample keeps coordinates in float32 and takes the border otherwise than ONNX
Runtime and PyTorch where the mode is cubic; it has no MaxRoiPool. ONNX Runtime is the judge of these.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from onnx.reference.op_run import OpRun


def _reflect(v, size, corners):
    low, high = (0, size - 1) if corners else (-0.5, size - 0.5)
    if high == low:
        return 0
    while not low <= v <= high:
        v = 2 * low - v if v < low else 2 * high - v
    return v


def _taps(v, size, mode, padding, corners):
    """(row, weight) of each tap."""
    if mode != "cubic":
        v = _reflect(v, size, corners) if padding == "reflection" else v
        v = min(max(v, 0), size - 1) if padding != "zeros" else v
    base = np.rint(v) if mode == "nearest" else math.floor(v)
    f = v - base

    def bump(d, a=-0.75):
        d = abs(d)
        return (a + 2) * d**3 - (a + 3) * d**2 + 1 if d <= 1 else a * (d**3 - 5 * d**2 + 8 * d - 4)

    near = {"nearest": [(0, 1)], "linear": [(0, 1 - f), (1, f)], "cubic": [(k, bump(k - f)) for k in (-1, 0, 1, 2)]}
    for k, w in near[mode]:
        row = _reflect(base + k, size, corners) if padding == "reflection" else base + k
        if 0 <= row <= size - 1 or padding != "zeros":
            yield int(min(max(row, 0), size - 1)), w


def _at(x, point, mode="linear", padding="zeros", corners=False):
    """The channels of x, [C, d…], interpolated at a point."""
    along = [list(_taps(v, n, mode, padding, corners)) for v, n in zip(point, x.shape[1:])]
    total = np.zeros(x.shape[0])
    for combined in itertools.product(*along):
        total += math.prod(w for _, w in combined) * x[:, *[r for r, _ in combined]]
    return total


class GridSample(OpRun):
    op_domain = ""

    def _run(self, X, grid, mode=None, padding_mode=None, align_corners=None):
        y = np.zeros((X.shape[0], X.shape[1], *grid.shape[1:-1]))
        size = np.array(X.shape[2:])
        for n, *o in np.ndindex(grid.shape[:-1]):
            g = grid[n, *o][::-1]
            point = (g + 1) / 2 * (size - 1) if align_corners else ((g + 1) * size - 1) / 2
            y[n, :, *o] = _at(X[n], point, mode, padding_mode, bool(align_corners))
        return (y.astype(X.dtype),)


class DeformConv(OpRun):
    op_domain = ""

    def _run(
        self, X, W, offset, B=None, mask=None, dilations=None, group=1, kernel_shape=None, offset_group=1,
        pads=None, strides=None,
    ):  # fmt: skip
        rank, kernel, out = X.ndim - 2, W.shape[2:], offset.shape[2:]
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        pads = pads or [0] * 2 * rank
        taps = list(np.ndindex(kernel))
        offset = offset.reshape(X.shape[0], offset_group, len(taps), rank, *out)
        mask = None if mask is None else mask.reshape(X.shape[0], offset_group, len(taps), *out)
        parts, wide = X.shape[1] // offset_group, W.shape[1]
        y = np.zeros((X.shape[0], W.shape[0], *out))
        for n, k, *o in np.ndindex(X.shape[0], len(taps), *out):
            column = np.zeros(X.shape[1])
            for part in range(offset_group):
                moved = offset[n, part, k, :, *o]
                point = np.array(o) * strides - pads[:rank] + np.array(taps[k]) * dilations + moved
                mine = slice(part * parts, (part + 1) * parts)
                column[mine] = _at(X[n, mine], point) * (1 if mask is None else mask[n, part, k, *o])
            for m in range(W.shape[0]):
                start = m // (W.shape[0] // group) * wide
                y[n, m, *o] += W[m, :, *taps[k]] @ column[start : start + wide]
        if B is not None:
            y += B.reshape(-1, *[1] * rank)
        return (y.astype(X.dtype),)


class MaxRoiPool(OpRun):
    op_domain = ""

    def _run(self, X, rois, pooled_shape=None, spatial_scale=None):
        y = np.zeros((rois.shape[0], X.shape[1], *pooled_shape))
        for r, (n, *box) in enumerate(rois):
            left, top, right, bottom = (int(math.copysign(math.floor(abs(v * spatial_scale) + 0.5), v)) for v in box)
            sides = ((top, bottom, X.shape[2]), (left, right, X.shape[3]))
            for o in np.ndindex(*pooled_shape):
                cut = []
                for (start, end, size), i, count in zip(sides, o, pooled_shape):
                    bin_size = max(end - start + 1, 1) / count
                    first, last = math.floor(i * bin_size) + start, math.ceil((i + 1) * bin_size) + start
                    cut.append(slice(min(max(first, 0), size), min(max(last, 0), size)))
                held = X[int(n), :, *cut]
                y[r, :, *o] = held.max((1, 2)) if held.size else 0
        return (y.astype(X.dtype),)
