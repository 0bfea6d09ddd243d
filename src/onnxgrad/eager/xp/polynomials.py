"""numpy's polynomials, histograms and quantiles that ignore NaN, composed of functions of the namespace."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, values_of
from onnxgrad.eager.xp import elementwise as e
from onnxgrad.eager.xp import reductions as r
from onnxgrad.eager.xp.creation import linspace
from onnxgrad.eager.xp.dtypes import as_float, cast, promoted
from onnxgrad.eager.xp.indexing import getitem
from onnxgrad.eager.xp.linalg import lstsq
from onnxgrad.eager.xp.manipulation import Axis, broadcast_arrays, concat, expand_dims, reshape
from onnxgrad.eager.xp.products import matmul
from onnxgrad.eager.xp.searching import take_along_axis
from onnxgrad.eager.xp.statistics import convolve, place_of, sorted_for_quantiles, vander
from onnxgrad.errors import BadInput

__all__ = [
    "bincount", "geomspace", "histogram", "nanmedian", "nanpercentile", "nanquantile", "polyadd", "polyder", "polyfit",
    "polyint", "polymul", "polysub",
]  # fmt: skip

# --- polynomials, the highest power first ----------------------------------------------------------


def _vector(p: Any) -> Array:
    return reshape(as_array(p), (-1,))


def _align_lengths(p: Any, q: Any) -> list[Array]:
    a, b = promoted(_vector(p), _vector(q))
    size = max(a.size, b.size)
    return [concat([Array(np.zeros(size - x.size, x.dtype)), x]) for x in (a, b)]


def polyadd(p: Any, q: Any, /) -> Array:
    """The sum of two polynomials."""
    return e.add(*_align_lengths(p, q))


def polysub(p: Any, q: Any, /) -> Array:
    """The difference of two polynomials."""
    return e.subtract(*_align_lengths(p, q))


def polymul(p: Any, q: Any, /) -> Array:
    """The product of two polynomials."""
    return convolve(_vector(p), _vector(q))


def polyder(p: Any, /, m: int = 1) -> Array:
    """The derivative of order `m` of a polynomial."""
    p = _vector(p)
    for _ in range(m):
        p = e.multiply(getitem(p, slice(None, -1)), np.arange(p.size - 1.0, 0.0, -1.0).astype(p.dtype))
    return p


def polyint(p: Any, /, m: int = 1, k: Any = 0) -> Array:
    """The antiderivative of order `m` of a polynomial, with the constants `k` of integration."""
    p = as_float(_vector(p))
    constants = reshape(e.multiply(as_array(k, p.dtype), np.ones(max(m, 1), p.dtype)), (-1,))
    for i in range(m):
        p = concat([e.divide(p, np.arange(p.size, 0, -1.0).astype(p.dtype)), getitem(constants, slice(i, i + 1))])
    return p


def polyfit(x: Any, y: Any, deg: int, w: Any = None) -> Array:
    """The polynomial of degree `deg` that fits points best, in the sense of least squares weighted by `w`."""
    x, y = promoted(x, y)
    a = vander(x, deg + 1)
    if w is not None:
        weights = as_array(w)
        a = e.multiply(a, expand_dims(weights, axis=1))
        y = e.multiply(y, weights if y.ndim == 1 else expand_dims(weights, axis=1))
    scale = e.sqrt(r.sum(e.square(a), axis=0))
    c = lstsq(e.divide(a, scale), y)[0]
    return e.divide(c, scale if c.ndim == 1 else expand_dims(scale, axis=1))


def geomspace(start: Any, stop: Any, num: int = 50, endpoint: bool = True) -> Array:
    """`num` numbers from `start` to `stop`, each the same multiple of the one before."""
    first, last = map(as_float, promoted(start, stop))
    first, last = broadcast_arrays(first, last)
    weights = np.linspace(0.0, 1.0, num, endpoint=endpoint).astype(first.dtype).reshape(-1, *[1] * first.ndim)
    return e.multiply(first, e.pow(e.divide(last, first), weights))


# --- counts ----------------------------------------------------------------------------------------


def _count_places(places: np.ndarray, weights: Any, count: int) -> Array:
    """The sums of the `weights` of each of `count` places; a place outside counts for none."""
    w = as_float(_vector(weights))
    return matmul(w, (places[:, None] == np.arange(count)).astype(w.dtype))


def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> Array:
    """The number of each whole number in `x`, or the sum of their `weights`."""
    places = np.asarray(as_array(x)._read("bincount"))
    if weights is None:
        return Array(np.bincount(places, minlength=minlength))
    return _count_places(places, weights, max(int(places.max(initial=-1)) + 1, minlength))


def histogram(
    x: Any, bins: Any = 10, range: tuple[float, float] | None = None, density: bool | None = None, weights: Any = None
) -> tuple[Array, Array]:
    """The number of elements of `x` in each bin, or the sum of their `weights`, and the edges of the bins.

    The numbers are constant in `x`; the edges depend on its extrema where `range` is not given.
    """
    x = reshape(as_array(x), (-1,))
    held = values_of("histogram", x)
    if isinstance(bins, str):
        raise BadInput("`bins` is a number or edges")
    edges = as_array(bins)
    if edges.ndim == 0:
        low, high = (r.min(x), r.max(x)) if range is None else map(as_array, range)
        if float(low._data) == float(high._data):
            low, high = e.subtract(low, 0.5), e.add(high, 0.5)
        edges = linspace(low, high, int(edges._data) + 1)
    steps = values_of("histogram", edges)
    places = np.searchsorted(steps, held, side="right") - 1
    places[held == steps[-1]] = steps.size - 2
    counts = Array(np.bincount(places[(places >= 0) & (places < steps.size - 1)], minlength=steps.size - 1))
    if weights is not None:
        counts = _count_places(places, weights, steps.size - 1)
    if density:
        width = e.subtract(getitem(edges, slice(1, None)), getitem(edges, slice(None, -1)))
        counts = e.divide(e.divide(cast(counts, np.float64), width), cast(r.sum(counts), np.float64))
    return counts, edges


# --- quantiles -------------------------------------------------------------------------------------


def nanquantile(
    x: Any,
    /,
    q: Any,
    axis: Axis = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
) -> Array:
    """The `q`-quantiles along `axis` of the elements that are not NaN; the rest is as of `quantile`."""
    between = place_of(method)
    flat, q, kept = sorted_for_quantiles(x, q, axis)
    numbers = np.sum(~np.isnan(values_of("nanquantile", flat)), axis=0)
    at = between(np.maximum(q.reshape(-1, *(1,) * (flat.ndim - 1)) * (numbers - 1.0), 0))
    low = np.floor(at).astype(int)
    high = np.minimum(low + 1, np.maximum(numbers - 1, 0))
    below, above = take_along_axis(flat, low, axis=0), take_along_axis(flat, high, axis=0)
    y = e.add(below, e.multiply(e.subtract(above, below), (at - low).astype(flat.dtype)))
    return reshape(y, (*q.shape, *kept) if keepdims else (*q.shape, *flat.shape[1:]))


def nanpercentile(x: Any, /, q: Any, axis: Axis = None, *how: Any, **options: Any) -> Array:
    """The `q`-percentiles along `axis` of the elements that are not NaN, `q` in [0, 100]: see `nanquantile`."""
    return nanquantile(x, np.true_divide(q, 100), axis, *how, **options)


def nanmedian(
    x: Any, /, axis: Axis = None, out: None = None, overwrite_input: bool = False, keepdims: bool = False
) -> Array:
    """The median along `axis` of the elements that are not NaN."""
    return nanquantile(x, 0.5, axis, keepdims=keepdims)
