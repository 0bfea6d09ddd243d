"""Offsets of slices in the steps of a Loop: the number of the step, elements of vectors at it, and equal lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.infer.context import InferenceContext
from onnxgrad.ir.infer.formulas import product, sum_of
from onnxgrad.ir.infer.loops import always_goes_on
from onnxgrad.ir.match import Dim, constant, is_number, is_op, not_none, producer, rank, single_constant
from onnxgrad.ir.shapes import same_dims

_CASTS = ("Cast", "CastLike", "Identity")
_FAR = 2**31 - 1


@dataclass(frozen=True)
class Offsets:
    """Offsets in the steps of a Loop, as far as they are known.

    Attributes:
        number: of the step.
        count: the number of steps.
        context: knows elements of shapes.
    """

    number: ir.Value
    count: ir.Value
    context: InferenceContext

    @property
    def steps(self) -> Dim | None:
        """The number of steps, or its symbol; None if there is none."""
        return self._number_in(self.count)

    def is_element(self, cut: ir.Node) -> bool:
        """True if a Slice leaves the element at the number of the step, plus a constant, alone."""
        shift = _shift(cut.inputs[1], self.number)
        return shift is not None and shift >= 0 and _shift(cut.inputs[2], self.number) == shift + 1

    def length(self, first: ir.Value | None, last: ir.Value | None, source: ir.Value | None = None) -> int:
        """The length of the slices from `first` to `last`, if they follow each other from 0 on; else 0.

        If `source` is given, they also have to reach its last row.
        """
        start, end, steps = self._element(first), self._element(last), self.steps
        if start is None or end is None or steps is None:
            return 0
        known, ends = constant(start[0]), constant(end[0])
        if known is not None and ends is not None and isinstance(steps, int) and steps:
            known, ends = known[start[1] :][:steps], ends[end[1] :][:steps]
            length = int(ends[0]) if ends.size else 0
            is_even = np.array_equal(known, length * np.arange(steps))
            is_even = is_even and np.array_equal(ends, length * np.arange(1, steps + 1))
        else:
            length = self._gap(start[0]) if end[0] is start[0] and (start[1], end[1]) == (0, 1) else 0
            is_even = length > 0
        if is_even and source is not None:
            rows = product([steps, length])
            is_even = rows is not None and source.shape is not None and same_dims(source.shape.dims[:1], [rows])
        return length if is_even else 0

    def are_ends_of_last(self, total: ir.Value | None, equal: ir.Node, end: ir.Value | None) -> bool:
        """True if `equal` holds in the last step alone, where `total` is `end`, the last element of a vector."""
        number, last = equal.inputs
        vector, shift = self._element(end) or (None, 0)
        joined = producer(vector, "Concat")
        if joined is None or joined.inputs[-1] is not total or shift != 1 or self.steps is None:
            return False
        found = [self._number_in(last), *(vector.shape or ())] if vector is not None else []
        wanted = [sum_of([self.steps], [1]), sum_of([self.steps, 1])]
        return _shift(number, self.number) == 0 and _are_same(found, wanted)

    def _number_in(self, value: ir.Value | None) -> Dim | None:
        """The one element of `value`, a number or a symbol, if it is known."""
        known = None if value is None else self.context.get_symbolic_value(value)
        return known[0] if known is not None and len(known) == 1 else None

    def _element(self, value: ir.Value | None) -> tuple[ir.Value, int] | None:
        """The vector whose element `value` is, and the constant that its place is beyond the number of the step."""
        while (view := producer(value, ("Unsqueeze", "Reshape", "Identity"))) is not None:
            value = view.inputs[0]
        node = producer(value, ("Gather", "Slice"))
        if node is None or rank(node.inputs[0]) != 1:
            return None
        if is_op(node, "Slice") and not (is_plain_slice(node) and self.is_element(node)):
            return None
        shift = _shift(node.inputs[1], self.number)
        if shift is None or shift < 0:
            return None
        vector = not_none(node.inputs[0])
        cut = producer(vector, "Slice")
        if cut is not None and is_plain_slice(cut) and is_number(cut.inputs[1], 1):
            far = single_constant(cut.inputs[2])
            if far is not None and far.item() >= _FAR:
                return not_none(cut.inputs[0]), shift + 1
        return vector, shift

    def _gap(self, vector: ir.Value) -> int:
        """The constant L where `vector` is 0, L, 2L, … up to L times the number of steps; else 0."""
        joined = producer(vector, "Concat")
        starts = None if joined is None else producer(joined.inputs[0], "Range")
        gap = None if starts is None else single_constant(starts.inputs[2])
        if joined is None or starts is None or gap is None or len(joined.inputs) != 2 or self.steps is None:
            return 0
        length = int(gap.item())
        found = [*(starts.outputs[0].shape or ()), self._number_in(joined.inputs[1])]
        fits = is_number(starts.inputs[0], 0) and _are_same(found, [self.steps, product([self.steps, length])])
        return length if fits and length > 0 else 0


def find_counter(loop: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """The number of the step of a Loop, and the number of all steps; None if that is not known before the Loop."""
    body, (trips, begins) = loop.attributes["body"].as_graph(), loop.inputs[:2]
    if trips is not None:
        return (body.inputs[0], trips) if always_goes_on(loop) else None
    goes_on: ir.Value | None = body.outputs[0]
    while (same := producer(goes_on, "Identity")) is not None:
        goes_on = same.inputs[0]
    less, before = producer(goes_on, "Less"), producer(begins, "Less")
    count = None if less is None else less.inputs[1]
    if less is None or count is None or getattr(count.producer(), "graph", None) is body:
        return None
    known = single_constant(count)
    starts = before is not None and is_number(before.inputs[0], 0) and before.inputs[1] is count
    if not starts and not (is_number(begins, True) and known is not None and known.item() > 0):
        return None
    for state, after, first in zip(body.inputs[2:], body.outputs[1:], loop.inputs[2:]):
        if after is less.inputs[0] and _shift(after, state) == 1 and is_number(first, 0):
            return state, count
    return None


def axes_of(node: ir.Node) -> list[int] | None:
    """The constant axes of a node, as an operand or an attribute; None if there are none."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return [int(a) for a in axes] if axes is not None and axes.size else None


def is_plain_slice(node: ir.Node) -> bool:
    """True if a Slice takes adjacent rows."""
    return all(v is None or is_all([default], v) for v, default in zip(node.inputs[3:], (0, 1)))


def is_all(wanted: list[int], value: ir.Value | None) -> bool:
    """True if `value` is the constant vector `wanted`."""
    known = constant(value)
    return known is not None and known.reshape(-1).tolist() == wanted


def _are_same(found: list[Dim | None], wanted: list[Dim | None]) -> bool:
    known, asked = [d for d in found if d is not None], [d for d in wanted if d is not None]
    return len(known) == len(found) == len(asked) == len(wanted) and same_dims(known, asked)


def _shift(value: ir.Value | None, number: ir.Value) -> int | None:
    """The constant by which `value` is greater than the `number` of the step; None if it is anything else."""
    shift = 0
    while value is not number:
        node = producer(value, ("Add", "Reshape", "Unsqueeze", *_CASTS))
        if node is None:
            return None
        if is_op(node, "Add"):
            added = node.inputs[1]
            while (view := producer(added, _CASTS)) is not None:
                added = view.inputs[0]
            known = single_constant(added)
            if known is None:
                return None
            shift += int(known.item())
        value = node.inputs[0]
    return shift
