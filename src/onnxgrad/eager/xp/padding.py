"""Padding."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.primitives import standard
from onnxgrad.eager.core.recording import record
from onnxgrad.eager.xp.indexing import take
from onnxgrad.eager.xp.manipulation import concat, repeat
from onnxgrad.eager.xp.reductions import max, mean, min
from onnxgrad.eager.xp.searching import sort
from onnxgrad.errors import BadInput

__all__ = ["pad"]


def pad(x: Any, width: Any, /, mode: str = "constant", *, constant_values: float = 0, end_values: float = 0) -> Array:
    """`x` padded along each axis.

    Args:
        x: an array.
        width: the number of elements to add: one number, a pair (before, after), or a pair for each axis.
        mode: "constant", or as in numpy "edge", "linear_ramp", "maximum", "mean", "median", "minimum", "reflect",
            "symmetric", "wrap".
        constant_values: the padding of the mode "constant", one number.
        end_values: the outermost elements of the mode "linear_ramp", one number.
    """
    x = as_array(x)
    widths = [(int(a), int(b)) for a, b in np.broadcast_to(width, (x.ndim, 2))]
    if mode == "constant":
        value = np.pad(x._data, widths, constant_values=constant_values)
        pads = tuple(a for a, _ in widths) + tuple(b for _, b in widths)
        statics = ((1, pads), (2, float(constant_values))) if constant_values else ((1, pads),)
        if x.dtype.kind == "c" and constant_values:
            raise BadInput("complex numbers are padded with zeros")
        return record(standard("Pad", statics), [x], value)
    if mode in _ENDS or mode == "linear_ramp":
        for axis, pair in enumerate(widths):
            if any(pair):
                x = _ramped(x, axis, pair, end_values) if mode == "linear_ramp" else _ended(x, axis, pair, mode)
        return x
    if mode not in ("edge", "reflect", "symmetric", "wrap"):
        known = ", ".join(map(repr, ("constant", "edge", "linear_ramp", *_ENDS, "reflect", "symmetric")))
        raise BadInput(f"mode is {known} or 'wrap', not {mode!r}")
    for axis, pair in enumerate(widths):
        if any(pair):
            x = take(x, Array(np.pad(np.arange(x.shape[axis]), pair, mode=mode)), axis=axis)  # type: ignore[call-overload]
    return x


def _middle(x: Array, axis: int, keepdims: bool) -> Array:
    """The median along `axis`."""
    y, count = sort(x, axis=axis), x.shape[axis]
    middle = take(y, Array(np.arange((count - 1) // 2, count // 2 + 1)), axis=axis)
    return mean(middle, axis=axis, keepdims=keepdims)


#: Modes of `pad` that repeat a statistic of the elements along an axis.
_ENDS: dict[str, Any] = {"maximum": max, "mean": mean, "median": _middle, "minimum": min}


def _ended(x: Array, axis: int, widths: tuple[int, int], mode: str) -> Array:
    end = _ENDS[mode](x, axis=axis, keepdims=True)
    before, after = (repeat(end, n, axis=axis) for n in widths)
    return concat([before, x, after], axis=axis)


def _ramped(x: Array, axis: int, widths: tuple[int, int], outermost: float) -> Array:
    parts = [x]
    for n, at in zip(widths, (0, -1)):
        share = (np.arange(n) / n if n else np.zeros(0)).astype(x.dtype)
        share = np.reshape(share if at == 0 else share[::-1], tuple(n if a == axis else 1 for a in range(x.ndim)))
        edge = take(x, Array(np.array([at % x.shape[axis]])), axis=axis)
        ramp = outermost + (edge - outermost) * share
        parts = [ramp, *parts] if at == 0 else [*parts, ramp]
    return concat(parts, axis=axis)
