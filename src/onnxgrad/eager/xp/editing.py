"""numpy's functions that delete, insert, pick and join elements, or apply a function to parts of an array."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.xp.dtypes import cast
from onnxgrad.eager.xp.indexing import getitem, take
from onnxgrad.eager.xp.manipulation import at_least, axes_of, broadcast_to, concat, moveaxis, reshape, stack
from onnxgrad.eager.xp.numpy_extras import diag
from onnxgrad.errors import BadInput

__all__ = ["apply_along_axis", "block", "delete", "diagflat", "extract", "insert", "vectorize"]

Function = Callable[..., Any]


def _places(obj: Any, how: str) -> Any:
    return as_array(obj)._read(how) if isinstance(obj, Array) else obj


def _resolve_axis(x: Any, axis: int | None) -> tuple[Array, int]:
    x = as_array(x)
    return (reshape(x, (-1,)), 0) if axis is None else (x, axes_of(axis, x.ndim)[0])


def delete(x: Any, obj: Any, axis: int | None = None) -> Array:
    """`x` without the elements `obj` along `axis`; by default, of the flattened array."""
    x, at = _resolve_axis(x, axis)
    return take(x, Array(np.delete(np.arange(x.shape[at]), _places(obj, "delete"))), axis=at)


def insert(x: Any, obj: Any, values: Any, axis: int | None = None) -> Array:
    """`x` with `values` inserted before the elements `obj` along `axis`; by default, of the flattened array."""
    x, at = _resolve_axis(x, axis)
    places, v, count = _places(obj, "insert"), as_array(values), x.shape[at]
    v = cast(at_least(v, x.ndim), x.dtype)
    if isinstance(places, slice):
        places = np.arange(count)[places]
    if np.ndim(places) == 0:
        v = moveaxis(v, 0, at)
        more = v.shape[at]
    else:
        places = np.asarray(places)
        places = np.flatnonzero(places) if places.dtype == bool else places
        more = places.size
    v = broadcast_to(v, (*x.shape[:at], more, *x.shape[at + 1 :]))
    order = np.insert(np.arange(count), places, count + np.arange(more))
    return take(concat([x, v], axis=at), Array(order), axis=at)


def extract(condition: Any, x: Any, /) -> Array:
    """The elements of `x`, flattened, where `condition` is true."""
    where = np.flatnonzero(np.asarray(_places(condition, "extract")))
    return take(reshape(as_array(x), (-1,)), Array(where), axis=0)


def diagflat(v: Any, /, k: int = 0) -> Array:
    """A matrix with the elements of `v`, flattened, on its diagonal `k`."""
    return diag(reshape(as_array(v), (-1,)), k)


def block(arrays: Any, /) -> Array:
    """Nested lists of blocks joined: the innermost along the last axis."""

    def depth(b: Any) -> int:
        return 1 + max(map(depth, b), default=0) if isinstance(b, list) else 0

    def rank(b: Any) -> int:
        return max(map(rank, b), default=0) if isinstance(b, list) else as_array(b).ndim

    deep = depth(arrays)
    axes = max(deep, rank(arrays))

    def join_level(b: Any, level: int) -> Array:
        if isinstance(b, list):
            return concat([join_level(part, level + 1) for part in b], axis=level - deep)
        return at_least(b, axes)

    return join_level(arrays, 0)


def apply_along_axis(f: Function, axis: int, x: Any, *args: Any, **kwargs: Any) -> Array:
    """`f` applied to each vector of `x` along `axis`; the result replaces the vector."""
    x = as_array(x)
    at = axes_of(axis, x.ndim)[0]
    last = moveaxis(x, at, -1)
    rest = last.shape[:-1]
    found = [as_array(f(getitem(last, i), *args, **kwargs)) for i in np.ndindex(*rest)]
    if not found:
        raise BadInput("apply_along_axis needs at least one vector")
    y = reshape(stack(found, axis=0), (*rest, *found[0].shape))
    more = found[0].ndim
    return moveaxis(y, tuple(range(-more, 0)), tuple(range(at, at + more))) if more else y


def vectorize(f: Function, otypes: Any = None, doc: str | None = None, **options: Any) -> Function:
    """`f`, a function of numbers, as a function of arrays that are broadcast; it is called for each element.

    With ``signature="(n),(n)->()"``, `f` takes and gives arrays of as many axes as it names, and the axes before them
    are broadcast.

    Raises:
        BadInput: an option of numpy's that is not supported: ``excluded``.
    """
    signature = options.pop("signature", None)
    unknown = {k for k, v in options.items() if v} - {"cache"}
    if unknown:
        raise BadInput(f"vectorize takes no {min(unknown)!r} here")
    ranks = None if signature is None else _ranks(signature)

    def applied(*arrays: Any) -> Any:
        operands, inner = [as_array(x) for x in arrays], ranks or [0] * len(arrays)
        if len(operands) != len(inner) or any(x.ndim < r for x, r in zip(operands, inner)):
            shapes = ", ".join(str(x.shape) for x in operands)
            raise BadInput(f"a function of signature {signature!r} does not take arrays of shapes {shapes}")
        cuts = [x.ndim - r for x, r in zip(operands, inner)]
        shape = np.broadcast_shapes(*(x.shape[:cut] for x, cut in zip(operands, cuts)))
        flat = [
            reshape(broadcast_to(x, shape + x.shape[cut:]), (math.prod(shape), *x.shape[cut:]))
            for x, cut in zip(operands, cuts)
        ]
        found = [f(*(getitem(x, i) for x in flat)) for i in range(math.prod(shape))]
        if not found:
            raise BadInput("vectorize needs at least one element")

        def stack_results(parts: Any) -> Array:
            y = stack(list(map(as_array, parts)), axis=0)
            return reshape(y, (*shape, *y.shape[1:]))

        return tuple(map(stack_results, zip(*found))) if isinstance(found[0], tuple) else stack_results(found)

    applied.__doc__ = doc or f.__doc__
    return applied


def _ranks(signature: str) -> list[int]:
    """The numbers of axes of the operands that a signature as "(m,n),(n)->(m)" names."""
    operands, arrow, _ = signature.partition("->")
    found = re.findall(r"\(([^()]*)\)", operands)
    if not arrow or not found:
        raise BadInput(f"a signature is of the form '(m,n),(n)->(m)', not {signature!r}")
    return [len([name for name in axes.split(",") if name.strip()]) for axes in found]
