"""Inverses, linear systems and determinants.

ONNX has no inverse: values are numpy's, and VJPs are given here as functions of arrays (Giles 2008, "Collected matrix
derivative results for forward and reverse mode algorithmic differentiation"). Forward mode and higher orders follow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, tracked, wrapped
from onnxgrad.eager.core.custom_derivatives import custom_vjp
from onnxgrad.eager.core.primitives import standard
from onnxgrad.eager.core.recording import record
from onnxgrad.eager.xp.complexes import by_squaring
from onnxgrad.eager.xp.dtypes import promoted
from onnxgrad.eager.xp.elementwise import imag, where
from onnxgrad.eager.xp.manipulation import expand_dims, matrix_transpose, reshape, squeeze
from onnxgrad.eager.xp.products import matmul
from onnxgrad.eager.xp.reductions import sum


class SlogdetResult(NamedTuple):
    """The sign of a determinant and the logarithm of its absolute value."""

    sign: Any
    logabsdet: Any


@custom_vjp
def inv(x: Any, /) -> Array:
    """The inverse of a square matrix (or of each of a stack)."""
    return wrapped(np.linalg.inv(as_array(x)._data))


@inv.defvjp
def _inv(arguments: Any, y: Any, g: Any) -> Any:
    """Y = X⁻¹: −Yᵀ·G·Yᵀ."""
    t = matrix_transpose(y)
    return -matmul(matmul(t, g), t)


@custom_vjp
def _solve(a: Any, b: Any, /) -> Array:
    return wrapped(np.linalg.solve(a._data, b._data))


@_solve.defvjp
def _solve_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """Y = A⁻¹·B: B gets A⁻ᵀ·G, and A gets −A⁻ᵀ·G·Yᵀ."""
    a, b = arguments
    at_b = _solve(matrix_transpose(a), g)
    at_a = -matmul(at_b, matrix_transpose(y))
    return _sum_to_shape(at_a, a.shape), _sum_to_shape(at_b, b.shape)


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting from `shape`."""
    lead = x.ndim - len(shape)
    axes = tuple(i for i in range(x.ndim) if i < lead or (shape[i - lead] == 1 and x.shape[i] != 1))
    return reshape(sum(x, axis=axes), shape) if axes else x


def solve(x1: Any, x2: Any, /) -> Array:
    """The solution Y of x1·Y = x2, where x2 is a vector or a stack of matrices."""
    a, b = promoted(x1, x2)
    if b.ndim == 1:
        return squeeze(_solve(a, expand_dims(b, axis=-1)), axis=-1)
    return _solve(a, b)


@custom_vjp
def det(x: Any, /) -> Array:
    """The determinant of a square matrix (or of each of a stack)."""
    x = as_array(x)
    if x._node is not None:  # during an export
        return record(standard("Det"), [x], np.linalg.det(x._data))
    return wrapped(np.linalg.det(x._data))


@det.defvjp
def _det(arguments: Any, y: Any, g: Any) -> Any:
    """y = det X: g·y·X⁻ᵀ; of a singular matrix g·C with the cofactors Cᵢⱼ = det (X with row i replaced by eⱼ)."""
    (x,) = arguments
    if (y._data == 0).any():
        n = x.shape[-1]
        unit = np.eye(n, dtype=x.dtype).reshape(1, n, 1, n)
        replaced = where(np.eye(n, dtype=bool).reshape(n, 1, n, 1), unit, expand_dims(x, axis=(-4, -3)))
        return _spread(g) * det(replaced)
    return _spread(g * y) * matrix_transpose(inv(x))


def _spread(g: Array) -> Array:
    return expand_dims(g, axis=(-2, -1))


@custom_vjp
def slogdet(x: Any, /) -> Any:
    """The sign of the determinant and the logarithm of its absolute value."""
    return SlogdetResult(*wrapped(tuple(np.linalg.slogdet(as_array(x)._data))))


@slogdet.defvjp
def _slogdet(arguments: Any, y: Any, g: Any) -> Any:
    """y = log |det X|: g·X⁻ᵀ. The sign s is constant for real numbers; for complex ones, it adds i·Im(gs·s)·X⁻ᵀ."""
    total = g.logabsdet
    if y.sign.dtype.kind == "c":
        total = total + imag(g.sign * y.sign) * 1j
    return _spread(total) * matrix_transpose(inv(arguments[0]))


def matrix_power(x: Any, n: int, /) -> Array:
    """The `n`-th power of a matrix; for negative `n`, of its inverse."""
    x = as_array(x)
    if not tracked(x):
        return wrapped(np.linalg.matrix_power(x._data, n))
    if n < 0:
        return matrix_power(inv(x), -n)
    if n == 0:
        return x * 0 + np.eye(x.shape[-1], dtype=x.dtype)
    return by_squaring(matmul, x, n)
