"""The linear algebra extension of the array API standard: its namespace, and norms.

Inverses, determinants and factorizations have modules of their own.
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, tracked, wrapped
from onnxgrad.eager.core.primitives import standard
from onnxgrad.eager.core.recording import record
from onnxgrad.eager.xp import elementwise as e
from onnxgrad.eager.xp.dtypes import as_float, cast, promoted
from onnxgrad.eager.xp.factorizations import (  # fmt: skip
    EighResult,
    EigResult,
    QRResult,
    SVDResult,
    cholesky,
    eig,
    eigh,
    eigvals,
    eigvalsh,
    pinv,
    qr,
    svd,
    svdvals,
)
from onnxgrad.eager.xp.inverses import SlogdetResult, det, inv, matrix_power, slogdet, solve
from onnxgrad.eager.xp.manipulation import axes_of, expand_dims, matrix_transpose, moveaxis, reshape
from onnxgrad.eager.xp.products import cross, matmul, tensordot, vecdot
from onnxgrad.eager.xp.products import diagonal_of_matrices as diagonal
from onnxgrad.eager.xp.products import outer_of_vectors as outer
from onnxgrad.eager.xp.products import trace_of_matrices as trace
from onnxgrad.eager.xp.reductions import max, min, sum
from onnxgrad.eager.xp.ufuncs import discrete, module_fallback
from onnxgrad.errors import BadInput

__all__ = [
    "EigResult", "EighResult", "LstsqResult", "QRResult", "SVDResult", "SlogdetResult", "cholesky", "cross", "det",
    "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "inv", "lstsq", "matmul", "matrix_norm", "matrix_power",
    "matrix_rank", "matrix_transpose", "multi_dot", "norm", "outer", "pinv", "qr", "slogdet", "solve", "svd",
    "svdvals", "tensordot", "tensorinv", "tensorsolve", "trace", "vecdot", "vector_norm",
]  # fmt: skip


def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Array:
    """The norm of vectors: (Σ|x|ᵖ)^(1/p), with max |x| or min |x| for `ord` ±inf and the number of nonzeros for 0."""
    x = as_float(x)
    if not tracked(x):
        return wrapped(np.linalg.vector_norm(x._data, axis=axis, keepdims=keepdims, ord=ord))
    x = e.abs(x) if x.dtype.kind == "c" else x
    if ord == np.inf:
        return max(e.abs(x), axis=axis, keepdims=keepdims)
    if ord == -np.inf:
        return min(e.abs(x), axis=axis, keepdims=keepdims)
    if ord == 0:
        return sum(cast(e.not_equal(x, 0), x.dtype), axis=axis, keepdims=keepdims)
    if ord == 1:
        return sum(e.abs(x), axis=axis, keepdims=keepdims)
    if ord == 2:  # an operator of its own, whose derivative at 0 is 0
        axes = axes_of(axis, x.ndim)
        value = np.linalg.vector_norm(x._data, axis=axes, keepdims=keepdims)
        return record(standard("ReduceL2", ((1, axes),), keepdims=int(keepdims)), [x], value)
    return e.pow(sum(e.pow(e.abs(x), ord), axis=axis, keepdims=keepdims), 1.0 / ord)


def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """The norm of matrices: "fro", of row and column sums (±inf, ±1), of singular values (±2, "nuc")."""
    x = as_float(x)
    if not tracked(x):
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
    """numpy's norm: of vectors, or over two axes of matrices."""
    x = as_array(x)
    if ord is None:
        return vector_norm(x, axis=axis, keepdims=keepdims)
    axes = axes_of(axis, x.ndim)
    if len(axes) == 1:
        return vector_norm(x, axis=axes[0], keepdims=keepdims, ord=ord)
    y = matrix_norm(moveaxis(x, axes, (-2, -1)), ord=ord, keepdims=keepdims)
    return moveaxis(y, (-2, -1), axes) if keepdims else y


def multi_dot(arrays: Sequence[Any], /) -> Array:
    """The product of matrices; the first and the last may be vectors."""
    return functools.reduce(matmul, arrays)


class LstsqResult(NamedTuple):
    """The solution, sums of squared residuals (none unless of full rank), the rank, and the singular values."""

    x: Any
    residuals: Any
    rank: Any
    singular_values: Any


def lstsq(a: Any, b: Any, /, rcond: Any = None) -> LstsqResult:
    """The solution of least norm that minimizes ‖a·x − b‖; derivatives are among matrices of the same rank."""
    a, b = promoted(a, b)
    _, residuals, rank, values = np.linalg.lstsq(a._data, b._data, rcond)
    cut = np.finfo(a.dtype).eps * builtins.max(a.shape) if rcond is None else rcond
    x = matmul(pinv(a, rtol=cut), b)
    left = e.subtract(b, matmul(a, x))
    sums = sum(e.square(e.abs(left)), axis=0, keepdims=b.ndim == 1) if residuals.size else Array(residuals)
    return LstsqResult(x, sums, int(rank), svdvals(a) if tracked(a) else Array(values))


def tensorinv(x: Any, /, ind: int = 2) -> Array:
    """The inverse of a tensor as a map from its last axes to its first `ind`."""
    x = as_array(x)
    count = math.prod(x.shape[:ind])
    return reshape(inv(reshape(x, (count, -1))), (*x.shape[ind:], *x.shape[:ind]))


def tensorsolve(a: Any, b: Any, /, axes: Any = None) -> Array:
    """The solution X of tensordot(a, X, X.ndim) = b; the axes `axes` of `a` are moved to the end first."""
    a, b = as_array(a), as_array(b)
    if axes is not None:
        a = moveaxis(a, tuple(axes), tuple(range(a.ndim - len(axes), a.ndim)))
    return reshape(solve(reshape(a, (b.size, -1)), reshape(b, (-1,))), a.shape[b.ndim :])


matrix_rank = discrete("matrix_rank", lambda x, /, *, rtol=None: np.linalg.matrix_rank(x, rtol=rtol))
__getattr__ = module_fallback(np.linalg, "numpy.linalg")
