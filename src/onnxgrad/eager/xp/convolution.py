"""Convolution, composed of a gathering of windows and a sum of products."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array
from onnxgrad.eager.xp.dtypes import promoted
from onnxgrad.eager.xp.indexing import getitem, take
from onnxgrad.eager.xp.manipulation import axes_of, flip
from onnxgrad.eager.xp.numpy_extras import pad
from onnxgrad.eager.xp.products import einsum
from onnxgrad.errors import BadInput

Axes = tuple[Sequence[int], Sequence[int]]


def convolve(
    x1: Any, x2: Any, axes: Axes | None = None, dot_axes: Axes = ((), ()), mode: str = "full", method: str = "auto"
) -> Array:
    """The convolution of two arrays.

    Args:
        x1: an array.
        x2: an array.
        axes: the axes of each to convolve, in pairs. Default: all.
        dot_axes: the axes of each to sum products over, in pairs.
        mode: "full" (m + n − 1 elements along an axis), "same" (the middle of it, with as many as `x1`), or "valid"
            (where the shorter lies inside the longer: |m − n| + 1).
        method: ignored: SciPy's choice of an algorithm.

    Returns:
        An array of the remaining axes of `x1`, those of `x2`, and the convolved ones.
    """
    a, b = promoted(x1, x2)
    if mode not in ("full", "same", "valid"):
        raise BadInput(f"mode is 'full', 'same' or 'valid', not {mode!r}")
    if axes is None:
        if a.ndim != b.ndim:
            raise BadInput(f"arrays of {a.ndim} and {b.ndim} axes: which of them are convolved?")
        axes = (range(a.ndim), range(b.ndim))
    left, right = axes_of(tuple(axes[0]), a.ndim), axes_of(tuple(axes[1]), b.ndim)
    names = iter(string.ascii_letters)
    of_a, of_b = [next(names) for _ in range(a.ndim)], [next(names) for _ in range(b.ndim)]
    for i, j in zip(axes_of(tuple(dot_axes[0]), a.ndim), axes_of(tuple(dot_axes[1]), b.ndim)):
        of_b[j] = of_a[i]
    summed = {of_a[i] for i in dot_axes[0]}
    rest_a = [c for i, c in enumerate(of_a) if i not in left and c not in summed]
    rest_b = [c for j, c in enumerate(of_b) if j not in right and c not in summed]
    lengths = [(a.shape[i], b.shape[j]) for i, j in zip(left, right)]
    if mode == "valid" and any(m < n for m, n in lengths):
        if any(m > n for m, n in lengths):
            raise BadInput("for mode 'valid', one array is at least as long as the other along all axes")
        (a, of_a, left), (b, of_b, right) = (b, of_b, right), (a, of_a, left)
        lengths = [(n, m) for m, n in lengths]
    # the windows of `a` that the reversed `b` lies on, as one more axis for each that is convolved
    widths = [[0, 0] for _ in range(a.ndim)]
    for i, (_, n) in zip(left, lengths):
        widths[i] = [0, 0] if mode == "valid" else [n - 1, n - 1]
    a = pad(a, widths) if any(map(any, widths)) else a
    places = []
    for i, (_, n) in sorted(zip(left, lengths), reverse=True):
        a = take(a, Array(np.arange(a.shape[i] - n + 1)[:, None] + np.arange(n)), axis=i)
    for i, c in enumerate(of_a):
        places.append(c + of_b[right[left.index(i)]] if i in left else c)
    out = [*rest_a, *rest_b, *(of_a[i] for i in left)]
    y = einsum(f"{''.join(places)},{''.join(of_b)}->{''.join(out)}", a, flip(b, axis=right) if right else b)
    if mode != "same":
        return y
    middle = tuple(slice((n - 1) // 2, (n - 1) // 2 + m) for m, n in lengths)
    return getitem(y, (Ellipsis, *middle)) if middle else y
