"""Loops over bags: a Loop whose steps reduce equal blocks of rows, written for all blocks at once.

PyTorch's older exporter writes EmbeddingBag as a Loop. A step slices the indices of a bag from a list of offsets,
gathers their rows, and reduces them. If the offsets are 0, L, 2L, … of a flattened matrix of L columns, the slices are
the rows of that matrix, and the steps become its first axis.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.infer.loops import always_goes_on
from onnxgrad.ir.match import constant, is_number, is_op, producer, rank
from onnxgrad.ir.shapes import same_dims
from onnxgrad.lower.registry import replace

#: Writes a value of a step for all steps, with the steps as its first axis.
_Lifted = Callable[[Builder], Var]

_ELEMENTWISE = ("Add", "Sub", "Mul", "Div")
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")


def write_bags(builder: Builder, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node` if it is such a Loop; the new nodes, or None."""
    if not is_op(node, "Loop") or len(node.inputs) != 2 or not always_goes_on(node):
        return None
    body = node.attributes["body"].as_graph()
    lifted = [_lift(v, node, body) for v in body.outputs[1:]]
    found = [write for write in lifted if write is not None]
    return replace(builder, node, lambda b, _: [write(b) for write in found]) if len(found) == len(lifted) else None


def _lift(value: ir.Value | None, loop: ir.Node, body: ir.Graph) -> _Lifted | None:
    """The value of a step for all steps; None where this has no such form."""
    node = None if value is None else value.producer()
    if node is None or node.graph is not body:
        return None
    if is_op(node, "Slice"):
        matrix = _sliced_rows(node, loop, body.inputs[0])
        return None if matrix is None else lambda b: b.var(matrix)
    if is_op(node, "Gather"):
        return _lift_rows(node, loop, body)
    operand = node.inputs[0]
    x = _lift(operand, loop, body)
    if x is None or rank(operand) is None:
        return None
    if is_op(node, "Cast"):
        return lambda b: b.Cast(x(b), to=node.attributes["to"].as_int())
    if is_op(node, _ELEMENTWISE):
        y = _lift(node.inputs[1], loop, body) if rank(node.inputs[1]) == rank(operand) else None
        return None if y is None else lambda b: getattr(b, node.op_type)(x(b), y(b))
    if not is_op(node, ("Unsqueeze", *_REDUCTIONS)) or (axes := _axes(node)) is None:
        return None
    behind = [a + 1 if a >= 0 else a for a in axes]
    if is_op(node, "Unsqueeze"):
        return lambda b: b.Unsqueeze(x(b), behind)
    keepdims = node.attributes.get_int("keepdims", 1)
    return lambda b: getattr(b, node.op_type)(x(b), behind, keepdims=keepdims)


def _lift_rows(node: ir.Node, loop: ir.Node, body: ir.Graph) -> _Lifted | None:
    """The rows of a table from around the Loop, at indices of all steps."""
    table, index = node.inputs
    at = _lift(index, loop, body)
    if at is None or table is None or table.graph is body or node.attributes.get_int("axis", 0) != 0:
        return None
    return lambda b: b.Gather(b.var(table), at(b), axis=0)


def _axes(node: ir.Node) -> list[int] | None:
    """The constant axes of a node, as an operand or an attribute; None if there are none."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return [int(a) for a in axes] if axes is not None and axes.size else None


# --- offsets --------------------------------------------------------------------------------------


def _sliced_rows(node: ir.Node, loop: ir.Node, number: ir.Value) -> ir.Value | None:
    """The matrix whose row of the number of the step `node` slices from its elements; None if there is none."""
    flat, first, last, *rest = node.inputs
    reshaped = producer(flat, "Reshape")
    matrix = None if reshaped is None or not _is_all([-1], reshaped.inputs[1]) else reshaped.inputs[0]
    offsets, ends = _find_vector(first, number), _find_vector(last, number)
    if matrix is None or matrix.shape is None or len(matrix.shape) != 2 or offsets is None or ends is None:
        return None
    if not all(_is_all([default], v) for v, default in zip(rest, (0, 1)) if v is not None):
        return None
    length = matrix.shape[1]
    if not isinstance(length, int) or not length or not _are_multiples(offsets, length, matrix):
        return None
    cut = producer(ends, "Slice")
    follow = cut is not None and cut.inputs[0] is offsets and _is_tail(cut)
    known, own = constant(ends), constant(offsets)
    follow = follow or (known is not None and own is not None and np.array_equal(known, own[1:]))
    return matrix if follow and _counts(loop.inputs[0], ends, matrix.shape[0]) else None


def _find_vector(value: ir.Value | None, number: ir.Value) -> ir.Value | None:
    """The vector whose element of the number of the step `value` is, with an axis of one element."""
    axis = producer(value, "Unsqueeze")
    gather = None if axis is None else producer(axis.inputs[0], "Gather")
    return gather.inputs[0] if gather is not None and gather.inputs[1] is number else None


def _are_multiples(offsets: ir.Value, length: int, matrix: ir.Value) -> bool:
    """True if `offsets` are 0, length, …, to the number of elements of `matrix`, of so many columns."""
    known = constant(offsets)
    if known is not None:
        count = matrix.shape[0] if matrix.shape is not None else None
        return isinstance(count, int) and np.array_equal(known, length * np.arange(count + 1))
    joined = producer(offsets, "Concat")
    steps = producer(joined.inputs[0], "Range") if joined is not None and len(joined.inputs) == 2 else None
    if joined is None or steps is None or not is_number(steps.inputs[0], 0) or not is_number(steps.inputs[2], length):
        return False
    return _is_size(steps.inputs[1], matrix) and _is_size(joined.inputs[1], matrix)


def _is_size(value: ir.Value | None, matrix: ir.Value) -> bool:
    """True if `value` is the number of elements of `matrix`, by the shape of a tensor as large or of its elements."""
    while (view := producer(value, ("Cast", "Unsqueeze"))) is not None:
        value = view.inputs[0]
    product = producer(value, "ReduceProd")
    if product is not None and len(product.inputs) == 1:
        shape = producer(product.inputs[0], "Shape")
        return shape is not None and not shape.attributes and _same_shape(shape.inputs[0], matrix)
    first = producer(value, "Gather")
    shape = producer(first.inputs[0], "Shape") if first is not None and is_number(first.inputs[1], 0) else None
    flat = None if shape is None else producer(shape.inputs[0], "Reshape")
    return flat is not None and _is_all([-1], flat.inputs[1]) and _same_shape(flat.inputs[0], matrix)


def _same_shape(x: ir.Value | None, y: ir.Value) -> bool:
    return x is not None and x.shape is not None and y.shape is not None and same_dims(x.shape.dims, y.shape.dims)


def _is_tail(cut: ir.Node) -> bool:
    """True if a Slice leaves out the first element of a vector alone."""
    wanted = [[1], None, [0], [1]]
    ends = constant(cut.inputs[2])
    far = ends is not None and ends.size == 1 and ends.item() >= 2**31 - 1
    return far and all(_is_all(w, v) for w, v in zip(wanted, cut.inputs[1:]) if w is not None and v is not None)


def _counts(trips: ir.Value | None, ends: ir.Value, count: object) -> bool:
    """True if `trips` is the length of `ends`, or the constant number `count`."""
    known = constant(trips)
    if known is not None:
        return isinstance(count, int) and known.item() == count
    first = producer(trips, "Gather")
    shape = producer(first.inputs[0], "Shape") if first is not None and is_number(first.inputs[1], 0) else None
    return shape is not None and shape.inputs[0] is ends


def _is_all(wanted: list[int], value: ir.Value | None) -> bool:
    """True if `value` is the constant vector `wanted`."""
    known = constant(value)
    return known is not None and known.reshape(-1).tolist() == wanted
