"""Pad, and CenterCropPad through its body: the cotangent is cropped, and copies of the border are added up."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxgrad.ir import Var
from onnxgrad.rules.index import numbered, put_back
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear
from onnxgrad.rules.rule import Result

_END = 2**63 - 1


def _margins(x: Var, pads: Any, axes: Any) -> Any:
    """(axis, before, after) per padded axis, or None for computed pads."""
    if pads.const is None or (axes is not None and axes.const is None):
        return None
    along = range(x.rank) if axes is None else [int(a) % x.rank for a in axes.const]
    half = len(pads.const) // 2
    margins = zip(along, map(int, pads.const[:half]), map(int, pads.const[half:]))
    return [(axis, before, after) for axis, before, after in margins if before or after]


def _crop_margins(op: Op, g: Var, margins: Any) -> Any:
    """`g` without the margins; a negative margin is replaced by zeros."""
    cut = [(a, max(b, 0), -e if e > 0 else _END) for a, b, e in margins if b > 0 or e > 0]
    fill = [(a, max(-b, 0), max(-e, 0)) for a, b, e in margins if b < 0 or e < 0]
    if cut:
        along, starts, ends = map(list, zip(*cut))
        g = op.Slice(g, starts, ends, along)
    if fill:
        along, befores, afters = map(list, zip(*fill))
        g = op.Pad(g, befores + afters, None, along)
    return g


def _cropped_at_run_time(op: Op, g: Var, pads: Any, axes: Any) -> Any:
    before, after = op.emit("Split", pads, axis=0, num_outputs=2, outputs=2)
    sizes = op.shape_of(g) if axes is None else op.Gather(op.shape_of(g), axes)
    inner = op.Slice(g, op.Max(before, [0]), sizes - op.Max(after, [0]), axes)
    return op.Pad(inner, op.Concat(op.Max(-before, [0]), op.Max(-after, [0]), axis=0), None, axes)


def _fold_margins(op: Op, g: Var, mode: Any, size: int, axis: int, before: int, after: int) -> Var:
    """`g` with its margins along one axis added to the elements that they copy."""

    def cut(start: Any, end: Any, step: int = 1) -> Any:
        return op.Slice(g, [start], [end], [axis], [step])

    def pad_to_size(part: Any, at: Any, count: int) -> Any:
        return op.Pad(part, [at, size - at - count], None, [axis])

    inner = cut(before, before + size)
    if before and mode == "reflect":
        inner += pad_to_size(cut(before - 1, -_END, -1), 1, before)
    elif before and mode == "edge":
        inner += pad_to_size(op.ReduceSum(cut(0, before), [axis], keepdims=1), 0, 1)
    elif before:
        inner += pad_to_size(cut(0, before), size - before, before)
    if after and mode == "reflect":
        inner += pad_to_size(cut(_END, before + size - 1, -1), size - 1 - after, after)
    elif after and mode == "edge":
        inner += pad_to_size(op.ReduceSum(cut(before + size, _END), [axis], keepdims=1), size - 1, 1)
    elif after:
        inner += pad_to_size(cut(before + size, _END), 0, after)
    return inner


@linear("Pad", wrt=(0, 2), joint=True)
def pad(op: Op, g: Var, x: Var, pads: Var, value: Var | None, axes: Var) -> Result:
    """y = x between margins of v or of copies of x: (g inside + g on its copies; Σ g on margins of v)"""
    mode = op.attr("mode")
    margins = _margins(x, pads, axes)
    if mode == "constant":
        dv = None
        if value is not None and op.needs[2]:
            margin = op.replay(op.zeros_like(x), pads, op.const(1, x.dtype), axes)
            outer = op.Where(op.Cast(margin, to=int(ir.DataType.BOOL)), g, 0.0)
            dv = op.ReduceSum(outer, None, keepdims=0)
            dv = op.reshape(dv, op.shape_of(value)) if value.shape != () else dv
        return (
            _cropped_at_run_time(op, g, pads, axes) if margins is None else _crop_margins(op, g, margins),
            None,
            dv,
        )
    limit = {"reflect": -1, "edge": 2**31, "wrap": 0}[mode]
    if margins is None or not all(
        isinstance(x.dims[a], int) and x.dims[a] > 0 and min(b, e) >= 0 and max(b, e) <= x.dims[a] + limit
        for a, b, e in margins
    ):
        return put_back(op, g, op.replay(numbered(op, x), pads, None, axes), x)
    for axis, before, after in margins:
        g = _fold_margins(op, g, mode, x.dims[axis], axis, before, after)
    return g
