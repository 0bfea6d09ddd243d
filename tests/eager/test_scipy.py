"""`eager.scipy`: SciPy's values, and derivatives of both orders and modes against central differences."""

from __future__ import annotations

import numpy as onp
import pytest

pytest.importorskip("scipy", reason="eager.scipy takes its values from SciPy")

import scipy.integrate
import scipy.linalg
import scipy.signal
import scipy.special
import scipy.stats

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad import NotDifferentiable
from onnxgrad.eager import check_grads
from onnxgrad.eager.scipy import integrate, linalg, signal, special, stats

rng = onp.random.default_rng(0)
P = onp.array([0.3, 0.9, 1.4, 2.6])  # positive
U = onp.array([0.15, 0.4, 0.7, 0.95])  # between 0 and 1
R = onp.array([-1.7, -0.2, 0.4, 2.1])

#: For each function the operands; a number in front is constant.
SPECIAL = {
    "beta": (P, P[::-1]), "betainc": (2.0, 3.5, U), "betaln": (P, P[::-1]), "dawsn": (R,), "digamma": (P,),
    "entr": (P,), "erf": (R,), "erfc": (R,), "erfcinv": (U * 2,), "erfcx": (R,), "erfinv": (R / 3,), "exp1": (P,),
    "expi": (P,), "expit": (R,), "expn": (2, P), "exprel": (onp.array([-1.0, 1e-3, 0.5, 3.0]),), "gamma": (P,),
    "gammainc": (1.7, P), "gammaincc": (1.7, P), "gammaln": (P,), "i0": (R,), "i0e": (P,), "i1": (R,), "i1e": (P,),
    "iv": (1.5, P), "ive": (1.5, P), "j0": (P,), "j1": (P,), "jv": (2, P), "k0": (P,), "k1": (P,), "kl_div": (P, U),
    "kv": (2, P), "log_expit": (R,), "log_ndtr": (R,), "logit": (U,), "ndtr": (R,), "ndtri": (U,), "poch": (P, U),
    "polygamma": (1, P), "psi": (P,), "rel_entr": (P, U), "rgamma": (R,), "spence": (P,), "stdtr": (2.5, R),
    "xlog1py": (R, P), "xlogy": (R, P), "y0": (P,), "y1": (P,), "yn": (2, P), "zeta": (2.5, P), "loggamma": (P,),
    "binom": (P + 3, U),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions(name):
    f, operands = getattr(special, name), SPECIAL[name]
    constants = [x for x in operands if onp.ndim(x) == 0]
    onp.testing.assert_allclose(onp.asarray(f(*operands)), getattr(scipy.special, name)(*operands), rtol=1e-13)
    check_grads(lambda *xs: f(*constants, *xs), *operands[len(constants) :])


def test_special_functions_at_the_edges():
    slope = lambda f: onp.asarray(og.elementwise_grad(f)(onp.array([0.0, 1.0])))  # noqa: E731
    onp.testing.assert_allclose(slope(lambda x: special.xlogy(x, 2.0)), onp.log(2.0))
    onp.testing.assert_allclose(slope(lambda y: special.xlogy(0.0, y)), 0.0)
    onp.testing.assert_allclose(slope(lambda x: special.xlog1py(x, -0.5)), onp.log(0.5))
    onp.testing.assert_allclose(og.grad(special.spence)(1.0), -1.0)
    for f in (special.xlogy, special.rel_entr, special.kl_div):
        assert onp.isfinite(onp.asarray(og.grad(f, (0, 1))(0.0, 0.0))).all()
    for f, args in ((special.xlogy, (R, P)), (special.xlog1py, (R, U))):
        g = og.grad(lambda x, y, f=f: np.sum(f(x, y)), (0, 1))
        onp.testing.assert_allclose(onp.asarray(og.jit(g)(*args)), onp.asarray(g(*args)), rtol=1e-13)
    onp.testing.assert_allclose(complex(og.holomorphic_grad(special.lambertw)(0j)), 1.0)
    check_grads(special.erf, R + 0.3j)


def test_special_functions_refuse_what_they_cannot():
    with pytest.raises(NotDifferentiable, match="betainc with respect to a parameter"):
        og.grad(lambda a: special.betainc(a, 1.0, 0.5))(1.5)
    with pytest.raises(NotDifferentiable, match=r"scipy.special.struve"):
        og.grad(lambda x: special.struve(0.0, x))(1.5)
    onp.testing.assert_allclose(special.struve(0.0, np.asarray(P)), scipy.special.struve(0.0, P))
    with pytest.raises(NotDifferentiable, match=r"^scipy.special.jv has no derivative"):
        og.grad(lambda x: np.sum(scipy.special.jv(1, x)))(P)


def test_incomplete_gamma_functions_of_their_parameter():
    a, x = onp.array([0.4, 1.7, 3.0, 40.0]), onp.array([0.6, 2.3, 9.0, 35.0])
    check_grads(special.gammainc, a, x)
    check_grads(special.gammaincc, a, x)
    value, slope = og.value_and_grad(lambda a: special.gammainc(a, 0.0))(1.5)
    assert (float(value), float(slope)) == (0.0, 0.0)


def test_derivatives_of_third_order():
    for f in (special.gammaln, special.erfinv, lambda x: special.jv(1, x), lambda x: special.expn(1, x)):
        check_grads(f, onp.asarray(0.6), order=3, modes=("rev",))


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_logsumexp(axis):
    x, b = rng.standard_normal((3, 4)), rng.uniform(0.5, 2.0, (3, 4))
    b[0, 0] = 0.0
    x[0, 0] = 900.0  # of no weight
    for how in ({}, {"b": b}, {"b": b, "keepdims": True}):
        x[0, 0] = 900.0 if how else 9.0
        found = special.logsumexp(x, axis=axis, **how)
        onp.testing.assert_allclose(onp.asarray(found), scipy.special.logsumexp(x, axis=axis, **how), rtol=1e-13)
        check_grads(lambda x, how=how: special.logsumexp(x, axis=axis, **how), x)
    whole = special.logsumexp(onp.full((3,), -onp.inf))
    assert onp.asarray(whole) == -onp.inf
    found, sign = special.logsumexp(x[1], b=-b[1], return_sign=True)
    onp.testing.assert_allclose([found, sign], scipy.special.logsumexp(x[1], b=-b[1], return_sign=True))
    onp.testing.assert_allclose(special.softmax(x[1:], axis=1), scipy.special.softmax(x[1:], axis=1), rtol=1e-13)


#: For each distribution the parameters of its shape, points, and functions.
STATS = {
    "norm": ((), R, "logpdf pdf cdf sf logcdf logsf"),
    "t": ((onp.array([2.5, 3.0, 4.0, 9.0]),), R, "logpdf pdf"),
    "t of fixed degrees": ((), R, "cdf sf logcdf logsf"),
    "gamma": ((P + 1,), P, "logpdf pdf"),
    "beta": ((P + 1, P[::-1]), U, "logpdf pdf"),
    "chi2": ((P * 3,), P, "logpdf pdf"),
    "expon": ((), P + 1, "logpdf pdf cdf sf"),
    "laplace": ((), R, "logpdf"),
    "cauchy": ((), R, "logpdf cdf"),
    "logistic": ((), R, "logpdf cdf sf logcdf logsf"),
    "uniform": ((), U, "pdf cdf sf"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "function"), [(n, f) for n, (_, _, fs) in STATS.items() for f in fs.split()])
def test_distributions(name, function):
    shapes, x, _ = STATS[name]
    fixed = (3.0,) if "fixed" in name else ()
    f, theirs = (
        getattr(getattr(stats, name.split()[0]), function),
        getattr(getattr(scipy.stats, name.split()[0]), function),
    )
    onp.testing.assert_allclose(onp.asarray(f(x, *fixed, *shapes)), theirs(x, *fixed, *shapes), rtol=1e-11)
    bounded = name in ("beta", "uniform", "gamma", "chi2", "expon")
    loc, scale = (-0.05, 1.1) if bounded else (0.3, 1.7)
    onp.testing.assert_allclose(f(x, *fixed, *shapes, loc, scale), theirs(x, *fixed, *shapes, loc, scale), rtol=1e-11)
    onp.testing.assert_allclose(f(x, *fixed, *shapes, scale=scale), theirs(x, *fixed, *shapes, scale=scale), rtol=1e-11)
    count = 1 + len(shapes)
    check_grads(lambda *a: f(*a[:1], *fixed, *a[1:count], *a[count:]), x, *shapes, loc, scale)


def test_distributions_outside_of_their_support():
    for d, theirs, x in ((stats.gamma, scipy.stats.gamma, [-1.0, 2.0]), (stats.beta, scipy.stats.beta, [-0.5, 1.5])):
        shapes = (2.0,) if d is stats.gamma else (2.0, 3.0)
        onp.testing.assert_allclose(onp.asarray(d.pdf(onp.array(x), *shapes)), theirs.pdf(x, *shapes))
        onp.testing.assert_allclose(onp.asarray(d.cdf(onp.array(x), *shapes)), theirs.cdf(x, *shapes))
        assert onp.isfinite(onp.asarray(og.elementwise_grad(lambda x, d=d, s=shapes: d.pdf(x, *s))(onp.array(x)))).all()
    assert onp.asarray(stats.norm.ppf(0.5)) == 0.0  # SciPy's
    with pytest.raises(NotDifferentiable, match=r"scipy.stats.norm.ppf"):
        og.grad(lambda q: stats.norm.ppf(q))(0.5)


def test_counts_and_vectors():
    k = onp.array([0.0, 1.0, 4.0, 2.0])
    for name in ("logpmf", "pmf", "cdf"):
        f = getattr(stats.poisson, name)
        onp.testing.assert_allclose(onp.asarray(f(k, P)), getattr(scipy.stats.poisson, name)(k, P), rtol=1e-12)
        check_grads(lambda mu, f=f: f(k, mu), P)
    onp.testing.assert_allclose(
        stats.dirichlet.logpdf(U / U.sum(), P), scipy.stats.dirichlet.logpdf(U / U.sum(), P), rtol=1e-12
    )
    check_grads(lambda x, a: stats.dirichlet.pdf(x / np.sum(x), a), U, P)
    a = rng.standard_normal((3, 3))
    x, mean, cov = rng.standard_normal((2, 3)), a[0], a @ a.T + onp.eye(3)
    mvn = stats.multivariate_normal
    for f, theirs in (
        (mvn.logpdf, scipy.stats.multivariate_normal.logpdf),
        (mvn.pdf, scipy.stats.multivariate_normal.pdf),
    ):
        onp.testing.assert_allclose(onp.asarray(f(x, mean, cov)), theirs(x, mean, cov), rtol=1e-12)
        check_grads(lambda x, m, c, f=f: f(x, m, (c + c.T) / 2), x, mean, cov)
    flat = onp.diag([1.0, 2.0, 0.0])
    at = x * [1, 1, 0] + mean
    onp.testing.assert_allclose(
        onp.asarray(mvn.logpdf(at, mean, flat, allow_singular=True)),
        scipy.stats.multivariate_normal.logpdf(at, mean, flat, allow_singular=True), rtol=1e-12,
    )  # fmt: skip
    onp.testing.assert_allclose(mvn.entropy(mean, cov), scipy.stats.multivariate_normal.entropy(mean, cov))


A = rng.standard_normal((3, 3)) + 3 * onp.eye(3)
B = rng.standard_normal((3, 3))
BANDS = rng.standard_normal((4, 5)) + onp.array([0, 4.0, 0, 0])[:, None]
LINALG = {
    "expm": (lambda s, x: s.expm(x), (B,)),
    "sqrtm": (lambda s, x: s.sqrtm(x), (A,)),
    "solve_sylvester": (lambda s, a, b, q: s.solve_sylvester(a, b, q), (A, B + 3 * onp.eye(3), B)),
    "solve_triangular": (lambda s, a, b: s.solve_triangular(a, b), (A, B)),
    "solve_triangular, lower": (lambda s, a, b: s.solve_triangular(a, b, trans="T", lower=True), (A, B[0])),
    "solve_triangular, unit": (lambda s, a, b: s.solve_triangular(a, b, lower=True, unit_diagonal=True), (A, B)),
    "solve_banded": (lambda s, a, b: s.solve_banded((2, 1), a, b), (BANDS, onp.arange(5.0))),
    "solve_banded, several": (lambda s, a, b: s.solve_banded((2, 1), a, b), (BANDS, rng.standard_normal((5, 2)))),
    "cholesky": (lambda s, a: s.cholesky(a @ a.T), (A,)),
    "cho_solve": (lambda s, a, b: s.cho_solve(s.cho_factor(a @ a.T), b), (A, B[0])),
    "cho_solve, lower": (lambda s, a, b: s.cho_solve(s.cho_factor(a @ a.T, lower=True), b), (A, B)),
    "toeplitz": (lambda s, c, r: s.toeplitz(c, r) @ s.toeplitz(c), (A[0], B[0])),
    "lu": (lambda s, a: s.lu(a[[2, 0, 1]])[1] @ s.lu(a)[0] + s.lu(a)[2] ** 2 @ s.lu(a, permute_l=True)[0], (A,)),
    "lu_factor": (lambda s, a: s.lu_factor(a)[0] ** 2 @ s.lu_factor(a[[2, 0, 1]])[0], (A,)),
    "block_diag": (lambda s, a, b: s.block_diag(a, b, a[0]), (A, B[:2])),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra(name):
    f, operands = LINALG[name]
    found, expected = onp.asarray(f(linalg, *map(np.asarray, operands))), f(scipy.linalg, *operands)
    onp.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    check_grads(lambda *xs: f(linalg, *xs), *operands)


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
def test_convolution(mode):
    for a, b in ((rng.standard_normal(6), R), (rng.standard_normal((4, 5)), rng.standard_normal((2, 3)))):
        onp.testing.assert_allclose(onp.asarray(signal.convolve(a, b, mode=mode)), scipy.signal.convolve(a, b, mode))
        check_grads(lambda a, b: signal.convolve(a, b, mode=mode), a, b)
    a, b = rng.standard_normal((3, 6)), rng.standard_normal((2, 3, 4))
    found = onp.asarray(signal.convolve(a, b, axes=([1], [2]), dot_axes=([0], [1]), mode=mode))
    rows = [[scipy.signal.convolve(a[i], b[j, i], mode) for i in range(3)] for j in range(2)]
    onp.testing.assert_allclose(found, onp.sum(rows, axis=1))


def test_odeint():
    """A pendulum with friction, and the closed form of a linear equation."""
    t, y0 = onp.array([0.0, 0.4, 1.0]), onp.array([0.5, 0.1])
    tight = {"rtol": 1e-10, "atol": 1e-10}

    def pendulum(y, t, friction, length):
        return np.stack([y[1], -friction * y[1] - np.sin(y[0]) / length + 0.1 * t])

    f = lambda y0, t, friction, length: integrate.odeint(pendulum, y0, t, (friction, length), **tight)  # noqa: E731
    check_grads(f, y0, t, 0.3, 1.2, order=1, modes=("rev",), eps=1e-4)
    linear = lambda a: integrate.odeint(lambda y, t, a: a * y, onp.ones(1), t, (a,), **tight)[-1, 0]  # noqa: E731
    for order, f in enumerate((linear, og.grad(linear), og.grad(og.grad(linear)))):
        onp.testing.assert_allclose(float(f(0.7)), onp.exp(0.7) * 1.0**order, rtol=1e-7)
    assert integrate.trapezoid(P) == scipy.integrate.trapezoid(P)  # SciPy's
