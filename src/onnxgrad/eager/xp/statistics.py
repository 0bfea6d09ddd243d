"""numpy's statistics, polynomials and interpolation, composed of functions from which their derivatives follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.xp import convolution
from onnxgrad.eager.xp import elementwise as e
from onnxgrad.eager.xp import reductions as r
from onnxgrad.eager.xp.creation import linspace
from onnxgrad.eager.xp.dtypes import as_float, cast
from onnxgrad.eager.xp.indexing import getitem, take
from onnxgrad.eager.xp.manipulation import Axis, along_axis, axes_of, concat, expand_dims, join_axes, reshape, stack
from onnxgrad.eager.xp.products import diagonal_of_matrices, matmul
from onnxgrad.eager.xp.searching import argsort, searchsorted, sort
from onnxgrad.errors import BadInput

__all__ = [
    "convolve", "corrcoef", "correlate", "cov", "ediff1d", "interp", "logspace", "median", "nanmax", "nanmean",
    "nanmin", "nanprod", "nanstd", "nansum", "nanvar", "partition", "percentile", "polyval", "ptp", "quantile",
    "trapezoid", "vander",
]  # fmt: skip


# --- order statistics ------------------------------------------------------------------------------


def partition(x: Any, /, kth: Any, axis: int | None = -1) -> Array:
    """`x` sorted along `axis`, which is a partition around any element."""
    return sort(x, axis)


#: The neighbour of a fractional place, and how far it lies towards the next: by numpy's name of the method.
_METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda at: at, "lower": np.floor, "higher": np.ceil, "nearest": np.round,
    "midpoint": lambda at: (np.floor(at) + np.ceil(at)) / 2,
}  # fmt: skip


def sorted_for_quantiles(x: Any, q: Any, axis: Axis) -> tuple[Array, np.ndarray, tuple[int, ...]]:
    """The elements sorted along a new first axis in place of `axis`, the shares `q`, and the shape with kept axes.

    Raises:
        BadInput: a share is not in [0, 1], or the elements are complex.
    """
    x, shares = as_array(x), np.asarray(as_array(q)._read("a quantile's q") if isinstance(q, Array) else q)
    x = as_float(x) if isinstance(q, (int, float)) else cast(x, np.result_type(as_float(x).dtype, shares.dtype))
    q = shares.astype(float)
    if not ((q >= 0) & (q <= 1)).all():
        raise BadInput("quantiles are of q between 0 and 1, percentiles between 0 and 100")
    if x.dtype.kind == "c":
        raise BadInput(f"quantiles are of real numbers, and this array is {x.dtype}")
    flat, kept = join_axes(x, axes_of(axis, x.ndim))
    return sort(flat, axis=0), q, kept


def place_of(method: str) -> Callable[[np.ndarray], np.ndarray]:
    """The function that moves fractional places as `method` says."""
    if method not in _METHODS:
        raise BadInput(f"method is one of {', '.join(_METHODS)}, not {method!r}")
    return _METHODS[method]


def quantile(
    x: Any,
    /,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
) -> Array:
    """The `q`-quantiles along `axis`, `q` in [0, 1], interpolated by `method`.

    The methods are "linear", "lower", "higher", "nearest" and "midpoint". Where there is a NaN, the result is NaN.
    The derivative flows to the elements it lies between; `q` is constant.
    """
    between = place_of(method)
    flat, q, kept = sorted_for_quantiles(x, q, axis)
    count = flat.shape[0]
    at = between(q * (count - 1))
    low = np.minimum(np.floor(at).astype(int), count - 1)
    share = (at - low).reshape(q.shape + (1,) * (flat.ndim - 1)).astype(flat.dtype)
    below, above = take(flat, low, 0), take(flat, np.minimum(low + 1, count - 1), 0)
    y = below + (above - below) * share
    last = getitem(flat, -1)  # NaN is sorted to the end
    y = e.where(e.isnan(last), last, y)
    return reshape(y, (*q.shape, *kept)) if keepdims else y


def percentile(x: Any, /, q: Any, axis: Axis = None, *how: Any, **options: Any) -> Array:
    """The `q`-percentiles along `axis`, `q` in [0, 100]: see `quantile`."""
    return quantile(x, np.true_divide(q, 100), axis, *how, **options)


def median(
    x: Any, /, axis: Axis = None, out: None = None, overwrite_input: bool = False, keepdims: bool = False
) -> Array:
    """The median along `axis`: the mean of the two elements in the middle, which share the derivative."""
    return quantile(x, 0.5, axis, keepdims=keepdims)


def ptp(x: Any, /, axis: Axis = None, out: None = None, keepdims: bool = False) -> Array:
    """The largest minus the smallest element along `axis`."""
    return e.subtract(r.max(x, axis, keepdims=keepdims), r.min(x, axis, keepdims=keepdims))


# --- without NaN -----------------------------------------------------------------------------------


def _instead(x: Any, by: float) -> Array:
    x = as_array(x)
    return e.where(e.isnan(x), np.asarray(by, x.dtype), x) if x.dtype.kind in "fc" else x


def nansum(x: Any, /, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Array:
    """The sum along `axis` of the elements that are not NaN."""
    return r.sum(_instead(x, 0.0), axis, dtype, out, keepdims)


def nanprod(x: Any, /, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Array:
    """The product along `axis` of the elements that are not NaN."""
    return r.prod(_instead(x, 1.0), axis, dtype, out, keepdims)


def nanmax(x: Any, /, axis: Axis = None, out: None = None, keepdims: bool = False) -> Array:
    """The largest element along `axis` that is not NaN."""
    return _nan_where_none(x, r.max(_instead(x, -np.inf), axis, keepdims=keepdims), axis, keepdims)


def nanmin(x: Any, /, axis: Axis = None, out: None = None, keepdims: bool = False) -> Array:
    """The smallest element along `axis` that is not NaN."""
    return _nan_where_none(x, r.min(_instead(x, np.inf), axis, keepdims=keepdims), axis, keepdims)


def _nan_where_none(x: Any, y: Array, axis: Axis, keepdims: bool) -> Array:
    if y.dtype.kind not in "fc":
        return y
    return e.where(r.all(e.isnan(as_array(x)), axis, keepdims=keepdims), np.asarray(np.nan, y.dtype), y)


def _numbers(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    """The number of elements along `axis` that are not NaN."""
    return r.sum(cast(e.logical_not(e.isnan(x)), x._data.real.dtype), axis, keepdims=keepdims)


def nanmean(x: Any, /, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Array:
    """The mean along `axis` of the elements that are not NaN."""
    x = as_array(x)
    return e.divide(nansum(x, axis, dtype, out, keepdims), _numbers(x, axis, keepdims))


def nanvar(
    x: Any, /, axis: Axis = None, dtype: Any = None, out: None = None, ddof: float = 0, keepdims: bool = False
) -> Array:
    """The variance along `axis` of the elements that are not NaN."""
    x = as_array(x)
    away = _instead(e.subtract(x, nanmean(x, axis, keepdims=True)), 0.0)
    return e.divide(r.sum(e.square(away), axis, dtype, out, keepdims), e.subtract(_numbers(x, axis, keepdims), ddof))


def nanstd(
    x: Any, /, axis: Axis = None, dtype: Any = None, out: None = None, ddof: float = 0, keepdims: bool = False
) -> Array:
    """The standard deviation along `axis` of the elements that are not NaN."""
    return e.sqrt(nanvar(x, axis, dtype, out, ddof, keepdims))


# --- several variables -----------------------------------------------------------------------------


def cov(
    x: Any,
    /,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
) -> Array:
    """The covariance matrix of variables in the rows of `x` (and `y`), or in its columns; as in numpy."""
    parts = [_variables(z, rowvar) for z in (x, y) if z is not None]
    x = concat(parts, axis=0) if len(parts) > 1 else parts[0]
    ddof = (0 if bias else 1) if ddof is None else ddof
    weights = None
    for given in (fweights, aweights):
        if given is not None:
            weights = as_array(given) if weights is None else e.multiply(weights, given)
    if weights is None:
        away, total = x - r.mean(x, axis=1, keepdims=True), x.shape[1] - float(ddof)
        product = matmul(away, e.conj(away.T))
    else:
        mass = r.sum(weights)
        away = x - r.sum(x * weights, axis=1, keepdims=True) / mass
        both = mass if aweights is None else r.sum(e.multiply(weights, aweights)) / mass
        total = mass - both * float(ddof) if aweights is not None else mass - float(ddof)
        product = matmul(away * weights, e.conj(away.T))
    y = product / total
    return reshape(y, ()) if y.size == 1 else y


def _variables(x: Any, rowvar: bool) -> Array:
    x = as_array(x)
    x = cast(x, np.result_type(x.dtype, np.float64))
    return reshape(x, (1, -1)) if x.ndim < 2 else x if rowvar else x.T


def corrcoef(x: Any, /, y: Any = None, rowvar: bool = True) -> Array:
    """The correlation matrix of variables in the rows of `x` (and `y`), or in its columns."""
    c = cov(x, y, rowvar)
    if not c.ndim:
        return c / c
    deviation = e.sqrt(e.real(diagonal_of_matrices(c)))
    return c / expand_dims(deviation, axis=1) / deviation


def convolve(a: Any, v: Any, mode: str = "full") -> Array:
    """The convolution of two vectors; "full", "same" (as many as the longer has) or "valid"."""
    a, v = as_array(a), as_array(v)
    return convolution.convolve(*((a, v) if a.size >= v.size else (v, a)), mode=mode)


def correlate(a: Any, v: Any, mode: str = "valid") -> Array:
    """The correlation of two vectors, Σ a(n + k)·conj(v(n)): the convolution with `v` reversed and conjugated."""
    a, v = as_array(a), as_array(v)
    if a.size < v.size and mode != "full":
        return getitem(e.conj(correlate(v, a, mode)), slice(None, None, -1))
    return convolution.convolve(a, e.conj(getitem(v, slice(None, None, -1))), mode=mode)


# --- interpolation, integrals, polynomials ---------------------------------------------------------


def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Array:
    """The value at `x` of the piecewise linear function through the points (`xp`, `fp`), of ascending `xp`.

    Beyond the points it is `left` and `right`, by default the first and last value; with `period`, it is periodic.
    """
    x, xp, fp = (as_array(z) for z in (x, xp, fp))
    if period is not None:
        period = abs(period)
        x, xp = e.remainder(x, period), e.remainder(xp, period)
        order = argsort(xp)
        xp, fp = take(xp, order), take(fp, order)
        xp = concat([getitem(xp, slice(-1, None)) - period, xp, getitem(xp, slice(0, 1)) + period])
        fp = concat([getitem(fp, slice(-1, None)), fp, getitem(fp, slice(0, 1))])
    if xp.size == 1:
        y = fp * e.where(e.isnan(x), x, np.ones_like(x._data))
    else:
        at = e.clip(searchsorted(xp, x, side="right"), 1, xp.size - 1)
        x0, x1, y0, y1 = take(xp, at - 1), take(xp, at), take(fp, at - 1), take(fp, at)
        y = y0 + (x - x0) * ((y1 - y0) / (x1 - x0))
    first, last = getitem(xp, 0), getitem(xp, -1)
    y = e.where(e.less(x, first), getitem(fp, 0) if left is None else left, y)
    return e.where(e.greater(x, last), getitem(fp, -1) if right is None else right, y)


def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Array:
    """The integral of samples `y` along `axis` by the trapezoidal rule, at the places `x`, or `dx` apart."""
    y = as_array(y)
    at = axes_of(axis, y.ndim)[0]
    if x is not None:
        x = as_array(x)
        dx = along_axis(r.diff(x), at, y.ndim) if x.ndim == 1 else r.diff(x, axis=at)
    lead = (slice(None),) * at
    return r.sum(dx * (getitem(y, (*lead, slice(1, None))) + getitem(y, (*lead, slice(None, -1)))) / 2.0, axis=at)


def polyval(p: Any, x: Any) -> Array:
    """The value at `x` of the polynomial with coefficients `p`, the highest power first."""
    p, x = as_array(p), as_array(x)
    y = e.multiply(x, 0)
    for i in range(p.shape[0]):
        y = y * x + getitem(p, i)
    return y


def vander(x: Any, /, N: int | None = None, increasing: bool = False) -> Array:  # noqa: N803  (numpy's name)
    """The matrix of powers of a vector, the highest first unless `increasing`."""
    x = as_array(x)
    x = cast(x, np.promote_types(x.dtype, int))
    count = x.size if N is None else N
    powers = [e.positive(x * 0 + 1)]
    for _ in range(1, count):
        powers.append(powers[-1] * x)
    return stack((powers if increasing else powers[::-1])[:count], axis=-1)


def ediff1d(x: Any, /, to_end: Any = None, to_begin: Any = None) -> Array:
    """Differences of neighbours in the flattened array, with values before and after."""
    parts = [
        reshape(as_array(z), (-1,)) for z in (to_begin, r.diff(reshape(as_array(x), (-1,))), to_end) if z is not None
    ]
    return concat(parts, axis=0) if len(parts) > 1 else parts[0]


def logspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True, base: float = 10.0) -> Array:
    """`num` numbers from base^start to base^stop, evenly spaced on a logarithmic scale."""
    return e.exp(linspace(start, stop, num, endpoint) * math.log(base))
