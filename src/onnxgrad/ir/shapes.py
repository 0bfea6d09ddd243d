"""Provable facts about shapes, and the two directions of broadcasting.

`sum_to` is the transpose of `expand_to`. Both decide while the graph is written where shapes are
provably equal or known, and otherwise emit the few nodes that decide at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.infer.loops import same_dim
from onnxgrad.ir.lowerings import lowering
from onnxgrad.ir.match import Dim

_LEADING = lowering("leading_products", "what was broadcast along leading axes", "ones·X", "ReduceSum")


def same_dims(a: Sequence[Dim] | None, b: Sequence[Dim] | None) -> bool:
    """True if two shapes are provably equal."""
    return a is not None and b is not None and len(a) == len(b) and all(map(same_dim, a, b))


def allows(shape: Sequence[Dim] | ir.Shape | None, sizes: Sequence[int]) -> bool:
    """True if a tensor of these `sizes` fits a declared `shape`, in which a symbol allows any size."""
    if shape is None:
        return True
    return len(shape) == len(sizes) and all(not isinstance(d, int) or d == n for d, n in zip(shape, sizes))


def same_shape(x: Var, y: Var) -> bool:
    """True if two variables have provably equal shapes."""
    return x.value is y.value or same_dims(x.shape, y.shape)


def sum_to(x: Var, like: Var) -> Var:
    """`x` summed over the axes along which `like` was broadcast to the shape of `x`.

    For shapes ``like = [3, 1]`` and ``x = [2, 3, 4]``: sum over axes 0 and 2, result ``[3, 1]``
    (Relay's ``collapse_sum_like``).
    """
    if same_shape(x, like):
        return x
    b = x.builder
    if x.shape is None or like.shape is None:
        return _sum_to_at_run_time(b, x, like)
    lead = len(x.shape) - len(like.shape)
    axes = list(range(lead))
    for axis, (have, want) in enumerate(zip(x.shape[lead:], like.shape), start=lead):
        if want == 1 and have != 1:
            axes.append(axis)
        elif have == 1:  # so is `want`, even if it is a symbol
            continue
        elif not (same_dim(have, want) or (isinstance(want, int) and want > 1)):
            return _sum_to_at_run_time(b, x, like)
    if all(x.shape[axis] == 1 for axis in axes):
        return reshape_to(x, like)
    leading = _LEADING.is_enabled and axes == list(range(len(axes))) and len(axes) < x.rank
    if leading and 0 not in x.shape and x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return _sum_leading(b, x, len(axes), like)
    if axes == list(range(lead)):
        return b.ReduceSum(x, axes, keepdims=0)
    summed = b.ReduceSum(x, axes, keepdims=1)
    return b.Squeeze(summed, list(range(lead))) if lead else summed


def _sum_leading(b: Builder, x: Var, count: int, like: Var) -> Var:
    """Σ over the first `count` axes as ones·X, with X the matrix of all rows.

    ONNX Runtime computes this 2 to 10 times faster than a ReduceSum, and more accurately (it adds in
    blocks). A column that holds NaN or an infinity keeps it to itself.
    """
    matrix = x if x.rank == 2 else b.Flatten(x, axis=count)
    rows = (matrix.shape or (None,))[0]
    if isinstance(rows, int) and rows <= 4096:
        ones = b.const(np.ones(rows), x.dtype)
    else:
        ones = b.Expand(b.const(1, x.dtype), b.shape_of(matrix, 0, 1))
    return reshape_to(ones @ matrix, like)


def _sum_to_at_run_time(b: Builder, x: Var, like: Var) -> Var:
    """Sum over every axis where `like`, padded with ones on the left, has size 1; then reshape."""
    want = b.shape_of(like)
    have = b.shape_of(x)
    lead = b.Sub(b.Shape(have), b.Shape(want))
    padded = b.Concat(b.ConstantOfShape(lead, value=ir.tensor([1], dtype=ir.DataType.INT64)), want, axis=0)
    axes = b.Squeeze(b.NonZero(b.Equal(padded, 1)), [0])
    return b.reshape(b.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=1), want)


def move_axis(x: Var, source: int, target: int) -> Var:
    """`x` with its axis `source` at the place `target`; the others keep their order."""
    source, target = source % x.rank, target % x.rank
    perm = [i for i in range(x.rank) if i != source]
    perm.insert(target, source)
    return x if source == target else x.builder.Transpose(x, perm=perm)


def product(x: Var, y: Var) -> Var:
    """x·y, and 0 where nothing is summed.

    ONNX Runtime leaves a batch of products, or one with a vector on the right, uninitialized if the summed size is 0. A
    product with a matrix on the right is correct; so is a product without elements, which it is if that size is also a
    size of the result.
    """
    z = x @ y
    size = None if x.shape is None else x.shape[-1]
    if y.rank == 2 or any(same_dim(size, d) for d in z.shape or () if isinstance(size, ir.SymbolicDim)):
        return z
    return unless_empty(z, x, x.rank - 1)


def unless_empty(z: Var, x: Var, axis: int) -> Var:
    """`z`, but 0 where `x` has size 0 along `axis`; `z` itself where that has another size for certain."""
    size = None if x.shape is None else x.shape[axis]
    if isinstance(size, int):
        return z if size else z.builder.zeros_like(z)
    return z.builder.Where(z.builder.shape_of(x, axis, axis + 1) > 0, z, 0)


def expand_to(x: Var, like: Var) -> Var:
    """`x` broadcast to the shape of `like`."""
    if same_shape(x, like):
        return x
    if like.shape is not None and 0 in like.shape and like.dtype == x.dtype:
        return x.builder.zeros_like(like)  # ONNX Runtime takes an Expand of size 1 to the constant size 0 for nothing
    return x.builder.Expand(x, x.builder.shape_of(like))


def reshape_to(x: Var, like: Var) -> Var:
    """`x`, which has as many elements as `like`, in the shape of `like`."""
    if same_shape(x, like):
        return x
    b = x.builder
    dims = like.shape or ()
    open_dims = [d for d in dims if not isinstance(d, int)]
    if len(open_dims) == 1 and 0 not in dims:  # the one open dimension follows from the number of elements
        y = b.Reshape(x, [d if isinstance(d, int) else -1 for d in dims])
        y.value.shape = ir.Shape(dims)
        return y
    return b.reshape(x, b.shape_of(like))
