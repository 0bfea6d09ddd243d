"""Convolutions of few pixels as products of matrices with the weights as they are.

The last layers of an image network have few pixels and many weights. There, most of the time goes into laying weights
out: in blocks of channels, turned round for the cotangent of the operand, and their cotangent back from the layout of
its convolution. A product of matrices reads and writes them as they are, [M, C·taps]. Its other operand holds what each
window covers, [pixels, C·taps]: rows of channels that a Gather copies by a table of places, with one more row of zeros.
The cotangent of the operand is the same backwards: rows of a product, picked and added up; of one tap, rows alone.
With four images of 5×5 pixels and 512 channels, the three convolutions of a layer take two thirds of the time; where
all images have as many pixels as there are channels, as at the end of ResNet-26, a step takes .97 to 1.

Of one tap, ONNX Runtime multiplies the weights by each image on its own: it reads them again for each, for a product of
few columns. The product of all images takes .3 of the time for 2×2 pixels, .8 for 6×6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import constant, is_op, permutation, producer
from onnxgrad.runtime.rewrites.blocked_layout import is_known_before, original_filter
from onnxgrad.runtime.rewrites.rewrite import NodeRule, rewrite_results

#: The number of images assumed if it is known only at run time.
_IMAGES = 16
#: The fewest weights: fewer are laid out quickly.
_WEIGHTS = 1 << 15
#: Of one tap: the fewest weights that take time to read for each image, and the most windows of an image, of which more
#: are enough columns of a product.
_WEIGHTS_OF_ONE_TAP, _WINDOWS = 1 << 16, 49
#: The most rows in a table of places, so that it is a small part of the graph.
_PLACES = 1 << 14


@dataclass(frozen=True)
class PixelWindows:
    """The windows of a convolution of [N, inner, *big] to [N, outer, *small]."""

    outer: int
    inner: int
    big: Sequence[int]
    small: Sequence[int]
    taps: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    head: Sequence[int]

    def is_worth(self, images: int | None) -> bool:
        """True if the weights outnumber what the windows cover, or are many, of one tap, for few windows an image."""
        ends, taps = math.prod(self.small), math.prod(self.taps)
        pixels, weights = ends * (images or _IMAGES), self.outer * self.inner * taps
        if not ends or max(ends * taps, math.prod(self.big)) > _PLACES or weights < _WEIGHTS:
            return False
        if taps > 1:
            return pixels <= self.outer
        is_large = ends <= _WINDOWS and weights >= _WEIGHTS_OF_ONE_TAP
        return is_large or 2 * pixels * (self.outer + self.inner) <= weights

    @property
    def has_pixels_alone(self) -> bool:
        """True if each window is one pixel, and each pixel has a window."""
        return math.prod(self.taps) == 1 and not any(self.head) and [*self.big] == [*self.small]

    def met(self) -> np.ndarray:
        """The pixel of the big side under each tap of each window, [small, taps]; their number where there is none."""
        ends, taps = (np.indices(n).reshape(len(n), -1) for n in (self.small, self.taps))
        pixels = np.zeros((ends.shape[1], taps.shape[1]), np.int64)
        is_inside = np.ones(pixels.shape, bool)
        for i, size in enumerate(self.big):
            at = ends[i][:, None] * self.strides[i] + taps[i] * self.dilations[i] - self.head[i]
            is_inside &= (at >= 0) & (at < size)
            pixels = pixels * size + at
        return np.where(is_inside, pixels, math.prod(self.big))

    def meeting(self) -> np.ndarray:
        """For each pixel of the big side, the windows and taps that meet it, numbered; their number for no more."""
        met = self.met()
        flat = met.ravel()
        lists = [np.flatnonzero(flat == pixel) for pixel in range(math.prod(self.big))]
        table = np.full((len(lists), max(1, *map(len, lists))), met.size)
        for row, found in zip(table, lists):
            row[: len(found)] = found
        return table


@dataclass(frozen=True)
class _Site:
    """A convolution, or a cotangent of one of its operands: `write` returns the result for `operands`."""

    windows: PixelWindows
    operands: Sequence[ir.Value | None]
    write: Callable[..., Var]


# --- products --------------------------------------------------------------------------------------------------------


def _pixels(b: Builder, x: Var, channels: int, pixels: int) -> Var:
    """[N, C, …] as [N, pixels, C]"""
    return b.Transpose(b.reshape(x, [-1, channels, pixels]), perm=[0, 2, 1])


def _image(b: Builder, rows: Var, channels: int, dims: Sequence[int]) -> Var:
    """[N, pixels, C] as [N, C, *dims]"""
    return b.reshape(b.Transpose(rows, perm=[0, 2, 1]), [-1, channels, *dims])


def _pick_rows(b: Builder, rows: Var, table: np.ndarray) -> Var:
    """The rows of [N, rows, C] that `table` names; the number of rows names a row of zeros."""
    if (table == table.max()).any() and table.max() == rows.dims[1]:
        rows = b.Pad(rows, [0, 0, 0, 0, 1, 0])
    return b.Gather(rows, table, axis=1)


def _unfold(b: Builder, x: Var, w: PixelWindows) -> Var:
    """The pixels of `x` under each window: [N·small, C·taps]"""
    rows = _pixels(b, x, w.inner, math.prod(w.big))
    if w.has_pixels_alone:
        return b.reshape(rows, [-1, w.inner])
    rows = _pick_rows(b, rows, w.met())
    return b.reshape(b.Transpose(rows, perm=[0, 1, 3, 2]), [-1, w.inner * math.prod(w.taps)])


def _matrix(b: Builder, weights: Var, w: PixelWindows) -> Var:
    return b.reshape(weights, [w.outer, w.inner * math.prod(w.taps)])


def _convolve(b: Builder, w: PixelWindows, x: Var, weights: Var, *bias: Var) -> Var:
    y = b.Gemm(_unfold(b, x, w), _matrix(b, weights, w), *bias, transB=1)
    return _image(b, b.reshape(y, [-1, math.prod(w.small), w.outer]), w.outer, w.small)


def _spread(b: Builder, w: PixelWindows, g: Var, weights: Var, *bias: Var) -> Var:
    """The transpose of the convolution, plus `bias`."""
    ends, taps = math.prod(w.small), math.prod(w.taps)
    y = b.reshape(_pixels(b, g, w.outer, ends), [-1, w.outer]) @ _matrix(b, weights, w)
    rows = b.Transpose(b.reshape(y, [-1, ends, w.inner, taps]), perm=[0, 1, 3, 2])
    rows = b.reshape(rows, [-1, ends * taps, w.inner])
    if not w.has_pixels_alone:
        rows = b.ReduceSum(_pick_rows(b, rows, w.meeting()), [2], keepdims=0)
    return _image(b, rows + bias[0] if bias else rows, w.inner, w.big)


def _correlate(b: Builder, w: PixelWindows, x: Var, g: Var) -> Var:
    """The cotangent of the weights."""
    rows = b.Transpose(g, perm=[1, 0, *range(2, g.rank)])
    return b.reshape(b.reshape(rows, [w.outer, -1]) @ _unfold(b, x, w), [w.outer, w.inner, *w.taps])


# --- matches ---------------------------------------------------------------------------------------------------------


def _attributes(node: ir.Node, rank: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]] | None:
    """Strides, dilations and padding before, without groups; None for other forms."""
    if node.attributes.get_int("group", 1) != 1 or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    if "output_shape" in node.attributes:
        return None
    read = node.attributes.get_ints
    strides, dilations = (read(name) or [1] * rank for name in ("strides", "dilations"))
    return strides, dilations, (read("pads") or [0] * rank)[:rank]


def _room(value: ir.Value | None) -> tuple[int | None, list[int]] | None:
    """Images, and channels and sizes, of a tensor of float32; None if the latter are not known."""
    if value is None or value.dtype != ir.DataType.FLOAT or value.shape is None or len(value.shape) < 3:
        return None
    images, *rest = value.shape
    known = [n for n in rest if isinstance(n, int)]
    return (images if isinstance(images, int) else None, known) if len(known) == len(rest) else None


def _match_convolution(node: ir.Node) -> _Site | None:
    """A convolution, or the transpose of one, as ConvTranspose or with mirrored weights."""
    if not is_op(node, ("Conv", "ConvTranspose")) or node.inputs[1] is None or is_known_before(node.inputs[1]):
        return None
    x, y, w = _room(node.inputs[0]), _room(node.outputs[0]), _room(node.inputs[1])
    own = None if x is None else _attributes(node, len(x[1]) - 1)
    if x is None or y is None or w is None or w[0] is None or own is None:
        return None
    weights, channels, taps = node.inputs[1], (w[0], w[1][0]), w[1][1:]
    strides, dilations, head = own
    turned = original_filter(weights) if is_op(node, "Conv") and max(strides) == 1 else None
    sides = x[1][1:], y[1][1:]
    write: Callable[..., Var] = _convolve
    if turned is not None or is_op(node, "ConvTranspose"):
        write, sides = _spread, (sides[1], sides[0])
    if turned is not None:
        weights, channels = turned, (channels[1], channels[0])
        head = [(k - 1) * d - before for k, d, before in zip(taps, dilations, head)]
    windows = PixelWindows(*channels, *sides, taps, strides, dilations, head)
    return _Site(windows, (node.inputs[0], weights, *node.inputs[2:]), write) if windows.is_worth(x[0]) else None


@dataclass(frozen=True)
class Correlation:
    """The cotangent of weights, as a convolution with channels inside its last axis (`rules/conv/weight.py`).

    Attributes:
        windows: those of the big side; the small side is the kernel of `convolution`.
        is_exchanged: True if the channels of the big side come first in the result.
    """

    windows: PixelWindows
    big: ir.Value
    small: ir.Value
    convolution: ir.Node
    is_exchanged: bool

    @property
    def images(self) -> int | None:
        """The number of images; None if it is known only at run time."""
        n = self.big.shape[0] if self.big.shape is not None else None
        return n if isinstance(n, int) else None

    def stop(self, b: Builder, kernel: Var, shape: Sequence[Any]) -> Var:
        """`kernel` with the dimensions `shape`, of which those that are None have at least one element.

        An empty batch does not fit: where the convolution stops a run then, this node does, by the same name.
        """
        dims = [b.Max(b.Shape(kernel, start=i, end=i + 1), [1]) if n is None else n for i, n in enumerate(shape)]
        y = b.reshape(kernel, b.Concat(*([n] if isinstance(n, int) else n for n in dims), axis=0))
        stopped = producer(self.convolution.inputs[1], "Reshape")
        node = y.value.producer()
        if stopped is not None and stopped.name and node is not None:
            node.name = b.names.fresh(stopped.name.rsplit("_", 1)[0])
        return y

    @classmethod
    def ending_in(cls, node: ir.Node) -> Correlation | None:
        """Match the operators that end in `node`. Returns None without a match."""
        lanes = producer(node.inputs[0], "Reshape") if is_op(node, "Transpose") else None
        y = None if lanes is None else lanes.inputs[0]
        cut = producer(y, "Slice")
        starts = None if cut is None else constant(cut.inputs[1])
        conv = producer(cut.inputs[0] if cut is not None and starts is not None and not starts.any() else y, "Conv")
        out = _room(node.outputs[0])
        own = None if conv is None or out is None else _attributes(conv, len(out[1]) - 1)
        if lanes is None or conv is None or out is None or out[0] is None or own is None or len(conv.inputs) > 2:
            return None
        (second, *taps), rank = out[1], len(out[1]) - 1
        is_exchanged = permutation(node) == (rank + 1, *range(rank + 1))
        outer, inner = (second, out[0]) if is_exchanged else (out[0], second)
        x, g = (
            _untransposed(conv.inputs[0], (0, *range(2, rank + 2), 1)),
            _untransposed(conv.inputs[1], (1, 0, *range(2, rank + 2))),
        )
        big, small, shape = _room(x), _room(g), constant(lanes.inputs[1])
        if x is None or g is None or big is None or small is None or shape is None:
            return None
        if not is_exchanged and permutation(node) != (0, rank + 1, *range(1, rank + 1)):
            return None
        dilations, strides, head = own  # their parts are exchanged; along the last axis, they count channels
        if [*shape[1:]] != [*taps, inner] or big[1][0] != inner or small[1][0] != outer or dilations[-1] != 1:
            return None
        if strides[-1] % inner or head[-1] % inner:
            return None
        strides, head = ([*n[:-1], n[-1] // inner] for n in (strides, head))
        windows = PixelWindows(outer, inner, big[1][1:], small[1][1:], taps, strides, dilations, head)
        return cls(windows, x, g, conv, is_exchanged)


def _match_cotangent(node: ir.Node) -> _Site | None:
    found = Correlation.ending_in(node)
    if found is None or found.is_exchanged or not found.windows.is_worth(found.images):
        return None
    return _Site(found.windows, (found.big, found.small), _correlate)


def _untransposed(value: ir.Value | None, axes: tuple[int, ...]) -> ir.Value | None:
    """The operand of the Transpose to the order `axes` that `value`, perhaps reshaped, is the result of."""
    view = producer(value, "Reshape")
    node = producer(value if view is None else view.inputs[0], "Transpose")
    return node.inputs[0] if node is not None and permutation(node) == axes else None


def _write(b: Builder, site: _Site) -> Var:
    return site.write(b, site.windows, *(Var(b, v) for v in site.operands if v is not None))


FEW_PIXELS = rewrite_results(
    "few_pixels",
    "convolutions and cotangents of their operands as products with the weights as they are",
    "float32, one group, weights that change, in 16 images not more pixels than channels; of one tap, up to 7×7 pixels",
    NodeRule(lambda node: _match_convolution(node) or _match_cotangent(node), _write),
)
