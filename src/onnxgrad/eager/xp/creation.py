"""Creation of arrays, which are constants on the tape.

An array created from others (``asarray([x, y])``, ``full(shape, x)``) keeps their derivatives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, plain, refuse_tracked, tracked
from onnxgrad.eager.core.tape import exporting
from onnxgrad.eager.xp.dtypes import as_float, cast, promoted
from onnxgrad.eager.xp.info import check_device
from onnxgrad.eager.xp.manipulation import broadcast_arrays, broadcast_to, expand_dims, stack

__all__ = [
    "arange", "asarray", "empty", "empty_like", "eye", "from_dlpack", "full", "full_like", "linspace", "ones",
    "ones_like", "zeros", "zeros_like",
]  # fmt: skip


def asarray(obj: Any, /, dtype: Any = None, device: Any = None, *, copy: bool | None = None) -> Array:
    """`obj` as an array: nested lists of numbers or arrays, or anything that numpy converts."""
    check_device(device)
    if isinstance(obj, Array):
        if copy is False and dtype is not None and obj.dtype != np.dtype(dtype):
            raise ValueError("another dtype takes a copy")
        x = obj if dtype is None else cast(obj, dtype)
        return Array(x._data.copy() if copy and x._node is None else x._data, x._node) if copy else x
    if isinstance(obj, (list, tuple)) and tracked(obj, floats=False):
        parts = [asarray(e) for e in obj]
        x = stack(parts)
        return x if dtype is None else cast(x, dtype)
    shared = copy is None and isinstance(obj, np.ndarray)  # memory that the caller could write into
    return Array(np.array(plain(obj), dtype=dtype, copy=True if shared else copy))


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
    """An array from an object that implements DLPack."""
    check_device(device)
    data = np.from_dlpack(x, copy=copy) if copy is not None else np.from_dlpack(x)
    return Array(data)


def arange(start: Any, /, stop: Any = None, step: Any = 1, dtype: Any = None, *, device: Any = None) -> Array:
    """Evenly spaced numbers in [`start`, `stop`)."""
    check_device(device)
    if exporting.get():
        refuse_tracked("arange of a number that is computed", [start, stop, step], "use op.Range", floats=False)
    first, last = (0, start) if stop is None else (start, stop)
    values = np.arange(plain(first), plain(last), plain(step), dtype=dtype)
    if tracked(first) or tracked(step):
        x = as_array(first) + as_array(step) * Array(np.arange(len(values)).astype(values.dtype))
        return cast(x, values.dtype)
    return Array(values)


def linspace(
    start: Any,
    stop: Any,
    /,
    num: int = 50,
    endpoint: bool = True,
    retstep: bool = False,
    dtype: Any = None,
    axis: int = 0,
    *,
    device: Any = None,
) -> Any:
    """`num` evenly spaced numbers from `start` to `stop`, along a new axis; with `retstep`, and their distance."""
    check_device(device)
    if retstep:
        gaps = max(num - 1 if endpoint else num, 1)
        return linspace(start, stop, num, endpoint, dtype=dtype, axis=axis), (as_array(stop) - start) / float(gaps)
    if tracked(start, floats=False) or tracked(stop, floats=False):
        first, last = map(as_float, promoted(start, stop))
        first, last = broadcast_arrays(first, last)
        weights = np.linspace(0.0, 1.0, num, endpoint=endpoint).astype(first.dtype)
        at = axis % (first.ndim + 1)
        first, last = expand_dims(first, axis=at), expand_dims(last, axis=at)
        y = first + (last - first) * weights.reshape(-1, *[1] * (first.ndim - 1 - at))
        return y if dtype is None else cast(y, dtype)
    return Array(np.linspace(plain(start), plain(stop), num, dtype=dtype, endpoint=endpoint, axis=axis))


def empty(shape: Any, dtype: Any = None, *, device: Any = None) -> Array:
    """Zeros: uninitialized memory would save nothing here."""
    return zeros(shape, dtype=dtype, device=device)


def eye(n_rows: int, n_cols: int | None = None, /, k: int = 0, dtype: Any = None, *, device: Any = None) -> Array:
    """A matrix with ones on the diagonal `k`, zeros elsewhere."""
    check_device(device)
    return Array(np.eye(n_rows, n_cols, k, dtype=np.float64 if dtype is None else dtype))


def full(shape: Any, fill_value: Any, dtype: Any = None, *, device: Any = None) -> Array:
    """An array filled with `fill_value`."""
    check_device(device)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if tracked(fill_value, floats=False):
        x = broadcast_to(fill_value, shape)
        return x if dtype is None else cast(x, dtype)
    return Array(np.full(shape, plain(fill_value), dtype=dtype))


def full_like(x: Any, /, fill_value: Any, dtype: Any = None, *, device: Any = None) -> Array:
    """An array filled with `fill_value`, in the shape and dtype of `x`."""
    x = as_array(x)
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device)


def zeros(shape: Any, dtype: Any = None, *, device: Any = None) -> Array:
    """Zeros."""
    check_device(device)
    return Array(np.zeros(shape, np.float64 if dtype is None else dtype))


def ones(shape: Any, dtype: Any = None, *, device: Any = None) -> Array:
    """Ones."""
    check_device(device)
    return Array(np.ones(shape, np.float64 if dtype is None else dtype))


def zeros_like(x: Any, /, dtype: Any = None, *, device: Any = None) -> Array:
    """Zeros in the shape and dtype of `x`."""
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Any, /, dtype: Any = None, *, device: Any = None) -> Array:
    """Ones in the shape and dtype of `x`."""
    return full_like(x, 1, dtype=dtype, device=device)


def empty_like(x: Any, /, dtype: Any = None, *, device: Any = None) -> Array:
    """Zeros in the shape and dtype of `x`."""
    return zeros_like(x, dtype=dtype, device=device)
