"""Special functions: SciPy's values, and derivatives by the formulas of the Digital Library of Mathematical Functions.

A line for each function gives its partial derivatives as functions of the operands and the result, written with the
functions of the namespace and of this module, so that derivatives of all orders follow. An operand without a formula
(the order of a Bessel function, the shape parameters of an incomplete beta function) is refused if it is a variable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import scipy.special as _scipy

from onnxgrad.eager import numpy as np
from onnxgrad.eager.core.array import Array, as_array, refuse_tracked, tracked
from onnxgrad.eager.core.custom_derivatives import elementwise
from onnxgrad.eager.core.primitives import standard
from onnxgrad.eager.core.recording import stop_gradient
from onnxgrad.eager.xp.dtypes import as_float
from onnxgrad.eager.xp.ufuncs import module_fallback, unary

Function = Callable[..., Any]
_ROOT_PI = math.sqrt(math.pi)


def _gauss(x: Any) -> Array:
    """The derivative of erf."""
    return np.exp(-x * x) * (2 / _ROOT_PI)


def _density(x: Any) -> Array:
    """The density of the standard normal distribution."""
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


#: Of an operand that must not be a variable.
_NONE = "refused"


def _ratio(x: Any, y: Any) -> Array:
    """x / y, and 1 for 0 / 0."""
    both = np.logical_and(x == 0, y == 0)
    return np.where(both, 1.0, x) / np.where(both, 1.0, y)


def exprel_slope(x: Any, y: Any) -> Array:
    """The derivative of (eˣ − 1)/x: (eˣ − y)/x, and near 0 its series."""
    near = np.abs(x) < 1e-2
    far = np.where(near, 1.0, x)
    series = 0.5 + x / 3 + x**2 / 8 + x**3 / 30 + x**4 / 144
    return np.where(near, series, (np.exp(far) - (np.exp(far) - 1) / far) / far)


def _define_function(name: str, *slopes: Any) -> Function:
    """SciPy's function `name` with these partial derivatives, of the operands and the result."""
    kernel = getattr(_scipy, name)

    def function(*operands: Any) -> Array:
        arrays = [as_array(x) for x in operands]
        if len(arrays) != len(slopes):
            raise TypeError(f"{name} takes {len(slopes)} operands, not {len(arrays)}")
        fixed = [x for x, slope in zip(arrays, slopes) if slope is _NONE]
        refuse_tracked(f"{name} with respect to a parameter", fixed, "only its last operand may be a variable")
        return elementwise(name, kernel, [None if slope is _NONE else slope for slope in slopes], *arrays)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = (kernel.__doc__ or name).strip().split("\n\n")[1 if "(" in name else 0]
    return function


# --- DLMF §5.2, 5.15, 6.2, 7.2, 8.8, 8.17, 10.6, 10.29 ---------------------------------------------

# gamma functions
gamma: Function = _define_function("gamma", lambda x, y: y * digamma(x))
gammaln: Function = _define_function("gammaln", lambda x, y: digamma(x))
gammasgn: Function = _define_function("gammasgn", None)
loggamma: Function = _define_function("loggamma", lambda x, y: digamma(x))
rgamma: Function = _define_function("rgamma", lambda x, y: -digamma(x) * y)
digamma: Function = _define_function("digamma", lambda x, y: polygamma(1, x))
polygamma: Function = _define_function("polygamma", _NONE, lambda n, x, y: polygamma(n + 1, x))
zeta: Function = _define_function("zeta", _NONE, lambda s, q, y: -s * zeta(s + 1, q))
beta: Function = _define_function(
    "beta", lambda a, b, y: y * (digamma(a) - digamma(a + b)), lambda a, b, y: y * (digamma(b) - digamma(a + b))
)
betaln: Function = _define_function(
    "betaln", lambda a, b, y: digamma(a) - digamma(a + b), lambda a, b, y: digamma(b) - digamma(a + b)
)
betainc: Function = _define_function(
    "betainc", _NONE, _NONE, lambda a, b, x, y: np.exp(xlogy(a - 1, x) + xlog1py(b - 1, -x) - betaln(a, b))
)
_gammainc: Function = _define_function("gammainc", _NONE, lambda a, x, y: np.exp(-x + xlogy(a - 1, x) - gammaln(a)))
_gammaincc: Function = _define_function("gammaincc", _NONE, lambda a, x, y: -np.exp(-x + xlogy(a - 1, x) - gammaln(a)))
poch: Function = _define_function(
    "poch", lambda a, m, y: y * (digamma(a + m) - digamma(a)), lambda a, m, y: y * digamma(a + m)
)

# error functions, integrals
erfc: Function = _define_function("erfc", lambda x, y: -_gauss(x))
erfcx: Function = _define_function("erfcx", lambda x, y: 2 * x * y - 2 / _ROOT_PI)
erfinv: Function = _define_function("erfinv", lambda x, y: np.exp(y * y) * (_ROOT_PI / 2))
erfcinv: Function = _define_function("erfcinv", lambda x, y: -np.exp(y * y) * (_ROOT_PI / 2))
dawsn: Function = _define_function("dawsn", lambda x, y: 1 - 2 * x * y)
log_ndtr: Function = _define_function("log_ndtr", lambda x, y: np.exp(-x * x / 2 - y) / math.sqrt(2 * math.pi))
ndtri: Function = _define_function("ndtri", lambda p, y: 1 / _density(y))
expi: Function = _define_function("expi", lambda x, y: np.exp(x) / x)
exp1: Function = _define_function("exp1", lambda x, y: -np.exp(-x) / x)
expn: Function = _define_function("expn", _NONE, lambda n, x, y: ((n - 1) * y - np.exp(-x)) / x)
spence: Function = _define_function("spence", lambda x, y: -np.log(x) / np.where(x == 1, 1.0, x - 1) - (x == 1))
stdtr: Function = _define_function(
    "stdtr", _NONE, lambda n, t, y: np.exp(-betaln(0.5, n / 2) - np.log(n) / 2 - (n + 1) / 2 * np.log1p(t * t / n))
)
lambertw: Function = _define_function("lambertw", lambda z, y: np.exp(-y) / (1 + y))

# Bessel functions
j0: Function = _define_function("j0", lambda x, y: -j1(x))
j1: Function = _define_function("j1", lambda x, y: (j0(x) - jv(2, x)) / 2)
y0: Function = _define_function("y0", lambda x, y: -y1(x))
y1: Function = _define_function("y1", lambda x, y: (y0(x) - yv(2, x)) / 2)
i0: Function = _define_function("i0", lambda x, y: i1(x))
i1: Function = _define_function("i1", lambda x, y: (i0(x) + iv(2, x)) / 2)
i0e: Function = _define_function("i0e", lambda x, y: i1e(x) - np.sign(x) * y)
i1e: Function = _define_function("i1e", lambda x, y: (i0e(x) + ive(2, x)) / 2 - np.sign(x) * y)
k0: Function = _define_function("k0", lambda x, y: -k1(x))
k1: Function = _define_function("k1", lambda x, y: -(k0(x) + kv(2, x)) / 2)
jv: Function = _define_function("jv", _NONE, lambda n, x, y: (jv(n - 1, x) - jv(n + 1, x)) / 2)
yv: Function = _define_function("yv", _NONE, lambda n, x, y: (yv(n - 1, x) - yv(n + 1, x)) / 2)
iv: Function = _define_function("iv", _NONE, lambda n, x, y: (iv(n - 1, x) + iv(n + 1, x)) / 2)
ive: Function = _define_function("ive", _NONE, lambda n, x, y: (ive(n - 1, x) + ive(n + 1, x)) / 2 - np.sign(x) * y)
kv: Function = _define_function("kv", _NONE, lambda n, x, y: -(kv(n - 1, x) + kv(n + 1, x)) / 2)

# of entropy; 0·log 0 counts as 0
entr: Function = _define_function("entr", lambda x, y: -np.log(x) - 1)
rel_entr: Function = _define_function(
    "rel_entr", lambda x, y, z: np.log(_ratio(x, y)) + 1, lambda x, y, z: -_ratio(x, y)
)
kl_div: Function = _define_function("kl_div", lambda x, y, z: np.log(_ratio(x, y)), lambda x, y, z: 1 - _ratio(x, y))
logit: Function = _define_function("logit", lambda x, y: 1 / (x * (1 - x)))
exprel: Function = _define_function("exprel", lambda x, y: exprel_slope(x, y))
psi, jn, yn = digamma, jv, yv


def _gammainc_series(a: Any, x: Any) -> Array:
    """Σₙ xᵃ⁺ⁿ·e⁻ˣ / Γ(a + n + 1) (DLMF 8.7.1); all terms are positive."""
    most = float(numpy.max(x._data, initial=0.0))
    n = numpy.arange(math.ceil(most + 12 * math.sqrt(most)) + 60.0)
    empty = x == 0
    a, x = a[..., None], np.where(empty, 1.0, x)[..., None]
    return np.where(empty, 0.0, np.sum(np.exp((a + n) * np.log(x) - x - gammaln(a + n + 1)), axis=-1))


def gammainc(a: Any, x: Any, /) -> Array:
    """The regularized lower incomplete gamma function; if `a` is a variable, as a series of about x terms."""
    a, x = as_array(a), as_array(x)
    return _gammainc_series(*np.broadcast_arrays(a, x)) if tracked(a) else _gammainc(a, x)


def gammaincc(a: Any, x: Any, /) -> Array:
    """The regularized upper incomplete gamma function: 1 − `gammainc`."""
    a, x = as_array(a), as_array(x)
    return 1.0 - gammainc(a, x) if tracked(a) else _gammaincc(a, x)


# --- functions that ONNX has -----------------------------------------------------------------------


expit = unary("expit", standard("Sigmoid"), _scipy.expit)
ndtr = unary("ndtr", lambda b, x: (b.Erf(x * math.sqrt(0.5)) + 1.0) * 0.5, _scipy.ndtr)
_real_erf = unary("erf", standard("Erf"), _scipy.erf)


def erf(x: Any, /) -> Array:
    """The error function, of real and complex numbers."""
    x = as_array(x)
    return _real_erf(x) if x.dtype.kind != "c" else elementwise("erf", _scipy.erf, [lambda x, y: _gauss(x)], x)


def log_expit(x: Any, /) -> Array:
    """The logarithm of expit: −log(1 + e⁻ˣ)."""
    return -np.logaddexp(np.zeros_like(x), -as_array(x))


# --- composed functions ----------------------------------------------------------------------------


def _unless_empty(x: Any, y: Any, least: float, instead: float) -> tuple[Array, Array]:
    """Both as floats, `y` with `instead` where `x` is 0 and the logarithm is not finite: 0·log 0 counts as 0."""
    x, y = np.broadcast_arrays(as_float(x), as_float(y))
    bad = np.logical_or(y <= least, y == numpy.inf)
    return x, np.where(np.logical_and(x == 0, bad), instead, y)


def xlogy(x: Any, y: Any, /) -> Array:
    """x·log y, and 0 where `x` is 0."""
    x, y = _unless_empty(x, y, 0.0, 1.0)
    return x * np.log(y)


def xlog1py(x: Any, y: Any, /) -> Array:
    """x·log(1 + y), and 0 where `x` is 0."""
    x, y = _unless_empty(x, y, -1.0, 0.0)
    return x * np.log1p(y)


def multigammaln(a: Any, d: int) -> Array:
    """The logarithm of the multivariate gamma function: log Γ_d(a) = d(d−1)/4·log π + Σⱼ log Γ(a − j/2)."""
    a = as_array(a)
    return sum((gammaln(a - j / 2) for j in range(1, d)), gammaln(a)) + d * (d - 1) / 4 * math.log(math.pi)


def logsumexp(a: Any, axis: Any = None, b: Any = None, keepdims: bool = False, return_sign: bool = False) -> Any:
    """log Σ b·exp(a) along `axis`, without overflow; with `return_sign`, the logarithm of |Σ| and the sign."""
    a = as_array(a)
    weights = None if b is None else as_array(b)
    counted = a if weights is None else np.where(weights != 0, a, -numpy.inf)
    top = stop_gradient(np.max(counted, axis=axis, keepdims=True))
    top = np.where(np.isfinite(top), top, numpy.zeros((), top.dtype))
    terms = np.exp(counted - top) if weights is None else weights * np.exp(counted - top)
    total = np.sum(terms, axis=axis, keepdims=keepdims)
    top = top if keepdims else np.reshape(top, total.shape)
    if return_sign:
        return np.log(np.abs(total)) + top, np.sign(total)
    return np.log(total) + top


def log_softmax(x: Any, axis: Any = None) -> Array:
    """x − log Σ exp(x) along `axis`."""
    x = as_array(x)
    return x - logsumexp(x, axis=axis, keepdims=True)


def softmax(x: Any, axis: Any = None) -> Array:
    """exp(x) / Σ exp(x) along `axis`."""
    return np.exp(log_softmax(x, axis))


def binom(n: Any, k: Any) -> Array:
    """The binomial coefficient Γ(n+1) / (Γ(k+1)·Γ(n−k+1)), of real numbers."""
    n, k = as_array(n), as_array(k)
    if not tracked(n) and not tracked(k):
        return Array(numpy.asarray(_scipy.binom(n._data, k._data)))
    return rgamma(k + 1) * rgamma(n - k + 1) * gamma(n + 1)


__getattr__ = module_fallback(_scipy, "scipy.special")
