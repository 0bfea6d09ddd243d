"""Sums over the windows of a pooling operator, read backwards."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Var
from onnxgrad.ir.constants import MOST_WRITTEN
from onnxgrad.ir.lowerings import lowering
from onnxgrad.rules.conv.geometry import Windows, crop, dim, pad, size, spatial, spread, unpad, vector, view, windows
from onnxgrad.rules.op import Op

_BANDS = lowering("band_products", "AveragePool, LpPool", "products with band matrices", "ConvTranspose with ones")
_COPIED = lowering("copied_planes", "pools of three axes, in tiles", "Resize over two, and copies", "Resize over three")
#: Most operands of a Concat that copies.
_COPIES = 8


def tiled(op: Op, x: Var) -> list[int] | None:
    """The kernel, if its windows tile `x` without overlap, gap or padding, and `upsample` can run."""
    if x.dtype != ir.DataType.FLOAT:  # the kernel of Resize that ONNX Runtime has
        return None
    where, _ = windows(op, x)
    if None in [size(x, a + 2) for a in range(where.rank)] or where.kernel != where.strides:
        return None
    if any(where.pads) or any(where.tail):
        return None
    return None if any(d > 1 for d in where.dilations) else where.kernel  # type: ignore[return-value]


def upsample(op: Op, y: Var, kernel: list[int]) -> Var:
    """Every element of `y` repeated over a tile of shape `kernel`: an exact copy, even of an infinity.

    A Resize over three axes takes ONNX Runtime ten times as long as one over two followed by copies.
    """
    sizes = [size(y, a + 2) for a in range(len(kernel))]
    modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if len(kernel) <= 2 or not all(sizes) or not _COPIED.is_enabled:
        return op.Resize(y, None, np.array([1, 1, *kernel], np.float32), **modes)
    planes = view(op, y, [1, -1, *sizes[-2:]])
    copied = op.Resize(planes, None, np.array([1, 1, *kernel[-2:]], np.float32), **modes)
    dims = [n * k for n, k in zip(sizes, kernel) if n]
    for i in reversed([i for i, k in enumerate(kernel[:-2]) if k > 1]):
        slices = op.reshape(copied, [-1, 1, math.prod(dims[i + 1 :])])
        copied = (
            op.Expand(slices, [1, kernel[i], 1]) if kernel[i] > _COPIES else op.Concat(*[slices] * kernel[i], axis=1)
        )
    return view(op, copied, [dim(op, y, 0), dim(op, y, 1), *dims])


def scatter_mean(op: Op, g: Var, x: Var, *, include_pads: bool) -> Var:
    """The transpose of the mean over windows; with `include_pads` the padding counts as elements."""
    where, pads = windows(op, x)
    sizes = [size(x, a + 2) for a in range(where.rank)]
    if _written(where, sizes):
        bands = _bands(where, sizes)
        tails = _nominal_tails(op, where)
        counts = [_counts(where, i, sizes[i], tails[i], include_pads) for i in range(where.rank)]
        return _through_bands(op, g, x, [b / c[:, None] for b, c in zip(bands, counts)])
    whole = float(math.prod(k for k in where.kernel if k is not None))
    padded = any([*where.pads, *(op.attr("pads") or [])])
    nothing_cut = pads is None and not op.attr("ceil_mode") and (include_pads or not padded)
    divisor = whole if nothing_cut else _counts_at_run_time(op, g, x, where, pads, include_pads)
    return scatter_sum(op, g / divisor, x)


def scatter_sum(op: Op, g: Var, x: Var) -> Var:
    """The transpose of the sum over windows: each element of `x` gets Σ g over its windows.

    Two products with band matrices where the sizes are known and not large (.2 × PyTorch's kernel), else a
    ConvTranspose with weights of one, channel by channel.
    """
    where, pads = windows(op, x)
    sizes = [size(x, a + 2) for a in range(where.rank)]
    if _written(where, sizes):
        return _through_bands(op, g, x, _bands(where, sizes))
    ones = _ones(op, where, g)
    padded = [h + a + b for h, a, b in zip(spatial(op, x), pads, pads[where.rank :])] if pads else spatial(op, x)
    planes = view(op, g, [-1, 1, *spatial(op, g)]) if g.shape and size(g, 1) != 1 else g
    spread_out = spread(op, planes, ones, where, padded)
    return op.reshape(unpad(op, spread_out, pads, x), op.shape_of(x))


def _nominal_tails(op: Op, where: Windows) -> list[int]:
    """The padding at the end by the node's attributes; `where.tail` is the part that windows reach."""
    pads = op.attr("pads")
    if op.attr("auto_pad") in ("NOTSET", None) and pads:
        return pads[where.rank :]
    return [max(t, 0) for t in where.tail] if op.attr("auto_pad") in ("SAME_UPPER", "SAME_LOWER") else [0] * where.rank


def _rows(where: Windows, i: int, h: int) -> int:
    """The number of windows along axis `i` of `h` elements."""
    return max((where.head[i] + h + where.tail[i] - where.reach[i] - 1) // where.strides[i] + 1, 0)


def _written(where: Windows, sizes: list[Any]) -> bool:
    """True if band matrices are wanted, known, and small enough to be constants."""
    return (
        _BANDS.is_enabled
        and None not in sizes
        and all(_rows(where, i, h) * max(h, where.kernel[i] or 0) <= MOST_WRITTEN for i, h in enumerate(sizes))
    )


def _ones(op: Op, where: Windows, g: Var) -> Var:
    """The weights of a sum over windows, [1, 1, k…]."""
    dims = [1, 1, *(k or 0 for k in where.kernel)]
    if math.prod(dims) > MOST_WRITTEN:
        return op.Expand(op.const(1, g.dtype), vector(op, dims))
    return op.const(np.ones(dims), g.dtype)


def _bands(where: Windows, sizes: list[Any]) -> list[np.ndarray]:
    """Per axis the matrix [o, h] that is 1 where window p contains element q."""
    matrices = []
    for i, h in enumerate(sizes):
        rows = _rows(where, i, h)
        matrix = np.zeros((rows, h))
        at = np.arange(rows)[:, None] * where.strides[i] - where.head[i]
        at = at + np.arange(where.kernel[i] or 0) * where.dilations[i]
        window, tap = np.nonzero((at >= 0) & (at < h))
        matrix[window, at[window, tap]] = 1.0
        matrices.append(matrix)
    return matrices


def _counts(where: Windows, i: int, h: Any, tail: int, include_pads: bool) -> np.ndarray:
    """The number of elements of each window along axis `i` that enter its mean."""
    at = (
        np.arange(_rows(where, i, h))[:, None] * where.strides[i]
        + np.arange(where.kernel[i] or 0) * where.dilations[i]
        - where.head[i]
    )
    first, last = (-where.head[i], h + tail) if include_pads else (0, h)
    return np.maximum(((at >= first) & (at < last)).sum(1), 1).astype(np.float64)


def _through_bands(op: Op, g: Var, x: Var, bands: list[np.ndarray]) -> Var:
    """`g` times the transpose of the band matrix of each axis."""
    rank = len(bands)
    y = g @ op.const(bands[-1], g.dtype)
    if rank > 1:
        y = op.const(bands[-2].T, g.dtype) @ y
    for i in range(rank - 3, -1, -1):
        inner = int(np.prod([b.shape[1] for b in bands[i + 1 :]]))
        y = op.const(bands[i].T, g.dtype) @ op.reshape(y, [-1, bands[i].shape[0], inner])
    return op.reshape(y, op.shape_of(x)) if rank > 2 else y


def _counts_at_run_time(op: Op, g: Var, x: Var, where: Windows, pads: list[Any] | None, include_pads: bool) -> Var:
    """The number of elements of each window that enter its mean: a convolution of ones, [1, 1, o…]."""
    heads, tails = where.head, _nominal_tails(op, where)
    if pads:
        heads, tails = pads[: where.rank], pads[where.rank :]
    ones = op.Expand(op.const(1, g.dtype), vector(op, [1, 1, *spatial(op, x)]))
    if include_pads:
        around = vector(op, [0, 0, *heads, 0, 0, *tails])
        ones = op.Pad(ones, around, op.const(1, g.dtype))
        heads, tails = [0] * where.rank, [0] * where.rank
    # room for a window beyond the end; the surplus is cut
    ones = pad(op, ones, [*heads, *(t + s + r for t, s, r in zip(tails, where.strides, where.reach))])
    counts = op.Conv(ones, _ones(op, where, g), strides=where.strides, dilations=where.dilations)
    counts = crop(op, counts, spatial(op, g))
    return op.Max(counts, 1.0)
