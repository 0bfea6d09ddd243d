"""Linear algebra with SciPy's names and arguments: numpy's functions, matrix functions and matrix equations.

VJPs are given as functions of arrays, by plain transposes; they hold for complex matrices too, of which all functions
here are holomorphic.
"""

from __future__ import annotations

from typing import Any

import numpy
import scipy.linalg as _scipy

from onnxgrad.eager import numpy as np
from onnxgrad.eager.core.array import Array, as_array, wrapped
from onnxgrad.eager.core.custom_derivatives import opaque_call
from onnxgrad.eager.numpy import linalg as _linalg
from onnxgrad.eager.xp.dtypes import promoted
from onnxgrad.eager.xp.ufuncs import module_fallback
from onnxgrad.errors import BadInput

det, inv, norm, pinv, solve, svdvals = (getattr(_linalg, n) for n in ("det", "inv", "norm", "pinv", "solve", "svdvals"))


def cholesky(a: Any, lower: bool = False) -> Array:
    """The triangular factor of a positive definite matrix: upper by default, as in SciPy."""
    return _linalg.cholesky(a, upper=not lower)


def eigh(a: Any) -> Any:
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix."""
    return _linalg.eigh(a)


def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    """Singular vectors and values."""
    return _linalg.svd(a, full_matrices, compute_uv)


def expm(a: Any) -> Array:
    """The exponential of a matrix. The cotangent of A is a block of exp [[Aᵀ, G], [0, Aᵀ]] (Van Loan 1978)."""

    def backward(arguments: Any, y: Any, g: Any) -> Any:
        t = np.matrix_transpose(arguments[0])
        n = t.shape[-1]
        block = np.concat([np.concat([t, g], axis=-1), np.concat([np.zeros_like(t), t], axis=-1)], axis=-2)
        return (expm(block)[..., :n, n:],)

    return opaque_call(lambda a: wrapped(_scipy.expm(as_array(a)._data)), (a,), backward)


def sqrtm(a: Any) -> Array:
    """The principal square root S of a matrix: the cotangent Z of A solves Sᵀ·Z + Z·Sᵀ = G."""

    def backward(arguments: Any, y: Any, g: Any) -> Any:
        t = np.matrix_transpose(y)
        return (solve_sylvester(t, t, g),)

    return opaque_call(lambda a: wrapped(_scipy.sqrtm(as_array(a)._data)), (a,), backward)


def solve_sylvester(a: Any, b: Any, q: Any) -> Array:
    """The solution X of A·X + X·B = Q. With Z of Aᵀ·Z + Z·Bᵀ = G: Q has Z, A has −Z·Xᵀ, B has −Xᵀ·Z."""

    def backward(arguments: Any, x: Any, g: Any) -> Any:
        a, b, _ = arguments
        z = solve_sylvester(a.T, b.T, g)
        return -(z @ x.T), -(x.T @ z), z

    def run(a: Any, b: Any, q: Any) -> Array:
        return wrapped(_scipy.solve_sylvester(a._data, b._data, q._data))

    return opaque_call(run, tuple(map(as_array, (a, b, q))), backward)


def solve_triangular(a: Any, b: Any, trans: Any = 0, lower: bool = False, unit_diagonal: bool = False) -> Array:
    """The solution X of A·X = B with a triangular matrix A; only one half of A is read.

    Args:
        a: a square matrix.
        b: a vector, or a matrix.
        trans: 0 or "N" for A, 1 or "T" for Aᵀ, 2 or "C" for its conjugate.
        lower: whether the lower half is read, and not the upper.
        unit_diagonal: whether the diagonal is taken as ones.
    """
    a, b = promoted(a, b)
    if trans in (2, "C"):
        a = np.conj(a)
    if trans in (1, "T", 2, "C"):
        a, lower = a.T, not lower
    if b.ndim == 1:
        return solve_triangular(a, b[:, None], 0, lower, unit_diagonal)[:, 0]

    def run(a: Any, b: Any) -> Array:
        return wrapped(_scipy.solve_triangular(a._data, b._data, lower=lower, unit_diagonal=unit_diagonal))

    def backward(arguments: Any, x: Any, g: Any) -> Any:
        at_b = solve_triangular(arguments[0], g, 1, lower, unit_diagonal)
        off = 1 if unit_diagonal else 0
        at_a = -(at_b @ x.T)
        return np.tril(at_a, -off) if lower else np.triu(at_a, off), at_b

    return opaque_call(run, (a, b), backward)


def solve_banded(l_and_u: tuple[int, int], ab: Any, b: Any) -> Array:
    """The solution X of A·X = B with a banded matrix A.

    Args:
        l_and_u: the numbers of diagonals below and above the main one.
        ab: the diagonals, of shape (l + u + 1, n): element (i, j) of A is in row u + i − j of column j.
        b: a vector, or a matrix.
    """
    below, above = l_and_u
    ab, b = promoted(ab, b)
    if b.ndim == 1:
        return solve_banded(l_and_u, ab, b[:, None])[:, 0]
    count = ab.shape[1]
    rows = numpy.arange(below + above + 1)[:, None] - above + numpy.arange(count)  # i, for a place of the diagonals
    inside = (rows >= 0) & (rows < count)
    rows = numpy.clip(rows, 0, count - 1)

    def run(ab: Any, b: Any) -> Array:
        return wrapped(_scipy.solve_banded((below, above), ab._data, b._data))

    def transposed(ab: Any) -> Array:
        """The diagonals of Aᵀ: its element (i, j) is (j, i) of A."""
        there = numpy.arange(below + above + 1)[:, None] - below + numpy.arange(count)
        held = (there >= 0) & (there < count)
        there = numpy.clip(there, 0, count - 1)
        return np.where(held, ab[above + numpy.arange(count) - there, there], 0.0)

    def backward(arguments: Any, x: Any, g: Any) -> Any:
        at_b = solve_banded((above, below), transposed(arguments[0]), g)
        return np.where(inside, -np.sum(at_b[rows] * x, axis=-1), 0.0), at_b

    return opaque_call(run, (ab, b), backward)


def cho_factor(a: Any, lower: bool = False) -> tuple[Array, bool]:
    """The Cholesky factor of a matrix for `cho_solve`, and True if it is the lower one."""
    return cholesky(a, lower), lower


def cho_solve(c_and_lower: tuple[Any, bool], b: Any) -> Array:
    """The solution X of A·X = B, given the Cholesky factor of A."""
    c, lower = c_and_lower
    return solve_triangular(c, solve_triangular(c, b, 0 if lower else 1, lower), 1 if lower else 0, lower)


def toeplitz(c: Any, r: Any = None) -> Array:
    """The matrix with equal elements along each diagonal, of the first column `c` and the first row `r` (conj(c))."""
    column = np.ravel(c)
    row = np.conj(column) if r is None else np.ravel(r)
    column, row = promoted(column, row)
    m, n = column.shape[0], row.shape[0]
    places = numpy.arange(m)[:, None] - numpy.arange(n) + (n - 1)
    return np.concat([np.flip(row[1:]), column])[places]


def lu(a: Any, permute_l: bool = False) -> Any:
    """P, L and U of A = P·L·U for a square matrix; with `permute_l`, P·L and U.

    P is constant. With M = Lᵀ·Ḡ_L below the diagonal and Ḡ_U·Uᵀ on and above it, A has P·L⁻ᵀ·M·U⁻ᵀ.
    """
    a = as_array(a)
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise BadInput(f"lu takes a square matrix here, not one of shape {a.shape}")
    p = _scipy.lu(a._data)[0]

    def run(a: Any) -> Any:
        return tuple(map(wrapped, _scipy.lu(p.T @ a._data, p_indices=False)[1:]))

    def backward(arguments: Any, y: Any, g: Any) -> Any:
        lower, upper = (np.matrix_transpose(z) for z in y)
        middle = np.tril(lower @ g[0], -1) + np.triu(g[1] @ upper)
        left = solve_triangular(y[0], middle, 1, lower=True, unit_diagonal=True)
        return (p @ solve_triangular(y[1], left.T).T,)

    factor, upper = opaque_call(run, (a,), backward)
    return (p @ factor, upper) if permute_l else (wrapped(p), factor, upper)


def lu_factor(a: Any) -> tuple[Array, Array]:
    """L below the diagonal and U on and above it, in one matrix, and the rows that were exchanged; see `lu`."""
    _, factor, upper = lu(a)
    return np.tril(factor, -1) + upper, wrapped(_scipy.lu_factor(as_array(a)._data)[1])


def block_diag(*arrays: Any) -> Array:
    """The matrices on the diagonal of one, with zeros elsewhere; a vector is a row."""
    parts = [np.atleast_2d(x) for x in arrays]
    width, at, rows = sum(x.shape[1] for x in parts), 0, []
    for x in parts:
        rows.append(np.pad(x, ((0, 0), (at, width - at - x.shape[1]))))
        at += x.shape[1]
    return np.concat(rows, axis=0)


__getattr__ = module_fallback(_scipy, "scipy.linalg")
