"""numpy's functions beside the standard: numpy's values, derivatives against differences of both orders."""

from __future__ import annotations

import numpy as onp
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad import BadInput
from onnxgrad.eager import check_grads

rng = onp.random.default_rng(0)
X = rng.standard_normal((3, 4))

#: Each is called with numpy and with the namespace.
FUNCTIONS = {
    "angle": lambda np, x: np.angle(np.fft.fft(x)[:, 1:2]) * np.angle(x[:, :1] + 2j * x[:, 1:2], deg=True),
    "degrees": lambda np, x: np.deg2rad(x) ** 2 + np.rad2deg(x) * np.radians(x) + np.degrees(x),
    "extremes": lambda np, x: np.fmax(x, onp.where(X > 0.5, onp.nan, 0.0)) * np.fmin(x, onp.where(X < 0, onp.nan, 1.0)),
    "logaddexp2": lambda np, x: np.logaddexp2(x, x[::-1] * 2.0),
    "nan_to_num": lambda np, x: np.nan_to_num(x / onp.where(X > 1, 0.0, 1.0), posinf=2.0) ** 2,
    "sinc": lambda np, x: np.sinc(x) + np.sinc(x * 0.001) * x,
    "at least": lambda np, x: np.atleast_3d(x[0]) * np.atleast_2d(x[1])[..., None] + np.atleast_1d(x[0, 0]) ** 2,
    "at least, several": lambda np, x: np.atleast_2d(x[0, 0], x[0])[1] * np.atleast_3d(x)[:, 0],
    "joins": lambda np, x: np.hstack([x, x**2])[:, 2:6] * np.vstack([x[0], x])[1:] + np.hstack([x[0, :2], x[1, :2]]),
    "columns": lambda np, x: np.column_stack([x[:, 0], x[:, 1:]]) * np.dstack([x, x * 2.0])[:, :, 1],
    "splits": lambda np, x: np.array_split(x, 3, axis=1)[0] ** 2 * np.hsplit(x, 2)[1] + np.vsplit(x, [1, 2])[1][:, :2],
    "depth": lambda np, x: np.dsplit(np.reshape(x, (1, 3, 4)), 2)[1] ** 2,
    "turns": lambda np, x: np.rot90(x) ** 2 + np.rot90(x, 3) * np.fliplr(np.flipud(x)).T + np.rot90(x, 5, axes=(1, 0)),
    "half a turn": lambda np, x: np.rot90(x, 2) * np.rot90(x, 4) ** 2,
    "diagonals": lambda np, x: (
        np.diag(x[0]) @ np.diag(x[1], k=-1)[:4, :4] * np.diag(x[:, 1:], k=1)[0] + np.diag(x[0, :2], 2)
    ),
    "pad": lambda np, x: np.pad(x, 1) ** 2 + np.pad(x, ((1, 1), (0, 2)), constant_values=0.5)[:, :6],
    "pad by elements": lambda np, x: (
        np.pad(x, 2, "edge") * np.pad(x, 2, mode="reflect") + np.pad(x, (2, 2), "symmetric") * np.pad(x, 2, "wrap") ** 2
    ),
    "kron": lambda np, x: np.kron(x[:, :2], x[:2, 1:]) + np.kron(x[0, :2], x)[:, :6][:1],
    "average": lambda np, x: np.average(x, axis=1, weights=onp.arange(1.0, 5.0)) * np.average(x) + np.average(x, 1),
    "average with variable weights": lambda np, x: (
        np.average(x, axis=0, weights=x**2) * np.average(x * 2.0, weights=x * x)
    ),
    "gradient": lambda np, x: np.gradient(x)[0] * np.gradient(x, 0.5)[1] + np.gradient(x, 2.0, axis=1) ** 2,
    "gradient with spacings": lambda np, x: np.gradient(x[:2], 0.5, 2.0)[0],
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives(name):
    f = FUNCTIONS[name]
    with onp.errstate(all="ignore"):
        onp.testing.assert_allclose(onp.asarray(f(np, np.asarray(X))), f(onp, X), rtol=1e-12, atol=1e-12)
        onp.testing.assert_allclose(onp.asarray(f(onp, np.asarray(X))), f(onp, X), rtol=1e-12, atol=1e-12)  # dispatched
        if name == "nan_to_num":
            g = og.grad(lambda x: np.sum(f(np, x)))(X)
            onp.testing.assert_allclose(onp.asarray(g), onp.where(X > 1, 0, 2 * X))
        else:
            check_grads(lambda x: f(np, x), X)


@pytest.mark.parametrize(
    "f",
    [
        lambda np, x: np.cov(x),
        lambda np, x: np.corrcoef(x),
        lambda np, x: np.percentile(x, [30.0, 50.0], axis=0),
        lambda np, x: np.percentile(x, 30.0, axis=0),
        lambda np, x: np.quantile(x, onp.array(0.3)),
        lambda np, x: np.vander(x[0]),
        lambda np, x: np.clip(x, -0.1, onp.float64(0.5)),
        lambda np, x: np.clip(x, -0.1, 0.5),
        lambda np, x: np.clip((x * 3).astype("int16"), -0.5, 1.5),
        lambda np, x: np.heaviside((x * 3).astype("int64"), 1),
    ],
)
def test_dtypes_of_float32(f):
    x = X.astype(onp.float32)
    expected = f(onp, x)
    for found in (f(np, np.asarray(x)), og.vjp(lambda x: f(np, x), x)[0]):
        assert found.dtype == expected.dtype
        onp.testing.assert_allclose(onp.asarray(found), expected, rtol=1e-5, atol=1e-6)


def test_sinc_at_zero():
    third = og.grad(og.grad(np.sinc))
    assert float(og.grad(np.sinc)(0.0)) == 0.0
    assert float(third(0.0)) == pytest.approx(-(onp.pi**2) / 3)
    assert og.elementwise_grad(np.sinc)(onp.array([0.0, 1.0])).tolist() == pytest.approx([0.0, -1.0])


def test_singular_points():
    """The subgradient of a norm, and of an angle as in PyTorch; an infinite slope."""
    for f in (np.hypot, np.arctan2):
        pair = lambda z, f=f: f(z[0], z[1])  # noqa: E731
        assert onp.asarray(og.grad(pair)(onp.zeros(2))).tolist() == [0.0, 0.0]
        check_grads(pair, onp.array([0.0, 0.7]))
        check_grads(pair, onp.array([-0.7, 0.0]))
    assert float(og.grad(np.cbrt)(0.0)) == onp.inf
    check_grads(np.cbrt, onp.array([-0.4, 2.0]))


@pytest.mark.torch
def test_singular_points_of_pytorch():
    """The page of conventions says where both agree at (0, 0), and where not."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    found = {}
    for name, f in (
        ("atan2", torch.atan2),
        ("hypot", torch.hypot),
        ("norm", lambda *z: torch.linalg.norm(torch.stack(z))),
    ):
        a, b = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
        f(a, b).backward()
        found[name] = [abs(a.grad.item()), abs(b.grad.item())]
    assert found["atan2"] == found["norm"] == [0.0, 0.0]
    assert onp.isnan(found["hypot"]).all()


def test_the_determinant_of_singular_matrices():
    singular = onp.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 1.0]])
    for x in (singular, onp.zeros((2, 2)), onp.stack([singular, singular + onp.eye(3)])):
        check_grads(np.linalg.det, x)
    assert onp.asarray(og.grad(np.linalg.det)(singular)).tolist() == [
        [4.0, 4.0, -4.0],
        [-2.0, -2.0, 2.0],
        [0.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: np.diag(onp.zeros((2, 2, 2))), "a vector or a matrix, not an array of 3"),
        (lambda: np.pad(X, 1, mode="reflected"), "not 'reflected'"),
        (lambda: np.pad(X, 1, mode="reflect", reflect_type="other"), "not 'other'"),
        (lambda: np.vectorize(abs, signature="n"), "of the form"),
        (lambda: np.vectorize(np.sum, signature="(m,n)->()")(X[0]), "does not take arrays of shapes"),
        (lambda: np.max(X, where=X > 0), "needs 'initial'"),
        (lambda: np.nanquantile(X, 0.5, method="none"), "method is one of"),
        (lambda: np.quantile(X * 1j, 0.5), "quantiles are of real numbers"),
        (lambda: np.pad(X * 1j, 1, constant_values=1.0), "padded with zeros"),
        (lambda: np.average(X, axis=0, weights=onp.ones(2)), r"weights of shape \(2,\)"),
        (lambda: np.gradient(X, onp.arange(3.0)), "one number for each axis"),
        (lambda: np.gradient(X[:1]), "two elements along axis 0, not 1"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(BadInput, match=words):
        call()


#: Reductions of the elements that a mask selects, and of none.
SELECTED = {
    "mean": lambda np, x, m: np.mean(x, axis=1, where=m),
    "var": lambda np, x, m: np.var(x, axis=0, where=m, ddof=0.5),
    "std": lambda np, x, m: np.std(x, where=m, keepdims=True),
    "all": lambda np, x, m: np.all(x > 0, axis=1, where=m),
    "any": lambda np, x, m: np.any(x > 1, axis=0, where=m),
    "empty": lambda np, x, m: np.max(x[:0], axis=0, initial=2.0) + np.min(x[:, :0], initial=3.0),
    "average": lambda np, x, m: np.average(x, axis=1, keepdims=True) + np.average(x, axis=0, weights=m, keepdims=True),
    "take": lambda np, x, m: np.take(x, [5, -1, 99], mode="clip") + np.take(x, [5, -1, 99], mode="wrap"),
    "of integers": lambda np, x, m: np.nanmax((x * 9).astype(int), axis=1) - np.nanmin((x * 9).astype(int), axis=1),
}


@pytest.mark.parametrize("name", SELECTED)
def test_selected_elements(name):
    f, mask = SELECTED[name], X > -0.7
    expected = f(onp, X, mask)
    onp.testing.assert_allclose(onp.asarray(f(np, np.asarray(X), mask)), expected, rtol=1e-12)
    if name not in ("all", "any", "of integers"):
        holes = onp.where(mask, X, onp.nan) if name in ("mean", "var", "std") else X  # which no gradient passes
        g = og.grad(lambda x: np.sum(np.sin(f(np, x, mask))))
        onp.testing.assert_allclose(onp.asarray(g(holes)), onp.asarray(g(X)))
        check_grads(lambda x: f(np, x, mask), X)
        onp.testing.assert_allclose(onp.asarray(og.jit(lambda x: f(np, x, mask))(X)), expected, rtol=1e-12)


def test_slopes_of_the_bessel_function_beside_nan_and_infinities():
    found = onp.asarray(og.elementwise_grad(np.i0)(onp.array([0.5, onp.nan, onp.inf, 0.0])))
    onp.testing.assert_allclose(found[[0, 3]], [0.25789430539089636, 0.0], atol=1e-15)
    assert onp.isnan(found[1])
