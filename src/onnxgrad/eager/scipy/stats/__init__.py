"""Probability distributions: densities, and distribution functions where their derivative is known.

One table has the logarithm of each density, for a location of 0 and a scale of 1. Other methods of a distribution
(``rvs``, ``mean``, …) are SciPy's, and accept only numbers without a derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import scipy.stats as _scipy

from onnxgrad.eager import numpy as np
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.scipy import special as s
from onnxgrad.eager.scipy.stats import dirichlet, multivariate_normal
from onnxgrad.eager.xp.ufuncs import module_fallback

__all__ = [
    "beta", "cauchy", "chi2", "dirichlet", "expon", "gamma", "laplace", "logistic", "multivariate_normal", "norm",
    "poisson", "t", "uniform",
]  # fmt: skip

Function = Callable[..., Any]


class Continuous:
    """A continuous distribution, of z = (x − loc) / scale.

    Args:
        name: its name in SciPy.
        logpdf: the logarithm of its density, of z and the parameters of its shape.
        functions: "cdf", "logcdf", "sf", "logsf", of the same.
        support: where the density is not 0: the bounds of z.
    """

    def __init__(
        self,
        name: str,
        shapes: int,
        logpdf: Function,
        support: tuple[float, float] = (-math.inf, math.inf),
        **functions: Any,
    ) -> None:
        self._shapes, self._logpdf, self._functions = shapes, logpdf, functions
        self._support = support
        self._outside = module_fallback(getattr(_scipy, name), f"scipy.stats.{name}")

    def _standard(self, x: Any, args: tuple[Any, ...], how: dict[str, Any]) -> tuple[Array, tuple[Any, ...], Any]:
        shapes, rest = args[: self._shapes], args[self._shapes :]
        loc, scale = (how | dict(zip(("loc", "scale"), rest))).get("loc", 0.0), 1.0
        scale = rest[1] if len(rest) > 1 else how.get("scale", 1.0)
        return (as_array(x) - loc) / scale, shapes, scale

    def logpdf(self, x: Any, *args: Any, **how: Any) -> Array:
        """The logarithm of the density at `x`, of the parameters of the shape, ``loc=0`` and ``scale=1``."""
        z, shapes, scale = self._standard(x, args, how)
        low, high = self._support
        if low == -math.inf:
            return self._logpdf(z, *shapes) - np.log(scale)
        inside = np.logical_and(np.greater_equal(z, low), np.less_equal(z, high))
        safe = np.where(inside, z, low + 0.5)
        return np.where(inside, self._logpdf(safe, *shapes) - np.log(scale), -math.inf)

    def pdf(self, x: Any, *args: Any, **how: Any) -> Array:
        """The density at `x`."""
        return np.exp(self.logpdf(x, *args, **how))

    def __getattr__(self, name: str) -> Any:
        made = self.__dict__.get("_functions", {}).get(name)
        if made is None:
            return self.__dict__["_outside"](name)

        def function(x: Any, *args: Any, **how: Any) -> Array:
            z, shapes, _ = self._standard(x, args, how)
            low, high = self._support
            return made(z if low == -math.inf else np.clip(z, low, high), *shapes)

        function.__name__ = name
        return function


_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

norm = Continuous(
    "norm", 0, lambda z: -z * z / 2 - _HALF_LOG_2PI, cdf=s.ndtr, sf=lambda z: s.ndtr(-z), logcdf=s.log_ndtr,
    logsf=lambda z: s.log_ndtr(-z),
)  # fmt: skip
t = Continuous(
    "t", 1, lambda z, df: -(df + 1) / 2 * np.log1p(z * z / df) - s.betaln(0.5, as_array(df) / 2) - np.log(df) / 2,
    cdf=lambda z, df: s.stdtr(df, z), sf=lambda z, df: s.stdtr(df, -z), logcdf=lambda z, df: np.log(s.stdtr(df, z)),
    logsf=lambda z, df: np.log(s.stdtr(df, -z)),
)  # fmt: skip
gamma = Continuous(
    "gamma", 1, lambda z, a: s.xlogy(as_array(a) - 1, z) - z - s.gammaln(a), (0, math.inf),
    cdf=lambda z, a: s.gammainc(a, z), sf=lambda z, a: s.gammaincc(a, z),
)  # fmt: skip
beta = Continuous(
    "beta", 2,
    lambda z, a, b: s.xlogy(as_array(a) - 1, z) + s.xlog1py(as_array(b) - 1, -z) - s.betaln(a, b), (0, 1),
    cdf=lambda z, a, b: s.betainc(a, b, z),
)  # fmt: skip
chi2 = Continuous(
    "chi2", 1, lambda z, k: gamma.logpdf(z, as_array(k) / 2, scale=2.0), (0, math.inf),
    cdf=lambda z, k: s.gammainc(as_array(k) / 2, z / 2), sf=lambda z, k: s.gammaincc(as_array(k) / 2, z / 2),
)  # fmt: skip
expon = Continuous("expon", 0, lambda z: -z, (0, math.inf), cdf=lambda z: -np.expm1(-z), sf=lambda z: np.exp(-z))
uniform = Continuous("uniform", 0, lambda z: 0 * z, (0, 1), cdf=lambda z: z, sf=lambda z: 1 - z)
laplace = Continuous("laplace", 0, lambda z: -np.abs(z) - math.log(2))
cauchy = Continuous(
    "cauchy", 0, lambda z: -np.log1p(z * z) - math.log(math.pi), cdf=lambda z: np.atan(z) / math.pi + 0.5
)
logistic = Continuous(
    "logistic", 0, lambda z: s.log_expit(z) + s.log_expit(-z), cdf=s.expit, sf=lambda z: s.expit(-z),
    logcdf=s.log_expit, logsf=lambda z: s.log_expit(-z),
)  # fmt: skip


class Poisson:
    """The Poisson distribution of counts `k`, which carry no derivative, with the mean `mu`."""

    def logpmf(self, k: Any, mu: Any, loc: int = 0) -> Array:
        """The logarithm of the probability of `k`."""
        k = as_array(k) - loc
        return s.xlogy(k, mu) - s.gammaln(k + 1) - mu

    def pmf(self, k: Any, mu: Any, loc: int = 0) -> Array:
        """The probability of `k`."""
        return np.exp(self.logpmf(k, mu, loc))

    def cdf(self, k: Any, mu: Any, loc: int = 0) -> Array:
        """The probability of at most `k`."""
        return s.gammaincc(np.floor(as_array(k) - loc) + 1, mu)

    def __getattr__(self, name: str) -> Any:
        return module_fallback(_scipy.poisson, "scipy.stats.poisson")(name)


poisson = Poisson()

__getattr__ = module_fallback(_scipy, "scipy.stats")
