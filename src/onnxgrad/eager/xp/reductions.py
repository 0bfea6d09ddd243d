"""Reductions and cumulative functions: sums, products, means, extrema, differences."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.primitives import Primitive, macro, standard
from onnxgrad.eager.core.recording import record
from onnxgrad.eager.core.tape import exporting
from onnxgrad.eager.xp import complexes
from onnxgrad.eager.xp import elementwise as e
from onnxgrad.eager.xp.dtypes import as_float, cast
from onnxgrad.eager.xp.indexing import getitem
from onnxgrad.eager.xp.manipulation import Axis, axes_of, broadcast_to, concat, expand_dims, stack, unstack
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var

__all__ = ["all", "any", "cumulative_prod", "cumulative_sum", "diff", "max", "mean", "min", "prod", "std", "sum", "var"]

_COMPLEX: dict[str, Any] = {
    "ReduceProd": complexes.prod,
    "ReduceMax": functools.partial(complexes.extremum, np.argmax),
    "ReduceMin": functools.partial(complexes.extremum, np.argmin),
}


def _reduce_axes(op_type: str, kernel: Any, x: Array, axis: Axis, keepdims: bool) -> Array:
    axes = axes_of(axis, x.ndim)
    if x._node is not None and x._data.dtype.kind == "c" and op_type in _COMPLEX and not exporting.get():
        return _COMPLEX[op_type](x, axes, keepdims)
    value = np.asarray(kernel(x._data, axis=axes, keepdims=keepdims), x.dtype)
    if x._node is None:
        return Array(value)
    if axes and exporting.get() and op_type in ("ReduceMax", "ReduceMin") and x.dtype.kind == "f":
        op: Primitive = macro(_extremum, op_type, axes, int(keepdims))
    else:
        op = standard(op_type, ((1, axes),), keepdims=int(keepdims)) if axes else standard("Identity")
    return record(op, [x], value)


def _extremum(b: Builder, x: Var, op_type: str, axes: tuple[int, ...], keepdims: int) -> Var:
    """The extremum, or NaN where there is one: ONNX Runtime finds some of them and overlooks others."""
    y = b.emit(op_type, x, list(axes), keepdims=keepdims)
    unknown = b.ReduceMax(b.Cast(b.IsNaN(x), to=int(x.dtype or 0)), list(axes), keepdims=keepdims)
    return y * b.Where(b.Less(b.const(0, x.dtype), unknown), b.const(np.nan, x.dtype), b.const(1, x.dtype))


def _widen(x: Any, dtype: Any) -> Array:
    """`x` in the dtype of its sum."""
    x = as_array(x)
    return cast(x, np.sum(x._data[..., :0]).dtype if dtype is None and x.ndim else dtype or np.sum(x._data).dtype)


def fill_unselected(x: Array, where: Any, instead: Any, name: str) -> Array:
    """`x` with `instead` in the place of elements where `where` is false.

    Raises:
        BadInput: elements are left out, and no number stands for them.
    """
    if where is None or where is True:
        return x
    if instead is None:
        raise BadInput(f"{name} with 'where' needs 'initial', the result for no elements")
    return e.where(where, x, np.asarray(instead, x.dtype))


def _from(f: Any, initial: Any, y: Array) -> Array:
    return y if initial is None else f(y, np.asarray(initial, y.dtype) if np.isscalar(initial) else initial)


def sum(
    x: Any, /, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False,
    initial: Any = None, where: Any = None,
) -> Array:  # fmt: skip
    """The sum of the elements along `axis` where `where` is true, and of `initial`."""
    y = _reduce_axes("ReduceSum", np.sum, fill_unselected(_widen(x, dtype), where, 0, "sum"), axis, keepdims)
    return _from(e.add, initial, y)


def prod(
    x: Any, /, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False,
    initial: Any = None, where: Any = None,
) -> Array:  # fmt: skip
    """The product of the elements along `axis` where `where` is true, and of `initial`."""
    y = _reduce_axes("ReduceProd", np.prod, fill_unselected(_widen(x, dtype), where, 1, "prod"), axis, keepdims)
    return _from(e.multiply, initial, y)


def mean(
    x: Any, /, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False, *, where: Any = None
) -> Array:
    """The mean of the elements along `axis` where `where` is true."""
    x = as_float(x) if dtype is None else as_float(cast(as_array(x), dtype))
    if (where is not None and where is not True) or not x.size:  # of no elements ONNX has 0
        return e.divide(sum(x, axis, keepdims=keepdims, where=where), _count(x, axis, keepdims, where))
    return _reduce_axes("ReduceMean", np.mean, x, axis, keepdims)


def _count(x: Array, axis: Axis, keepdims: bool, where: Any) -> Array:
    """The number of elements along `axis` where `where` is true."""
    chosen = broadcast_to(cast(as_array(True if where is None else where), x._data.real.dtype), x.shape)
    return sum(chosen, axis, keepdims=keepdims)


def _initial_alone(x: Array, axis: Axis, keepdims: bool, initial: Any) -> Array:
    """`initial` in the shape of a reduction of no elements."""
    shape = np.sum(x._data, axis=axes_of(axis, x.ndim), keepdims=keepdims).shape
    return broadcast_to(cast(as_array(initial), x.dtype), shape)


def max(
    x: Any, /, axis: Axis = None, out: None = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Array:
    """The maximum along `axis` where `where` is true, and of `initial`; ties share the derivative."""
    x = fill_unselected(as_array(x), where, initial, "max")
    if initial is not None and not x.size:
        return _initial_alone(x, axis, keepdims, initial)
    y = _reduce_axes("ReduceMax", np.max, x, axis, keepdims)
    return _from(e.maximum, initial, y)


def min(
    x: Any, /, axis: Axis = None, out: None = None, keepdims: bool = False, initial: Any = None, where: Any = None
) -> Array:
    """The minimum along `axis` where `where` is true, and of `initial`; ties share the derivative."""
    x = fill_unselected(as_array(x), where, initial, "min")
    if initial is not None and not x.size:
        return _initial_alone(x, axis, keepdims, initial)
    y = _reduce_axes("ReduceMin", np.min, x, axis, keepdims)
    return _from(e.minimum, initial, y)


def var(
    x: Any,
    /,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: float = 0.0,
    keepdims: bool = False,
    *,
    where: Any = None,
    correction: float | None = None,
) -> Array:
    """The variance along `axis` where `where` is true: squared deviations over n − `correction` (numpy: `ddof`)."""
    x = as_array(x) if dtype is None else cast(as_array(x), dtype)
    ddof = ddof if correction is None else correction
    whole = where is None or where is True
    if x._node is None and whole:
        return Array(np.asarray(np.var(x._data, axis=axis, ddof=ddof, keepdims=keepdims)))
    x = fill_unselected(x, where, 0, "var")
    count = math.prod(x.shape[a] for a in axes_of(axis, x.ndim)) if whole else _count(x, axis, keepdims, where)
    distance = e.subtract(x, mean(x, axis=axis, keepdims=True, where=where))
    square = e.square(distance)
    if x.dtype.kind == "c":
        square = e.add(e.square(e.real(distance)), e.square(e.imag(distance)))
    total = sum(square, axis=axis, keepdims=keepdims, where=where)
    return e.divide(total, float(count - ddof) if isinstance(count, int) else e.subtract(count, ddof))


def std(
    x: Any,
    /,
    axis: Axis = None,
    dtype: Any = None,
    out: None = None,
    ddof: float = 0.0,
    keepdims: bool = False,
    *,
    where: Any = None,
    correction: float | None = None,
) -> Array:
    """The standard deviation along `axis`, the square root of `var`; its derivative is 0 where it is 0."""
    v = var(x, axis, dtype, out, ddof, keepdims, where=where, correction=correction)
    if v._node is None:
        return e.sqrt(v)
    zero = e.equal(v, 0)
    return e.where(zero, np.zeros((), v.dtype), e.sqrt(e.where(zero, np.ones((), v.dtype), v)))


def cumulative_sum(x: Any, /, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """The cumulative sum along `axis`."""
    x, at = _running(_widen(x, dtype), axis)
    y = record(standard("CumSum", ((1, at),)), [x], np.cumsum(x._data, axis=at, dtype=x.dtype))
    return _prepend(0, y, at) if include_initial else y


def cumulative_prod(x: Any, /, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """The cumulative product along `axis`."""
    x, at = _running(_widen(x, dtype), axis)
    if x._node is None:
        y = Array(np.cumprod(x._data, axis=at, dtype=x.dtype))
    elif x.shape[at] == 0:
        y = x
    else:
        so_far: list[Array] = []
        for piece in unstack(x, axis=at):
            so_far.append(e.multiply(so_far[-1], piece) if so_far else piece)
        y = stack(so_far, axis=at) if len(so_far) > 1 else expand_dims(so_far[0], axis=at)
    return _prepend(1, y, at) if include_initial else y


def _running(x: Array, axis: int | None) -> tuple[Array, int]:
    if axis is None:
        if x.ndim != 1:
            raise ValueError(f"which axis? the array has {x.ndim}")
        axis = 0
    return x, axes_of(axis, x.ndim)[0]


def _prepend(first: int, y: Array, axis: int) -> Array:
    shape = tuple(1 if a == axis else n for a, n in enumerate(y.shape))
    return concat([Array(np.full(shape, first, y.dtype)), y], axis=axis)


def diff(x: Any, /, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Array:
    """The `n`-th discrete difference along `axis`, of `x` with `prepend` and `append` joined to its ends."""
    x = as_array(x)
    at = axes_of(axis, x.ndim)[0]
    edge = (*x.shape[:at], 1, *x.shape[at + 1 :])
    ends = [p if p is None or as_array(p).ndim else broadcast_to(p, edge) for p in (prepend, append)]
    parts = [as_array(p) for p in (ends[0], x, ends[1]) if p is not None]
    x = concat(parts, axis=at) if len(parts) > 1 else x
    for _ in range(n):
        later, earlier = (getitem(x, (slice(None),) * at + (s,)) for s in (slice(1, None), slice(None, -1)))
        x = (e.not_equal if x.dtype == bool else e.subtract)(later, earlier)
    return x


def _logical(op_type: str, kernel: Any, x: Any, axis: Axis, keepdims: bool, where: Any) -> Array:
    x = as_array(x)
    if where is not None and where is not True:
        x = e.where(where, x if x.dtype == bool else e.not_equal(x, 0), np.asarray(op_type == "ReduceMin"))
    if x._node is None or not x.size:
        return Array(np.asarray(kernel(x._data, axis=axis, keepdims=keepdims)))
    ones = cast(x if x.dtype == bool else e.not_equal(x, 0), np.int64)
    return cast(_reduce_axes(op_type, getattr(np, op_type[6:].lower()), ones, axis, keepdims), bool)


def all(x: Any, /, axis: Axis = None, out: None = None, keepdims: bool = False, *, where: Any = None) -> Array:
    """True where all elements along `axis` are true, of those where `where` is."""
    return _logical("ReduceMin", np.all, x, axis, keepdims, where)


def any(x: Any, /, axis: Axis = None, out: None = None, keepdims: bool = False, *, where: Any = None) -> Array:
    """True where some element along `axis` is true, of those where `where` is."""
    return _logical("ReduceMax", np.any, x, axis, keepdims, where)
