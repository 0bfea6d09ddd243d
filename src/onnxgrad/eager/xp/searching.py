"""Sorting, searching and sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.eager.core.array import Array, as_array, call_plain, tracked
from onnxgrad.eager.core.primitives import Primitive, macro, standard
from onnxgrad.eager.core.recording import record
from onnxgrad.eager.core.tape import exporting
from onnxgrad.eager.xp import elementwise as e
from onnxgrad.eager.xp.dtypes import cast
from onnxgrad.eager.xp.indexing import as_index, take
from onnxgrad.eager.xp.manipulation import Axis, broadcast_to, expand_dims, reshape
from onnxgrad.eager.xp.reductions import sum
from onnxgrad.eager.xp.ufuncs import discrete, nondifferentiable
from onnxgrad.ir import Builder, Var

__all__ = [
    "argmax", "argmin", "argsort", "count_nonzero", "isin", "nonzero", "searchsorted", "sort", "take_along_axis",
    "unique_all", "unique_counts", "unique_inverse", "unique_values",
]  # fmt: skip


def take_along_axis(x: Any, /, indices: Any, axis: int = -1) -> Array:
    """The elements of `x` at `indices`, matched one to one along `axis`."""
    x, i = as_array(x), as_array(indices)
    value = np.take_along_axis(x._data, i._data, axis=axis)
    if value.shape != i.shape or any(m != n for a, (m, n) in enumerate(zip(i.shape, x.shape)) if a != axis % x.ndim):
        at = axis % x.ndim
        shape = np.broadcast_shapes(*((*s[:at], 1, *s[at + 1 :]) for s in (x.shape, i.shape)))
        x = broadcast_to(x, (*shape[:at], x.shape[at], *shape[at + 1 :]))
        i = broadcast_to(i, (*shape[:at], i.shape[at], *shape[at + 1 :]))
    return record(standard("GatherElements", axis=axis % x.ndim), [x, as_index(i)], value)


def argsort(
    x: Any,
    /,
    axis: int | None = -1,
    kind: Any = None,
    order: None = None,
    *,
    descending: bool = False,
    stable: bool = True,
) -> Array:
    """The indices that sort `x` along `axis` (None: flattened), stably."""
    x = as_array(x)
    if axis is None:
        x, axis = reshape(x, (-1,)), -1
    if descending:  # numpy only sorts ascending: sort the flipped array, so that equal elements keep their order
        back = np.flip(x._data, axis)
        value = x.shape[axis] - 1 - np.flip(np.argsort(back, axis=axis, kind="stable"), axis)
    else:
        value = np.argsort(x._data, axis=axis, kind="stable")
    return record(macro(order_of, x.shape[axis], axis, descending), [x], value)


def order_of(b: Builder, x: Var, count: int, axis: int, descending: bool) -> Var:
    """The second output of TopK, which has no order for NaN: it comes after all numbers, as in numpy."""
    if x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16):
        numbers = x.dtype.numpy()
        most = b.const(np.finfo(numbers).max, x.dtype)
        x = b.Where(b.IsNaN(x), b.const(np.inf, x.dtype), b.Where(b.Less(most, x), most, x))
    return b.TopK(x, [count], axis=axis, largest=int(descending), outputs=2)[1]


def sort(
    x: Any,
    /,
    axis: int | None = -1,
    kind: Any = None,
    order: None = None,
    *,
    descending: bool = False,
    stable: bool = True,
) -> Array:
    """`x` sorted along `axis` (None: flattened)."""
    x = as_array(x)
    if axis is None:
        x, axis = reshape(x, (-1,)), -1
    return take_along_axis(x, argsort(x, axis=axis, descending=descending), axis=axis)


_INSTEAD = "use sort, or stop_gradient(x)"
unique_all = nondifferentiable("unique_all", np.unique_all, _INSTEAD)
unique_counts = nondifferentiable("unique_counts", np.unique_counts, _INSTEAD)
unique_inverse = nondifferentiable("unique_inverse", np.unique_inverse, _INSTEAD)
unique_values = nondifferentiable("unique_values", np.unique_values, _INSTEAD)
isin = discrete("isin", lambda x1, x2, /, *, invert=False: np.isin(x1, x2, invert=invert))


def _arg_extremum(op_type: str, kernel: Any, x: Any, axis: int | None, keepdims: bool) -> Array:
    x = as_array(x)
    value = kernel(x._data, axis=axis, keepdims=keepdims)
    if x._node is None:
        return Array(np.asarray(value))
    x = cast(x, np.int32) if x.dtype == bool else x  # which ONNX cannot compare
    if axis is None:
        flat = _arg_extremum(op_type, kernel, reshape(x, (-1,)), 0, False)
        return reshape(flat, (1,) * x.ndim) if keepdims else flat
    op: Primitive = standard(op_type, axis=int(axis), keepdims=int(keepdims))
    if exporting.get() and x.dtype.kind == "f":
        op = macro(_place_of, op_type, int(axis), int(keepdims))
    return record(op, [x], np.asarray(value, np.int64))


def _place_of(b: Builder, x: Var, op_type: str, axis: int, keepdims: int) -> Var:
    """The index of the first extremum, or of the first NaN: ONNX Runtime overlooks some."""
    unknown = b.Cast(b.IsNaN(x), to=int(ir.DataType.INT32))
    at, found = b.ArgMax(unknown, axis=axis, keepdims=keepdims), b.ReduceMax(unknown, [axis], keepdims=keepdims)
    return b.Where(b.Cast(found, to=int(ir.DataType.BOOL)), at, b.emit(op_type, x, axis=axis, keepdims=keepdims))


def argmax(x: Any, /, axis: int | None = None, out: None = None, keepdims: bool = False) -> Array:
    """The index of the first maximum along `axis`."""
    return _arg_extremum("ArgMax", np.argmax, x, axis, keepdims)


def argmin(x: Any, /, axis: int | None = None, out: None = None, keepdims: bool = False) -> Array:
    """The index of the first minimum along `axis`."""
    return _arg_extremum("ArgMin", np.argmin, x, axis, keepdims)


def count_nonzero(x: Any, /, axis: Axis = None, keepdims: bool = False) -> Array:
    """The number of nonzero elements along `axis`."""
    return sum(cast(e.not_equal(x, 0), np.int64), axis=axis, keepdims=keepdims)


nonzero = discrete("nonzero", np.nonzero)


def searchsorted(x1: Any, x2: Any, /, side: str = "left", sorter: Any = None) -> Array:
    """The index of the first element of the sorted vector `x1` that is not below (for "right": above) each of `x2`."""
    if not (exporting.get() and tracked([x1, x2, sorter], floats=False)):
        return call_plain(np.searchsorted, (x1, x2, side, sorter), {})
    a, v = as_array(x1), expand_dims(as_array(x2), axis=-1)
    later = (e.less if side == "right" else e.less_equal)(v, a if sorter is None else take(a, sorter, axis=0))
    return cast(sum(cast(e.logical_not(later), np.float64), axis=-1), np.int64)
