"""The cotangent of convolution weights: correlate the big side with the small side over batch and space.

``W̄[m, c, i] = Σₙₚ small[n, m, p] · big[n, c, p·stride + i·dilation - head]``, within each group. There is
no single best way to say this in ONNX; four are used, chosen by what is known and what was measured
on ONNX Runtime 1.31 (two cores, batch 16 to 32, 32 to 64 channels, 16² to 32², 3×3):

* `_pointwise` — one tap: a product of matrices. Where the planes are larger than the weights, one for each image,
  added up: channels need not be moved out of the batch, which takes as long as the product (.46 to .91 of the time).
* `_interleaved` — the channels of the big side moved inside its last axis, so that one convolution, whose
  kernel is the whole small side and whose dilations are the strides, yields all taps and channels of a row
  at once. 1.2 to 1.9 × PyTorch's kernel, where exchanging batch and channels takes 5 to 15 ×. Dilated over one
  or two axes, channels are an axis of their own, so that nothing is computed between taps (.6 to .8 of a WaveNet's
  step; of 3×3 over 28² .65 dilated by 2, .37 by 4). What is the kernel are the rows of a product, of which a runtime
  likes many: with stride 1, where the big side has more channels, it is the kernel, and the taps come out mirrored
  (.79 of the time from 64 to 32 channels, .87 from 128 to 64 and from 256 to 128).
* `_by_rows` — depthwise: the products of all columns with all columns (a batched product of matrices), of
  which a 0/1 mask picks the diagonals. 2.7 and 4.8 ms where `_exchanged` takes 6.9 and 15.
* `_exchanged` — batch and channels exchanged in an ordinary convolution: needs no size at all.

For an empty batch all sums are empty, so 0. A convolution over no channels never ends on ONNX Runtime, or returns
uninitialized memory; so if the batch may be empty, `_stop_if_empty` stops the run first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from onnxgrad.ir import Var, unless_empty
from onnxgrad.ir.lowerings import lowering
from onnxgrad.ir.match import HALF, not_none
from onnxgrad.ir.stops import CONVOLUTION, name_stop
from onnxgrad.rules.conv.geometry import Windows, crop, dim, mirrored, pad, size, spatial, tap, vector, view
from onnxgrad.rules.op import Op

_POINTWISE = lowering("pointwise_weight", "weights of Conv 1×1", "a product of matrices", "`interleaved_weight`")
_IMAGES = lowering(
    "image_products", "weights of Conv 1×1, large planes", "a product for each image, summed", "`pointwise_weight`"
)
_INTERLEAVED = lowering(
    "interleaved_weight", "weights of Conv", "a Conv with channels inside its last axis", "batch and channels exchanged"
)
_WIDER = lowering(
    "wider_kernel",
    "weights of Conv, stride 1, fewer channels out",
    "a Conv with the operand as kernel",
    "the cotangent",
)
_ROWS = lowering(
    "depthwise_rows", "weights of depthwise Conv", "products of rows, and a mask", "batch and channels exchanged"
)

#: Widest rows for `_by_rows`, whose work per element grows with the width.
WIDEST_ROW = 64


def correlate(op: Op, big: Var, small: Var, like: Var, windows: Windows) -> Var:
    """The cotangent of the weights `like`, [M, C/G, k…]."""
    with op.builder.untouched(big, small):
        w = _correlate(op, big, small, like, windows)
    if windows.rank in (1, 2, 3) and None not in windows.kernel:
        op.named(
            "ConvWeightGrad",
            [w],
            of=[big, small],
            kernel=windows.kernel,
            strides=windows.strides,
            dilations=windows.dilations,
            pads=windows.head,
            group=windows.group,
        )
    return w


def _correlate(op: Op, big: Var, small: Var, like: Var, windows: Windows) -> Var:
    group = windows.group
    inner = size(like, 1)
    if inner is None and size(big, 1) is not None:
        inner = size(big, 1) // group  # type: ignore[operator]
    if _POINTWISE.is_enabled and group == 1 and windows.kernel == [1] * windows.rank and not any(windows.pads):
        return _pointwise(op, big, small, like, windows)
    if None in windows.kernel or inner is None:
        return _exchanged(op, big, small, like, windows)
    if group > 1 and inner == 1:
        rows = _ROWS.is_enabled and windows.rank == 2 and windows.exact and size(like, 0) == group
        width, narrow = size(big, big.rank - 1), size(small, small.rank - 1)
        if rows and width is not None and narrow is not None and size(small, 2) and width <= WIDEST_ROW:
            return _by_rows(op, big, small, like, windows)
        return _exchanged(op, big, small, like, windows)
    if not _INTERLEAVED.is_enabled:
        return _exchanged(op, big, small, like, windows)
    outer = size(like, 0)
    turned = _exchanged_roles(windows)
    if _WIDER.is_enabled and outer is not None and turned is not None and outer < inner * group:
        return mirrored(op, _interleaved(op, small, big, inner * group, turned, outer // group), turned)
    return _interleaved(op, big, small, outer, windows, inner)


def _exchanged_roles(windows: Windows) -> Windows | None:
    """The windows of the big side over the small one, whose taps are those of `windows` mirrored; None for no such."""
    if not windows.exact or any(s > 1 for s in windows.strides):
        return None
    head, tail = ([r - p for r, p in zip(windows.reach, side)] for side in (windows.head, windows.tail))
    return dataclasses.replace(windows, head=head, tail=tail) if min(head + tail) >= 0 else None


def _pointwise(op: Op, big: Var, small: Var, like: Var, windows: Windows) -> Var:
    """One tap: W̄ = S·B over all pixels, or Σₙ Sₙ·Bₙ."""
    axes = list(range(2, big.rank))
    if any(s > 1 for s in windows.strides):
        far = [int(np.iinfo(np.int64).max)] * windows.rank
        big = op.Slice(big, [0] * windows.rank, far, axes, windows.strides)
    if _IMAGES.is_enabled and _has_large_planes(small, like):
        pixels = int(np.prod([size(small, axis) for axis in axes]))  # type: ignore[arg-type]
        rows, columns = (view(op, v, [dim(op, v, 0), size(like, a), pixels]) for a, v in enumerate((small, big)))
        each = rows @ op.Transpose(columns, perm=[0, 2, 1])
        return op.reshape(op.ReduceSum(each, [0], keepdims=0), op.shape_of(like))
    rows = op.Flatten(op.Transpose(small, perm=[1, 0, *axes]), axis=1)
    columns = op.Flatten(op.Transpose(big, perm=[0, *axes, 1]), axis=big.rank - 1)
    return op.reshape(rows @ columns, op.shape_of(like))


def _has_large_planes(small: Var, like: Var) -> bool:
    """True if an image has more pixels in both operands than the kernel has weights; False for 16 bits."""
    outer, inner = size(like, 0), size(like, 1)
    room = [size(small, axis) for axis in range(2, small.rank)]
    if outer is None or inner is None or None in room or small.dtype in HALF:
        return False
    return outer * inner < int(np.prod(room)) * (outer + inner)  # type: ignore[arg-type]


def _interleaved(op: Op, big: Var, small: Var, outer: int | None, windows: Windows, inner: int) -> Var:
    """One convolution over the big side as [1, G·N, h…, w·C/G], with the small side [M, N, o…] as kernel: [M, C/G, k…].

    `outer` is M, and `inner` C/G.
    """
    rank, group = windows.rank, windows.group
    axes = list(range(2, big.rank))
    batch, room = dim(op, big, 0), spatial(op, big)
    if group == 1:
        lanes = op.Transpose(big, perm=[0, *axes, 1])
    else:
        lanes = view(op, big, [batch, group, inner, *room])
        lanes = op.Transpose(lanes, perm=[1, 0, *(a + 1 for a in axes), 2])
    kernel = _stop_if_empty(op, op.Transpose(small, perm=[1, 0, *axes]))
    gap = windows.dilations[-1]
    taps: list[Any] = list(windows.kernel)
    if gap > 1 and rank < 3:  # the offsets between taps dominate; no runtime has four axes
        pads = windows.pads
        y = op.Conv(
            view(op, lanes, [1, batch * group, *room, inner]),
            op.Unsqueeze(kernel, [rank + 2]),
            strides=[*windows.dilations, 1],
            dilations=[*windows.strides, 1],
            pads=[*pads[:rank], 0, *pads[rank:], 0],
            group=group,
        )
        if any(e >= d for e, d in zip(windows.surplus, windows.dilations)):
            y = crop(op, y, [*taps, inner])
        return op.Transpose(op.Squeeze(y, [0]), perm=[0, rank + 1, *range(1, rank + 1)])
    lanes = view(op, lanes, [1, batch * group, *room[:-1], room[-1] * inner])
    pads = windows.pads
    pads[rank - 1] *= inner
    pads[-1] *= inner
    y = op.Conv(
        lanes,
        kernel,
        strides=[*windows.dilations[:-1], 1],
        dilations=[*windows.strides[:-1], windows.strides[-1] * inner],
        pads=pads,
        group=group,
    )
    run = windows.reach[-1] + 1  # the last axis of y holds every offset, not only the taps
    if any(e >= d for e, d in zip(windows.surplus, [*windows.dilations[:-1], 1])):
        y = crop(op, y, [*taps[:-1], run * inner])
    y = view(op, y, [-1 if outer is None else outer, *taps[:-1], run, inner])
    if gap > 1:
        y = op.Slice(y, [0], [run], [rank], [gap])
    return op.Transpose(y, perm=[0, rank + 1, *range(1, rank + 1)])


def _stop_if_empty(op: Op, kernel: Var) -> Var:
    """`kernel`, [M, N, o…]; a run with N = 0 stops at this node, whose name is the message."""
    if size(kernel, 1) is not None:
        return kernel
    rows = op.Max(op.shape_of(kernel, 1, 2), 1)
    same = op.reshape(kernel, vector(op, [dim(op, kernel, 0), rows, *spatial(op, kernel)]))
    same.value.shape = kernel.value.shape
    not_none(same.value.producer()).name = name_stop(op.builder.names, CONVOLUTION, op.node)
    return same


def _by_rows(op: Op, big: Var, small: Var, like: Var, windows: Windows) -> Var:
    """Depthwise: Mᵢ = Σₙₚ rowsᵢ[n, p]ᵀ·small[n, p] for each tap i down; its diagonals are the taps across."""
    (down, across), (s, s_across), (d, d_across) = windows.kernel, windows.strides, windows.dilations
    assert down is not None
    assert across is not None
    rows, width, narrow = not_none(size(small, 2)), not_none(size(big, 3)), not_none(size(small, 3))
    big = pad(op, big, [windows.head[0], 0, max(windows.tail[0], 0), 0])
    shifted = [op.Slice(big, [i * d], [i * d + (rows - 1) * s + 1], [2], [s]) for i in range(down)]
    lines = op.Transpose(op.Concat(*shifted, axis=3), perm=[1, 0, 2, 3])
    channels = windows.group
    lines = op.Transpose(op.reshape(lines, [channels, -1, down * width]), perm=[0, 2, 1])
    columns = op.reshape(op.Transpose(small, perm=[1, 0, 2, 3]), [channels, -1, narrow])
    products = op.reshape(lines @ columns, [channels * down, width * narrow])
    at = np.arange(width)[:, None, None] + windows.head[1]
    mask = at == np.arange(narrow)[:, None] * s_across + np.arange(across) * d_across
    diagonals = products @ op.const(mask.reshape(width * narrow, across), big.dtype)
    return unless_empty(op.reshape(diagonals, op.shape_of(like)), small, 0)


def _exchanged(op: Op, big: Var, small: Var, like: Var, windows: Windows) -> Var:
    """Convolve the big side [C/G, G·N, …] with the small side [M, N, …] as kernel; strides ↔ dilations."""
    rank, group = windows.rank, windows.group
    axes = list(range(2, big.rank))
    if group == 1:
        lanes = op.Transpose(big, perm=[1, 0, *axes])
    else:
        batch, room = dim(op, big, 0), spatial(op, big)
        inner = dim(op, like, 1)
        lanes = view(op, big, [batch, group, inner, *room])
        lanes = op.Transpose(lanes, perm=[2, 1, 0, *(a + 1 for a in axes)])
        lanes = view(op, lanes, [inner, batch * group, *room])
    y = op.Conv(
        lanes,
        _stop_if_empty(op, op.Transpose(small, perm=[1, 0, *axes])),
        strides=windows.dilations,
        dilations=windows.strides,
        pads=windows.pads,
        group=group,
    )
    if any(e >= d for e, d in zip(windows.surplus, windows.dilations)):
        y = crop(op, y, [tap(op, like, windows.kernel, i) for i in range(rank)])
    return op.Transpose(y, perm=[1, 0, *axes])
