"""Indexing: ``x[key]``, ``x[key] = value`` and `take`.

Integers, slices, ``...`` and ``newaxis`` become a Slice, then Squeeze and Unsqueeze. An integer array along one axis
becomes a Gather. Everything else that numpy accepts (several arrays, masks, mixtures) becomes a Gather from the
flattened array, at the positions that numpy finds. Integer arrays that an exported program computes become a GatherND
or a ScatterND.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, plain, refuse_tracked, tracked
from onnxgrad.eager.core.primitives import macro, standard
from onnxgrad.eager.core.recording import record, stop_gradient
from onnxgrad.eager.core.tape import exporting
from onnxgrad.eager.xp.dtypes import cast
from onnxgrad.ir import Builder, Var

__all__ = ["getitem", "setitem", "take"]

_BEFORE = -(2**62)


def getitem(x: Array, key: Any) -> Array:
    """``x[key]``."""
    keys = key if isinstance(key, tuple) else (key,)
    if x._node is None and not (exporting.get() and tracked(list(keys), floats=False)):
        return Array(np.asarray(x._data[plain(key)]))
    if isinstance(key, list) and any(isinstance(k, slice) or k is None or k is Ellipsis for k in key):
        raise IndexError("a list of slices is no index: use a tuple")
    keys = tuple(_index(k) for k in keys)
    if all(k is None or k is Ellipsis or isinstance(k, (int, slice)) for k in keys):
        value = np.asarray(x._data[keys])
        return record(macro(sliced, *_static(keys, x.shape)), [x], value)
    arrays = [k for k in keys if isinstance(k, Array)]
    axis = _only_axis(keys)
    if axis is not None:
        return take(x, arrays[0], axis=axis)
    if exporting.get() and any(k._node is not None for k in arrays):
        refuse_tracked("a mask", [k for k in arrays if k.dtype == bool], "use where(mask, x, 0)", floats=False)
        return _gather_elements(x, keys)
    places = np.arange(x.size).reshape(x.shape)[tuple(plain(k) for k in keys)]
    return record(macro(gathered_flat), [x, Array(np.ascontiguousarray(places))], x._data.reshape(-1)[places])


def _index(k: Any) -> Any:
    """One part of a key: an int, a slice, None, an ellipsis or an array."""
    if k is None or k is Ellipsis or isinstance(k, slice):
        return k
    if isinstance(k, (bool, np.bool_, list, tuple, range, np.ndarray)):
        return as_array(np.asarray(k))
    if isinstance(k, Array):
        scalar = k.ndim == 0 and k.dtype.kind in "iu" and (k._node is None or not exporting.get())
        return int(k) if scalar else k
    return int(k.__index__())


def _only_axis(keys: tuple[Any, ...]) -> int | None:
    """The axis that a single integer array indexes if all others are taken whole."""
    arrays = [i for i, k in enumerate(keys) if isinstance(k, Array)]
    whole = all(isinstance(k, Array) or k is Ellipsis or k == slice(None) for k in keys)
    if len(arrays) != 1 or not whole or keys[arrays[0]].dtype.kind not in "iu":
        return None
    if Ellipsis in [k for k in keys if not isinstance(k, Array)]:
        dots = next(i for i, k in enumerate(keys) if k is Ellipsis)
        return arrays[0] if arrays[0] < dots else arrays[0] - len(keys)
    return arrays[0]


def _static(keys: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A key of integers, slices and new axes as slice bounds, axes to squeeze and axes to unsqueeze."""
    used = sum(k is not None and k is not Ellipsis for k in keys)
    bounds, gone, new, axis, at = [], [], [], 0, 0
    for k in (*keys, Ellipsis) if Ellipsis not in keys else keys:
        if k is None:
            new.append(at)
            at += 1
        elif k is Ellipsis:
            axis += len(shape) - used
            at += len(shape) - used
        elif isinstance(k, int):
            start = k % shape[axis]
            bounds.append((axis, start, start + 1, 1))
            gone.append(axis)
            axis += 1
        else:
            start, stop, step = k.indices(shape[axis])
            if len(range(start, stop, step)) == 0:
                start, stop, step = 0, 0, 1
            if (start, stop, step) != (0, shape[axis], 1):
                bounds.append((axis, start, _BEFORE if stop < 0 else stop, step))
            axis += 1
            at += 1
    return tuple(bounds), tuple(gone), tuple(new)


def _indices_in_front(x: Array, keys: tuple[Any, ...]) -> tuple[Array, Array, list[int], int]:
    """An index of integer arrays, as ONNX has it: of the first axes, as vectors.

    Returns:
        `x`, sliced, with the indexed axes first; the vectors; the axes in that order; the place that numpy gives the
        axes of the index in the result.
    """
    if any(k is None for k in keys):
        refuse_tracked("an index of arrays and new axes", keys, "index first", floats=False)
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    rest = [slice(None)] * (x.ndim - len([k for k in keys if k is not Ellipsis]))
    full = [*keys[:at], *rest, *keys[at + 1 :]]
    axes = [i for i, k in enumerate(full) if not isinstance(k, slice)]
    x = getitem(x, tuple(k if isinstance(k, slice) else slice(None) for k in full))
    order = [*axes, *(i for i in range(x.ndim) if i not in axes)]
    space = Array._xp
    vectors = [space.astype(full[i], np.int64) for i in axes]
    together = axes == list(range(axes[0], axes[-1] + 1))
    indices = space.stack(space.broadcast_arrays(*vectors), axis=-1)
    return space.permute_dims(x, order), indices, order, axes[0] if together else 0


def _gather_elements(x: Array, keys: tuple[Any, ...]) -> Array:
    """``x[keys]`` for integer arrays, which an exported program computes; ints and slices may be among them."""
    moved, indices, _, place = _indices_in_front(x, keys)
    value = moved._data[tuple(np.moveaxis(indices._data, -1, 0))]
    y = record(standard("GatherND"), [moved, indices], value)
    count = indices.ndim - 1
    order = [*range(count, count + place), *range(count), *range(count + place, y.ndim)]
    return y if not place else Array._xp.permute_dims(y, order)


def _scatter_elements(x: Array, keys: tuple[Any, ...], value: Array) -> Array:
    """The array that `x` becomes by ``x[keys] = value``, like `_gather_elements`; slices must be whole axes."""
    if any(isinstance(k, slice) and k != slice(None) for k in keys):
        refuse_tracked("an assignment to slices at computed indices", keys, "use where", floats=False)
    moved, indices, order, place = _indices_in_front(x, keys)
    space, count, at = Array._xp, indices.ndim - 1, tuple(np.moveaxis(indices._data, -1, 0))
    shape = moved._data[at].shape
    after = shape[count : count + place], shape[:count], shape[count + place :]
    value = space.broadcast_to(cast(value, x.dtype), (*after[0], *after[1], *after[2]))
    value = space.permute_dims(value, [*range(place, place + count), *range(place), *range(place + count, len(shape))])
    if indices.size > indices.shape[-1]:
        value = _last_of_equal(indices, value, moved.shape[: indices.shape[-1]])
    data = moved._data.copy()
    data[at] = value._data
    y = record(standard("ScatterND"), [moved, indices, value], data)
    return space.permute_dims(y, [order.index(i) for i in range(x.ndim)])


def _last_of_equal(indices: Array, value: Array, shape: tuple[int, ...]) -> Array:
    """`value` with the last of the updates at each place for all of them, and a derivative of that one only.

    ONNX leaves open which of several updates of a place is written.
    """
    space, block = Array._xp, indices.shape[:-1]
    own = Array(np.arange(math.prod(block)).reshape(block))
    data, at = np.full(shape, -1), tuple(np.moveaxis(indices._data, -1, 0))
    np.maximum.at(data, at, own._data)
    winners = record(standard("ScatterND", reduction="max"), [Array(np.full(shape, -1)), indices, own], data)
    winner = record(standard("GatherND"), [winners, indices], data[at])
    rest = value.shape[len(block) :]
    last = take(space.reshape(value, (-1, *rest)), space.reshape(winner, (-1,)), axis=0)
    wins = space.reshape(space.equal(winner, own), (*block, *[1] * len(rest)))
    return space.where(wins, value, stop_gradient(space.reshape(last, value.shape)))


def sliced(
    b: Builder, x: Var, bounds: tuple[tuple[int, int, int, int], ...], gone: tuple[int, ...], new: tuple[int, ...]
) -> Var:
    """Slice `x` by `bounds` (axis, start, stop, step), squeeze the axes `gone`, unsqueeze the axes `new`."""
    if bounds:
        axes, starts, stops, steps = (list(part) for part in zip(*bounds))
        x = b.Slice(x, starts, stops, axes, steps)
    x = b.Squeeze(x, list(gone)) if gone else x
    x = b.Unsqueeze(x, list(new)) if new else x
    return x if bounds or gone or new else b.Identity(x)


def gathered_flat(b: Builder, x: Var, places: Var) -> Var:
    """The elements at `places` of the flattened `x`."""
    return b.Gather(b.Reshape(x, [-1]), places, axis=0)


def setitem(x: Array, key: Any, value: Any) -> Array:
    """The array that `x` becomes by ``x[key] = value``."""
    value = as_array(value, x.dtype)
    if exporting.get() and any(tracked(k, floats=False) for k in (key if isinstance(key, tuple) else (key,))):
        parts = tuple(_index(k) for k in (key if isinstance(key, tuple) else (key,)))
        masks = [k for k in parts if isinstance(k, Array) and k.dtype == bool]
        refuse_tracked("an assignment by a mask", masks, "use where", floats=False)
        return _scatter_elements(x, parts, value)
    keys = tuple(plain(k) for k in key) if isinstance(key, tuple) else plain(key)
    data = x._data.copy()
    data[keys] = value._data
    if x._node is None and value._node is None:
        return Array(data)
    places = np.arange(x.size).reshape(x.shape)[keys]
    filled = np.broadcast_to(np.arange(value.size).reshape(value.shape), places.shape)
    order = np.full(x.size, -1)
    order[places.reshape(-1)] = filled.reshape(-1)  # the last of repeated indices wins
    at = np.flatnonzero(order >= 0)
    op = macro(put_flat)
    return record(op, [x, Array(at), cast(value, x.dtype), Array(order[at])], data)


def put_flat(b: Builder, x: Var, at: Var, values: Var, order: Var) -> Var:
    """`x` with the elements `order` of the flattened `values` at the places `at` of it, flattened."""
    updates = b.Gather(b.Reshape(values, [-1]), order, axis=0)
    y = b.ScatterElements(b.Reshape(x, [-1]), at, updates, axis=0)
    return b.reshape(y, b.shape_of(x))


def take(x: Any, /, indices: Any, axis: int | None = None, out: None = None, mode: str = "raise") -> Array:
    """The slices of `x` at `indices` along `axis`; by default, the elements of the flattened array.

    With the `mode` "wrap" or "clip", indices outside of the array count from its other end, or are those of its ends.
    """
    x, i = as_array(x), as_array(indices)
    if axis is None:
        x, axis = (x if x.ndim == 1 else x.reshape(-1)), 0
    if mode != "raise":
        count = x.shape[axis]
        i = Array._xp.remainder(i, count) if mode == "wrap" else Array._xp.clip(i, 0, count - 1)
    value = np.take(x._data, i._data, axis=axis)
    return record(standard("Gather", axis=axis % x.ndim), [x, as_index(i)], value)


def as_index(i: Array) -> Array:
    """`i` as indices of ONNX, which are int32 or int64."""
    return i if i.dtype in (np.int32, np.int64) else cast(i, np.int64)
