"""Batching rules of operators: the same node for many directions, with a new first axis as the batch axis.

Four ideas cover almost all of them. Elementwise operators broadcast. Operators along axes shift their axes by one.
Operators that treat a batch row by row take the directions as more rows. Operators on leading axes leave trailing axes
alone, so the batch axis is moved to the end and back. A convolution takes directions of its filters as more filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.batching.batched_node import BatchedNode, Unstackable, Write
from onnxgrad.batching.product_rules import affine_grid, conv, einsum, gemm, matmul, recurrent, resize, rows
from onnxgrad.ir import Var
from onnxgrad.ir.match import not_none
from onnxgrad.ir.operators import ByOperator, Kind
from onnxgrad.ir.shapes import move_axis
from onnxgrad.rules.op import Op

# --- by kind ----------------------------------------------------------------------------------------


def _elementwise(s: BatchedNode) -> Var:
    rank = max(s.rank(i) for i in range(len(s.x)))
    return s.emit_again(*(s.lift(i, rank) for i in range(len(s.x))))


def _shift_axes(axes: Sequence[int], rank: int) -> list[int]:
    """The same axes of a stack."""
    return [axis % max(rank, 1) + 1 for axis in axes]


def _along_axis(s: BatchedNode) -> Any:
    """Along the axis of an attribute; only the first operand may be a stack."""
    axis = Op(s.b, s.node).attr("axis", -1)
    return s.emit_again(s.only(0), *s.x[1:], axis=_shift_axes([axis], s.rank(0))[0])


def _reduce(s: BatchedNode) -> Var:
    x = s.only(0)
    axes = s.constant_ints(1)
    if not axes:
        if s.int_attr("noop_with_empty_axes", 0):  # |x| for ReduceL1, x² for ReduceSumSquare
            return s.emit_again(x)
        axes = list(range(s.rank(0)))
    if not axes:  # of a scalar: an axis of one element, whose reduction is that of the scalar
        return s.emit_again(s.b.Unsqueeze(x, [1]), [1], keepdims=0)
    return s.emit_again(x, _shift_axes(axes, s.rank(0)), keepdims=s.int_attr("keepdims", 1))


_rule: ByOperator[Write] = ByOperator(
    {Kind.ELEMENTWISE: _elementwise, Kind.REDUCTION: _reduce, Kind.ALONG_AXIS: _along_axis, Kind.ROWS: rows}
)
#: The function that writes the stacked form of a node. None: its operator has none.
batching_rule = _rule.of

_rule("AffineGrid")(affine_grid)
_rule("Conv", "ConvTranspose")(conv)
_rule("Einsum")(einsum)
_rule("Gemm")(gemm)
_rule("MatMul")(matmul)
_rule("Resize")(resize)
_rule("GRU", "LSTM", "RNN")(recurrent)


# --- operators that their kind does not describe ----------------------------------------------------


@_rule("Bernoulli", "CastLike", "Clip", "Det", "Dropout", "RandomNormalLike", "RandomUniformLike", "Trilu")
def _alike(s: BatchedNode) -> Any:
    return s.emit_again(s.only(0), *s.x[1:])


@_rule("PRelu")
def _prelu(s: BatchedNode) -> Var:
    x = s.stack(0)
    return s.emit_again(x, s.lift(1, s.rank(0)))


# --- along axes ------------------------------------------------------------------------------------


@_rule("Transpose")
def _transpose(s: BatchedNode) -> Var:
    axes = s.node.attributes.get_ints("perm") or range(s.rank(0))[::-1]
    return s.b.Transpose(s.x[0], perm=[0, *(p + 1 for p in axes)])


@_rule("Unsqueeze")
def _unsqueeze(s: BatchedNode) -> Var:
    return s.b.Unsqueeze(s.only(0), _shift_axes(s.constant_ints(1), s.out_rank))


@_rule("Squeeze")
def _squeeze(s: BatchedNode) -> Var:
    axes = s.constant_ints(1)
    if not axes:
        value = not_none(s.values[0])
        if value.shape is None or not all(isinstance(d, int) for d in value.shape):
            raise Unstackable
        axes = [i for i, d in enumerate(value.shape) if d == 1]
    return s.b.Squeeze(s.only(0), _shift_axes(axes, s.rank(0))) if axes else s.only(0)


@_rule("Slice")
def _slice(s: BatchedNode) -> Var:
    axes = s.constant_ints(3) or list(range(_length(s.x[1])))
    return s.b.Slice(s.only(0), s.x[1], s.x[2], _shift_axes(axes, s.rank(0)), *s.x[4:])


@_rule("Pad")
def _pad(s: BatchedNode) -> Var:
    b, x, rank = s.b, s.only(0), s.rank(0)
    pads, axes = s.x[1], s.constant_ints(3)
    if axes:  # to sizes for every axis: ONNX Runtime folds a Pad that names its axes wrongly
        amounts, every = s.constant_ints(1), [0] * (2 * rank)
        for i, axis in enumerate(axes):
            every[axis % rank], every[axis % rank + rank] = amounts[i], amounts[i + len(axes)]
        pads = b.const(every)
    before, after = (b.Slice(pads, [n], [m], [0]) for n, m in ((0, rank), (rank, 2 * rank)))
    both = b.join([0], b.folded(before), [0], b.folded(after))
    return s.emit_again(x, both, *s.x[2:3])


@_rule("CumProd", "CumSum")
def _cumulate(s: BatchedNode) -> Var:
    return s.emit_again(s.only(0), s.b.const(_shift_axes(s.constant_ints(1), s.rank(0))[0]))


@_rule("Tile")
def _tile(s: BatchedNode) -> Var:
    return s.b.Tile(s.only(0), s.b.join([1], s.x[1]))


@_rule("Concat")
def _concat(s: BatchedNode) -> Var:
    return s.emit_again(*(s.stack(i) for i in range(len(s.x))), axis=_shift_axes([s.int_attr("axis", 0)], s.rank(0))[0])


@_rule("Compress")
def _compress(s: BatchedNode) -> Var:
    if "axis" not in s.node.attributes:
        raise Unstackable
    return s.emit_again(s.only(0), *s.x[1:], axis=_shift_axes([s.int_attr("axis", 0)], s.rank(0))[0])


@_rule("DFT")
def _dft(s: BatchedNode) -> Var:
    x = s.only(0)
    if s.b.opset >= 20:  # the axis is an operand; by default it counts from the end
        axis = [a if a < 0 else a + 1 for a in s.constant_ints(2)] or [-2]
        return s.emit_again(x, s.x[1] if len(s.x) > 1 else None, s.b.const(axis[0], ir.DataType.INT64))
    return s.emit_again(x, *s.x[1:], axis=_shift_axes([s.int_attr("axis", 1)], s.rank(0))[0])


@_rule("OneHot")
def _one_hot(s: BatchedNode) -> Var:
    axis = s.int_attr("axis", -1)
    return s.emit_again(s.only(0), *s.x[1:], axis=axis if axis < 0 else axis + 1)


# --- where elements go -----------------------------------------------------------------------------


def shape(s: BatchedNode) -> Var:
    """The sizes of an unbatched element."""
    rank = s.rank(0)
    start, end, _ = slice(s.int_attr("start", 0), s.int_attr("end", rank)).indices(rank)
    return s.b.Shape(s.x[0], start=start + 1, end=max(start, end) + 1)


def size(s: BatchedNode) -> Var:
    """The number of elements of one."""
    return s.b.ReduceProd(s.b.Shape(s.x[0], start=1), keepdims=0)


@_rule("Reshape")
def _reshape(s: BatchedNode) -> Var:
    dims = s.node.outputs[0].shape
    if dims is not None and all(isinstance(d, int) and d for d in dims):  # a -1 would be unknown beside no direction
        s.only(0)
        return s.b.Reshape(s.x[0], s.b.join(s.count, list(dims)))
    return s.b.Reshape(s.only(0), s.b.join(s.count, s.x[1]), allowzero=s.int_attr("allowzero", 0) or None)


@_rule("Flatten")
def _flatten(s: BatchedNode) -> Var:
    b, x, at = s.b, s.only(0), s.int_attr("axis", 1)
    at = at + s.rank(0) if at < 0 else at
    left, right = b.shape_of(x, 1, at + 1), b.shape_of(x, at + 1)
    sides = [[1] if v.shape == (0,) else b.ReduceProd(v, keepdims=1) for v in (left, right)]
    return b.reshape(x, b.join(s.count, *sides))


@_rule("Expand")
def _expand(s: BatchedNode) -> Var:
    s.only(0)
    if s.x[1].shape != (s.out_rank,):
        raise Unstackable
    return s.b.Expand(s.lift(0, s.out_rank), s.b.join(s.count, s.x[1]))


@_rule("Gather")
def _gather(s: BatchedNode) -> Var:
    axis = s.int_attr("axis", 0) % s.rank(0)
    if not s.stacked[1]:
        return s.b.Gather(s.x[0], s.x[1], axis=axis + 1)
    s.only(1)
    return move_axis(s.b.Gather(s.x[0], s.x[1], axis=axis), axis, 0)


@_rule("GatherElements")
def _gather_elements(s: BatchedNode) -> Var:
    return s.emit_again(s.stack(0), s.stack(1), axis=_shift_axes([s.int_attr("axis", 0)], s.rank(0))[0])


@_rule("GatherND")
def _gather_nd(s: BatchedNode) -> Var:
    return s.emit_again(s.stack(0), s.stack(1), batch_dims=s.int_attr("batch_dims", 0) + 1)


@_rule("ScatterElements")
def _scatter_elements(s: BatchedNode) -> Var:
    axis = _shift_axes([s.int_attr("axis", 0)], s.rank(0))[0]
    return s.emit_again(s.stack(0), s.stack(1), s.stack(2), axis=axis)


@_rule("ScatterND")
def _scatter_nd(s: BatchedNode) -> Var:
    if s.stacked[1]:
        raise Unstackable
    return move_axis(s.emit_again(move_axis(s.stack(0), 0, -1), s.x[1], move_axis(s.stack(2), 0, -1)), -1, 0)


@_rule("ReverseSequence")
def _reverse_sequence(s: BatchedNode) -> Var:
    return move_axis(s.emit_again(move_axis(s.only(0), 0, -1), s.x[1]), -1, 0)


def _length(x: Var) -> int:
    if x.shape is None or not isinstance(x.shape[0], int):
        raise Unstackable
    return x.shape[0]


#: Operators that give sizes, which are the same in all directions.
SIZES: dict[str, Write] = {"Shape": shape, "Size": size}
