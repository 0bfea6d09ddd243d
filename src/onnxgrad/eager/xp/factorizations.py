"""Factorizations of matrices: Cholesky, QR, eigenvalues, singular values, the pseudoinverse.

Values are numpy's. VJPs are functions of arrays, so they can be differentiated again, and forward mode follows:

- Cholesky: Giles 2008, "Collected matrix derivative results for forward and reverse mode algorithmic differentiation".
- Symmetric eigenproblems: Magnus 1985, "On differentiating eigenvalues and eigenvectors"; others: Boeddeker et al.
  2017, "On the computation of complex-valued gradients with application to statistically optimum beamforming".
- Singular values: Townsend 2016, "Differentiating the singular value decomposition".
- QR: Walter and Lehmann 2012, "Algorithmic linear algebra for tensors", and Seeger et al. 2017, "Auto-differentiating
  linear algebra"; of wide matrices Roberts and Roberts 2020, "QR and LQ decomposition matrix backpropagation".
- Pseudoinverse: Golub and Pereyra 1973, "The differentiation of pseudo-inverses".

Formulas of complex matrices are of gradients ∂/∂x + i·∂/∂y, the conjugates of cotangents. Complex vectors are unique up
to factors of modulus 1, so a function of them must not depend on these factors.

As in PyTorch, eigenvectors and singular vectors of repeated eigenvalues or singular values have no derivative: the
result is inf or nan. The values themselves have one; a repeated value has that of the vectors found.
The signs of vectors are numpy's. `cholesky`, `eigh` and `eigvalsh` are functions of the symmetric part
of their operand, (X + Xᴴ)/2, as in JAX (numpy reads the lower half): so their gradient is symmetric, as in PyTorch, and
is what differences in any direction say.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, plain, tracked, wrapped
from onnxgrad.eager.core.custom_derivatives import custom_vjp, opaque_call
from onnxgrad.eager.core.primitives import Primitive
from onnxgrad.eager.core.tape import Node
from onnxgrad.eager.xp.elementwise import conj, imag, real
from onnxgrad.eager.xp.indexing import getitem
from onnxgrad.eager.xp.inverses import inv, solve
from onnxgrad.eager.xp.manipulation import concat, expand_dims, matrix_transpose, tril, triu
from onnxgrad.eager.xp.products import matmul
from onnxgrad.errors import BadInput, NotDifferentiable


class EighResult(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors as columns."""

    eigenvalues: Any
    eigenvectors: Any


class EigResult(NamedTuple):
    """Eigenvalues, and eigenvectors as columns."""

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


def _is_nonzero(g: Any) -> bool:
    """True unless a cotangent is identically zero; a zero cotangent skips terms that might be 0/0."""
    return g._node is not None or bool(np.any(g._data))


def _columns(w: Any) -> Array:
    """`w` as factors for the columns of a matrix."""
    return expand_dims(w, axis=-2)


def _inverse_gaps(gaps: Any) -> Any:
    """1/gaps off the diagonal, where the gaps are 0, and 0 on it."""
    unit = np.eye(gaps.shape[-1], dtype=gaps.dtype)
    return (1 - unit) / (gaps + unit)


def _symmetric(x: Any) -> np.ndarray:
    """The symmetric (Hermitian) part of a matrix; exact to the last digit for a symmetric matrix."""
    data = as_array(x)._data
    return data * 0.5 + np.conj(np.swapaxes(data, -1, -2)) * 0.5 if data.dtype.kind in "fc" else data


def _adjoint(x: Any) -> Array:
    """The conjugate transpose."""
    return conj(matrix_transpose(x))


# --- Cholesky --------------------------------------------------------------------------------------


@custom_vjp
def _cholesky(x: Any, /) -> Array:
    return wrapped(np.linalg.cholesky(_symmetric(x)))


@_cholesky.defvjp
def _cholesky_vjp(arguments: Any, low: Any, g: Any) -> Any:
    """X = L·Lᴴ: with P = Φ(Lᴴ·G), where Φ takes the lower half and half the diagonal: sym(L⁻ᴴ·P·L⁻¹)."""
    product = tril(matmul(_adjoint(low), conj(g)))
    product = product - product * (0.5 * np.eye(low.shape[-1], dtype=low.dtype))
    back = inv(low)
    s = matmul(matmul(_adjoint(back), product), back)
    return conj((s + _adjoint(s)) * 0.5)


def cholesky(x: Any, /, *, upper: bool = False) -> Array:
    """The triangular factor of a positive definite matrix: L with L·Lᴴ = (X + Xᴴ)/2, or its adjoint."""
    x = as_array(x)
    return _adjoint(_cholesky(x)) if upper else _cholesky(x)


# --- symmetric eigenproblems -----------------------------------------------------------------------


@custom_vjp
def _eigh(x: Any, /) -> Any:
    return EighResult(*wrapped(tuple(np.linalg.eigh(_symmetric(x)))))


@_eigh.defvjp
def _eigh_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X = V·diag(w)·Vᴴ: V·(diag(gw) + F∘(Vᴴ·gV))·Vᴴ, symmetrized, with Fᵢⱼ = 1/(wⱼ−wᵢ), of distinct eigenvalues."""
    w, v = y
    s = matmul(v * _columns(g.eigenvalues), _adjoint(v))
    if _is_nonzero(g.eigenvectors):
        inner = matmul(_adjoint(v), conj(g.eigenvectors)) * _inverse_gaps(_columns(w) - expand_dims(w, axis=-1))
        s = s + matmul(matmul(v, inner), _adjoint(v))
    return conj((s + _adjoint(s)) * 0.5)


def _half(x: Any, uplo: str | None) -> Array:
    """The symmetric matrix given by the lower ("L") or upper half of `x`; without `uplo`, `x`."""
    x = as_array(x)
    if uplo is None:
        return x
    if uplo.upper() not in ("L", "U"):
        raise BadInput(f"UPLO is 'L' or 'U', not {uplo!r}")
    low, over = tril(x) if uplo.upper() == "L" else _adjoint(triu(x)), np.eye(x.shape[-1], dtype=x.dtype)
    return low + _adjoint(low) - (real(low) if x.dtype.kind == "c" else low) * over


def eigh(x: Any, /, UPLO: str | None = None) -> EighResult:  # noqa: N803  (numpy's name)
    """Eigenvalues (ascending) and eigenvectors (columns) of a symmetric matrix: (X + Xᴴ)/2, or one half if `UPLO`."""
    return _eigh(_half(x, UPLO))


@custom_vjp
def _eigvalsh(x: Any, /) -> Array:
    return wrapped(np.linalg.eigvalsh(_symmetric(x)))


@_eigvalsh.defvjp
def _eigvalsh_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X = V·diag(w)·Vᴴ: V·diag(g)·Vᴴ."""
    v = _eigh(arguments[0]).eigenvectors
    return conj(matmul(v * _columns(g), _adjoint(v)))


def eigvalsh(x: Any, /, UPLO: str | None = None) -> Array:  # noqa: N803  (numpy's name)
    """Eigenvalues of a symmetric matrix, ascending: of (X + Xᴴ)/2, or of one half if `UPLO`."""
    return _eigvalsh(_half(x, UPLO))


# --- other eigenproblems ---------------------------------------------------------------------------


def _complex(x: np.ndarray) -> np.ndarray:
    return x.astype(np.result_type(x, np.complex64))


@custom_vjp
def _eig(x: Any, /) -> Any:
    return EigResult(*wrapped(tuple(map(_complex, np.linalg.eig(as_array(x)._data)))))


@_eig.defvjp
def _eig_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X·V = V·diag(w) with columns of length 1: with P = Vᴴ·gV and Fᵢⱼ = 1/(wⱼ−wᵢ),
    V⁻ᴴ·(diag(gw) + conj(F)∘(P − VᴴV·diag(Re P)))·Vᴴ, of distinct eigenvalues."""
    w, v = y
    back = _adjoint(v)
    inner = np.eye(v.shape[-1], dtype=v.dtype) * _columns(conj(g.eigenvalues))
    if _is_nonzero(g.eigenvectors):
        p = matmul(back, conj(g.eigenvectors))
        along = matmul(matmul(back, v), real(p) * np.eye(v.shape[-1], dtype=v.dtype))
        inner = inner + (p - along) * conj(_inverse_gaps(_columns(w) - expand_dims(w, axis=-1)))
    return conj(matmul(inv(back), matmul(inner, back)))


def eig(x: Any, /) -> EigResult:
    """Eigenvalues and eigenvectors (columns of length 1) of a square matrix, as complex numbers."""
    return _eig(as_array(x))


def eigvals(x: Any, /) -> Array:
    """Eigenvalues of a square matrix, as complex numbers."""
    x = as_array(x)
    return _eig(x).eigenvalues if tracked(x) else wrapped(_complex(np.linalg.eigvals(x._data)))


# --- singular values -------------------------------------------------------------------------------


@custom_vjp
def _svd(x: Any, /) -> Any:
    return SVDResult(*wrapped(tuple(np.linalg.svd(as_array(x)._data, full_matrices=False))))


@_svd.defvjp
def _svd_vjp(arguments: Any, y: Any, g: Any) -> Any:
    """X = U·S·Vᴴ, Fᵢⱼ = 1/(sⱼ²−sᵢ²): with the skew parts J = F∘(UᴴgU − gUᴴU) and K = F∘(VᴴgV − gVᴴV),
    U·(J·S + diag(gS) + S·K)·Vᴴ + (I−UUᴴ)·gU·S⁻¹·Vᴴ + U·S⁻¹·gVᴴ·(I−VVᴴ), of distinct singular values > 0.
    Complex vectors add i·Im diag(UᴴgU)/S to the diagonal."""
    u, s, vh = y
    v = _adjoint(vh)
    x = matmul(u * _columns(g.S), vh)
    rows, columns, count = u.shape[-2], v.shape[-2], s.shape[-1]
    low, high = expand_dims(s, axis=-1), _columns(s)
    # a cotangent of Vᴴ is one of V, transposed: its gradient is the adjoint of that of Vᴴ, which is its conjugate
    for vectors, cotangent, left in ((u, conj(g.U), True), (v, matrix_transpose(g.Vh), False)):
        if not _is_nonzero(cotangent):
            continue
        p = matmul(_adjoint(vectors), cotangent)
        skew = (p - _adjoint(p)) * _inverse_gaps((high - low) * (high + low))
        x = x + matmul(matmul(u, skew * high if left else low * skew), vh)
        if left and p.dtype.kind == "c":
            turns = imag(p) * np.eye(count, dtype=s.dtype) / high
            x = x + matmul(matmul(u, turns * 1j), vh)
        if (rows if left else columns) > count:  # the vectors may move out of the space they span
            rest = (cotangent - matmul(vectors, p)) / high
            x = x + (matmul(rest, vh) if left else matmul(u, _adjoint(rest)))
    return conj(x)


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
    """X = U·diag(s)·Vᴴ: U·diag(g)·Vᴴ."""
    u, _, vh = _svd(arguments[0])
    return conj(matmul(u * _columns(g), vh))


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
    (x,), (q, r) = arguments, y
    if x.dtype.kind == "c":
        raise NotDifferentiable("qr of complex numbers has no derivative\n  hint: real and imaginary part; or cholesky")
    gq, gr = g.Q, g.R
    count = q.shape[-1]
    wide = x.shape[-1] > count
    if wide:
        beyond = getitem(gr, (Ellipsis, slice(count, None)))
        gq = gq + matmul(getitem(x, (Ellipsis, slice(count, None))), matrix_transpose(beyond))
        r, gr = getitem(r, (Ellipsis, slice(count))), getitem(gr, (Ellipsis, slice(count)))
    m = tril(matmul(r, matrix_transpose(gr)) - matmul(matrix_transpose(gq), q))
    m = m + matrix_transpose(m) - m * np.eye(count, dtype=m.dtype)
    at_x = matrix_transpose(solve(r, matrix_transpose(gq + matmul(q, m))))
    return concat([at_x, matmul(q, beyond)], axis=-1) if wide else at_x


_numpys_qr: Any = np.linalg.qr  # whose type annotations require a constant mode


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
    cut = plain(rtol)

    def backward(arguments: Any, y: Any, g: Any) -> Any:
        """P = X⁺: −Pᴴ·G·Pᴴ + (I−X·P)·Gᴴ·P·Pᴴ + Pᴴ·P·Gᴴ·(I−P·X)."""
        (x,) = arguments
        p, gt = y, matrix_transpose(g)
        pt = _adjoint(p)
        left, right = matmul(gt, matmul(p, pt)), matmul(matmul(pt, p), gt)
        beside = left - matmul(x, matmul(p, left)) + right - matmul(matmul(right, p), x)
        return conj(beside - matmul(matmul(pt, conj(g)), pt))

    def run(x: Array) -> Array:
        return wrapped(np.linalg.pinv(x._data, rtol=cut))

    run.__name__ = "pinv"
    return opaque_call(run, (as_array(x),), backward)
