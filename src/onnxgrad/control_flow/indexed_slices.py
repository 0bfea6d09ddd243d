"""Indexed slices: gathers of the steps from a captured value, whose cotangents are put together after the iteration.

The cotangents of slices are stacked. Written in each step, the VJP of Gather is a tensor of zeros with a few nonzero
slices: time that grows with the size of the captured value times the number of steps. Slices by the number of the step
are differentiated like scan inputs; of all others, the indices are stacked as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.control_flow.iteration import Iteration, ScanAxis
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import reads
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
    def gives(self) -> list[tuple[ir.Value, ScanAxis]]:
        """The values that the steps stack, and the layouts of the stacks: last step first."""
        return [(self.g, ScanAxis(self.axis, backwards=True))]

    def read_instead(self, instead: Mapping[ir.Value, ir.Value]) -> None:
        """Replace values that the steps no longer compute."""
        self.g = instead.get(self.g, self.g)

    def assemble(self, o: Builder, stack: Var) -> Term:
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


@dataclass
class StepRows:
    """The cotangent `g` of the slices that a step picks at `index` along the first axis of `x`."""

    g: ir.Value
    x: ir.Value
    index: ir.Value

    @property
    def gives(self) -> list[tuple[ir.Value, ScanAxis]]:
        """The values that the steps stack, and the layouts of the stacks."""
        return [(v, ScanAxis(0, backwards=True)) for v in (self.g, self.index)]

    def read_instead(self, instead: Mapping[ir.Value, ir.Value]) -> None:
        """Replace values that the steps no longer compute."""
        self.g, self.index = (instead.get(v, v) for v in (self.g, self.index))

    def assemble(self, o: Builder, stack: Var, indices: Var) -> Term:
        """The cotangent of `x`, given the stacked cotangents of its slices, and their indices."""
        return Scattered(stack, indices, Var(o, self.x), 0)


def step_slices(terms: Iterable[Term], it: Iteration, rows: bool) -> dict[int, StepSlice | StepRows]:
    """The `terms` of a captured value that are the cotangents of slices, by their places.

    Args:
        terms: the cotangent of one step.
        it: the iteration.
        rows: whether slices by other indices than the number of the step are among them.
    """
    slices: dict[int, StepSlice | StepRows] = {}
    for i, term in enumerate(terms):
        if not isinstance(term, Scattered):
            continue
        g, x, index = term.g.value, term.x.value, term.index.value
        by_number = it.lead and it.body.inputs[0].shape == ()
        offset = _offset(index, it.body.inputs[0]) if by_number else None
        if offset is not None:
            slices[i] = StepSlice(g, x, term.axis, offset[0])
        elif rows and term.axis == 0 and _is_stackable(g, index, x, sizes_around(it.node)):
            slices[i] = StepRows(g, x, index)
    return slices


def _is_stackable(g: ir.Value, index: ir.Value, x: ir.Value, sizes: set[str]) -> bool:
    """True if rows `g` at `index` are of one shape in all steps, and not certainly larger than `x`."""
    if not all(keeps_its_shape(v, sizes) for v in (g, index)) or g.shape is None or x.shape is None:
        return False
    if not (g.shape.is_static() and x.shape.is_static()):
        return True
    return math.prod(g.shape.numpy()) <= math.prod(x.shape.numpy())


def sizes_around(node: ir.Node) -> set[str]:
    """The names of the sizes of what an iteration reads, which are the same in all steps."""
    return {d.value for v in reads(node) for d in v.shape or () if not isinstance(d, int) and d.value}


def keeps_its_shape(v: ir.Value, sizes: set[str]) -> bool:
    """True if `v` is a tensor that provably has the same shape at every step, given names of fixed `sizes`."""
    if not isinstance(v.type, ir.TensorType) or v.shape is None:
        return False
    return all(isinstance(d, int) or d.value in sizes for d in v.shape)


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
