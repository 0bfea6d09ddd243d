"""Factorizations: against differences of both orders in every shape, PyTorch, JAX and autograd; degenerate matrices."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as onp
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad import BadInput, NotDifferentiable
from onnxgrad.eager import check_grads

rng = onp.random.default_rng(0)
SHAPES = ((3, 3), (5, 3), (3, 5), (2, 4, 3), (2, 3, 4), (1, 1), (4, 1), (1, 3))
L = np.linalg


def svd(x):
    return L.svd(x, full_matrices=False)


FUNCTIONS = {
    "U": lambda x: np.abs(svd(x).U),
    "Vh": lambda x: np.abs(svd(x).Vh),
    "a function of the matrix": lambda x: svd(x).U @ (np.tanh(svd(x).S)[..., None] * svd(x).Vh),
    "S of the full": lambda x: L.svd(x).S ** 2,
    "svdvals": lambda x: L.svdvals(x) ** 3,
    "qr": lambda x: tuple(L.qr(x)),
    "r": lambda x: L.qr(x, mode="r") ** 2,
    "complete qr": lambda x: L.qr(x[..., :1, :], mode="complete").R ** 2,
    "pinv": lambda x: L.pinv(x) ** 2,
    "pinv of less than full rank": lambda x: L.pinv(x[..., :1] * onp.arange(1.0, 4.0), rtol=1e-10),
    "norms": lambda x: L.matrix_norm(x, ord="nuc") + L.matrix_norm(x, ord=2) * L.matrix_norm(x, ord=-2),
    "eigenvalues": lambda x: L.eigvalsh(x @ x.mT) ** 2,
    "cholesky": lambda x: L.cholesky(x @ x.mT + onp.eye(x.shape[-2]), upper=True) ** 2,
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_central_differences_twice(name, shape):
    x = rng.standard_normal(shape)
    check_grads(FUNCTIONS[name], x, order=2 if x.size <= 15 else 1, rtol=1e-3, atol=1e-5)


def close(a, b, tolerance=1e-9):
    onp.testing.assert_allclose(onp.asarray(a), onp.asarray(b), rtol=tolerance, atol=tolerance)


def weighted(parts, xp=np):
    """A number that depends on every element, whatever the signs of vectors."""
    return sum(xp.sum(xp.abs(p) * onp.cos(onp.arange(p.size).reshape(p.shape))) for p in parts)


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_pytorch(shape):
    torch = pytest.importorskip("torch")
    x = rng.standard_normal(shape)

    def theirs(f):
        t = torch.tensor(x, requires_grad=True)
        parts = f(t)
        weights = [torch.tensor(onp.cos(onp.arange(p.numel()).reshape(p.shape))) for p in parts]
        sum((p.abs() * w).sum() for p, w in zip(parts, weights)).backward()
        return t.grad.numpy()

    close(og.grad(lambda x: weighted(svd(x)))(x), theirs(lambda t: torch.linalg.svd(t, full_matrices=False)))
    close(og.grad(lambda x: weighted(L.qr(x)))(x), theirs(torch.linalg.qr))
    close(og.grad(lambda x: weighted([L.pinv(x)]))(x), theirs(lambda t: [torch.linalg.pinv(t)]))
    for order in ("nuc", 2, -2):
        mine = og.grad(lambda x: weighted([L.matrix_norm(x, ord=order)]))(x)  # noqa: B023
        close(mine, theirs(lambda t: [torch.linalg.matrix_norm(t, ord=order)]))  # noqa: B023
    square = lambda x: x @ x.mT  # noqa: E731
    close(og.grad(lambda x: weighted(L.eigh(square(x))))(x[..., :3, :]) if shape[-1] >= shape[-2] else 0.0,
          theirs(lambda t: torch.linalg.eigh(square(t))) if shape[-1] >= shape[-2] else 0.0)  # fmt: skip


@pytest.mark.jax
def test_against_jax_in_both_modes():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    jax.config.update("jax_enable_x64", True)
    x, t = rng.standard_normal((4, 3)), rng.standard_normal((4, 3))
    pairs = [(svd, lambda x: jnp.linalg.svd(x, full_matrices=False)), (L.pinv, jnp.linalg.pinv), (L.qr, jnp.linalg.qr)]
    for mine, theirs in pairs:
        f = lambda x: weighted(mine(x) if isinstance(mine(x), tuple) else [mine(x)])  # noqa: B023, E731
        g = lambda x: weighted(theirs(x) if isinstance(theirs(x), tuple) else [theirs(x)], jnp)  # noqa: B023, E731
        close(og.grad(f)(x), jax.grad(g)(x))
        close(og.jvp(f, x, t)[1], jax.jvp(g, (x,), (t,))[1])


def test_symmetric_matrices_may_be_moved_in_any_direction():
    """The functions are those of the symmetric part, so differences along any direction agree with them."""
    x = rng.standard_normal((2, 3, 3))
    for at in (x @ x.swapaxes(-1, -2) + onp.eye(3), x + 9 * onp.eye(3)):
        for f in (
            L.cholesky,
            lambda x: L.cholesky(x, upper=True),
            L.eigvalsh,
            lambda x: [L.eigh(x).eigenvalues, np.abs(L.eigh(x).eigenvectors)],
        ):
            check_grads(f, at)
            close(og.elementwise_grad(lambda x: f(x)[-1] ** 2)(at)[..., 0, 1],  # noqa: B023
                  og.elementwise_grad(lambda x: f(x)[-1] ** 2)(at)[..., 1, 0])  # fmt: skip  # noqa: B023
        symmetric = (at + at.swapaxes(-1, -2)) / 2
        close(L.eigvalsh(at), onp.linalg.eigvalsh(symmetric))
        close(L.cholesky(at), onp.linalg.cholesky(symmetric))


def test_against_autograd():
    x = rng.standard_normal((4, 3))
    for mine, theirs in [
        (svd, lambda x: anp.linalg.svd(x, full_matrices=False)),
        (lambda x: [L.pinv(x)], lambda x: [anp.linalg.pinv(x)]),
        (lambda x: [L.svd(x, compute_uv=False)], lambda x: [anp.linalg.svd(x, full_matrices=False)[1]]),
    ]:
        g = lambda x: weighted(theirs(x), anp)  # noqa: B023, E731
        close(og.grad(lambda x: weighted(mine(x)))(x), autograd.grad(g)(x))  # noqa: B023


def test_repeated_values():
    """Like PyTorch: the values have a derivative, the vectors have inf or nan."""
    unit = onp.eye(3)
    close(og.grad(lambda x: np.sum(L.svdvals(x)))(unit), unit)
    close(og.grad(lambda x: L.matrix_norm(x, ord="nuc"))(onp.diag([2.0, 0.0, 0.0])), unit)
    close(og.grad(lambda x: np.sum(L.svd(x, full_matrices=False).S))(unit), unit)
    close(og.grad(lambda x: np.sum(L.eigvalsh(x)))(unit), unit)
    close(og.grad(lambda x: np.sum(L.eigh(x).eigenvalues ** 2))(unit), 2 * unit)
    weights = rng.standard_normal((3, 3))
    with onp.errstate(all="ignore"):
        for f in (lambda x: L.svd(x).U, lambda x: L.svd(x).Vh, lambda x: L.eigh(x).eigenvectors):
            assert not onp.isfinite(onp.asarray(og.grad(lambda x: np.sum(f(x) * weights))(unit))).all()  # noqa: B023


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 3), (2, 0, 3)], ids=str)
def test_matrices_without_elements(shape):
    for f in (L.svdvals, L.pinv, lambda x: svd(x).U, lambda x: L.qr(x).R, lambda x: L.matrix_norm(x, ord="fro")):
        assert og.grad(lambda x: np.sum(f(x)))(onp.zeros(shape)).shape == shape  # noqa: B023


def test_what_is_not_determined_is_refused():
    tall, wide = rng.standard_normal((4, 2)), rng.standard_normal((2, 4))
    close(og.grad(lambda x: np.sum(np.abs(L.svd(x).U)))(wide), og.grad(lambda x: np.sum(np.abs(svd(x).U)))(wide))
    for f, x in [
        (lambda x: L.svd(x).U[:, :2], tall),
        (lambda x: L.svd(x).Vh, wide),
        (lambda x: L.qr(x, mode="complete").Q, tall),
        (lambda x: L.qr(x, mode="complete").R, tall),
    ]:
        for derive in (lambda: og.grad(lambda x: np.sum(f(x)))(x), lambda: og.jvp(f, x, x)):  # noqa: B023
            with pytest.raises(NotDifferentiable, match=r"hint: use (svd|qr)\("):
                derive()
    with pytest.raises(BadInput, match="not 'raw'"):
        L.qr(tall, mode="raw")
    with pytest.raises(BadInput, match="svd cannot be recorded as ONNX"):
        og.export(lambda x: L.svd(x).S, tall)


def test_values_and_names_are_numpys():
    x = np.asarray(rng.standard_normal((4, 3)))
    for ours, numpys in [
        (onp.linalg.svd(x), onp.linalg.svd(onp.asarray(x))),
        (onp.linalg.qr(x, "complete"), onp.linalg.qr(onp.asarray(x), "complete")),
        ((onp.linalg.qr(x, mode="r"),), (onp.linalg.qr(onp.asarray(x), mode="r"),)),
        ((onp.linalg.pinv(x),), (onp.linalg.pinv(onp.asarray(x)),)),
    ]:
        for a, b in zip(ours, numpys):
            close(a, b, 0)
    assert L.svd(x)._fields == ("U", "S", "Vh")
    assert L.qr(x)._fields == ("Q", "R")
    x32 = onp.asarray(x).astype(onp.float32)
    assert og.grad(lambda x: weighted([*svd(x), *L.qr(x), L.pinv(x)]))(x32).dtype == onp.float32
