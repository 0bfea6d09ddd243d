"""Elementwise functions of numpy beyond the array API standard."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, values_of
from onnxgrad.eager.core.custom_derivatives import elementwise
from onnxgrad.eager.core.primitives import standard
from onnxgrad.eager.xp import elementwise as e
from onnxgrad.eager.xp.dtypes import as_float, cast, promoted
from onnxgrad.eager.xp.ufuncs import binary

__all__ = ["divmod", "fix", "float_power", "fmod", "heaviside", "i0", "ldexp", "modf", "unwrap"]

fix = e.trunc
fmod = binary("fmod", standard("Mod", fmod=1), np.fmod)


def divmod(x1: Any, x2: Any, /) -> tuple[Array, Array]:
    """The quotient rounded down, and the remainder."""
    return e.floor_divide(x1, x2), e.remainder(x1, x2)


def modf(x: Any, /) -> tuple[Array, Array]:
    """The fractional part and the integral part, both with the sign of `x`."""
    x = as_float(x)
    whole = e.trunc(x)
    return e.where(e.isinf(x), np.zeros((), x.dtype), e.subtract(x, whole)), whole


def float_power(x1: Any, x2: Any, /) -> Array:
    """x1 to the power x2, in double precision."""
    return e.pow(*(cast(x, np.result_type(x.dtype, np.float64)) for x in promoted(x1, x2)))


def ldexp(x1: Any, x2: Any, /) -> Array:
    """x1·2^x2, for integers x2."""
    x = as_float(x1)
    return e.multiply(x, cast(e.exp2(cast(as_array(x2), np.float64)), x.dtype))


def heaviside(x1: Any, x2: Any, /) -> Array:
    """0 where `x1` is negative, 1 where it is positive, `x2` where it is 0."""
    x, y = map(as_float, promoted(x1, x2))
    step = e.where(e.greater(x, 0), np.ones((), x.dtype), np.zeros((), x.dtype))
    return e.where(e.isnan(x), x, e.where(e.equal(x, 0), y, step))


#: Above, exp(x) is infinite.
_LARGEST = 710


def _moment(k: int, x: np.ndarray) -> np.ndarray:
    """(1/π)·∫₀^π cosᵏθ·exp(x·cos θ) dθ by the trapezoidal rule, which converges geometrically; numpy's I₀ for k = 0."""
    if k == 0:
        return np.i0(x)
    most = np.max(np.abs(x), initial=0, where=np.abs(x) < _LARGEST)
    count = 64 + 4 * math.ceil(float(most))
    cosines = np.cos((np.arange(count) + 0.5) * (math.pi / count))
    return np.asarray(sum(c**k * np.exp(x * c) for c in cosines) / count).astype(x.dtype)


def _bessel(k: int, x: Array) -> Array:
    return elementwise("i0", functools.partial(_moment, k), [lambda x, y: _bessel(k + 1, x)], x)


def i0(x: Any, /) -> Array:
    """The modified Bessel function of the first kind, of order 0."""
    return _bessel(0, as_float(x))


def unwrap(p: Any, /, discont: float | None = None, axis: int = -1, *, period: float = 2 * math.pi) -> Array:
    """Phases with multiples of `period` added, so that neighbours along `axis` differ by at most half of it.

    The multiples are constant.
    """
    p = as_float(p)
    values = values_of("unwrap", p)
    return e.add(p, np.asarray(np.unwrap(values, discont, axis, period=period) - values, p.dtype))
