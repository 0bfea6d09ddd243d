"""Fourier transforms and complex numbers inside of a function: against differences, PyTorch, JAX, numpy's values."""

from __future__ import annotations

import numpy as onp
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad import BadInput, NotDifferentiable
from onnxgrad.eager import check_grads

rng = onp.random.default_rng(0)
X = rng.standard_normal((3, 4))
W = rng.standard_normal((3, 4)) + 1j * rng.standard_normal((3, 4))
F = np.fft


def assigned(x):
    z = F.fft(x) * 1.0
    z[0] = x[1]
    z[1, [0, 2]] = 0
    z = np.where(x > 0, z, 2j * z)
    return np.abs(z) + np.real(np.mean(z, axis=0) * np.conj(z) * np.sum(z))


def moved(x):
    z = np.concat([F.fft(x), W], axis=1)
    z = np.reshape(np.permute_dims(z, (1, 0)), (2, 4, 3))[:, ::-1] + np.cumulative_sum(W.sum(0)[:3] * x[0, 1])
    z = np.stack([z[0], z[1]], axis=2) + np.expand_dims(np.squeeze(np.expand_dims(z[1, :, 0], axis=0)), axis=(1, 2))
    z = np.take(z, np.asarray([2, 0, 0]), axis=1) * np.tril(np.tile(np.broadcast_to(x[0, 0], (3, 2)), (1, 1)))
    return np.imag(np.flip(np.roll(z, 1, axis=0))) ** 2


FUNCTIONS = {
    "power spectrum": lambda x: np.abs(F.rfft(x)) ** 2,
    "filter": lambda x: np.real(F.ifft(F.fft(x) * W, axis=0)) ** 2,
    "quotient": lambda x: np.imag(F.fft(x) * F.fft(x, axis=0) / (F.fftn(x) + 5j)),
    "another length": lambda x: F.irfft(F.rfft(x, n=7) * np.exp(1j * onp.arange(4.0)), n=5, norm="ortho") ** 2,
    "odd length": lambda x: F.irfft(x[:, :3] + 1j * x[:, 1:], n=5) ** 2,
    "one element": lambda x: F.irfft(F.fft(x, n=1), n=1) ** 2 + np.abs(F.ihfft(x, n=1)),
    "convolution": lambda x: F.irfftn(F.rfftn(x, s=(5, 6)) * F.rfftn(x[::-1], s=(5, 6)), s=(5, 6)) ** 2,
    "planes": lambda x: F.irfft2(F.rfft2(x) * W[:, :3]) + np.real(F.ifft2(F.fft2(x, s=(2, 4)), s=(3, 4)) * W),
    "shifts": lambda x: np.abs(F.ifftshift(F.fftshift(F.fftn(x, axes=(0,)), axes=0) * W)[1:]).sum(axis=1),
    "hermitian": lambda x: F.hfft(x * (1 + 2j), norm="forward") ** 2,
    "to hermitian": lambda x: np.abs(F.ihfft(x) - 1j * x[:, :3]) ** 2,
    "inverse of several": lambda x: np.real(F.ifftn(x * W, norm="forward")) ** 2,
    "products": lambda x: np.abs(F.fft(x) @ W.T) + np.abs(np.einsum("ij,kj->ik", F.fft(x), W + x)),
    "dot": lambda x: np.real(np.vecdot(F.fft(x), W)) * np.imag(np.tensordot(F.fft(x), W, axes=((1,), (1,)))[0]) ** 2,
    "powers": lambda x: np.real((x + 1j * x[::-1]) ** 3 + (x + 2j) ** -2) + np.imag(np.exp(0.3 * x * (1j + 0.2))),
    "functions": lambda x: np.abs(np.square(x * W) - np.reciprocal(W + x) + (-(x * 1j))) + np.linalg.norm(x * W),
    "one number": lambda x: np.abs(x[0, 0] * 1j + x[1, 1]) * np.real(np.sum(F.fft(x)) * 2j + x[0, 1]),
    "order": lambda x: np.real(np.sort(F.fft(x[0])) * onp.arange(4.0)) + np.imag(np.cumulative_prod(F.fft(x[0]))),
    "spread": lambda x: np.var(F.fft(x), axis=0) + np.std(x * W),
    "precision": lambda x: np.abs(np.astype(np.astype(x, np.complex128) * 1j, np.complex128) + 1.0),
    "assignment": assigned,
    "shapes": moved,
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_central_differences_twice(name):
    check_grads(FUNCTIONS[name], X)


ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
MANY = ("fftn", "ifftn", "rfftn", "irfftn")


@pytest.mark.sweep(3)
@pytest.mark.torch
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("name", ONE + MANY)
def test_values_and_gradients_against_numpy_and_pytorch(name, norm):
    torch = pytest.importorskip("torch")
    real = name in ("rfft", "ihfft", "rfftn")
    x = rng.standard_normal((3, 5, 4))
    for size, axis in ((None, -1), (7, 1), (3, 1), (6, 0)):
        how = {"n": size, "axis": axis} if name in ONE else {"s": None if size is None else (size,), "axes": (axis,)}
        if name in MANY and size is None:
            how = {"s": (4, 6), "axes": (0, 2)}
        z = x if real else x * (1 + 2j)
        want = getattr(onp.fft, name)(z, norm=norm, **how)
        weights = onp.cos(onp.arange(want.size).reshape(want.shape))

        def mine(x):
            y = getattr(F, name)(x if real else x * (1 + 2j), norm=norm, **how)  # noqa: B023
            onp.testing.assert_allclose(y._data, want, rtol=1e-12, atol=1e-12)  # noqa: B023
            return np.sum((np.real(y) ** 2 + np.sin(np.imag(y))) * weights)  # noqa: B023

        t = torch.tensor(x, requires_grad=True)
        theirs = {"dim": how.get("axis", how.get("axes")), **{k: v for k, v in how.items() if k in ("n", "s")}}
        y = getattr(torch.fft, name)(t if real else t * (1 + 2j), norm=norm, **theirs)
        parts = y.real**2 + (torch.sin(y.imag) if y.is_complex() else 0)
        (parts * torch.tensor(weights)).sum().backward()
        onp.testing.assert_allclose(onp.asarray(og.grad(mine)(x)), t.grad.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.jax
def test_against_jax_in_both_modes():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    t = rng.standard_normal(X.shape)

    def f(xp):
        return lambda x: xp.sum(xp.abs(xp.fft.rfft(x) * W[:, :3]) ** 2 / (1 + xp.real(xp.fft.fft(x))[:, :3] ** 2))

    onp.testing.assert_allclose(onp.asarray(og.grad(f(np))(X)), jax.grad(f(jax.numpy))(X), rtol=1e-9)
    onp.testing.assert_allclose(onp.asarray(og.jvp(f(np), X, t)[1]), jax.jvp(f(jax.numpy), (X,), (t,))[1], rtol=1e-9)


def test_a_long_transform_is_as_exact_as_numpys():
    x = rng.standard_normal(997)
    g = og.grad(lambda x: np.sum(np.abs(F.fft(x)) ** 2))(x)  # 2·n·x, by Parseval
    onp.testing.assert_allclose(onp.asarray(g), 2 * 997 * x, rtol=1e-11)
    x = x.astype(onp.float32)
    g = og.grad(lambda x: np.sum(np.abs(F.rfft(x)[1:]) ** 2))(x)
    assert g.dtype == onp.float32
    onp.testing.assert_allclose(onp.asarray(g), 997 * (x - x.mean()), rtol=1e-3, atol=1e-2)


def test_the_derivative_at_zero_is_finite():
    g = og.grad(lambda x: np.sum(np.abs(F.fft(x))))(onp.zeros(4))
    assert g.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("f", "dynamic"),
    [
        (lambda x: np.abs(F.rfft(x, n=8)) ** 2, None),
        (lambda x: F.irfft(F.rfft(x) * np.exp(1j * onp.arange(3.0))), {"x": {0: "N"}}),
        (lambda x: np.real(F.ifftn(x * 1j)) + np.imag(F.fft(x, axis=0)), None),
        (og.elementwise_grad(lambda x: np.abs(F.fft(x)) ** 2), None),
        (lambda x: np.real(og.stop_gradient(F.fft(x)) * F.ifft(x)), None),
    ],
)
def test_models(f, dynamic):
    model = og.export(f, X, dynamic=dynamic)
    got = og.from_onnx(model)(X)
    onp.testing.assert_allclose(onp.asarray(got), onp.asarray(f(np.asarray(X))), rtol=1e-6, atol=1e-6)
    assert "DFT" in {n.op_type for n in model.graph.node}
    assert all(n.domain == "" for n in model.graph.node)


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: np.sum(F.fft(x)), r"returned complex128.*real\(z\)"),
        (lambda x: np.abs(F.fft(x, n=0)), "at least one element"),
        (lambda x: np.abs(F.fft(x, norm="up")), "norm is"),
        (lambda x: np.abs(F.fftn(x, s=(2,), axes=(0, 1))), "1 lengths for 2 axes"),
        (lambda x: np.sum(onp.asarray(F.fft(x))), "functions of onnxgrad.eager.numpy"),
        (lambda x: np.abs(np.linalg.qr(F.fft(x)).R)[0, 0], "qr of complex"),
    ],
)
def test_what_is_refused(f, words):
    import re

    with pytest.raises((BadInput, NotDifferentiable)) as caught:
        og.grad(f)(X)
    assert re.search(words, str(caught.value), flags=re.S), str(caught.value)


def test_what_is_refused_of_complex_arguments():
    with pytest.raises(BadInput, match=r"real and (the )?imaginary part"):
        og.export(np.abs, X * 1j)
    with pytest.raises(NotDifferentiable, match="sin of complex numbers"):
        og.export(lambda x: np.abs(np.sin(F.fft(x))), X)
    with pytest.raises(BadInput, match="returned complex128"):
        og.jacobian(np.sin)(X * 1j)
    with pytest.raises(BadInput, match=r"write 1 \+ 0j"):
        og.holomorphic_grad(np.sin)(1.0)


Z = rng.standard_normal((3, 3)) + 1j * rng.standard_normal((3, 3))
HOLOMORPHIC = [
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "exp", "exp2", "expm1", "log", "log10", "log1p",
    "log2", "prod", "reciprocal", "sin", "sinh", "sqrt", "square", "tan", "tanh",
]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", HOLOMORPHIC)
def test_holomorphic_functions(name):
    f, kernel = getattr(np, name), getattr(onp, name)
    onp.testing.assert_allclose(onp.asarray(f(np.asarray(Z))), kernel(Z), rtol=1e-13)
    check_grads(f, Z)
    if name != "prod":
        step = 1e-6
        slope = (kernel(Z + step) - kernel(Z - step)) / (2 * step)
        onp.testing.assert_allclose(onp.asarray(og.holomorphic_grad(f)(Z)), slope, rtol=1e-6)


H = Z @ Z.conj().T + onp.eye(3)
#: Functions of complex matrices, which do not depend on the phases of vectors.
MATRICES = {
    "inv": lambda z: np.linalg.inv(z),
    "solve": lambda z: np.linalg.solve(z, z[:, :2] ** 2),
    "det": lambda z: np.linalg.det(z),
    "slogdet": lambda z: tuple(np.linalg.slogdet(z)),
    "pinv": lambda z: np.linalg.pinv(z[:, :2]),
    "cholesky": lambda z: np.linalg.cholesky(z @ np.conj(z.T) + onp.eye(3)),
    "eigvalsh": lambda z: np.linalg.eigvalsh(z),
    "eigvalsh, upper": lambda z: np.linalg.eigvalsh(z, "U"),
    "eigh": lambda z: np.abs(np.linalg.eigh(z).eigenvectors),
    "eig": lambda z: (np.linalg.eig(z)[0], np.abs(np.linalg.eig(z)[1])),
    "eig of real numbers": lambda z: np.abs(np.linalg.eig(np.real(z))[1]) ** 2,
    "svdvals": lambda z: np.linalg.svdvals(z[:, :2]),
    "svd": lambda z: (lambda u, s, v: (np.abs(u), (u * s**2) @ v))(*np.linalg.svd(z, full_matrices=False)),
    "svd, tall": lambda z: (lambda u, s, v: (u * s**2) @ v)(*np.linalg.svd(z[:, :2], full_matrices=False)),
    "svd, wide": lambda z: (lambda u, s, v: (u * s**2) @ v)(*np.linalg.svd(z[:2], full_matrices=False)),
    "norms": lambda z: np.linalg.norm(z) * np.linalg.norm(z, "nuc"),
    "extrema": lambda z: np.max(z, axis=0) * np.min(z),
    "powers": lambda z: z**2.5 + z**z + np.pow(2.0, z) + z**-2,
    "var": lambda z: np.var(z, axis=0) * np.std(z),
    "einsum of three": lambda z: np.einsum("ij,jk,kl->il", z, z**2, z),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MATRICES)
def test_functions_of_complex_matrices(name):
    check_grads(MATRICES[name], Z)


def test_gradients_of_complex_arguments():
    z = 0.3 + 0.7j
    g = og.grad(lambda z: np.abs(z) ** 2 * np.real(z))(z)  # (x² + y²)·x: ∂x − i·∂y
    onp.testing.assert_allclose(complex(g), (3 * z.real**2 + z.imag**2) - 2j * z.real * z.imag)
    value, pullback = og.vjp(lambda z: np.conj(z) * z, z)
    onp.testing.assert_allclose(complex(pullback(1.0 + 0j)), 2 * z.conjugate())
    assert complex(value) == z.conjugate() * z
    _, tangent = og.jvp(np.exp, z, 2.0 - 1j)
    onp.testing.assert_allclose(complex(tangent), onp.exp(z) * (2 - 1j))
    second = og.grad(lambda z: np.real(og.holomorphic_grad(lambda z: z**3)(z)))(z)
    onp.testing.assert_allclose(complex(second), 6 * z)
    jacobian = og.jacobian(lambda z: np.abs(z) ** 2)(Z[0])
    onp.testing.assert_allclose(onp.asarray(jacobian), onp.diag(2 * Z[0].conj()))
    assert og.grad(lambda z: np.real(np.sum(z)))(Z.astype(onp.complex64)).dtype == onp.complex64


def test_facts_about_complex_numbers_are_constant():
    def f(x):
        z = F.fft(x)
        assert bool(np.all(np.isfinite(z)))
        assert not bool(np.any(np.isnan(z)))
        assert bool(np.all(np.equal(z, z)))
        return np.sum(np.real(z * og.stop_gradient(z)))

    assert onp.isfinite(onp.asarray(og.grad(f)(X))).all()


def test_numpys_own_functions_dispatch():
    x = np.asarray(X)
    assert onp.fft.fft(x, 8).shape == (3, 8)
    g = og.grad(lambda x: onp.sum(onp.abs(onp.fft.rfft(x, 6, 0)) ** 2))(X)
    onp.testing.assert_allclose(
        onp.asarray(g), onp.asarray(og.grad(lambda x: np.sum(np.abs(F.rfft(x, n=6, axis=0)) ** 2))(X))
    )
