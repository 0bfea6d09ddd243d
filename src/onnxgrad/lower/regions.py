"""Pooling over regions of interest, written out: RoiAlign between the elements, MaxRoiPool of whole elements.

The number of points or elements of a bin differs between regions; all regions get the largest number, and a mask
excludes the surplus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import not_none
from onnxgrad.lower.registry import attribute, lowering
from onnxgrad.lower.sampling import (
    LINEAR,
    Size,
    Taps,
    clamped,
    first_rows,
    gathered,
    real,
    rows_of,
    size_of,
    taps,
)


def _most(b: Builder, counts: Var) -> Var:
    """The largest of `counts`, but at least 1, as a scalar int64."""
    joined = b.Concat(b.const([1.0], counts.dtype), b.Reshape(counts, [-1]), axis=0)
    return b.Cast(b.ReduceMax(joined, None, keepdims=0), to=int(ir.DataType.INT64))


def _range(b: Builder, count: Any, like: Var) -> Var:
    """0, 1, 2, … in the dtype of `like`."""
    if isinstance(count, int):
        return b.const(np.arange(count), like.dtype)
    return b.cast_like(b.Range(0, count, 1), like)


def _first_of(b: Builder, x: Var, batch: Var, axes: list[int]) -> tuple[Var, list[Size]]:
    """The first row in `rows_of` for each region, with further `axes`, and the strides of height and width."""
    first, strides = first_rows(b, x, size_of(b, x, 0))
    return b.Unsqueeze(b.Gather(first, batch, axis=0), axes), strides


class _Side:
    """The points along one side of every region: [R, bins, points]."""

    def __init__(self, b: Builder, start: Var, length: Var, bins: int, ratio: int) -> None:
        self.b = b
        width = length / float(bins)
        #: how many points each bin of a region has, [R, 1, 1], or the same for all
        self.count: Var | None = None
        if ratio > 0:
            points = b.const((np.arange(ratio) + 0.5) / ratio, start.dtype)
        else:
            self.count = b.Unsqueeze(b.Ceil(width), [1, 2])
            self.steps = _range(b, _most(b, self.count), start)
            points = (self.steps + 0.5) / b.Max(self.count, 1.0)
        places = b.Unsqueeze(b.const(np.arange(bins), start.dtype), [1]) + points
        self.at = b.Unsqueeze(start, [1, 2]) + places * b.Unsqueeze(width, [1, 2])

    def counts(self) -> Var | None:
        """A mask of the sampling points that enter the mean, [R, 1, points]; None if all do."""
        return None if self.count is None else self.steps < self.count

    def taps(self, size: Size, axes: list[int], *, blank: bool) -> Taps:
        """The taps of the points, with further `axes`; 0 for points far outside, and if `blank` for those that do
        not count."""
        b = self.b
        high = real(b, size, self.at)
        inside = b.And(self.at >= -1.0, self.at <= high)
        counts = self.counts()
        if blank and counts is not None:
            inside = b.And(inside, counts)
        weights = taps(b, clamped(b, self.at, high - 1.0), size, LINEAR, "border")
        assert weights.weights is not None
        later = [a + 1 for a in axes]
        return Taps(b.Unsqueeze(weights.rows, later), b.Unsqueeze(b.Where(inside, weights.weights, 0.0), later))


@lowering("RoiAlign")
def roi_align(b: Builder, node: ir.Node, image: Var, rois: Var, batch: Var) -> Sequence[Var | None]:
    """y[r, c, i, j] = the mean, or the largest weighted tap, of x[n(r), c] interpolated at the points of a bin"""
    x, boxes = b.widen(image), b.widen(rois)
    half = attribute(b, node, "coordinate_transformation_mode") == "half_pixel"
    ratio, scale = attribute(b, node, "sampling_ratio"), attribute(b, node, "spatial_scale")
    boxes = boxes * float(scale) - (0.5 if half else 0)
    largest = attribute(b, node, "mode") == "max"
    left, top, right, bottom = (b.Gather(boxes, b.const(k), axis=1) for k in range(4))
    sides = []
    for start, end, name in ((top, bottom, "output_height"), (left, right, "output_width")):
        length = end - start if half else b.Max(end - start, 1.0)
        sides.append(_Side(b, start, length, attribute(b, node, name), ratio))
    beside = ([3, 4], [1, 2])  # the points are laid out as [R, rows, points, columns, points]
    along = [side.taps(size_of(b, x, axis), more, blank=not largest) for side, axis, more in zip(sides, (2, 3), beside)]
    first, strides = _first_of(b, x, batch, [1, 2, 3, 4])
    values, weights = gathered(b, rows_of(b, x), first, strides, along)
    values, inner = values * weights, [0, 1, 4, 6]
    if largest:
        y = _largest(b, values, sides, beside, inner)
    else:
        y = b.ReduceSum(values, inner, keepdims=0)
        if ratio > 0:
            y = y * (1.0 / ratio**2)
        else:
            y = y / b.Max(b.Unsqueeze(not_none(sides[0].count) * not_none(sides[1].count), [3]), 1.0)
    return [b.cast_like(b.Transpose(y, perm=[0, 3, 1, 2]), image)]


def _largest(b: Builder, values: Var, sides: list[_Side], beside: tuple[list[int], ...], inner: list[int]) -> Var:
    """The largest of `values`, [taps, taps, R, rows, points, columns, points, C], that count; 0 if none does."""
    rows, columns = (side.counts() for side in sides)
    if rows is None or columns is None:
        return b.ReduceMax(values, inner, keepdims=0)
    counts = b.And(*[b.Unsqueeze(c, [*more, 5]) for c, more in zip((rows, columns), beside)])
    y = b.ReduceMax(b.Where(counts, values, -np.inf), inner, keepdims=0)
    some = [side.count > 0.5 for side in sides if side.count is not None]
    return b.Where(b.Unsqueeze(b.And(*some), [3]), y, 0.0)


@lowering("MaxRoiPool")
def max_roi_pool(b: Builder, node: ir.Node, image: Var, rois: Var) -> Sequence[Var | None]:
    """y[r, c, i, j] = the largest of x[n(r), c] in a bin, the first where there are more; 0 if it is empty"""
    x, rois = b.widen(image), b.widen(rois)
    scaled = rois * float(attribute(b, node, "spatial_scale"))
    corners = b.Sign(scaled) * b.Floor(b.Abs(scaled) + 0.5)  # halves away from 0
    batch, left, top, right, bottom = (b.Gather(v, b.const(k), axis=1) for k, v in enumerate([rois, *[corners] * 4]))
    bins = attribute(b, node, "pooled_shape")
    rows, inside, some = [], [], []
    for start, end, axis in ((top, bottom, 2), (left, right, 3)):
        count, size = bins[axis - 2], size_of(b, x, axis)
        wide = b.Unsqueeze(b.Max(end - start + 1.0, 1.0) / float(count), [1])
        high = real(b, size, x)
        high = high if isinstance(high, Var) else b.const(high, x.dtype)
        bin_ = b.const(np.arange(count), x.dtype)
        edges = (b.Floor(wide * bin_), b.Ceil(wide * (bin_ + 1.0)))
        low, past = (b.Clip(e + b.Unsqueeze(start, [1]), b.const(0.0, x.dtype), high) for e in edges)
        at = b.Unsqueeze(low, [2]) + _range(b, _most(b, past - low), x)
        row = b.Max(b.Cast(b.Min(at, high - 1.0), to=int(ir.DataType.INT64)), 0)
        lay = [2, 4] if axis == 2 else [1, 3]  # as [R, rows, columns, elements, elements]
        rows.append(b.Unsqueeze(row, lay))
        inside.append(b.Unsqueeze(at < b.Unsqueeze(past, [2]), lay))
        some.append(b.Unsqueeze(past > low, [2, 3] if axis == 2 else [1, 3]))
    first, strides = _first_of(b, x, b.Cast(batch, to=int(ir.DataType.INT64)), [1, 2, 3, 4])
    index = first + rows[0] * strides[0] + rows[1] * strides[1]
    table = rows_of(b, x)
    seen = b.Where(b.Unsqueeze(b.And(*inside), [5]), b.Gather(table, index, axis=0), -np.inf)
    outer, channels = b.Shape(index, start=0, end=3), b.shape_of(x, 1, 2)
    best = b.ArgMax(b.reshape(seen, b.join(outer, [-1], channels)), axis=3, keepdims=0)
    # the index of the best for each channel; its element, and no other, has a derivative
    chosen = b.GatherElements(b.reshape(index, b.join(outer, [-1])), best, axis=3)
    y = b.GatherElements(table, b.reshape(chosen, b.join([-1], channels)), axis=0)
    y = b.Where(b.And(*some), b.reshape(y, b.join(outer, channels)), 0.0)
    return [b.cast_like(b.Transpose(y, perm=[0, 3, 1, 2]), image)]
