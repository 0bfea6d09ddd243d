"""Operators that put elements into a larger tensor: MaxUnpool at given places, Col2Im in overlapping blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Var, reshape_to
from onnxgrad.ir.operators import Kind
from onnxgrad.rules.index import numbered, scatter
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear
from onnxgrad.rules.rule import Result

#: Whole numbers up to the square of this are carried in two float32 tensors, up to this in one.
_EXACT = 2**20


def _sources(op: Op, x: Var, index: Var, shape: Var | None) -> Var:
    """For every element of y the number, from 1, of the element of x that came there, or 0; a vector.

    MaxUnpool itself resolves ambiguities, on a tensor of element numbers: the winner among several elements with one
    index, and the meaning of an index with an output shape. ONNX Runtime and the reference evaluator differ there, so
    the rule must not decide.
    """
    numbers = op.Add(numbered(op, x), 1)
    known = op.shape_of(x).const
    parts = [numbers]
    if known is None or known.prod() >= _EXACT:
        parts = [op.Mod(numbers, _EXACT), op.Div(numbers, _EXACT)]
    placed = [op.replay(op.Cast(p, to=int(ir.DataType.FLOAT)), index, shape) for p in parts]
    whole = [op.Reshape(op.Cast(p, to=int(ir.DataType.INT64)), [-1]) for p in placed]
    return whole[0] if len(whole) == 1 else whole[0] + whole[1] * _EXACT


@linear("MaxUnpool")
def max_unpool(op: Op, g: Var, x: Var, index: Var, shape: Var) -> Result:
    """y[i[k]] = x[k], else 0: g[i[k]], but 0 for an element that another one with the same index replaced"""
    dims = op.shape_of(x).const
    count = op.Add(op.Size(x), 1) if dims is None else int(dims.prod()) + 1
    room = op.reshape(count, [1]) if isinstance(count, Var) else [count]
    zeros = op.Expand(op.const(0.0, x.dtype), room)
    taken = scatter(op, op.Reshape(g, [-1]), _sources(op, x, index, shape), zeros, 0, unique=True)
    return reshape_to(op.Slice(taken, [1], [2**31 - 1]), x)  # elements without a source went to place 0


def _sizes(op: Op, vector: Var, rank: int) -> list[Any]:
    """The elements of an int64 vector as ints, or as scalars that are read at run time."""
    known = vector.const
    if known is not None:
        return [int(v) for v in known]
    return [op.Squeeze(op.Slice(vector, [k], [k + 1]), [0]) for k in range(rank)]


def _count_up(op: Op, count: Any, step: int, place: int, rank: int) -> Var:
    """0, step, 2·step, … as a tensor of `rank` axes along the axis `place`."""
    if isinstance(count, int):
        numbers = op.const(np.arange(count) * step)
    else:
        numbers = op.Mul(op.Range(op.const(0), count, op.const(1)), step)
    return op.Unsqueeze(numbers, [k for k in range(rank) if k != place])


@linear("Col2Im", kind=Kind.ROWS)
def col2im(op: Op, g: Var, x: Var, image: Var, block: Var) -> Result:
    """y = Σ of the blocks, columns of x, each laid at its place of an image: the blocks of g as columns"""
    rank = g.rank - 2
    strides, dilations = op.attr("strides") or [1] * rank, op.attr("dilations") or [1] * rank
    pads = op.attr("pads") or [0] * 2 * rank
    if any(pads):
        g = op.Pad(g, [0, 0, *pads[:rank], 0, 0, *pads[rank:]])
    blocks = _sizes(op, block, rank)
    inner: Any = 1
    places = None
    for i in reversed(range(rank)):  # row-major numbers of the elements, block by block: [b…, o…]
        size = _sizes(op, image, rank)[i] + (pads[i] + pads[rank + i])
        room = size - (blocks[i] - 1) * dilations[i] - 1
        steps = (room // strides[i] if isinstance(room, int) else op.Div(room, strides[i])) + 1
        within = _count_up(op, blocks[i], dilations[i], i, 2 * rank)
        here = (within + _count_up(op, steps, strides[i], rank + i, 2 * rank)) * inner
        places = here if places is None else here + places
        inner = inner * size
    flat = op.reshape(g, op.join(op.shape_of(g, 0, 2), [-1]))
    return reshape_to(op.Gather(flat, places, axis=2), x)
