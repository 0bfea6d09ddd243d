"""Functions of numpy beyond the array API standard, composed of its functions, from which their derivatives follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, plain, tracked, values_of, wrapped
from onnxgrad.eager.xp import elementwise as e
from onnxgrad.eager.xp.dtypes import as_float, promoted
from onnxgrad.eager.xp.elementwise import where
from onnxgrad.eager.xp.indexing import getitem
from onnxgrad.eager.xp.manipulation import (
    along_axis,
    at_least,
    axes_of,
    concat,
    expand_dims,
    flip,
    moveaxis,
    reshape,
    split,
    swapaxes,
)
from onnxgrad.eager.xp.padding import pad
from onnxgrad.eager.xp.products import diagonal_of_matrices
from onnxgrad.eager.xp.reductions import cumulative_prod, cumulative_sum, mean, sum
from onnxgrad.eager.xp.ufuncs import unary
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var

__all__ = [
    "angle", "append", "array_split", "atleast_1d", "atleast_2d", "atleast_3d", "average", "c_", "cbrt",
    "column_stack", "cumprod", "cumsum", "deg2rad", "degrees", "diag", "dsplit", "dstack", "fliplr", "flipud", "fmax",
    "fmin", "gradient", "hsplit", "hstack", "kron", "logaddexp2", "nan_to_num", "nancumprod", "nancumsum",
    "r_", "rad2deg", "radians", "real_if_close", "rollaxis", "rot90", "select", "sinc", "vsplit", "vstack",
]  # fmt: skip

# --- elements --------------------------------------------------------------------------------------


def angle(z: Any, /, deg: bool = False) -> Array:
    """The argument of complex numbers."""
    y = e.atan2(e.imag(z), e.real(z))
    return y * (180 / math.pi) if deg else y


def deg2rad(x: Any, /) -> Array:
    """Degrees as radians."""
    return e.multiply(x, math.pi / 180)


def rad2deg(x: Any, /) -> Array:
    """Radians as degrees."""
    return e.multiply(x, 180 / math.pi)


radians, degrees = deg2rad, rad2deg


def fmax(x1: Any, x2: Any, /) -> Array:
    """The elementwise maximum, ignoring NaN."""
    a, b = promoted(x1, x2)
    return where(e.isnan(a), b, where(e.isnan(b), a, e.maximum(a, b)))


def fmin(x1: Any, x2: Any, /) -> Array:
    """The elementwise minimum, ignoring NaN."""
    a, b = promoted(x1, x2)
    return where(e.isnan(a), b, where(e.isnan(b), a, e.minimum(a, b)))


def logaddexp2(x1: Any, x2: Any, /) -> Array:
    """log₂(2^x1 + 2^x2)."""
    a, b = promoted(x1, x2)
    return e.logaddexp(a * math.log(2), b * math.log(2)) * (1 / math.log(2))


def nan_to_num(x: Any, /, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Array:
    """`x` with NaN and infinities replaced (by 0 and the largest finite numbers), with derivative 0."""
    x = as_array(x)
    if x.dtype.kind != "f":
        return x
    most = float(np.finfo(x.dtype).max)
    x = where(e.isnan(x), np.asarray(nan, x.dtype), x)
    x = where(e.equal(x, np.inf), np.asarray(most if posinf is None else posinf, x.dtype), x)
    return where(e.equal(x, -np.inf), np.asarray(-most if neginf is None else neginf, x.dtype), x)


def sinc(x: Any, /) -> Array:
    """sin πx / πx; near 0 its series, which keeps the derivatives accurate."""
    y = e.multiply(x, math.pi)
    near = e.less(e.abs(y), 0.01)
    s = where(near, y, np.zeros((), y.dtype)) ** 2
    far = where(near, np.ones((), y.dtype), y)
    return where(near, 1.0 - s / 6 + s**2 / 120 - s**3 / 5040, e.sin(far) / far)


def cbrt(x: Any, /) -> Array:
    """The real cube root."""
    return _cbrt(as_float(x))


def _signed_root(b: Builder, x: Var) -> Var:
    """s·(s·x)^⅓ with the sign s, which is 1 at 0; the slope at 0 is infinite."""
    sign = b.Where(b.Less(x, b.const(0, x.dtype)), b.const(-1, x.dtype), b.const(1, x.dtype))
    return sign * b.Pow(sign * x, b.const(1 / 3, x.dtype))


_cbrt = unary("cbrt", _signed_root, np.cbrt)


def real_if_close(x: Any, /, tol: float = 100.0) -> Array:
    """The real part of complex numbers if all imaginary parts are below `tol` machine epsilons; else the numbers."""
    x = as_array(x)
    return (
        e.real(x)
        if x.dtype.kind == "c" and np.real_if_close(values_of("real_if_close", x), tol).dtype.kind == "f"
        else x
    )


# --- joins and splits ------------------------------------------------------------------------------


def _at_least(x: Any, rank: int) -> Array:
    x = as_array(x)
    if rank == 3 and x.ndim == 2:
        return expand_dims(x, axis=2)
    if rank == 3 and x.ndim == 1:
        return expand_dims(x, axis=(0, 2))
    return at_least(x, rank)


def _all_at_least(arrays: tuple[Any, ...], rank: int) -> Any:
    found = tuple(_at_least(x, rank) for x in arrays)
    return found[0] if len(found) == 1 else found


def atleast_1d(*arrays: Any) -> Any:
    """Arrays with at least one axis."""
    return _all_at_least(arrays, 1)


def atleast_2d(*arrays: Any) -> Any:
    """Arrays with at least two axes; a vector becomes a row."""
    return _all_at_least(arrays, 2)


def atleast_3d(*arrays: Any) -> Any:
    """Arrays with at least three axes; a vector becomes (1, n, 1), a matrix (m, n, 1)."""
    return _all_at_least(arrays, 3)


def hstack(arrays: Sequence[Any], /) -> Array:
    """The arrays joined along the second axis; vectors along the first."""
    parts = [at_least(x, 1) for x in arrays]
    return concat(parts, axis=0 if parts[0].ndim == 1 else 1)


def vstack(arrays: Sequence[Any], /) -> Array:
    """The arrays joined along the first axis; vectors become rows."""
    return concat([at_least(x, 2) for x in arrays], axis=0)


def dstack(arrays: Sequence[Any], /) -> Array:
    """The arrays joined along the third axis."""
    return concat([_at_least(x, 3) for x in arrays], axis=2)


def column_stack(arrays: Sequence[Any], /) -> Array:
    """The arrays joined along the second axis; vectors become columns."""
    parts = [as_array(x) for x in arrays]
    return concat([x if x.ndim > 1 else reshape(x, (-1, 1)) for x in parts], axis=1)


def array_split(x: Any, sections: int | Sequence[int], /, axis: int = 0) -> list[Array]:
    """Split into parts like `split`; the parts may differ in size."""
    x = as_array(x)
    if isinstance(sections, int):
        short, more = divmod(x.shape[axis], sections)
        sections = [i * short + min(i, more) for i in range(1, sections)]
    return split(x, sections, axis=axis)


def hsplit(x: Any, sections: int | Sequence[int], /) -> list[Array]:
    """Parts side by side."""
    return split(x, sections, axis=min(as_array(x).ndim - 1, 1))


def vsplit(x: Any, sections: int | Sequence[int], /) -> list[Array]:
    """Parts one below the other."""
    return split(x, sections, axis=0)


def dsplit(x: Any, sections: int | Sequence[int], /) -> list[Array]:
    """Parts along the third axis."""
    return split(x, sections, axis=2)


def append(x: Any, values: Any, axis: int | None = None) -> Array:
    """`values` joined to the end of `x` along `axis`; by default, of the flattened arrays."""
    return concat([as_array(x), as_array(values)], axis)


class _Join:
    """``r_[x, y, 0:3]`` and ``c_[x, y]``: arrays, numbers and ranges joined as in numpy."""

    def __init__(self, numpys: Any, axis: int, at: int, least: int) -> None:
        self._numpys, self._axis, self._at, self._least = numpys, axis, at, least

    def __getitem__(self, key: Any) -> Array:
        """The arrays of `key` joined."""
        keys = key if isinstance(key, tuple) else (key,)
        if not tracked(list(keys)):
            return wrapped(self._numpys[tuple(map(plain, keys))])
        axis, at, least = self._axis, self._at, self._least
        if isinstance(keys[0], str):
            first, keys = keys[0], keys[1:]
            try:
                axis, least, at = (*map(int, first.split(",")), least, -1)[:3] if "," in first else (int(first), 1, -1)
            except ValueError as error:
                raise BadInput(f"{first!r}: here the first string is axes, such as '0,2'") from error
        parts = []
        for k in keys:
            x = wrapped(np.r_[k]) if isinstance(k, slice) else as_array(k)
            if x.ndim < least:
                new = least - x.ndim
                lead = new if at == -1 else min(at, new)
                x = reshape(x, (1,) * lead + x.shape + (1,) * (new - lead))
            parts.append(x)
        return concat([reshape(x, (1,)) if x.ndim == 0 else x for x in parts], axis)


r_, c_ = _Join(np.r_, 0, -1, 1), _Join(np.c_, -1, 0, 2)


def select(conditions: Sequence[Any], choices: Sequence[Any], default: Any = 0) -> Array:
    """Elements of the first of `choices` whose condition is true, else `default`."""
    y = as_array(default, as_array(choices[0]).dtype)
    for condition, choice in zip(reversed(list(conditions)), reversed(list(choices))):
        y = where(condition, choice, y)
    return y


# --- places ----------------------------------------------------------------------------------------


def fliplr(x: Any, /) -> Array:
    """The columns in reverse order."""
    return flip(x, axis=1)


def flipud(x: Any, /) -> Array:
    """`x` with its rows reversed."""
    return flip(x, axis=0)


def rot90(x: Any, /, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Array:
    """`x` rotated by `k` right angles, from the first of `axes` towards the second."""
    x = as_array(x)
    first, second = axes_of(tuple(axes), x.ndim)
    if k % 4 == 2:
        return flip(x, axis=(first, second))
    if k % 4 == 1:
        return swapaxes(flip(x, axis=second), first, second)
    return flip(swapaxes(x, first, second), axis=second) if k % 4 else x


def rollaxis(x: Any, /, axis: int, start: int = 0) -> Array:
    """`x` with `axis` moved before the axis `start`."""
    x = as_array(x)
    at = axes_of(axis, x.ndim)[0]
    start = start + x.ndim if start < 0 else start
    return moveaxis(x, at, start - 1 if at < start else start)


def diag(x: Any, /, k: int = 0) -> Array:
    """A matrix with a vector on its diagonal `k`, or the diagonal `k` of a matrix."""
    x = as_array(x)
    if x.ndim == 2:
        return diagonal_of_matrices(x, offset=k)
    if x.ndim != 1:
        raise BadInput(f"diag takes a vector or a matrix, not an array of {x.ndim} axes")
    square = where(np.eye(x.size, dtype=bool), x, np.zeros((), x.dtype))
    return pad(square, ((max(-k, 0), max(k, 0)), (max(k, 0), max(-k, 0))))


def kron(x1: Any, x2: Any, /) -> Array:
    """The Kronecker product: each element of `x1` times all of `x2`."""
    a, b = promoted(x1, x2)
    rank = max(a.ndim, b.ndim)
    a, b = at_least(a, rank), at_least(b, rank)
    apart = expand_dims(a, axis=tuple(range(1, 2 * rank, 2))) * expand_dims(b, axis=tuple(range(0, 2 * rank, 2)))
    return reshape(apart, tuple(m * n for m, n in zip(a.shape, b.shape)))


# --- along an axis ---------------------------------------------------------------------------------


def average(x: Any, /, axis: Any = None, weights: Any = None, *, keepdims: bool = False) -> Array:
    """The mean, weighted by `weights` in the shape of `x`, or one for each element along `axis`."""
    x = as_array(x)
    if weights is None:
        return mean(x, axis=axis, keepdims=keepdims)
    w = as_array(weights)
    if w.shape != x.shape:
        if w.ndim != 1 or not isinstance(axis, int) or w.size != x.shape[axis]:
            raise BadInput(f"weights of shape {w.shape} for an array of shape {x.shape} and the axis {axis}")
        w = along_axis(w, axis % x.ndim, x.ndim)
    total = sum(w, axis=axis, keepdims=keepdims) if w.shape == x.shape else sum(w)
    return sum(x * w, axis=axis, keepdims=keepdims) / total


def gradient(x: Any, /, *spacing: float, axis: Any = None) -> Any:
    """Numerical derivatives along each axis, by central differences, one-sided at the ends.

    Args:
        x: an array of at least two elements along each axis.
        spacing: the distance between elements: none (1), one number, or one for each axis.
        axis: the axes. Default: all.

    Returns:
        An array, or for several axes a tuple with one for each.
    """
    x = as_array(x)
    axes = axes_of(axis, x.ndim)
    steps = spacing if len(spacing) == len(axes) else (spacing or (1.0,)) * len(axes)
    if len(steps) != len(axes) or any(np.ndim(h) for h in steps):
        raise BadInput("`spacing` is one number, or one number for each axis")
    found = []
    for at, h in zip(axes, steps):
        if x.shape[at] < 2:
            raise BadInput(f"gradient needs two elements along axis {at}, not {x.shape[at]}")

        def cut(start: int | None, stop: int | None, at: int = at) -> Array:
            return getitem(x, (slice(None),) * at + (slice(start, stop),))

        inner = (cut(2, None) - cut(None, -2)) / (2.0 * h)
        ends = (cut(1, 2) - cut(None, 1)) / h, (cut(-1, None) - cut(-2, -1)) / h
        found.append(concat([ends[0], inner, ends[1]], axis=at))
    return found[0] if len(found) == 1 else tuple(found)


def cumsum(x: Any, /, axis: int | None = None, dtype: Any = None, out: None = None) -> Array:
    """The cumulative sum along `axis`; by default, of the flattened array."""
    return cumulative_sum(reshape(x, (-1,)) if axis is None else x, axis or 0, dtype)


def cumprod(x: Any, /, axis: int | None = None, dtype: Any = None, out: None = None) -> Array:
    """The cumulative product along `axis`; by default, of the flattened array."""
    return cumulative_prod(reshape(x, (-1,)) if axis is None else x, axis or 0, dtype)


def nancumsum(x: Any, /, axis: int | None = None, dtype: Any = None, out: None = None) -> Array:
    """The cumulative sum along `axis` (default: of the flattened array), with NaN as 0."""
    return cumsum(where(e.isnan(x), np.zeros((), as_array(x).dtype), x), axis, dtype)


def nancumprod(x: Any, /, axis: int | None = None, dtype: Any = None, out: None = None) -> Array:
    """The cumulative product along `axis` (default: of the flattened array), with NaN as 1."""
    return cumprod(where(e.isnan(x), np.ones((), as_array(x).dtype), x), axis, dtype)
