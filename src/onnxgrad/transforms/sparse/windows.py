"""Dependences of pools and convolutions: each element from the places that its window sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from onnxgrad.ir.match import not_none
from onnxgrad.transforms.sparse.dependence import (
    MOST_ENTRIES,
    Found,
    Operand,
    Shape,
    SizedNode,
    Unknown,
    matrix,
)

if TYPE_CHECKING:
    from scipy.sparse import csr_array


def _windows(s: SizedNode, image: Shape, result: Shape, kernel: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For every place of the result and of the kernel: the index in one image, and a mask of valid ones."""
    rank = len(image)
    strides, dilations = s.attr("strides") or [1] * rank, s.attr("dilations") or [1] * rank
    pads, auto = s.attr("pads") or [0] * (2 * rank), s.attr("auto_pad", "NOTSET")
    place, inside = np.zeros((), np.int64), np.ones((), bool)
    for d in range(rank):
        before = pads[d]
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            total = max((result[d] - 1) * strides[d] + (kernel[d] - 1) * dilations[d] + 1 - image[d], 0)
            before = (total + (auto == "SAME_LOWER")) // 2
        at = np.arange(result[d])[:, None] * strides[d] + np.arange(kernel[d]) * dilations[d] - before
        shape = [1] * (2 * rank)
        shape[d], shape[rank + d] = at.shape
        place = place * image[d] + at.reshape(shape)
        inside = inside & ((at >= 0) & (at < image[d])).reshape(shape)
    full = (math.prod(result), math.prod(kernel))
    return place.reshape(full), np.broadcast_to(inside, (*result, *kernel)).reshape(full)


def pooled(s: SizedNode) -> Found:
    """Each element from the window of its channel."""
    x, y = not_none(s.x[0]), s.shapes[0]
    if len(s.shapes) > 1:
        raise Unknown
    place, inside = _windows(s, x.shape[2:], y[2:], s.attr("kernel_shape"))
    images = x.shape[0] * x.shape[1]
    if images * place.size > MOST_ENTRIES:
        raise Unknown
    rows, k = np.nonzero(inside)
    first = np.arange(images)[:, None]
    columns = first * math.prod(x.shape[2:]) + place[rows, k]
    return [{0: matrix(first * math.prod(y[2:]) + rows, columns, (math.prod(y), x.numbers.size))}]


def _convolve(s: SizedNode, image: Shape, result: Shape, filters: Operand) -> csr_array:
    """The dependence of a convolution's elements on its image."""
    group, kernel = s.attr("group", 1), filters.shape[2:]
    place, inside = _windows(s, image[2:], result[2:], kernel)
    each, channels = result[1] // group, image[1] // group  # channels of a group
    weights = np.ones(filters.shape, bool) if filters.const is None else filters.const != 0
    linked = weights.reshape(group, -1, weights.shape[1], math.prod(kernel))  # [g, out channels, in channels, kernel]
    if linked.shape[:3] != (group, each, channels):
        raise Unknown
    g, m, c, k = np.nonzero(linked)
    if image[0] * g.size * place.shape[0] > MOST_ENTRIES:
        raise Unknown
    n = np.arange(image[0])[:, None, None]
    spots = np.arange(place.shape[0])[None, None]
    rows = (n * result[1] + (g * each + m)[:, None]) * place.shape[0] + spots
    columns = (n * image[1] + (g * channels + c)[:, None]) * math.prod(image[2:]) + place.T[k][None]
    seen = np.broadcast_to(inside.T[k][None], np.broadcast_shapes(rows.shape, columns.shape))
    rows, columns = (np.broadcast_to(a, seen.shape)[seen] for a in (rows, columns))
    return matrix(rows, columns, (math.prod(result), math.prod(image)))


def convolution(s: SizedNode) -> Found:
    """Each element depends on the window of its group's channels; with filters as operands, on all of them."""
    x, w, *bias = s.x
    assert x is not None
    assert w is not None
    if w.asked or any(b is not None and b.asked for b in bias):
        raise Unknown
    if s.node.op_type == "Conv":
        return [{0: _convolve(s, x.shape, s.shapes[0], w)}]
    if s.attr("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or s.attr("output_shape"):
        raise Unknown  # pads that follow from the shape
    return [{0: _convolve(s, s.shapes[0], x.shape, w).T.tocsr()}]
