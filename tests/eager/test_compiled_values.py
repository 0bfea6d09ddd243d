"""Compiled functions at values that the trace did not see: nothing of the first call may stay in their graphs."""

import warnings

import numpy
import pytest

import onnxgrad.eager as og
import onnxgrad.eager.numpy as np
from onnxgrad.eager.scipy import special
from onnxgrad.errors import BadInput

RNG = numpy.random.default_rng(0)
FLOATS = RNG.standard_normal((3, 4))
COUNTS = numpy.array([[1, 2, 0, 1], [2, 1, 0, 0], [0, 0, 3, 2]])
PLACES, HEIGHTS = numpy.linspace(-1.5, 2.0, 5), RNG.standard_normal(5)

#: functions of an array of integers, and of one of floats
OF_COUNTS = """
np.eye(4)[a] | np.eye(4)[a[0], 1:] | np.arange(12.0).reshape(4, 3)[a[:, 0], 1] | np.arange(4.0)[a[0, 0]]
np.linalg.norm(a) | np.linalg.norm(a, axis=0) | np.linalg.norm(a, 1) | np.linalg.norm(a, ord=3, axis=1)
np.linalg.matrix_power(a[:, :3], 2) | np.fft.fft(a).real | np.fft.rfft2(a).imag | np.fft.irfft(a)
np.r_[a[0], 1] | np.c_[a[0], a[1]] | np.interp(a, [0.0, 1.0, 2.0], [0.0, 1.0, 4.0]) | a**2.5 | a**2 | np.cov(a)
np.searchsorted([0, 1, 2], a) | np.searchsorted([0, 1, 2], a, side="right") | np.sqrt(a) | np.exp(a) | np.tanh(a)
np.angle(a) | np.arctan2(a, 1) | np.hypot(a, 1) | np.logaddexp(a, 1) | np.copysign(a, -1) | np.heaviside(a, 1)
special.erf(a) | special.logsumexp(a) | np.clip(a, 0.5, 1.5) | a / 2 | a.astype("int16") / np.int16(2) | np.floor(a)
(a > 0) + (a > 1) | (a > 0) * (a > 1) | np.maximum(a > 0, a > 1) | np.minimum(a > 0, a > 1) | np.argmax(a > 1, axis=1)
np.sqrt(a > 0) | np.logical_not(a) | np.logical_and(a, a > 1) | np.logical_or(a, 0.5) | np.logical_xor(a, a > 1)
"""
OF_FLOATS = """
np.interp(a, PLACES, HEIGHTS) | np.interp(a, np.cumsum(np.abs(a[0])), a[1], period=2.0) | np.logical_not(np.floor(a))
np.searchsorted(np.sort(a[0]), a) | np.searchsorted(a[0], a[1], sorter=np.argsort(a[0])) | a * np.size(a) * np.ndim(a)
a * np.shape(a)[1] * np.iscomplexobj(a) | np.gradient(a, 0.5, axis=0) | np.clip(a, -0.5, 0.5) | np.percentile(a, 30)
"""
REFUSED = "np.gcd(a, 3) | np.unique(a) | np.choose(a, [1, 2, 3, 4]) | np.arange(4.0)[a > 1] | special.binom(a, 1)"


def expressions(text):
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]


def function(text):
    return eval(f"lambda a: {text}", {"np": np, "special": special, "PLACES": PLACES, "HEIGHTS": HEIGHTS})


@pytest.mark.parametrize("text", [*expressions(OF_COUNTS), *expressions(OF_FLOATS)])
def test_nothing_of_the_first_call_stays(text):
    f, first = function(text), COUNTS if text in OF_COUNTS else FLOATS
    compiled = og.jit(f)
    compiled(first)
    for other in (first[::-1] * first[::-1] % 4, (first + 1)[:, ::-1] % 4):
        found, expected = compiled(other), f(np.asarray(other))
        assert found.dtype == expected.dtype
        numpy.testing.assert_allclose(numpy.asarray(found), numpy.asarray(expected), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("text", expressions(REFUSED))
def test_what_depends_on_integers_in_python_is_refused(text):
    with pytest.raises(BadInput, match="cannot be recorded as ONNX"):
        og.jit(function(text))(COUNTS)


NAN, INF = numpy.nan, numpy.inf
PAIRS = numpy.meshgrid([0.0, -0.0, 1.0, -2.5, 0.4, 1e-17, 1e-5, -0.3, 1e17, 800.0, INF, -INF, NAN], [
    0.0, 1.0, -2.5, 0.1, 1e-10, -0.3, -1e17, 700.0, INF, -INF, NAN
])  # fmt: skip
X, Y = (a.reshape(-1) for a in PAIRS)
HOLES = numpy.array([[NAN, INF, 1.0, -INF, 2.0], [1.0, 2.0, NAN, 3.0, INF], [1.0, 3.0, 3.0, -1.0, NAN]])
AT_THE_EDGES = """
np.expm1(x) | np.log1p(x) | np.logaddexp(x, y) | np.hypot(x, y) | np.arctan2(y, x) | x % y | x // y | np.fmod(x, y)
special.xlogy(x, y) | special.xlog1py(x, y) | np.expm1(x.astype("float32")) | np.log1p(x.astype("float32"))
np.max(h, axis=1) | np.max(h, axis=0) | np.min(h, axis=1) | np.min(h, axis=0) | np.argmax(h, axis=1) | np.ptp(h, axis=0)
np.argmin(h, axis=0) | np.sort(h) | np.argsort(h, axis=0) | np.median(h, axis=1) | np.mean(h[:0], axis=0)
np.all(h[:0], axis=0) | np.any(h[:0], axis=0) | np.max(h[:0], axis=0, initial=2.0) | np.logaddexp2(x, y)
"""


@pytest.mark.parametrize("text", expressions(AT_THE_EDGES))
def test_values_at_the_edges(text):
    """Rounding, infinities and NaN: a compiled function has numpy's values."""
    f = eval(f"lambda x, y, h: {text}", {"np": np, "special": special})
    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of means of nothing
        found, expected = og.jit(f)(X, Y, HOLES), f(*map(np.asarray, (X, Y, HOLES)))
    assert found.dtype == expected.dtype
    rtol = 1e-6 if found.dtype == "float32" else 1e-13
    numpy.testing.assert_allclose(numpy.asarray(found), numpy.asarray(expected), rtol=rtol)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8"])
def test_quotients_of_all_integers(dtype):
    """By 0, by −1 of the least integer, and where the difference of number and remainder overflows."""
    info = numpy.iinfo(dtype)
    x, y = (a.reshape(-1) for a in numpy.meshgrid(*[numpy.array([info.min, info.max, 0, 1, 2, 7], dtype)] * 2))
    x, y = numpy.concatenate([x, -x]), numpy.concatenate([y, y])
    with numpy.errstate(all="ignore"):
        numpy.testing.assert_array_equal(numpy.asarray(og.jit(np.floor_divide)(x, y)), x // y)
        numpy.testing.assert_array_equal(numpy.asarray(og.jit(np.remainder)(x, y)), x % y)


def test_derivatives_of_logarithms_of_sums_at_the_edges():
    x, y = numpy.array([0.3, 800.0, -INF, INF, -INF, 1.0]), numpy.array([0.3, -800.0, 1.0, 1.0, -INF, INF])
    expected = [0.5, 1.0, 0.0, 1.0], [0.5, 0.0, 1.0, 0.0]
    for transform in (lambda f: f, og.jit):
        found = transform(og.grad(lambda x, y: np.sum(np.logaddexp(x, y)), (0, 1)))(x, y)
        for g, e in zip(found, expected, strict=True):
            numpy.testing.assert_allclose(numpy.asarray(g)[:4], e, atol=1e-15)
            assert numpy.isfinite(numpy.asarray(g)).all()
    second = og.hessian(lambda v: np.logaddexp(v[0], v[1]))(numpy.array([0.3, 0.3]))
    numpy.testing.assert_allclose(numpy.asarray(second), [[0.25, -0.25], [-0.25, 0.25]])


def test_gradients_of_an_interpolation_are_those_of_the_values_of_each_call():
    def f(x, heights):
        return np.sum(np.interp(x, PLACES, heights) ** 2)

    compiled = og.jit(og.grad(f, argnums=(0, 1)))
    for x in (FLOATS, FLOATS[::-1] * 2, numpy.array([-9.0, 0.1, 9.0])):
        for found, expected in zip(compiled(x, HEIGHTS), og.grad(f, argnums=(0, 1))(x, HEIGHTS), strict=True):
            numpy.testing.assert_allclose(numpy.asarray(found), numpy.asarray(expected), rtol=1e-10)


def test_an_array_in_the_shape_that_it_has_is_another_array():
    def f(x):
        y = np.reshape(x, x.shape)
        y[0] = 5.0
        return np.sum(x * y) + np.sum(np.roll(x, 1) * x[::-1])

    x = FLOATS[0]
    expected = og.grad(lambda x: np.sum(x[1:] ** 2) + 5 * x[0] + np.sum(np.concat([x[-1:], x[:-1]]) * x[::-1]))(x)
    numpy.testing.assert_allclose(numpy.asarray(og.grad(f)(x)), numpy.asarray(expected))
    model = og.export(lambda x: np.roll(x, 1), x)
    assert "Reshape" not in [n.op_type for n in model.graph.node]
