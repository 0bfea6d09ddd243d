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
from onnxgrad.eager.xp.manipulation import axes_of, expand_dims, moveaxis, reshape, squeeze, stack, unstack
from onnxgrad.eager.xp.reductions import sum

__all__ = [
    "cross", "diagonal", "dot", "einsum", "inner", "make_diagonal", "matmul", "outer", "tensordot", "trace", "vdot",
    "vecdot",
]  # fmt: skip

_MATMUL = standard("MatMul")


def matmul(x1: Any, x2: Any, /) -> Array:
    """The matrix product, also of stacks of matrices and of vectors."""
    a, b = promoted(x1, x2)
    if a._data.dtype.kind == "c" and (a._node is not None or b._node is not None):
        return bilinear(matmul, a, b)
    return record(_MATMUL, [a, b], np.matmul(a._data, b._data))


def einsum(*operands: Any, optimize: Any = True) -> Array:
    """Einstein summation, as in numpy: of an equation and arrays, or of arrays and lists of axes in turn."""
    equation, parts = _equation(operands)
    dtype = np.result_type(*(x._data.dtype for x in parts))
    parts = [cast(x, dtype) for x in parts]
    if dtype.kind == "c" and tracked(parts):
        if len(parts) == 2:
            return bilinear(lambda x, y: einsum(equation, x, y), *parts)
        if len(parts) > 2:
            return _product_of_many(equation, parts)
    value = np.einsum(equation, *(x._data for x in parts), optimize=len(parts) > 2)
    if not tracked(parts, floats=False):
        return Array(np.asarray(value))
    return record(standard("Einsum", equation=equation), parts, value)


def _product_of_many(equation: str, parts: Sequence[Array]) -> Array:
    """The summation of the first operand with the product of the others, whose axes are kept."""
    terms, out = equation.split("->")
    first, *rest = terms.split(",")
    kept = "".join(dict.fromkeys(c for c in "".join(rest) if c in first or c in out))
    return einsum(f"{first},{kept}->{out}", parts[0], einsum(f"{','.join(rest)}->{kept}", *parts[1:]))


def _equation(operands: Sequence[Any]) -> tuple[str, list[Array]]:
    """The equation with its result and a letter for each axis, and the arrays.

    ONNX aligns the axes of an ellipsis only if they are equally many, and broadcasts no axis of length 1: ellipses
    become letters, and an axis of length 1 where another operand has more elements is dropped.
    """
    if isinstance(operands[0], str):
        equation, arrays = operands[0].replace(" ", ""), operands[1:]
    else:
        lists = [_letters(sublist) for sublist in operands[1::2]]
        arrays = operands[: 2 * (len(operands) // 2) : 2]
        equation = ",".join(lists) + (f"->{_letters(operands[-1])}" if len(operands) % 2 else "")
    parts = [as_array(x) for x in arrays]
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(parts):
        raise ValueError(f"{equation!r} is of {len(terms)} operands, not {len(parts)}")
    if not arrow:
        named = left.replace(",", "").replace("...", "")
        out = ("..." if "..." in left else "") + "".join(sorted(c for c in set(named) if named.count(c) == 1))
    free = [c for c in string.ascii_letters if c not in equation]
    ranks = [x.ndim - len(t.replace("...", "")) for t, x in zip(terms, parts)]
    dots = free[: max((r for t, r in zip(terms, ranks) if "..." in t), default=0)]
    terms = [t.replace("...", "".join(dots[len(dots) - r :])) for t, r in zip(terms, ranks)]
    for t, x in zip(terms, parts):
        if len(t) != x.ndim:
            raise ValueError(f"{equation!r} names {len(t)} axes of an array with {x.ndim}")
    lengths = {
        c: max(x.shape[i] for t, x in zip(terms, parts) for i, d in enumerate(t) if d == c) for c in set("".join(terms))
    }
    for i, (t, x) in enumerate(zip(terms, parts)):
        single = tuple(k for k, c in enumerate(t) if x.shape[k] == 1 and lengths[c] > 1)
        if single:
            parts[i], terms[i] = squeeze(x, axis=single), "".join(c for k, c in enumerate(t) if k not in single)
    return f"{','.join(terms)}->{out.replace('...', ''.join(dots))}", parts


def _letters(sublist: Sequence[Any]) -> str:
    return "".join("..." if i is Ellipsis else string.ascii_letters[int(i)] for i in sublist)


def tensordot(x1: Any, x2: Any, /, axes: Any = 2) -> Array:
    """The tensor contraction over the last and first `axes` axes, or over pairs of axes."""
    a, b = promoted(x1, x2)
    if isinstance(axes, (int, np.integer)):
        left, right = tuple(range(a.ndim - int(axes), a.ndim)), tuple(range(int(axes)))
    else:
        left, right = axes_of(axes[0], a.ndim), axes_of(axes[1], b.ndim)
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


def vdot(x1: Any, x2: Any, /) -> Array:
    """The dot product of two arrays, flattened; the first is conjugated."""
    return vecdot(reshape(x1, (-1,)), reshape(x2, (-1,)))


def outer_of_vectors(x1: Any, x2: Any, /) -> Array:
    """The outer product of two vectors."""
    a, b = as_array(x1), as_array(x2)
    if a.ndim != 1 or b.ndim != 1:
        raise ValueError("the outer product is of two vectors")
    return e.multiply(expand_dims(a, axis=1), b)


def outer(x1: Any, x2: Any, /) -> Array:
    """The outer product of two arrays, flattened."""
    return outer_of_vectors(reshape(x1, (-1,)), reshape(x2, (-1,)))


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


def diagonal_of_matrices(x: Any, /, *, offset: int = 0) -> Array:
    """A diagonal of each matrix of a stack."""
    x = as_array(x)
    rows, columns = x.shape[-2:]
    count = max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)
    at = np.arange(count)
    return getitem(x, (Ellipsis, Array(at + max(-offset, 0)), Array(at + max(offset, 0))))


def trace_of_matrices(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """The sum of a diagonal of each matrix of a stack."""
    return sum(diagonal_of_matrices(x, offset=offset), axis=-1, dtype=dtype)


def diagonal(x: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """A diagonal of the matrices in two axes, as the last axis."""
    return diagonal_of_matrices(moveaxis(x, (axis1, axis2), (-2, -1)), offset=offset)


def trace(x: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Array:
    """The sum of a diagonal of the matrices in two axes."""
    return trace_of_matrices(moveaxis(x, (axis1, axis2), (-2, -1)), offset=offset, dtype=dtype)


def make_diagonal(x: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
    """Square matrices in two axes of the result, whose diagonals are the vectors in the last axis of `x`."""
    x = as_array(x)
    if offset:
        raise ValueError("make_diagonal fills main diagonals")
    square = e.where(np.eye(x.shape[-1], dtype=bool), expand_dims(x, axis=-1), np.zeros((), x.dtype))
    return moveaxis(square, (-2, -1), (axis1, axis2))


def cross(x1: Any, x2: Any, /, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Array:
    """The vector product in three dimensions, of vectors along `axisa` and `axisb`, or along `axis` of all three."""
    a, b = promoted(x1, x2)
    if axis is None:
        return moveaxis(cross(moveaxis(a, axisa, -1), moveaxis(b, axisb, -1), axis=-1), -1, axisc)
    if a.shape[axis] != 3 or b.shape[axis] != 3:
        raise ValueError("the vector product is of vectors of three elements")
    if a._node is None and b._node is None:
        return Array(np.cross(a._data, b._data, axis=axis))
    (a1, a2, a3), (b1, b2, b3) = unstack(moveaxis(a, axis, -1), axis=-1), unstack(moveaxis(b, axis, -1), axis=-1)
    products = [(a2, b3, a3, b2), (a3, b1, a1, b3), (a1, b2, a2, b1)]
    parts = [e.subtract(e.multiply(p, q), e.multiply(r, s)) for p, q, r, s in products]
    return moveaxis(stack(parts, axis=-1), -1, axis)
