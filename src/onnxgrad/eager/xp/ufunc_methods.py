"""Methods of numpy's ufuncs for functions of the namespace: ``add.reduce``, ``accumulate``, ``reduceat``, ``outer``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, values_of
from onnxgrad.eager.xp import reductions as r
from onnxgrad.eager.xp.indexing import getitem
from onnxgrad.eager.xp.manipulation import expand_dims, moveaxis, reshape, stack
from onnxgrad.errors import BadInput

Function = Callable[..., Any]

#: Functions of two operands that have these methods.
NAMES = (
    "add", "arctan2", "atan2", "divide", "fmax", "fmin", "hypot", "logaddexp", "logaddexp2", "logical_and",
    "logical_or", "maximum", "minimum", "multiply", "pow", "power", "subtract", "true_divide",
)  # fmt: skip
_REDUCED: dict[str, Function] = {
    "add": r.sum, "logical_and": r.all, "logical_or": r.any, "maximum": r.max, "minimum": r.min, "multiply": r.prod,
}  # fmt: skip
_ACCUMULATED: dict[str, Function] = {"add": r.cumulative_sum, "multiply": r.cumulative_prod}


def reduce(
    f: Function, x: Any, axis: Any = 0, dtype: Any = None, out: None = None, keepdims: bool = False,
    initial: Any = None, where: Any = None,
) -> Array:  # fmt: skip
    """`initial` and the elements of `x` along `axis` where `where` is true, combined by `f` from the first on."""
    x = as_array(x) if dtype is None else as_array(x).astype(dtype)
    known = _REDUCED.get(f.__name__)
    if known is not None and not f.__name__.startswith("logical"):
        return known(x, axis=axis, keepdims=keepdims, initial=initial, where=where)
    identity = getattr(np, f.__name__).identity
    x = r.fill_unselected(x, where, initial if identity is None else identity, f"{f.__name__}.reduce")
    if known is not None:
        y = known(x, axis=axis, keepdims=keepdims)
        return y if initial is None else f(y, initial)
    if not isinstance(axis, int):
        raise BadInput(f"{f.__name__}.reduce goes along one axis, not {axis!r}")
    first = [] if initial is None else [as_array(initial)]
    y = functools.reduce(f, [*first, *_slices(x, axis, f)])
    return expand_dims(y, axis=axis) if keepdims else y


def reduceat(f: Function, x: Any, indices: Any, axis: int = 0, dtype: Any = None, out: None = None) -> Array:
    """The results of `reduce` from each of `indices` to the next, the last one to the end.

    An index that is not below the next one gives its element alone, as in numpy.
    """
    x = as_array(x) if dtype is None else as_array(x).astype(dtype)
    front = moveaxis(x, axis, 0)
    size = front.shape[0]
    starts = np.asarray(values_of("reduceat", as_array(indices))).tolist()
    if any(not 0 <= i < size for i in starts):
        raise IndexError(f"indices of reduceat are from 0 to {size - 1}, not {starts}")
    ends = [*starts[1:], size]
    parts = [reduce(f, getitem(front, slice(i, end))) if i < end else getitem(front, i) for i, end in zip(starts, ends)]
    return moveaxis(stack(parts, axis=0), 0, axis)


def accumulate(f: Function, x: Any, axis: int = 0, dtype: Any = None, out: None = None) -> Array:
    """The results of `reduce` over the first elements of `x` along `axis`: 1, 2, … of them."""
    x = as_array(x) if dtype is None else as_array(x).astype(dtype)
    known = _ACCUMULATED.get(f.__name__)
    if known is not None:
        return known(x, axis=axis)
    parts: list[Any] = []
    for piece in _slices(x, axis, f):
        parts.append(f(parts[-1], piece) if parts else piece)
    return stack(parts, axis=axis)


def _slices(x: Array, axis: int, f: Function) -> list[Array]:
    front = moveaxis(x, axis, 0)
    if not front.shape[0]:
        raise BadInput(f"{f.__name__} over no elements has no first one")
    return [getitem(front, i) for i in range(front.shape[0])]


def outer(f: Function, x1: Any, x2: Any, /) -> Array:
    """`f` of each element of `x1` with each element of `x2`."""
    a, b = as_array(x1), as_array(x2)
    return f(reshape(a, (*a.shape, *(1,) * b.ndim)), b)


def attach(namespace: dict[str, Any]) -> None:
    """Attach numpy's ufunc methods to the functions of `namespace`."""
    for name in NAMES:
        f = namespace[name]
        for method in (reduce, accumulate, reduceat, outer):
            setattr(f, method.__name__, functools.partial(method, f))
