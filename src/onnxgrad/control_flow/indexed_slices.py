"""Indexed slices: a Loop's gathers by the number of the step, differentiated like scan inputs.

Their cotangents are stacked and assembled once, after the backward iteration. The VJP of Gather would give a tensor
of zeros with one nonzero slice, accumulated in every step: time quadratic in the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.control_flow.iteration import Iteration, ScanAxis
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import is_op
from onnxgrad.rules.op import Op


@dataclass
class StepSlice:
    """`out` is, in step t, the slice `start` + t of `x` (from around the Loop) along an axis."""

    node: ir.Node
    x: ir.Value
    axis: int
    start: ir.Value | None

    @property
    def out(self) -> ir.Value:
        """The slice."""
        return self.node.outputs[0]

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


def step_slices(op: Op, body: ir.Graph) -> list[StepSlice]:
    """The slices that nodes of `body`, of a Loop, gather by step number from values whose cotangents are wanted."""
    if not Iteration.of(op.node).lead or body.inputs[0].shape is None or len(body.inputs[0].shape):
        return []
    own = set(body.inputs) | set(body.initializers.values()) | {v for n in body for v in n.outputs}
    slices = []
    for node in body:
        if not is_op(node, "Gather") or node.inputs[0] not in op.active or node.inputs[0] in own:
            continue
        x, index = node.inputs
        offset = _offset(index, body.inputs[0], own)
        if x is not None and x.shape is not None and isinstance(x.type, ir.TensorType) and offset is not None:
            axis = node.attributes.get_int("axis") or 0
            slices.append(StepSlice(node, x, axis % len(x.shape), offset[0]))
    return slices


def _offset(index: ir.Value | None, step: ir.Value, own: set[ir.Value]) -> tuple[ir.Value | None] | None:
    """Match index = step + offset. Returns (offset,), (None,) for no offset, or None."""
    if index is step:
        return (None,)
    maker = None if index is None else index.producer()
    if is_op(maker, "Add") and step in maker.inputs:
        (other,) = [v for v in maker.inputs if v is not step] or [step]
        if other is not None and other not in own and other.shape is not None and not len(other.shape):
            return (other,)
    return None
