"""Convolutions over three axes as convolutions of the planes over two, with the taps in depth as channels.

ONNX Runtime copies the windows of three axes number by number. Planes that meet the same weights are stacked as
channels instead, [N, C, D, H, W] as [N·D, K·C, H, W]: copies of whole planes. Then one convolution over two axes adds
up all taps, in blocks of channels (`blocked_layout`): .5 to .95 of the time, .8 of a step of three such layers. Where
channels are no whole blocks, nothing is gained.

The cotangent of weights is such a convolution too, with windows as large as the tensor (`rules/conv/weight.py`), and of
a few places. Where the operand has one channel or two, its product has too few columns. There, the places in depth
become neighbours along the last axis: half of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_op
from onnxgrad.runtime.rewrites.blocked_layout import block_size, fits_blocks
from onnxgrad.runtime.rewrites.rewrite import NodeRule, rewrite_results

#: Places of a plane of the result, for which the product has too few columns.
_FEW = 32


@dataclass(frozen=True)
class _Site:
    """A convolution: the sizes of its operands and of its result, and strides, dilations and pads; -1 is unknown.

    Attributes:
        in_lanes: True if the places of the result in depth become neighbours along the last axis.
    """

    operands: Sequence[ir.Value]
    x: Sequence[int]
    weights: Sequence[int]
    y: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    pads: Sequence[int]
    in_lanes: bool


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
    in_lanes = not fits and x[0] == 1 < y[2] < w[2] and y[3] * y[4] <= _FEW and strides[2] == 1
    operands = [v for v in node.inputs if v is not None]
    return _Site(operands, x, w, y, strides, dilations, read("pads") or [0] * 6, in_lanes) if fits or in_lanes else None


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


def _padded(b: Builder, site: _Site, x: Var, axis: int) -> Var:
    """`x`, of four axes, with the padding in depth, which is along `axis`."""
    pads = [0] * 8
    pads[axis], pads[4 + axis] = site.pads[0], site.pads[3]
    return b.Pad(x, pads) if any(pads) else x


def _write_lanes(b: Builder, site: _Site) -> Var:
    """Planes as channels, places of the result in depth as neighbours along the last axis."""
    (_, channels, *size), (out, _, *taps), (_, _, lanes, *pixels) = site.x, site.weights, site.y
    planes = _padded(b, site, b.reshape(site.operands[0], [1, channels, size[0], size[1] * size[2]]), 2)
    stride, dilation = site.strides[0], site.dilations[0]
    rows = b.Gather(planes, stride * np.arange(lanes)[:, None] + dilation * np.arange(taps[0]), axis=2)
    rows = b.Transpose(b.reshape(rows, [-1, lanes, taps[0], size[1] * size[2]]), perm=[0, 2, 3, 1])
    y = b.Conv(
        b.reshape(rows, [1, -1, size[1], size[2] * lanes]),
        b.reshape(site.operands[1], [out, -1, *taps[1:]]),
        *site.operands[2:],
        strides=[site.strides[1], 1],
        dilations=[site.dilations[1], site.dilations[2] * lanes],
        pads=[p * (1, lanes)[i % 3 - 1] for i, p in enumerate(site.pads) if i % 3],
    )
    y = b.Transpose(b.reshape(y, [out, pixels[0] * pixels[1], lanes]), perm=[0, 2, 1])
    return b.reshape(y, [1, out, lanes, *pixels])


def _write(b: Builder, site: _Site) -> Var:
    if site.in_lanes:
        return _write_lanes(b, site)
    (n, _, *size), (out, channels, *taps), depth = site.x, site.weights, site.y[2]
    exchanged = _exchanged(b, site.operands[0], [n, channels, size[0], size[1] * size[2]])
    planes = _padded(b, site, exchanged, 1)
    stride, dilation = site.strides[0], site.dilations[0]
    stacked = b.Gather(planes, stride * np.arange(depth)[:, None] + dilation * np.arange(taps[0]), axis=1)
    kernel = _exchanged(b, site.operands[1], [out, channels, taps[0], taps[1] * taps[2]])
    met = taps[0] * channels if channels > 0 else -1
    y = b.Conv(
        b.reshape(stacked, [n * depth if n > 0 else -1, met, *size[1:]]),
        b.reshape(kernel, [out, met, *taps[1:]]),
        *site.operands[2:],
        strides=site.strides[1:],
        dilations=site.dilations[1:],
        pads=[p for i, p in enumerate(site.pads) if i % 3],
    )
    pixels = site.y[3:]
    return b.reshape(_exchanged(b, y, [n, depth, out, pixels[0] * pixels[1]]), [n, out, depth, *pixels])


FLAT_DEPTH = rewrite_results(
    "flat_depth",
    "convolutions over three axes as ones over two, the taps in depth as channels",
    "float32, one group, known sizes, blocks of channels or few places of the result",
    NodeRule(_match, _write),
)
