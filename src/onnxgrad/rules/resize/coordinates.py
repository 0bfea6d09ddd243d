"""Interpolation coordinates of Resize as functions of its region of interest and its scales.

Along each axis, element i of the result is read at a coordinate cᵢ: y is x times a matrix of weights K(cᵢ - j). So
∂y/∂cᵢ is x times the slopes K'(cᵢ - j). It is 0 beyond the edge, where the last element or another constant continues.
At an element, where linear weights have a kink, the slope is the one to its right.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.errors import NoDerivative
from onnxgrad.ir import Var
from onnxgrad.ir.match import not_none
from onnxgrad.rules.op import Op

#: How far a cubic weight reaches.
REACH = 2


def crops(op: Op) -> bool:
    """True if the region of interest is read."""
    return bool(op.attr("coordinate_transformation_mode") == "tf_crop_and_resize")


def check_moves(op: Op, roi: bool, scales: bool) -> None:
    """Refuse derivatives with respect to coordinates that have no formula here."""
    if scales and op.attr("antialias"):
        raise NoDerivative("there is no rule for scales that set the width of an antialiasing filter")
    if scales and op.attr("coordinate_transformation_mode") == "align_corners":
        raise NoDerivative(
            "it is not settled whether scales with align_corners do more than to set the shape: what the "
            "specification calls the resized length is rounded in some runtimes and not in others"
        )


class Axis:
    """One axis of a Resize: its coordinates, and their dependence on the region and the scale."""

    def __init__(self, op: Op, x: Var, y: Var, place: int, axis: int, count: int) -> None:
        self.op = op
        self.dtype = x.dtype if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        self.length, self.resized = (self._number(op.shape_of(v, axis, axis + 1 or None)) for v in (x, y))
        self.last = self.length - 1.0
        steps = op.places_along(y, axis)
        self.step = op.Cast(steps, to=int(self.dtype))
        self.columns = op.size_of(x, axis)
        region, scales = op.inputs[1:3]
        if crops(op):
            self.start, self.end = (self.at(not_none(region), p) for p in (place, place + count))
            single = op.Equal(self.resized, 1.0)
            self.share = op.Where(single, 0.5, self.step / op.Max(self.resized - 1.0, 1.0))
            self.place = (self.start * (1.0 - self.share) + self.end * self.share) * self.last
        else:
            self.scale = self.at(not_none(scales), place)
            self.place = self._scaled()

    def _number(self, dim: Var) -> Var:
        """A dimension as a float, a vector of one."""
        return self.op.Cast(dim, to=int(self.dtype))

    def at(self, values: Var, place: int) -> Var:
        """The entry of `values`, one per axis, at `place`, as a vector of one."""
        held = self.op.Gather(values, [place], axis=0)
        return held if held.dtype == self.dtype else self.op.Cast(held, to=int(self.dtype))

    def _offset(self) -> tuple[float, Var | None]:
        """(a, b) of the place c = (i + a)/s + b/s·[…], see `_scaled`."""
        mode = self.op.attr("coordinate_transformation_mode")
        return (0.0 if mode == "asymmetric" else 0.5), (self.resized * 0.5 if mode == "half_pixel_symmetric" else None)

    def _scaled(self) -> Var:
        """(i + ½)/s - ½; i/s if asymmetric; with half_pixel_symmetric, L/2 + (i + ½ - L'/2)/s - ½."""
        half, middle = self._offset()
        along = self.step + half
        if middle is None:
            c = along / self.scale - half if half else along / self.scale
        else:
            c = (along - middle) / self.scale + (self.length * 0.5 - half)
        if self.op.attr("coordinate_transformation_mode") == "pytorch_half_pixel":
            c = self.op.Where(self.op.Equal(self.resized, 1.0), 0.0, c)
        return c

    def by_scale(self) -> Var:
        """∂c/∂s, one number for each element of the result."""
        half, middle = self._offset()
        along = self.step + half if middle is None else self.step + half - middle
        rate = -(along / (self.scale * self.scale))
        if self.op.attr("coordinate_transformation_mode") == "pytorch_half_pixel":
            rate = self.op.Where(self.op.Equal(self.resized, 1.0), 0.0, rate)
        return rate

    def by_region(self) -> tuple[Var, Var]:
        """∂c/∂start and ∂c/∂end, one number each for each element of the result."""
        return (1.0 - self.share) * self.last, self.share * self.last

    def slopes(self) -> Var:
        """K'(cᵢ - j) as a matrix [o, n]."""
        op = self.op
        inside = op.And(self.place >= 0.0, self.place <= self.last)
        if op.attr("mode") == "linear":
            first = op.Floor(self.place)
            before = op.Cast(first, to=int(ir.DataType.INT64))
            j = op.Range(op.const(0), self.columns, op.const(1))
            row = op.Unsqueeze(before, [1])
            hot = [op.Cast(op.Equal(row + k, j) if k else op.Equal(row, j), to=int(self.dtype)) for k in (1, 0)]
            within = op.And(inside, self.place < self.last)
            return (hot[0] - hot[1]) * op.Unsqueeze(op.Cast(within, to=int(self.dtype)), [1])
        found = self._cubic()
        return op.Where(op.Unsqueeze(inside, [1]), found, 0.0) if crops(op) else found

    def _cubic(self) -> Var:
        """Slopes of the cubic weights; taps beyond an edge count for the edge element, or not at all."""
        op, a = self.op, float(self.op.attr("cubic_coeff_a"))
        wide = op.Add(self.columns, 2 * REACH)
        j = op.Cast(op.Range(op.const(0), wide, op.const(1)), to=int(self.dtype)) - float(REACH)
        apart = op.Unsqueeze(self.place, [1]) - j
        t = op.Abs(apart)
        near = ((a + 2) * t - (a + 3)) * t * t + 1.0
        far = ((t - 5.0) * t + 8.0) * (a * t) - 4 * a
        near_slope = ((3 * (a + 2)) * t - 2 * (a + 3)) * t
        far_slope = (3.0 * t * t - 10.0 * t + 8.0) * a
        weight = op.Where(t <= 1.0, near, op.Where(t < 2.0, far, 0.0))
        slope = op.Where(t <= 1.0, near_slope, op.Where(t < 2.0, far_slope, 0.0)) * op.Sign(apart)
        inner = op.Slice(slope, [REACH], [-REACH], [1])
        if op.attr("exclude_outside"):
            kept = op.Slice(weight, [REACH], [-REACH], [1])
            total, moved = (op.ReduceSum(v, [1], keepdims=1) for v in (kept, inner))
            return (inner - kept * (moved / total)) / total
        edges = [op.ReduceSum(op.Slice(slope, s, e, [1]), [1], keepdims=1) for s, e in (([0], [2]), ([-2], [2**31]))]
        at = op.Range(op.const(0), self.columns, op.const(1))
        ends = [op.Equal(at, 0), op.Equal(at, op.Sub(self.columns, 1))]
        for edge, end in zip(edges, ends):
            inner = inner + op.Where(end, edge, 0.0)
        return inner
