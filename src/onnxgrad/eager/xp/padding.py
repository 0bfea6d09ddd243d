"""Padding."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.primitives import standard
from onnxgrad.eager.core.recording import record
from onnxgrad.eager.xp.indexing import take
from onnxgrad.eager.xp.manipulation import along_axis, concat, moveaxis, repeat
from onnxgrad.eager.xp.products import matmul
from onnxgrad.eager.xp.reductions import max, mean, min
from onnxgrad.eager.xp.searching import sort
from onnxgrad.errors import BadInput

__all__ = ["pad"]


def pad(
    x: Any, width: Any, /, mode: str = "constant", *, constant_values: float = 0, end_values: float = 0,
    reflect_type: str = "even",
) -> Array:  # fmt: skip
    """`x` padded along each axis.

    Args:
        x: an array.
        width: the number of elements to add: one number, a pair (before, after), or a pair for each axis.
        mode: "constant", or as in numpy "edge", "empty" (zeros here), "linear_ramp", "maximum", "mean", "median",
            "minimum", "reflect", "symmetric", "wrap".
        constant_values: the padding of the mode "constant", one number.
        end_values: the outermost elements of the mode "linear_ramp", one number.
        reflect_type: "odd" mirrors elements at the point of the edge: 2·edge - x; for "reflect" and "symmetric".
    """
    x = as_array(x)
    widths = [(int(a), int(b)) for a, b in np.broadcast_to(width, (x.ndim, 2))]
    if reflect_type not in ("even", "odd"):
        raise BadInput(f"reflect_type is 'even' or 'odd', not {reflect_type!r}")
    if mode == "empty":
        mode, constant_values = "constant", 0
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
                x = (
                    _pad_ramp(x, axis, pair, end_values)
                    if mode == "linear_ramp"
                    else _pad_end_values(x, axis, pair, mode)
                )
        return x
    if mode not in ("edge", "reflect", "symmetric", "wrap"):
        known = ", ".join(map(repr, ("constant", "edge", "empty", "linear_ramp", *_ENDS, "reflect", "symmetric")))
        raise BadInput(f"mode is {known} or 'wrap', not {mode!r}")
    for axis, pair in enumerate(widths):
        if any(pair):
            odd = reflect_type == "odd" and mode in ("reflect", "symmetric")
            x = (_odd if odd else _even)(x, axis, pair, mode)
    return x


def _even(x: Array, axis: int, widths: tuple[int, int], mode: str) -> Array:
    return take(x, Array(np.pad(np.arange(x.shape[axis]), widths, mode=mode)), axis=axis)  # type: ignore[call-overload]


def _odd(x: Array, axis: int, widths: tuple[int, int], mode: str) -> Array:
    """The linear map that numpy makes of an axis, as a matrix: element i of the result is a sum over elements of x."""
    size = x.shape[axis]
    columns = [np.pad(row, widths, mode=mode, reflect_type="odd") for row in np.eye(size)]  # type: ignore[call-overload]
    matrix = Array(np.stack(columns).astype(x.dtype))
    return moveaxis(matmul(moveaxis(x, axis, -1), matrix), -1, axis)


def _middle(x: Array, axis: int, keepdims: bool) -> Array:
    """The median along `axis`."""
    y, count = sort(x, axis=axis), x.shape[axis]
    middle = take(y, Array(np.arange((count - 1) // 2, count // 2 + 1)), axis=axis)
    return mean(middle, axis=axis, keepdims=keepdims)


#: Modes of `pad` that repeat a statistic of the elements along an axis.
_ENDS: dict[str, Any] = {"maximum": max, "mean": mean, "median": _middle, "minimum": min}


def _pad_end_values(x: Array, axis: int, widths: tuple[int, int], mode: str) -> Array:
    end = _ENDS[mode](x, axis=axis, keepdims=True)
    before, after = (repeat(end, n, axis=axis) for n in widths)
    return concat([before, x, after], axis=axis)


def _pad_ramp(x: Array, axis: int, widths: tuple[int, int], outermost: float) -> Array:
    parts = [x]
    for n, at in zip(widths, (0, -1)):
        share = (np.arange(n) / n if n else np.zeros(0)).astype(x.dtype)
        edge = take(x, Array(np.array([at % x.shape[axis]])), axis=axis)
        ramp = outermost + (edge - outermost) * along_axis(share if at == 0 else share[::-1], axis, x.ndim)
        parts = [ramp, *parts] if at == 0 else [*parts, ramp]
    return concat(parts, axis=axis)
