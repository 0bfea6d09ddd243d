"""Indexed slices: a Loop's gathers by the number of the step, differentiated like scan inputs.

Their cotangents are stacked and assembled once, after the backward iteration. Written in each step, the VJP of Gather
is a tensor of zeros with one nonzero slice: time quadratic in the number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.control_flow.iteration import Iteration, ScanAxis
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import producer
from onnxgrad.rules.index import Scattered
from onnxgrad.rules.rule import Term


@dataclass
class StepSlice:
    """The cotangent `g` of the slice that step t picks at `start` + t of `x`, from around the Loop."""

    g: ir.Value
    x: ir.Value
    axis: int
    start: ir.Value | None

    @property
    def slot(self) -> ScanAxis:
        """The layout of the stacked cotangents of all slices: last step first."""
        return ScanAxis(self.axis, backwards=True)

    def assemble(self, o: Builder, stack: Var) -> Var:
        """The cotangent of `x`, given the stacked cotangents of its slices: padded with zeros."""
        x = Var(o, self.x)
        before = o.const([0]) if self.start is None else o.Unsqueeze(Var(o, self.start), [0])
        size, made = o.shape_of(x, self.axis, self.axis + 1), o.Shape(stack, start=self.axis, end=self.axis + 1)
        after = size - made - before if self.start is not None else size - made
        rest = x.rank - self.axis - 1
        pads = o.join([0] * self.axis, before, [0] * rest, [0] * self.axis, after, [0] * rest)
        padded = o.Pad(stack, pads)
        padded.value.shape = self.x.shape
        return padded


def step_slices(terms: Iterable[Term], it: Iteration) -> dict[int, StepSlice]:
    """The `terms` of a captured value that are the cotangents of slices by the number of the step, by their places."""
    slices = {}
    for i, term in enumerate(terms):
        if isinstance(term, Scattered) and it.lead and it.body.inputs[0].shape == ():
            offset = _offset(term.index.value, it.body.inputs[0])
            if offset is not None:
                slices[i] = StepSlice(term.g.value, term.x.value, term.axis, offset[0])
    return slices


def _offset(index: ir.Value, step: ir.Value) -> tuple[ir.Value | None] | None:
    """Match index = step + offset. Returns (offset,), (None,) for no offset, or None."""
    if index is step:
        return (None,)
    total = producer(index, "Add")
    if total is not None and step in total.inputs:
        (other,) = [v for v in total.inputs if v is not step] or [step]
        if other is not None and other.graph is not step.graph and other.shape == ():
            return (other,)
    return None
