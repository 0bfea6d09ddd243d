"""Manipulation: shapes, axes, joining, splitting and repeating."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, plain, refuse_tracked
from onnxgrad.eager.core.primitives import macro, standard
from onnxgrad.eager.core.recording import record
from onnxgrad.eager.core.tape import exporting
from onnxgrad.eager.xp.dtypes import cast
from onnxgrad.eager.xp.indexing import getitem, take
from onnxgrad.ir import Builder, Var

__all__ = [
    "broadcast_arrays", "broadcast_to", "concat", "expand_dims", "flip", "matrix_transpose", "meshgrid", "moveaxis",
    "permute_dims", "ravel", "repeat", "reshape", "roll", "split", "squeeze", "stack", "swapaxes", "tile", "tril",
    "triu", "unstack",
]  # fmt: skip

Axis = int | tuple[int, ...] | None


def axes_of(axis: Axis, ndim: int) -> tuple[int, ...]:
    """`axis` as a tuple of nonnegative axes; None means all."""
    if axis is None:
        return tuple(range(ndim))
    axes = np.atleast_1d(axis).astype(int).tolist()
    for a in axes:
        if not -ndim <= a < ndim:
            raise IndexError(f"axis {a} of an array with {ndim} axes")
    return tuple(a % ndim for a in axes)


def along_axis(x: Any, axis: int, rank: int) -> Array:
    """The vector `x` along `axis` of an array with `rank` axes, the others of length 1."""
    return reshape(x, tuple(-1 if a == axis else 1 for a in range(rank)))


def at_least(x: Any, rank: int) -> Array:
    """`x` with axes of length 1 in front, so that it has at least `rank`."""
    x = as_array(x)
    return reshape(x, (1,) * (rank - x.ndim) + x.shape) if x.ndim < rank else x


def join_axes(x: Array, axes: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """`x` with `axes` joined into a first one before the others, and the shape with `axes` of length 1."""
    rest = [a for a in range(x.ndim) if a not in axes]
    count = math.prod(x.shape[a] for a in axes)
    flat = reshape(permute_dims(x, (*axes, *rest)), (count, *(x.shape[a] for a in rest)))
    return flat, tuple(1 if a in axes else n for a, n in enumerate(x.shape))


def reshape(x: Any, /, shape: Any, order: str = "C", *, copy: bool | None = None) -> Array:
    """`x` in another shape; one length may be -1. The order is "C", or "F" with the first axis fastest."""
    x = as_array(x)
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    if order == "F":
        back = reshape(permute_dims(x, range(x.ndim)[::-1]), shape[::-1], copy=copy)
        return permute_dims(back, range(back.ndim)[::-1])
    if order not in ("C", "A", "K"):
        raise ValueError(f"order is 'C' or 'F', not {order!r}")
    data = np.reshape(x._data, shape, copy=copy)
    if x._node is None or data.shape == x.shape:
        return Array(data if x._node is None else x._data, x._node)
    return record(standard("Reshape", ((1, data.shape),), **({"allowzero": 1} if 0 in data.shape else {})), [x], data)


def permute_dims(x: Any, /, axes: Sequence[int]) -> Array:
    """`x` with its axes permuted."""
    x = as_array(x)
    axes = axes_of(tuple(axes), x.ndim)
    data = np.transpose(x._data, axes)
    return record(standard("Transpose", perm=axes), [x], data) if x.ndim else record(standard("Identity"), [x], data)


def matrix_transpose(x: Any, /) -> Array:
    """`x` with its last two axes swapped."""
    x = as_array(x)
    if x.ndim < 2:
        raise ValueError(f"a matrix has two axes, and this array {x.ndim}")
    return permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def moveaxis(x: Any, /, source: int | tuple[int, ...], destination: int | tuple[int, ...]) -> Array:
    """`x` with the axes `source` moved to `destination`."""
    x = as_array(x)
    order = np.moveaxis(np.empty((1,) * x.ndim), source, destination)  # for its checks
    places, targets = axes_of(source, x.ndim), axes_of(destination, x.ndim)
    rest = iter(a for a in range(order.ndim) if a not in places)
    moved = dict(zip(targets, places))
    return permute_dims(x, [moved[a] if a in moved else next(rest) for a in range(x.ndim)])


def swapaxes(x: Any, /, axis1: int, axis2: int) -> Array:
    """`x` with two axes swapped."""
    order = list(range(as_array(x).ndim))
    order[axis1], order[axis2] = order[axis2], order[axis1]
    return permute_dims(x, order)


def expand_dims(x: Any, /, axis: int | tuple[int, ...] = 0) -> Array:
    """`x` with new axes of length 1 at `axis`."""
    x = as_array(x)
    data = np.expand_dims(x._data, axis)
    return record(standard("Unsqueeze", ((1, axes_of(axis, data.ndim)),)), [x], data)


def squeeze(x: Any, /, axis: int | tuple[int, ...] | None = None) -> Array:
    """`x` without the axes `axis`, of length 1."""
    x = as_array(x)
    axes = axes_of(axis, x.ndim) if axis is not None else tuple(a for a, n in enumerate(x.shape) if n == 1)
    op = standard("Squeeze", ((1, axes),)) if axes else standard("Identity")
    return record(op, [x], np.squeeze(x._data, axes))


def broadcast_to(x: Any, /, shape: Sequence[int]) -> Array:
    """`x` broadcast to `shape`."""
    x = as_array(x)
    return record(standard("Expand", ((1, tuple(shape)),)), [x], np.broadcast_to(x._data, tuple(shape)))


def broadcast_arrays(*arrays: Any) -> tuple[Array, ...]:
    """The arrays broadcast against each other."""
    shape = np.broadcast_shapes(*(as_array(x).shape for x in arrays))
    return tuple(broadcast_to(x, shape) for x in arrays)


def concat(arrays: Sequence[Any], /, axis: int | None = 0) -> Array:
    """The arrays joined along `axis`; with None, flattened first."""
    parts = [as_array(x) for x in arrays]
    if axis is None:
        parts, axis = [reshape(x, (-1,)) for x in parts], 0
    dtype = np.result_type(*(x._data.dtype for x in parts))
    parts = [cast(x, dtype) for x in parts]
    data = np.concatenate([x._data for x in parts], axis=axis)
    return record(standard("Concat", axis=axes_of(axis, data.ndim)[0]), parts, data)


def stack(arrays: Sequence[Any], /, axis: int = 0) -> Array:
    """The arrays joined along a new axis."""
    return concat([expand_dims(x, axis=axis) for x in arrays], axis=axis)


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Array, ...]:
    """The slices of `x` along `axis`, which is removed."""
    x = as_array(x)
    at = (slice(None),) * axes_of(axis, x.ndim)[0]
    return tuple(getitem(x, (*at, i)) for i in range(x.shape[axis]))


def split(x: Any, /, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Array]:
    """`x` split along `axis` into equal sections, or at the given indices."""
    x = as_array(x)
    sections = indices_or_sections
    at, length = (slice(None),) * axes_of(axis, x.ndim)[0], x.shape[axis]
    if isinstance(sections, int) and length % sections:
        raise ValueError(f"{length} elements do not split into {sections} equal parts")
    places = range(0, length, length // sections)[1:] if isinstance(sections, int) else sections
    return [getitem(x, (*at, slice(a, b))) for a, b in zip([0, *places], [*places, length])]


def flip(x: Any, /, axis: int | tuple[int, ...] | None = None) -> Array:
    """`x` reversed along `axis`."""
    x = as_array(x)
    axes = axes_of(axis, x.ndim)
    return getitem(x, tuple(slice(None, None, -1) if a in axes else slice(None) for a in range(x.ndim)))


def roll(x: Any, /, shift: int | tuple[int, ...], axis: int | tuple[int, ...] | None = None) -> Array:
    """`x` shifted cyclically by `shift` along `axis`."""
    x = as_array(x)
    if axis is None:
        return reshape(roll(reshape(x, (-1,)), shift, axis=0), x.shape)
    for by, at in np.broadcast(shift, axis):
        at, length, by = axes_of(int(at), x.ndim)[0], x.shape[int(at)], int(by)
        by = by if -length < by < length else by % max(length, 1)
        x = record(macro(rolled, by, at), [x], np.roll(x._data, by, at)) if by else x
    return x


def rolled(b: Builder, x: Var, by: int, axis: int) -> Var:
    """`x` shifted cyclically by `by` along `axis`, which is longer."""
    return b.Concat(b.Slice(x, [-by], [2**62], [axis]), b.Slice(x, [0], [-by], [axis]), axis=axis)


def repeat(x: Any, /, repeats: Any, axis: int | None = None) -> Array:
    """Each element repeated along `axis` (default: of the flattened array)."""
    x = as_array(x)
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    if exporting.get():
        refuse_tracked("repeat by numbers that are computed", [repeats], "use tile", floats=False)
    return take(x, Array(np.repeat(np.arange(x.shape[axis]), np.asarray(plain(repeats)))), axis=axis)


def tile(x: Any, /, reps: int | Sequence[int]) -> Array:
    """`x` repeated as a whole along each axis."""
    x = as_array(x)
    counts = (reps,) if isinstance(reps, int) else tuple(reps)
    rank = max(len(counts), x.ndim)
    x = at_least(x, rank)
    counts = (1,) * (rank - len(counts)) + counts
    return record(standard("Tile", ((1, counts),)), [x], np.tile(x._data, counts))


def meshgrid(*arrays: Any, indexing: str = "xy", sparse: bool = False, copy: bool = True) -> tuple[Array, ...]:
    """Coordinate arrays of the grid spanned by vectors; with `sparse`, of length 1 along the axes of the others."""
    parts, rank = [as_array(x) for x in arrays], len(arrays)
    if indexing not in ("xy", "ij"):
        raise ValueError(f"indexing is 'xy' or 'ij', not {indexing!r}")
    places = list(range(rank))
    if indexing == "xy" and rank > 1:
        places[:2] = 1, 0
    grid = tuple(along_axis(x, at, rank) for x, at in zip(parts, places))
    return grid if sparse else broadcast_arrays(*grid)


def tril(x: Any, /, k: int = 0) -> Array:
    """The elements on and below the diagonal `k`, zeros above."""
    return _triangle(np.tril, 0, as_array(x), k)


def triu(x: Any, /, k: int = 0) -> Array:
    """The elements on and above the diagonal `k`, zeros below."""
    return _triangle(np.triu, 1, as_array(x), k)


def _triangle(kernel: Any, upper: int, x: Array, k: int) -> Array:
    if x.ndim == 1:  # as NumPy does: in each row
        x = broadcast_to(x, (x.size, x.size))
    return record(standard("Trilu", ((1, int(k)),), upper=upper), [x], kernel(x._data, k))


def ravel(x: Any, /, order: str = "C") -> Array:
    """`x` flattened, in the order "C", or "F" with the first axis fastest."""
    return reshape(x, (-1,), order)
