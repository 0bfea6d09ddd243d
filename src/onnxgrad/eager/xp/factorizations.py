"""Factorizations of matrices: Cholesky, QR, eigenvalues of symmetric matrices, singular values, the pseudoinverse.

Values are numpy's. VJPs are functions of arrays, so they can be differentiated again, and forward mode follows:

- Cholesky: Giles 2008, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation".
- Symmetric eigenproblems: Magnus 1985, "On differentiating eigenvalues and eigenvectors".
- Singular values: Townsend 2016, "Differentiating the singular value decomposition".
- QR: Walter and Lehmann 2012, "Algorithmic linear algebra for tensors", and Seeger et al. 2017, "Auto-differentiating
  linear algebra"; of wide matrices Roberts and Roberts 2020, "QR and LQ decomposition matrix backpropagation".
- Pseudoinverse: Golub and Pereyra 1973, "The differentiation of pseudo-inverses".

As in PyTorch, eigenvectors and singular vectors of repeated eigenvalues or singular values have no derivative: the
result is inf or nan. The values themselves have one; a repeated value has that of the vectors found.
The signs of vectors are numpy's. `cholesky`, `eigh` and `eigvalsh` are functions of the symmetric part
of their operand, (X + Xᵀ)/2, as in JAX (numpy reads the lower half): so their gradient is symmetric, as in PyTorch, and
is what differences in any direction say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, plain, tracked, wrapped
from onnxgrad.eager.core.custom_derivatives import custom_vjp
from onnxgrad.eager.core.primitives import Primitive
from onnxgrad.eager.core.tape import Node
from onnxgrad.eager.xp.indexing import getitem
from onnxgrad.eager.xp.inverses import inv, solve
from onnxgrad.eager.xp.manipulation import concat, expand_dims, matrix_transpose, tril
from onnxgrad.eager.xp.products import matmul
from onnxgrad.errors import BadInput, NotDifferentiable


class EighResult(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors as columns."""

    eigenvalues: Any
    eigenvectors: Any


class QRResult(NamedTuple):
    """A matrix of orthonormal columns, and a triangular one."""

    Q: Any
    R: Any


class SVDResult(NamedTuple):
    """Left singular vectors as columns, singular values in descending order, right singular vectors as rows."""

    U: Any
    S: Any
    Vh: Any


def _given(g: Any) -> bool:
    """Whether a cotangent is not identically zero; otherwise terms that might be 0/0 are left out."""
    return g._node is not None or bool(np.any(g._data))


def _unit(n: int, dtype: Any) -> np.ndarray:
    return np.eye(n, dtype=dtype)


def _columns(w: Any) -> Array:
    """`w` as factors for the columns of a matrix."""
    return expand_dims(w, axis=-2)


def _inverse_gaps(gaps: Any) -> Any:
    """1/gaps off the diagonal, where the gaps are 0, and 0 on it."""
    unit = _unit(gaps.shape[-1], gaps.dtype)
    return (1 - unit) / (gaps + unit)


def _symmetric(x: Any) -> np.ndarray:
    """The symmetric (Hermitian) part of a matrix; exact to the last digit for a symmetric matrix."""
    data = as_array(x)._data
    return data * 0.5 + np.conj(np.swapaxes(data, -1, -2)) * 0.5 if data.dtype.kind in "fc" else data


# --- Cholesky --------------------------------------------------------------------------------------


@custom_vjp
def _cholesky(x: Any, /) -> Array:
    return wrapped(np.linalg.cholesky(_symmetric(x)))


@_cholesky.defvjp
def _cholesky_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X = L·Lᵀ: with P = Φ(Lᵀ·G), where Φ takes the lower half and half the diagonal: sym(L⁻ᵀ·P·L⁻¹)."""
    low = _cholesky(arguments[0])
    product = tril(matmul(matrix_transpose(low), g))
    product = product - product * (0.5 * _unit(low.shape[-1], low.dtype))
    back = inv(low)
    s = matmul(matmul(matrix_transpose(back), product), back)
    return (s + matrix_transpose(s)) * 0.5


def cholesky(x: Any, /, *, upper: bool = False) -> Array:
    """The triangular factor of a positive definite matrix: L with L·Lᵀ = (X + Xᵀ)/2, or its transpose."""
    x = as_array(x)
    return matrix_transpose(_cholesky(x)) if upper else _cholesky(x)


# --- symmetric eigenproblems -----------------------------------------------------------------------


@custom_vjp
def _eigh(x: Any, /) -> Any:
    return EighResult(*wrapped(tuple(np.linalg.eigh(_symmetric(x)))))


@_eigh.defvjp
def _eigh_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X = V·diag(w)·Vᵀ: V·(diag(gw) + F∘(Vᵀ·gV))·Vᵀ, symmetrized, with Fᵢⱼ = 1/(wⱼ−wᵢ), of distinct eigenvalues."""
    w, v = _eigh(arguments[0])
    s = matmul(v * _columns(g.eigenvalues), matrix_transpose(v))
    if _given(g.eigenvectors):
        inner = matmul(matrix_transpose(v), g.eigenvectors) * _inverse_gaps(_columns(w) - expand_dims(w, axis=-1))
        s = s + matmul(matmul(v, inner), matrix_transpose(v))
    return (s + matrix_transpose(s)) * 0.5


def eigh(x: Any, /) -> EighResult:
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix, (X + Xᵀ)/2."""
    return _eigh(as_array(x))


@custom_vjp
def _eigvalsh(x: Any, /) -> Array:
    return wrapped(np.linalg.eigvalsh(_symmetric(x)))


@_eigvalsh.defvjp
def _eigvalsh_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X = V·diag(w)·Vᵀ: V·diag(g)·Vᵀ."""
    v = _eigh(arguments[0]).eigenvectors
    return matmul(v * _columns(g), matrix_transpose(v))


def eigvalsh(x: Any, /) -> Array:
    """Eigenvalues of a symmetric matrix, (X + Xᵀ)/2, ascending."""
    return _eigvalsh(as_array(x))


# --- singular values -------------------------------------------------------------------------------


@custom_vjp
def _svd(x: Any, /) -> Any:
    return SVDResult(*wrapped(tuple(np.linalg.svd(as_array(x)._data, full_matrices=False))))


@_svd.defvjp
def _svd_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X = U·S·Vᵀ, Fᵢⱼ = 1/(sⱼ²−sᵢ²): with the skew parts J = F∘(UᵀgU − gUᵀU) and K = F∘(VᵀgV − gVᵀV),
    U·(J·S + diag(gS) + S·K)·Vᵀ + (I−UUᵀ)·gU·S⁻¹·Vᵀ + U·S⁻¹·gVᵀ·(I−VVᵀ), of distinct singular values > 0."""
    u, s, vh = _svd(arguments[0])
    v = matrix_transpose(vh)
    x = matmul(u * _columns(g.S), vh)
    rows, columns, count = u.shape[-2], v.shape[-2], s.shape[-1]
    low, high = expand_dims(s, axis=-1), _columns(s)
    for vectors, cotangent, left in ((u, g.U, True), (v, matrix_transpose(g.Vh), False)):
        if not _given(cotangent):
            continue
        p = matmul(matrix_transpose(vectors), cotangent)
        skew = (p - matrix_transpose(p)) * _inverse_gaps((high - low) * (high + low))
        x = x + matmul(matmul(u, skew * high if left else low * skew), vh)
        if (rows if left else columns) > count:  # the vectors may move out of the space they span
            rest = (cotangent - matmul(vectors, p)) / high
            x = x + (matmul(rest, vh) if left else matmul(u, matrix_transpose(rest)))
    return x


def svd(x: Any, /, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    """Singular vectors and values: X = U·diag(S)·Vh.

    Args:
        x: a matrix, or a stack of them, of shape (…, M, N); K is the smaller of M and N.
        full_matrices: whether U is (…, M, M) and Vh (…, N, N), and not (…, M, K) and (…, K, N). Vectors beyond the K-th
            are not determined by the matrix, so the larger of the two then has no derivative; the other and S have.
        compute_uv: as in numpy; if not, `svdvals`.

    Returns:
        U, S and Vh.
    """
    x = as_array(x)
    if not compute_uv:
        return svdvals(x)
    if not tracked(x):
        return SVDResult(*wrapped(tuple(np.linalg.svd(x._data, full_matrices))))
    u, s, vh = _svd(x)
    if full_matrices and x.shape[-2] != x.shape[-1]:
        whole = np.linalg.svd(x._data)
        hint = "svd(x, full_matrices=False)"
        if x.shape[-2] > x.shape[-1]:
            u = _refused(x, whole[0], "the matrix U of svd with full_matrices", hint)
        else:
            vh = _refused(x, whole[2], "the matrix Vh of svd with full_matrices", hint)
    return SVDResult(u, s, vh)


class _Refused(Primitive):
    """A result that no derivative can pass through."""

    __slots__ = ()

    def write(self, b: Any, operands: Any) -> Any:
        what, instead = self.key
        raise NotDifferentiable(f"{what} has no derivative\n  hint: use {instead}")


def _refused(x: Array, value: np.ndarray, what: str, instead: str) -> Array:
    return Array(value, Node(_Refused(what, instead), (x._node,), value))


@custom_vjp
def _svdvals(x: Any, /) -> Array:
    return wrapped(np.linalg.svdvals(as_array(x)._data))


@_svdvals.defvjp
def _svdvals_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X = U·diag(s)·Vᵀ: U·diag(g)·Vᵀ."""
    u, _, vh = _svd(arguments[0])
    return matmul(u * _columns(g), vh)


def svdvals(x: Any, /) -> Array:
    """Singular values, descending."""
    return _svdvals(as_array(x))


# --- QR --------------------------------------------------------------------------------------------


@custom_vjp
def _qr(x: Any, /) -> Any:
    return QRResult(*wrapped(tuple(np.linalg.qr(as_array(x)._data))))


@_qr.defvjp
def _qr_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X = Q·R of full column rank: with M = R·gRᵀ − gQᵀ·Q, and its lower half L mirrored to a symmetric matrix,
    (gQ + Q·(L + Lᵀ − diag))·R⁻ᵀ. Of a wide X = [A B], R = [P Q⁻¹B]: gB = Q·g(Q⁻¹B), and A has gQ + B·g(Q⁻¹B)ᵀ."""
    (x,) = arguments
    q, r = _qr(x)
    gq, gr = g.Q, g.R
    count = q.shape[-1]
    wide = x.shape[-1] > count
    if wide:
        beyond = getitem(gr, (Ellipsis, slice(count, None)))
        gq = gq + matmul(getitem(x, (Ellipsis, slice(count, None))), matrix_transpose(beyond))
        r, gr = getitem(r, (Ellipsis, slice(count))), getitem(gr, (Ellipsis, slice(count)))
    m = tril(matmul(r, matrix_transpose(gr)) - matmul(matrix_transpose(gq), q))
    m = m + matrix_transpose(m) - m * _unit(count, m.dtype)
    at_x = matrix_transpose(solve(r, matrix_transpose(gq + matmul(q, m))))
    return concat([at_x, matmul(q, beyond)], axis=-1) if wide else at_x


_numpys_qr: Any = np.linalg.qr  # whose types say that the mode is a constant


def qr(x: Any, /, mode: str = "reduced") -> Any:
    """X = Q·R, of orthonormal columns and a triangular matrix.

    Args:
        x: a matrix, or a stack of them, of shape (…, M, N); K is the smaller of M and N. The derivative requires
            the first K columns to be independent; otherwise it is inf or nan, or the solver raises.
        mode: "reduced" (shapes (…, M, K) and (…, K, N)), "complete" ((…, M, M) and (…, M, N); no derivative if M > N),
            or "r" for R alone.

    Returns:
        Q and R.
    """
    x = as_array(x)
    if mode not in ("reduced", "complete", "r"):
        raise BadInput(f"mode is 'reduced', 'complete' or 'r', not {mode!r}")
    if mode == "r":
        return qr(x).R
    if not tracked(x):
        return QRResult(*wrapped(tuple(_numpys_qr(x._data, mode))))
    if mode == "complete" and x.shape[-2] > x.shape[-1]:
        what = "the complete QR factorization of a matrix of more rows than columns"
        return QRResult(*(_refused(x, y, what, "qr(x)") for y in _numpys_qr(x._data, mode)))
    return _qr(x)


# --- the pseudoinverse -----------------------------------------------------------------------------


def pinv(x: Any, /, *, rtol: Any = None) -> Array:
    """The pseudoinverse, which treats singular values ≤ `rtol` times the largest as zero.

    The derivative is along matrices of the same rank.
    """
    return _pinv(x, rtol) if rtol is None else _pinv(x, plain(rtol))


def _pinv(x: Any, rtol: Any) -> Array:
    derived: Callable[..., Any] = custom_vjp(lambda x: wrapped(np.linalg.pinv(as_array(x)._data, rtol=rtol)))

    def backward(arguments: Any, y: Any, g: Any) -> Any:
        """P = X⁺: −Pᵀ·G·Pᵀ + (I−X·P)·Gᵀ·P·Pᵀ + Pᵀ·P·Gᵀ·(I−P·X)."""
        (x,) = arguments
        p, gt = _pinv(x, rtol), matrix_transpose(g)
        pt = matrix_transpose(p)
        left, right = matmul(gt, matmul(p, pt)), matmul(matmul(pt, p), gt)
        beside = left - matmul(x, matmul(p, left)) + right - matmul(matmul(right, p), x)
        return beside - matmul(matmul(pt, g), pt)

    derived.__name__ = "pinv"
    derived.defvjp(backward)  # type: ignore[attr-defined]
    return derived(x)
