"""Sequences and optionals: the cotangent of a sequence is a sequence of the cotangents of its elements."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.ir import Var, containers
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear, rule, zero
from onnxgrad.rules.rule import Result

zero("SequenceLength", "OptionalHasElement", reason="only the number of elements is read")


@linear("SequenceConstruct", wrt=None, joint=True)
def construct(op: Op, g: Var) -> Result:
    """y = (x₁ … xₙ): its elements, (g₁ … gₙ)"""
    return [op.SequenceAt(g, op.const(i)) if need else None for i, need in enumerate(op.needs)]


@linear("SequenceAt")
def at(op: Op, g: Var, x: Var, position: Var) -> Result:
    """y = x[i]: zeros, but g at i"""
    here = _from_front(op, position, op.SequenceLength(x))
    return op.SequenceInsert(op.SequenceErase(op.zeros_like(x), here), g, here)


@linear("SequenceInsert", wrt=(0, 1), joint=True)
def insert(op: Op, g: Var, x: Var, element: Var, position: Var | None) -> Result:
    """y = x with an element inserted at i: g without g[i], and g[i]"""
    last = op.const(-1)
    if position is not None:
        last = _from_front(op, position, op.SequenceLength(g) - 1)
    return [
        op.SequenceErase(g, last) if op.needs[0] else None,
        op.SequenceAt(g, last) if op.needs[1] else None,
    ]


@linear("SequenceErase")
def erase(op: Op, g: Var, x: Var, position: Var | None) -> Result:
    """y = x without x[i]: g with zeros inserted at i"""
    last = op.const(-1)
    if position is None:
        return op.SequenceInsert(g, op.zeros_like(op.SequenceAt(x, last)))
    here = _from_front(op, position, op.SequenceLength(x))
    return op.SequenceInsert(g, op.zeros_like(op.SequenceAt(x, here)), here)


@linear("ConcatFromSequence")
def concat(op: Op, g: Var, x: Var) -> Result:
    """y = [x₁ … xₙ] along an axis: g cut into the sizes of the elements"""
    axis = op.attr("axis")
    if op.attr("new_axis"):
        return op.SplitToSequence(g, axis=axis, keepdims=0)
    sizes = containers.map_sequences(op.builder, lambda e: e.builder.Shape(e, start=axis, end=axis + 1 or None), x)
    return op.SplitToSequence(g, op.ConcatFromSequence(sizes, axis=0), axis=axis)


@linear("SplitToSequence")
def split(op: Op, g: Var, x: Var, sizes: Var | None) -> Result:
    """(y₁ … yₙ) = x cut along an axis: [g₁ … gₙ]"""
    stacked = sizes is None and not op.attr("keepdims")
    return op.ConcatFromSequence(g, axis=op.attr("axis"), new_axis=1 if stacked else None)


@linear("Optional")
def optional(op: Op, g: Var, x: Var) -> Result:
    """y = x, which might have been absent: the value of g, or zeros"""
    return containers.contents(op.builder, g, x)


def _push_element(op: Op, tangents: Sequence[Var | None], x: Var, y: Var) -> Var | None:
    """The tangent of an optional's value: the element of its own tangent, or zeros."""
    (t,) = tangents
    return containers.contents(op.builder, t, y) if t is not None and containers.is_optional(t) else t


@rule("OptionalGetElement", jvp=_push_element)
def get_element(op: Op, g: Var, x: Var) -> Result:
    """y = the value of x: g"""
    return op.Optional(g) if containers.is_optional(x) else g


def _from_front(op: Op, position: Var, length: Var) -> Var:
    """`position` among `length` elements as an index from 0; a negative one counts from the end."""
    known = position.const
    if known is not None and known.item() >= 0:
        return position
    position = op.Cast(position, to=int(ir.DataType.INT64))
    return op.Where(position < 0, position + length, position)
