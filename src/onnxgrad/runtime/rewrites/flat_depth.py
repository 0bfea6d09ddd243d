"""Convolutions over three axes as convolutions of the planes over two, with the taps in depth as channels.

ONNX Runtime copies the windows of three axes number by number. Planes that meet the same weights are stacked as
channels instead, [N, C, D, H, W] as [N·D, K·C, H, W]: copies of whole planes. Then one convolution over two axes adds
up all taps, in blocks of channels (`blocked_layout`): .5 to .95 of the time, .8 of a step of three such layers. Where
channels are no whole blocks, nothing is gained.

The cotangent of weights is one over two axes likewise, whose images are the planes. It takes half of the time for a
channel or two, whose taps are too few columns of a product, .8 to .9 where it is computed in blocks (`weight_blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_op
from onnxgrad.runtime.rewrites.blocked_layout import block_size, fits_blocks
from onnxgrad.runtime.rewrites.few_pixels import Correlation, PixelWindows
from onnxgrad.runtime.rewrites.rewrite import NodeRule, rewrite_results
from onnxgrad.runtime.rewrites.weight_blocks import PIXELS

#: Most channels times taps in depth for which a product has too few columns.
_FEW = 24


@dataclass(frozen=True)
class _Site:
    """A convolution: the sizes of its operands and of its result, and strides, dilations and pads; -1 is unknown."""

    operands: Sequence[ir.Value]
    x: Sequence[int]
    weights: Sequence[int]
    y: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    pads: Sequence[int]


def _match(node: ir.Node) -> _Site | None:
    if not is_op(node, "Conv") or node.attributes.get_int("group", 1) != 1:
        return None
    x, w, y = (_sizes(v) for v in (*node.inputs[:2], *node.outputs))
    if len(w) != 5 or len(x) != 5 or len(y) != 5 or min(*x[2:], *w[2:], *y[2:]) < 1:
        return None
    if w[0] < 1 or (x[0] < 1 and w[1] < 1) or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    read = node.attributes.get_ints
    strides, dilations = (read(name) or [1] * 3 for name in ("strides", "dilations"))
    block = block_size()
    fits = w[1] > 0 and fits_blocks(w[0], w[1] * w[2], w[3:], block) and (w[1] % block == 0 or max(w[3:]) > 3)
    operands = [v for v in node.inputs if v is not None]
    return _Site(operands, x, w, y, strides, dilations, read("pads") or [0] * 6) if fits else None


def _sizes(value: ir.Value | None) -> list[int]:
    """The sizes of a tensor of float32, -1 where not known; none for others."""
    if value is None or value.dtype != ir.DataType.FLOAT or value.shape is None:
        return []
    return [n if isinstance(n, int) else -1 for n in value.shape]


def _exchanged(b: Builder, x: Var | ir.Value, dims: Sequence[int]) -> Var:
    """`x` as a tensor of `dims` with the middle two axes exchanged."""
    n, one, other, pixels = dims
    if 1 in (one, other):
        return b.reshape(x, [n, other, one, pixels])
    return b.Transpose(b.reshape(x, dims), perm=[0, 2, 1, 3])


def _stacked(b: Builder, x: Var | ir.Value, sizes: Sequence[int], steps: Sequence[int], pads: Sequence[int]) -> Var:
    """The planes of `x` that meet the same weights as channels: [N·depth, taps·C, H, W].

    Args:
        sizes: those of `x`, of which -1 are not known.
        steps: depth, taps, stride and dilation.
        pads: planes of zeros before and after.
    """
    n, channels, *size = sizes
    depth, taps, stride, dilation = steps
    planes = _exchanged(b, x, [n, channels, size[0], size[1] * size[2]])
    if any(pads):
        planes = b.Pad(planes, [0, pads[0], 0, 0, 0, pads[1], 0, 0])
    planes = b.Gather(planes, stride * np.arange(depth)[:, None] + dilation * np.arange(taps), axis=1)
    met = taps * channels if channels > 0 else -1
    return b.reshape(planes, [n * depth if n > 0 else -1, met, *size[1:]])


def _write(b: Builder, site: _Site | Correlation) -> Var:
    if isinstance(site, Correlation):
        return _write_weights(b, site)
    (n, _, *size), (out, channels, *taps), depth = site.x, site.weights, site.y[2]
    steps = depth, taps[0], site.strides[0], site.dilations[0]
    stacked = _stacked(b, site.operands[0], (n, channels, *size), steps, (site.pads[0], site.pads[3]))
    kernel = _exchanged(b, site.operands[1], [out, channels, taps[0], taps[1] * taps[2]])
    met = taps[0] * channels if channels > 0 else -1
    y = b.Conv(
        stacked,
        b.reshape(kernel, [out, met, *taps[1:]]),
        *site.operands[2:],
        strides=site.strides[1:],
        dilations=site.dilations[1:],
        pads=[p for i, p in enumerate(site.pads) if i % 3],
    )
    pixels = site.y[3:]
    return b.reshape(_exchanged(b, y, [n, depth, out, pixels[0] * pixels[1]]), [n, out, depth, *pixels])


def _match_weights(node: ir.Node) -> Correlation | None:
    site = Correlation.ending_in(node)
    if site is None or len(site.windows.taps) != 3 or min(*site.windows.big, *site.windows.small) < 1:
        return None
    return site if site.images != 0 and _gains(site.windows) else None


def _gains(w: PixelWindows) -> bool:
    """True if a product over three axes has few columns, or one over two is a convolution in blocks."""
    met, block = w.inner * w.taps[0], block_size()
    if met <= _FEW:
        return True
    is_blocked = block and w.outer % block == 0 == met % block and max(w.strides) == 1
    return bool(is_blocked) and math.prod(w.small[1:]) >= PIXELS


def _write_weights(b: Builder, site: Correlation) -> Var:
    """The cotangent of weights over two axes, as `rules/conv/weight.py` writes it, of all planes as images."""
    w, n = site.windows, site.images or -1
    ends = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(w.small, w.strides, w.taps, w.dilations)]
    tail = [end - head - size for end, head, size in zip(ends, w.head, w.big)]
    behind = [max(0, zeros) for zeros in tail]  # where fewer, the last of the big side are beyond all windows
    (deep, *taps), (depth, *places), met = w.taps, w.small, w.taps[0] * w.inner
    steps = depth, deep, w.strides[0], w.dilations[0]
    planes = _stacked(b, site.big, (n, w.inner, *w.big), steps, (w.head[0], behind[0]))
    lanes = b.reshape(b.Transpose(planes, perm=[0, 2, 3, 1]), [1, -1, w.big[1], w.big[2] * met])
    small = _exchanged(b, site.small, [n, w.outer, depth, math.prod(places)])
    kernel = b.Transpose(b.reshape(small, [-1, w.outer, *places]), perm=[1, 0, 2, 3])
    y = b.Conv(
        lanes,
        site.stop(b, kernel, [w.outer, None, *places]),
        strides=[w.dilations[1], 1],
        dilations=[w.strides[1], w.strides[2] * met],
        pads=[w.head[1], w.head[2] * met, behind[1], behind[2] * met],
    )
    if tail[1:] != behind[1:]:
        y = b.Slice(y, [0, 0], [taps[0], taps[1] * met], [2, 3])
    y = b.Transpose(b.reshape(y, [w.outer, *taps, met]), perm=[0, 3, 1, 2])
    y = b.reshape(y, [w.outer, deep, w.inner, math.prod(taps)])
    y = b.Transpose(y, perm=[2, 0, 1, 3] if site.is_exchanged else [0, 2, 1, 3])
    return b.reshape(y, [*((w.inner, w.outer) if site.is_exchanged else (w.outer, w.inner)), *w.taps])


FLAT_DEPTH = rewrite_results(
    "flat_depth",
    "convolutions over three axes as ones over two, the taps in depth as channels; cotangents of weights likewise",
    "float32, one group, known sizes, blocks of channels; cotangents of weights also of few channels",
    NodeRule(lambda node: _match(node) or _match_weights(node), _write),
)
