"""DeformConv, written out: columns sampled where the offsets point to, times the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.lower.registry import attribute, lowering
from onnxgrad.lower.sampling import (
    LINEAR,
    Size,
    first_rows,
    rows_of,
    sampled,
    size_of,
    taps,
)


def _positions(b: Builder, like: Var, count: Size, stride: int, head: int) -> Var:
    """The starts of the windows along an axis."""
    if isinstance(count, int):
        return b.const(np.arange(count) * stride - head, like.dtype)
    return b.cast_like(b.Range(0, count, 1), like) * float(stride) - float(head)


@lowering("DeformConv")
def deform_conv(
    b: Builder, node: ir.Node, x: Var, weights: Var, offset: Var, bias: Var | None, mask: Var | None
) -> Sequence[Var | None]:
    """y[n, m, o] = Σ w[m, c, k]·mask[n, k, o]·x[n, c, p] with p = o·stride - pad + k·dilation + offset[n, k, o]"""
    image, weights, offset = b.widen(x), b.widen(weights), b.widen(offset)
    rank = image.rank - 2
    group, parts = attribute(b, node, "group"), attribute(b, node, "offset_group")
    strides = attribute(b, node, "strides") or [1] * rank
    dilations = attribute(b, node, "dilations") or [1] * rank
    heads = (attribute(b, node, "pads") or [0] * rank)[:rank]
    kernel = attribute(b, node, "kernel_shape") or [size_of(b, weights, 2 + i) for i in range(rank)]

    batch, out = b.shape_of(image, 0, 1), b.shape_of(offset, 2)
    # [N·parts, C/parts, d…]: each part of the channels has offsets of its own
    channels = size_of(b, image, 1)
    wide = [channels // parts] if isinstance(channels, int) else b.Unsqueeze(b.Div(channels, parts), [0])
    joined = b.Mul(batch, parts) if batch.const is None else b.const(batch.const * parts)
    pieces = b.reshape(image, b.join(joined, wide, b.shape_of(image, 2))) if parts > 1 else image
    vector = [b.Unsqueeze(k, [0]) if isinstance(k, Var) else [k] for k in kernel]
    offset = b.reshape(offset, b.join(joined, *vector, [rank], out))  # [N·parts, k…, rank, o…]
    axes = 1 + 2 * rank  # of the points, laid out as [N·parts, k…, o…]
    along = []
    for i in range(rank):
        window = _positions(b, pieces, size_of(b, offset, 2 + rank + i), strides[i], heads[i])
        tap = _positions(b, pieces, kernel[i], dilations[i], 0)
        at = b.Gather(offset, b.const(i), axis=1 + rank)
        for place, along_axis in ((1 + rank + i, window), (1 + i, tap)):
            at = at + b.Unsqueeze(along_axis, [k for k in range(axes) if k != place])
        along.append(taps(b, at, size_of(b, pieces, 2 + i), LINEAR))
    first, steps = first_rows(b, pieces, size_of(b, pieces, 0))
    columns = sampled(b, rows_of(b, pieces), b.Unsqueeze(first, list(range(1, axes))), steps, along)
    if mask is not None:
        columns = columns * b.Unsqueeze(b.reshape(b.widen(mask), b.join(joined, *vector, out)), [axes])
    columns = b.Transpose(columns, perm=[0, axes, *range(1, axes)])  # [N·parts, C/parts, k…, o…]
    inner = b.shape_of(weights, 1)  # [C/group, k…]
    depth = b.const([int(inner.const.prod())]) if inner.const is not None else b.ReduceProd(inner, None, keepdims=1)
    columns = b.reshape(columns, b.join(batch, [group], depth, [-1]))
    y = b.reshape(weights, b.join([group, -1], depth)) @ columns
    y = b.reshape(y, b.join(batch, b.shape_of(weights, 0, 1), out))
    if bias is not None:
        y = y + b.Unsqueeze(b.widen(bias), list(range(1, rank + 1)))
    return [b.cast_like(y, x)]
