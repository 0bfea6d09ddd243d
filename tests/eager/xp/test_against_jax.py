"""Functions written once, for `jax.numpy` and for the namespace: values, gradients, and products with the Hessian."""

from __future__ import annotations

import numpy as onp
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as xp

pytestmark = pytest.mark.jax
rng = onp.random.default_rng(0)
X, V = rng.standard_normal((3, 4)), rng.standard_normal((3, 4))
S = onp.arange(12.0).reshape(3, 4)
HOLES = S > 9

#: Each takes the namespace and a matrix of shape (3, 4).
FUNCTIONS = {
    "triu": lambda np, x: np.triu(x, 1) @ np.tril(x, -1).T,
    "tensordot": lambda np, x: np.tensordot(x, x.T, 1) + np.tensordot(x, x, ([1], [1])),
    "concatenate": lambda np, x: np.concatenate([x, x**2], 1),
    "std": lambda np, x: np.std(x, axis=1, ddof=1) * np.var(x, 1, ddof=2),
    "clip": lambda np, x: np.clip(x, -0.5, 0.5) * x,
    "tile": lambda np, x: np.tile(x, reps=(2, 1)) ** 2,
    "repeat": lambda np, x: np.repeat(x, 2, axis=1) * np.repeat(x, repeats=2, axis=1)[::-1],
    "swapaxes": lambda np, x: np.swapaxes(x, 0, 1) @ x,
    "moveaxis": lambda np, x: np.moveaxis(x[None], 0, -1) * np.moveaxis(x[None], source=0, destination=2),
    "where": lambda np, x: np.where(x > 0, x**3, np.sin(x)),
    "cross": lambda np, x: np.cross(x[:, :3], x[:, 1:], axis=1),
    "einsum": lambda np, x: np.einsum("ij,kj->ik", x, x, optimize=True),
    "einsum of ellipses": lambda np, x: np.einsum("...j,...j->...", x, x[0]) * np.einsum("i...->...", x)[:3],
    "cumsum": lambda np, x: np.cumsum(x) ** 2,
    "cumprod": lambda np, x: np.cumprod(x, axis=1) * np.cumsum(x, 1),
    "methods": lambda np, x: x.ravel()[:3].dot(x.T.flatten()[:3]) * x.std() + x.var(0).prod() * x.clip(-1, 1).mean(),
    "more methods": lambda np, x: (x.reshape(4, 3).T * x).cumsum(axis=1).squeeze() * x.copy().conj().real.max(axis=0),
    "append": lambda np, x: np.append(x, x * 2.0) ** 2,
    "select": lambda np, x: np.select([x > 1, x > 0], [x**2, x**3], 0.5) * x,
    "linspace": lambda np, x: np.linspace(0, x[0], 3)[1] * np.linspace(x, x[0] ** 2, 2, axis=1)[0, 1],
    "spaces": lambda np, x: np.geomspace(1, x**2, 3) * np.logspace(0, x, 3),
    "diff to numbers": lambda np, x: np.diff(x, prepend=0.5) * np.diff(x, axis=0, append=x[0, 0]),
    "vdot": lambda np, x: np.vdot(x, x.T) * np.vdot(x[0], x[1]),
    "parts": lambda np, x: np.modf(3 * x)[0] * np.modf(3 * x)[1] + np.trunc(3 * x) * x,
    "without NaN": lambda np, x: (
        np.nancumsum(np.where(HOLES, onp.nan, x), 1) * np.nancumprod(np.where(HOLES, onp.nan, x)).reshape(3, 4)
    ),
    "partition": lambda np, x: np.partition(x, 2, axis=1)[:, 2] ** 2,
    "rollaxis": lambda np, x: np.rollaxis(x[None], 2) * np.rollaxis(x[None], 2, 0),
    "r_": lambda np, x: np.r_[x[0], 2.0, x[1]] ** 2,
    "c_": lambda np, x: np.c_[x[0], x[1]] @ x[:2],
    "cbrt": lambda np, x: np.cbrt(x) * x,
    "median": lambda np, x: np.median(x, axis=1) ** 2 * np.median(x),
    "percentile": lambda np, x: np.percentile(x, 30.0, axis=0) ** 2,
    "quantile": lambda np, x: np.quantile(x, onp.array([0.1, 0.8]), axis=1) ** 2,
    "interp": lambda np, x: np.interp(x[0], onp.array([-2.0, -0.5, 0.3, 2.0]), x[1]) ** 2,
    "convolve": lambda np, x: np.convolve(x[0], x[1]) * np.convolve(x.ravel(), x[2, :3], "valid")[:7],
    "correlate": lambda np, x: np.correlate(x[0], x[1, :2], "full"),
    "polyval": lambda np, x: np.polyval(x[0], x[1]),
    "trapezoid": lambda np, x: np.trapezoid(x, axis=0) * np.trapezoid(x, S, axis=1)[0],
    "cov": lambda np, x: np.cov(x) @ np.corrcoef(x),
    "nansum": lambda np, x: (
        np.nansum(np.where(S > 9, onp.nan, x) ** 2, axis=1) * np.nanmean(np.where(S > 9, onp.nan, x))
    ),
    "nanmax": lambda np, x: (
        np.nanmax(np.where(S > 9, onp.nan, x), axis=1) * np.nanmin(np.where(S > 9, onp.nan, x)) ** 2
    ),
    "vander": lambda np, x: np.vander(x[0], 3) @ x,
    "lstsq": lambda np, x: np.linalg.lstsq(x.T, x[0])[0],
    "multi_dot": lambda np, x: np.linalg.multi_dot([x, x.T, x[:, 0]]),
    "lists as indices": lambda np, x: x[onp.array([0, 2]), :][:, onp.array([1, 3, 3])] ** 2,
    "tuples as indices": lambda np, x: x[onp.array([0, 1]), onp.array([2, 3])] ** 2 * x[1:, None, 2][:, 0],
    "masks": lambda np, x: x[S % 3 == 0] ** 2,
    "gradient": lambda np, x: np.gradient(x)[0] * np.gradient(x, axis=1),
    "diff": lambda np, x: np.diff(x, 2, axis=1) * np.diff(x, axis=0)[:, :2].sum(),
    "sort": lambda np, x: np.sort(x, axis=0) ** 2 * np.sort(x, 1),
    "kron": lambda np, x: np.kron(x[:2, :2], x[:1]),
    "outer": lambda np, x: np.outer(x[:2], x[2]),
    "inner": lambda np, x: np.inner(x, x),
    "trace": lambda np, x: np.trace(x) * np.trace(x, 1) * np.diagonal(x, 1),
    "stacks": lambda np, x: np.diagonal(x.reshape(2, 2, 3)) ** 2 * np.trace(x.reshape(3, 2, 2), axis1=1, axis2=2)[0],
    "ptp": lambda np, x: np.ptp(x, axis=1) ** 2,
    "logaddexp": lambda np, x: np.logaddexp(x, x[::-1] * 2) * np.logaddexp2(x, 1.0),
    "hypot": lambda np, x: np.hypot(x, 2.0) * np.arctan2(x, x[::-1] + 3.0),
    "sinc": lambda np, x: np.sinc(x) * np.heaviside(0.3, 1.0),
    "fmod": lambda np, x: np.fmod(x * 3, x[::-1] ** 2 + 0.7) * np.float_power(x**2 + 1, x),
    "divmod": lambda np, x: np.divmod(x * 5, 1.7)[1] ** 2 * np.ldexp(x, S.astype(int) - 5),
    "heaviside": lambda np, x: np.heaviside(np.where(S > 6, 0.0, x), x**2) * x,
    "i0": lambda np, x: np.i0(x) * np.i0(x * 7),
    "unwrap": lambda np, x: np.unwrap(np.cumsum(x * 9, axis=1)) ** 2 + np.unwrap(x * 5, axis=0, period=3.0),
    "delete": lambda np, x: np.delete(x, 1, axis=0) * np.delete(x, onp.array([0, 3]), 1)[:2, :1] * np.delete(x, 2)[0],
    "insert": lambda np, x: (
        np.insert(x, 1, x[0] ** 2, axis=0)[:, :3] * np.insert(x, onp.array([0, 2]), 2.0, axis=1)[0, 2]
    ),
    "extract": lambda np, x: np.extract(S % 3 == 0, x) ** 2,
    "block": lambda np, x: np.block([[x, x[:, :1] ** 2], [np.ones((1, 3)), x[:1, 2:]]]) ** 2,
    "diagflat": lambda np, x: np.diagflat(x[:2], 1) ** 2,
    "apply_along_axis": lambda np, x: (
        np.apply_along_axis(lambda v: v[:2] * v.sum(), 1, x)[:, 0] * np.apply_along_axis(lambda v: v.max(), 1, x)
    ),
    "vectorize": lambda np, x: np.vectorize(lambda a, b: a * b**2)(x, x[0]),
    "vectorize with a signature": lambda np, x: np.vectorize(
        lambda a, b: np.sum(a * b**2) * a, signature="(n),(n)->(n)"
    )(x, x[0]),
    "geomspace": lambda np, x: np.geomspace(x[0, 0] ** 2 + 1, x[0, 1] ** 2 + 5, 7) ** 2,
    "polymul": lambda np, x: np.polymul(x[0], x[1, :3]) * 2 + np.polyadd(x[2], np.polymul(x[0, :3], x[1])),
    "polyder": lambda np, x: np.polyder(x[0], 2) * np.polyint(x[1, :1], 1, 3.0) - np.polysub(x[0, :1], x[2, 2:]),
    "polyfit": lambda np, x: np.polyfit(x[0], x[1], 2) * np.polyfit(x[1], x[2], 2, w=x[0] ** 2 + 1),
    "nanmedian": lambda np, x: (
        np.nanmedian(np.where(S > 9, onp.nan, x), axis=1) * np.nanmedian(np.where(S > 9, onp.nan, x)) ** 2
    ),
    "nanquantile": lambda np, x: (
        np.nanquantile(np.where(S > 9, onp.nan, x), onp.array([0.2, 0.7]), axis=1) ** 2
        * np.nanpercentile(np.where(S > 9, onp.nan, x), 30.0, axis=1, keepdims=True)[:, 0]
    ),
    "histogram": lambda np, x: (
        np.histogram(x, 4, weights=x**2)[0] * np.histogram(x, 4)[1][1:] * np.histogram(x, 4, density=True)[0]
    ),
    "bincount": lambda np, x: np.bincount(S.astype(int).ravel() // 3, weights=x.ravel() ** 2, minlength=6),
    "pad by statistics": lambda np, x: (
        np.pad(x, 1, "mean") * np.pad(x, 1, "maximum") + np.pad(x, 1, "minimum") * np.pad(x, (1, 1), "median")
    ),
    "pad by ramps": lambda np, x: np.pad(x, ((1, 2), (3, 0)), "linear_ramp") ** 2,
    "methods of ufuncs": lambda np, x: (
        np.add.reduce(x, axis=1, keepdims=True) * np.multiply.accumulate(x, axis=1) + np.subtract.outer(x[0], x[1])[:3]
    ),
    "methods of ufuncs with options": lambda np, x: (
        np.add.reduce(x, axis=1, initial=2.0, where=S > 4) * np.multiply.reduce(x, axis=1, where=S > 4)
        + np.maximum.reduce(x, axis=1, initial=0.1, where=S > 8) * np.sum(x, axis=1, where=S > 4, initial=1.0)
    ),
    "parts of ufuncs": lambda np, x: (
        np.add.reduceat(x, onp.array([0, 3, 1]), axis=1) ** 2 * np.multiply.reduceat(x[0], onp.array([0, 2, 3]))
    ),
    "nanquantile by methods": lambda np, x: (
        np.nanquantile(np.where(S > 9, onp.nan, x), 0.35, axis=1, method="lower")
        * np.nanquantile(np.where(S > 9, onp.nan, x), 0.35, axis=1, method="higher")
        * np.nanpercentile(np.where(S > 9, onp.nan, x), 35.0, axis=1, method="midpoint")
    ),
    "pad by odd reflections": lambda np, x: (
        np.pad(x, ((1, 2), (3, 0)), "reflect", reflect_type="odd")
        * np.pad(x, ((1, 2), (3, 0)), "symmetric", reflect_type="odd")
    ),
    "pad with anything": lambda np, x: np.pad(x, 1, "empty")[1:-1, 1:-1] ** 2,
    "divmod of Python": lambda np, x: divmod(x, x[0] ** 2 + 0.3)[1] * divmod(2.5, x**2 + 0.3)[1],
    "pad": lambda np, x: np.pad(x, ((1, 0), (0, 2)), mode="reflect") ** 2,
    "complex functions": lambda np, x: np.abs(np.sin(x + 1j * x[::-1]) * np.log(x + 2j) * np.sqrt(x * 1j + 3.0)),
    "norms": lambda np, x: np.linalg.norm(x) * np.linalg.norm(x, axis=1) * np.linalg.norm(x, "nuc"),
    "svd": lambda np, x: np.linalg.svd(x, full_matrices=False)[1] ** 3,
    "eigh": lambda np, x: np.linalg.eigh(x @ x.T)[0] ** 2,
    "solve": lambda np, x: np.linalg.solve(x[:, :3] + 4 * onp.eye(3), x[:, 3]) * np.linalg.slogdet(x @ x.T)[1],
    "fft": lambda np, x: np.abs(np.fft.rfft2(x)) ** 2,
    "roll": lambda np, x: np.roll(x, 1, axis=0) * np.roll(x, (1, 2), (0, 1)) ** 2,
    "take": lambda np, x: np.take(x, onp.array([0, 5, 5])) ** 2 * np.take_along_axis(x, onp.array([[0, 1, 3]]), 1)[0],
}


@pytest.fixture(scope="module")
def jax():
    jax = pytest.importorskip("jax", reason="compared with JAX")
    with jax.enable_x64(True):
        yield jax


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, jax):
    f = FUNCTIONS[name]
    theirs = lambda x: jax.numpy.sum(f(jax.numpy, x) * 1.5)  # noqa: E731
    ours = lambda x: xp.sum(f(xp, x) * 1.5)  # noqa: E731
    close = lambda a, b: onp.testing.assert_allclose(onp.asarray(a), onp.asarray(b), rtol=1e-9, atol=1e-9)  # noqa: E731
    close(f(xp, xp.asarray(X)), f(jax.numpy, jax.numpy.asarray(X)))
    value, gradient = og.value_and_grad(ours)(X)
    close(value, theirs(X))
    close(gradient, jax.grad(theirs)(X))
    close(og.hvp(ours)(X, V), jax.jvp(jax.grad(theirs), (X,), (V,))[1])


def test_running_extrema_and_logsumexps(jax):
    lax = jax.lax
    pairs = (
        (lambda x: xp.maximum.accumulate(x, axis=1), lambda x: lax.cummax(x, axis=1)),
        (lambda x: xp.minimum.accumulate(x), lambda x: lax.cummin(x, axis=0)),
        (lambda x: xp.logaddexp.accumulate(x, axis=1), lambda x: lax.cumlogsumexp(x, axis=1)),
        (lambda x: xp.logaddexp.reduce(x, axis=1), lambda x: jax.nn.logsumexp(x, axis=1)),
        (lambda x: onp.add.accumulate(x), lambda x: jax.numpy.cumsum(x, axis=0)),
        (lambda x: onp.maximum.reduce(x, axis=1), lambda x: jax.numpy.max(x, axis=1)),
    )
    for ours, theirs in pairs:
        onp.testing.assert_allclose(onp.asarray(ours(xp.asarray(X))), theirs(X), rtol=1e-12)
        got = og.grad(lambda x, f=ours: xp.sum(f(x) ** 2))(X)
        want = jax.grad(lambda x, f=theirs: jax.numpy.sum(f(x) ** 2))(X)
        onp.testing.assert_allclose(onp.asarray(got), want, rtol=1e-10, atol=1e-12)
