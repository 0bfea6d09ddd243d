"""Products of matrices and vectors."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, tracked
from onnxgrad.eager.core.primitives import standard
from onnxgrad.eager.core.recording import record
from onnxgrad.eager.xp import elementwise as e
from onnxgrad.eager.xp.complexes import bilinear
from onnxgrad.eager.xp.dtypes import cast, promoted
from onnxgrad.eager.xp.indexing import getitem
from onnxgrad.eager.xp.manipulation import axes_of, expand_dims, moveaxis, stack, unstack
from onnxgrad.eager.xp.reductions import sum

_MATMUL = standard("MatMul")


def matmul(x1: Any, x2: Any, /) -> Array:
    """The matrix product, also of stacks of matrices and of vectors."""
    a, b = promoted(x1, x2)
    if a._data.dtype.kind == "c" and (a._node is not None or b._node is not None):
        return bilinear(matmul, a, b)
    return record(_MATMUL, [a, b], np.matmul(a._data, b._data))


def einsum(equation: str, /, *operands: Any) -> Array:
    """Einstein summation, as in numpy."""
    parts = [as_array(x) for x in operands]
    dtype = np.result_type(*(x._data.dtype for x in parts))
    parts = [cast(x, dtype) for x in parts]
    if dtype.kind == "c" and len(parts) == 2 and tracked(parts):
        return bilinear(lambda x, y: einsum(equation, x, y), *parts)
    value = np.einsum(equation, *(x._data for x in parts), optimize=len(parts) > 2)
    return record(standard("Einsum", equation=equation.replace(" ", "")), parts, value)


def tensordot(x1: Any, x2: Any, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Array:
    """The tensor contraction over the last and first `axes` axes, or over pairs of axes."""
    a, b = promoted(x1, x2)
    if isinstance(axes, int):
        left, right = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        left, right = axes_of(tuple(axes[0]), a.ndim), axes_of(tuple(axes[1]), b.ndim)
    value = np.tensordot(a._data, b._data, (left, right))
    if a._node is None and b._node is None:
        return Array(np.asarray(value))
    letters = iter(string.ascii_letters)
    first = [next(letters) for _ in range(a.ndim)]
    second = [first[left[right.index(i)]] if i in right else next(letters) for i in range(b.ndim)]
    out = [c for i, c in enumerate(first) if i not in left] + [c for i, c in enumerate(second) if i not in right]
    return einsum(f"{''.join(first)},{''.join(second)}->{''.join(out)}", a, b)


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """The dot product of vectors along `axis`; the first is conjugated."""
    a, b = promoted(x1, x2)
    if not -min(a.ndim, b.ndim) <= axis < 0:
        raise ValueError(f"axis counts from the end, here down to -{min(a.ndim, b.ndim)}; it is {axis}")
    if a.shape[axis] != b.shape[axis]:
        raise ValueError(f"vectors of {a.shape[axis]} and {b.shape[axis]} elements")
    return sum(e.multiply(e.conj(a), b), axis=axis, dtype=a.dtype)


def outer(x1: Any, x2: Any, /) -> Array:
    """The outer product of two vectors."""
    a, b = as_array(x1), as_array(x2)
    if a.ndim != 1 or b.ndim != 1:
        raise ValueError("the outer product is of two vectors")
    return e.multiply(expand_dims(a, axis=1), b)


def dot(x1: Any, x2: Any, /) -> Array:
    """numpy's dot: the inner product of vectors, the matrix product of matrices, a multiple with a number."""
    a, b = as_array(x1), as_array(x2)
    if not a.ndim or not b.ndim:
        return e.multiply(a, b)
    if a.ndim <= 2 and b.ndim <= 2:
        return matmul(a, b)
    return tensordot(a, b, axes=((a.ndim - 1,), (max(b.ndim - 2, 0),)))


def inner(x1: Any, x2: Any, /) -> Array:
    """numpy's inner: the sum of products over the last axis of both."""
    a, b = as_array(x1), as_array(x2)
    return tensordot(a, b, axes=((a.ndim - 1,), (b.ndim - 1,))) if a.ndim and b.ndim else e.multiply(a, b)


def diagonal(x: Any, /, *, offset: int = 0) -> Array:
    """A diagonal of each matrix of a stack."""
    x = as_array(x)
    rows, columns = x.shape[-2:]
    count = max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)
    at = np.arange(count)
    return getitem(x, (Ellipsis, Array(at + max(-offset, 0)), Array(at + max(offset, 0))))


def trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """The sum of a diagonal of each matrix of a stack."""
    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """The vector product in three dimensions."""
    a, b = promoted(x1, x2)
    if a.shape[axis] != 3 or b.shape[axis] != 3:
        raise ValueError("the vector product is of vectors of three elements")
    if a._node is None and b._node is None:
        return Array(np.cross(a._data, b._data, axis=axis))
    (a1, a2, a3), (b1, b2, b3) = unstack(moveaxis(a, axis, -1), axis=-1), unstack(moveaxis(b, axis, -1), axis=-1)
    products = [(a2, b3, a3, b2), (a3, b1, a1, b3), (a1, b2, a2, b1)]
    parts = [e.subtract(e.multiply(p, q), e.multiply(r, s)) for p, q, r, s in products]
    return moveaxis(stack(parts, axis=-1), -1, axis)
