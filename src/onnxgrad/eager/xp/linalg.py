"""The linear algebra extension of the array API standard: inverses, determinants, norms (see `factors` for the rest).

ONNX has no inverse. Its values are numpy's, derivatives are given here as functions of arrays (Giles 2008, "Collected
matrix derivative results for forward and reverse mode algorithmic differentiation"), and in forward mode and at higher
orders follow from these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, record
from onnxgrad.eager.core.operators import standard
from onnxgrad.eager.custom import custom_vjp
from onnxgrad.eager.op import apply
from onnxgrad.eager.xp import elementwise as e
from onnxgrad.eager.xp.elementwise import discrete, opaque, wrapped
from onnxgrad.eager.xp.factorizations import (  # fmt: skip
    EighResult,
    QRResult,
    SVDResult,
    cholesky,
    eigh,
    eigvalsh,
    pinv,
    qr,
    svd,
    svdvals,
)
from onnxgrad.eager.xp.products import cross, diagonal, matmul, outer, tensordot, trace, vecdot
from onnxgrad.eager.xp.reductions import axes_of, max, min, sum
from onnxgrad.eager.xp.shaping import expand_dims, matrix_transpose, moveaxis, reshape, squeeze
from onnxgrad.errors import BadInput

__all__ = [
    "EigResult", "EighResult", "QRResult", "SVDResult", "SlogdetResult", "cholesky", "cross", "det", "diagonal", "eig",
    "eigh", "eigvals", "eigvalsh", "inv", "matmul", "matrix_norm", "matrix_power", "matrix_rank", "matrix_transpose",
    "norm", "outer", "pinv", "qr", "slogdet", "solve", "svd", "svdvals", "tensordot", "trace", "vecdot", "vector_norm",
]  # fmt: skip


class EigResult(NamedTuple):
    """Eigenvalues, and eigenvectors as columns."""

    eigenvalues: Any
    eigenvectors: Any


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
    t = matrix_transpose(inv(arguments[0]))
    return -matmul(matmul(t, g), t)


@custom_vjp
def _solve(a: Any, b: Any, /) -> Array:
    return wrapped(np.linalg.solve(a._data, b._data))


@_solve.defvjp
def _solve_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """Y = A⁻¹·B: B gets A⁻ᵀ·G, and A gets −A⁻ᵀ·G·Yᵀ."""
    a, b = arguments
    at_b = _solve(matrix_transpose(a), g)
    at_a = -matmul(at_b, matrix_transpose(_solve(a, b)))
    return _summed(at_a, a.shape), _summed(at_b, b.shape)


def _summed(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting from `shape`."""
    lead = x.ndim - len(shape)
    axes = tuple(i for i in range(x.ndim) if i < lead or (shape[i - lead] == 1 and x.shape[i] != 1))
    return reshape(sum(x, axis=axes), shape) if axes else x


def solve(x1: Any, x2: Any, /) -> Array:
    """The solution of x1·Y = x2, where x2 is a vector or a stack of matrices."""
    a, b = e.promoted(x1, x2)
    if b.ndim == 1:
        return squeeze(_solve(a, expand_dims(b, axis=-1)), axis=-1)
    return _solve(a, b)


@custom_vjp
def det(x: Any, /) -> Array:
    """The determinant of a square matrix (or of each of a stack)."""
    x = as_array(x)
    if x._node is not None:  # in a program that is being recorded
        return apply("Det", x)
    return wrapped(np.linalg.det(x._data))


@det.defvjp
def _det(arguments: Any, y: Any, g: Any) -> Any:
    """y = det X: g·y·X⁻ᵀ, of a regular matrix."""
    (x,) = arguments
    return _spread(g * det(x)) * matrix_transpose(inv(x))


def _spread(g: Array) -> Array:
    return expand_dims(expand_dims(g, axis=-1), axis=-1)


@custom_vjp
def slogdet(x: Any, /) -> Any:
    """The sign of the determinant, and the logarithm of its absolute value."""
    return SlogdetResult(*wrapped(tuple(np.linalg.slogdet(as_array(x)._data))))


@slogdet.defvjp
def _slogdet(arguments: Any, y: Any, g: Any) -> Any:
    """y = log |det X|: g·X⁻ᵀ; the sign is constant."""
    return _spread(g.logabsdet) * matrix_transpose(inv(arguments[0]))


def matrix_power(x: Any, n: int, /) -> Array:
    """The product of `n` times the matrix; of its inverse for a negative `n`."""
    x = as_array(x)
    if not e.tracked(x):
        return wrapped(np.linalg.matrix_power(x._data, n))
    if n < 0:
        return matrix_power(inv(x), -n)
    if n == 0:
        return x * 0 + np.eye(x.shape[-1], dtype=x.dtype)
    half = matrix_power(x, n // 2) if n > 1 else None
    even = None if half is None else matmul(half, half)
    return x if even is None else matmul(even, x) if n % 2 else even


def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Array:
    """The norm of vectors: (Σ|x|ᵖ)^(1/p), with the extremes for infinite `ord`, the count for 0."""
    x = as_array(x)
    if not e.tracked(x):
        data = x._data if x.dtype.kind in "fc" else x._data.astype(np.float64)
        return wrapped(np.linalg.vector_norm(data, axis=axis, keepdims=keepdims, ord=ord))
    x = e.abs(x) if x.dtype.kind == "c" else x
    if ord == np.inf:
        return max(e.abs(x), axis=axis, keepdims=keepdims)
    if ord == -np.inf:
        return min(e.abs(x), axis=axis, keepdims=keepdims)
    if ord == 0:
        return sum(e.cast(e.not_equal(x, 0), x.dtype), axis=axis, keepdims=keepdims)
    if ord == 1:
        return sum(e.abs(x), axis=axis, keepdims=keepdims)
    if ord == 2:  # an operator of its own, whose derivative at 0 is 0
        axes = axes_of(axis, x.ndim)
        value = np.linalg.vector_norm(x._data, axis=axes, keepdims=keepdims)
        return record(standard("ReduceL2", ((1, axes),), keepdims=int(keepdims)), [x], value)
    return e.pow(sum(e.pow(e.abs(x), ord), axis=axis, keepdims=keepdims), 1.0 / ord)


def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """The norm of matrices: "fro", the sums of rows and columns (±inf, ±1), the singular values (±2, "nuc")."""
    x = as_array(x)
    if not e.tracked(x):
        return wrapped(np.linalg.matrix_norm(x._data, keepdims=keepdims, ord=ord))
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in (1, -1, np.inf, -np.inf):
        sums = sum(e.abs(x), axis=-2 if abs(ord) == 1 else -1, keepdims=True)
        return (max if ord > 0 else min)(sums, axis=(-2, -1), keepdims=keepdims)
    if ord not in ("nuc", 2, -2):
        raise BadInput(f"a norm of matrices is 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, not {ord!r}")
    kinds: dict[Any, Any] = {"nuc": sum, 2: max, -2: min}
    y = kinds[ord](svdvals(x), axis=-1)
    return expand_dims(y, axis=(-2, -1)) if keepdims else y


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Array:
    """numpy's norm: of vectors, or for two axes of matrices."""
    x = as_array(x)
    if ord is None:
        return vector_norm(x, axis=axis, keepdims=keepdims)
    axes = axes_of(axis, x.ndim)
    if len(axes) == 1:
        return vector_norm(x, axis=axes[0], keepdims=keepdims, ord=ord)
    y = matrix_norm(moveaxis(x, axes, (-2, -1)), ord=ord, keepdims=keepdims)
    return moveaxis(y, (-2, -1), axes) if keepdims else y


def _complex(x: np.ndarray) -> np.ndarray:
    return x.astype(np.result_type(x, np.complex64))


eigvals = opaque("eigvals", lambda x, /: _complex(np.linalg.eigvals(x)), "use eigvalsh of a symmetric matrix")
eig = opaque("eig", lambda x, /: EigResult(*map(_complex, np.linalg.eig(x))), "use eigh of a symmetric matrix")
matrix_rank = discrete("matrix_rank", lambda x, /, *, rtol=None: np.linalg.matrix_rank(x, rtol=rtol))
