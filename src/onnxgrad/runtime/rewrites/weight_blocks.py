"""The cotangent of convolution weights as a convolution in blocks of channels.

In standard operators it is a convolution whose kernel is one whole operand (`rules/conv/weight.py`). ONNX Runtime
copies its windows and multiplies matrices, at half the speed of its direct convolution, which reads them in place: in
blocks, that takes .6 to .95 of the time. It has the channels of the kernel as lanes, the taps and 16 channels of the
other operand as places, and sums over images as channels, of which there may be few only. So each channel is a
stack of images, with as many rows of zeros between them as a window reaches over: the largest number of stacks below a
block that divides the images, so that a stack stays in the cache. Columns of zeros are written, because the places that
a convolution pads are computed one by one. The kernel is read again for every few places: a large image of it is cut
into strips of rows that stay in the cache, which are images then (.97 of the step of a U-Net of 96×96 pixels).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import not_none
from onnxgrad.runtime.rewrites.blocked_layout import Blocks, block_size, emit_blocked
from onnxgrad.runtime.rewrites.few_pixels import Correlation, PixelWindows
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite_sites

#: Fewest pixels of the small side: with less, most of the time goes into weights.
PIXELS = 144
#: Blocks of the kernel that are computed together. From there on, strides gain nothing: the big side is too large.
_FILTERS = 4
#: Fewest parts of the result, which threads share, and fewest taps.
_PARTS = 3
#: Fewest products of an image: for fewer, a step of few images has more operators and is no faster.
_PRODUCTS = 5 << 17
#: Bytes of a strip of the kernel, which is read for every few places, and its fewest rows.
_STRIP, _ROWS = 1 << 20, 16
#: Most numbers of an image of the kernel where the other operand has few channels, and it is read for few places each.
_CACHED = 1 << 18


class _Correlations(Blocks):
    def __init__(self, b: Builder, block: int) -> None:
        super().__init__(b, block)
        self._stacks: dict[tuple[str | None, int], tuple[Var, Var]] = {}

    def correlate(self, node: ir.Node, found: Correlation) -> None:
        """Replace the cotangent of weights that ends in `node`."""
        w, taps = found.windows, math.prod(found.windows.taps)
        (height, width), (rows, columns), (above, before) = w.big, w.small, w.head
        (stride, stride_across), (dilation, _) = w.strides, w.dilations
        reach = (w.taps[0] - 1) * dilation
        pitch = max(above + height, (rows - 1) * stride + reach + 1 - above)
        pitch += -pitch % stride
        strips = _count_strips(w)
        if strips > 1:
            pitch = rows // strips + reach
        line = (columns - 1) * stride_across + w.taps[1]
        if w.inner % self.block:
            lanes, lined = w.inner, self.b.Transpose(self.view(found.big, -1, w.inner, height * width), perm=[0, 2, 1])
        else:
            lanes, lined = self.block, self.fresh(found.big)
        parts = w.inner // lanes
        if strips > 1:
            lined = self._strips(lined, w, lanes, strips, line)
            data = self.stack(lined, parts, (strips * pitch, line), (0, strips * pitch), (0, line), lanes)
        else:
            data = self.stack(lined, parts, (height, width), (above, pitch), (before, line), lanes)
        pitches = 0, pitch // stride
        if found.is_exchanged:  # in another shape, or ONNX Runtime keeps the blocks of the forward pass beside it
            kernel = self.fresh(self.view(found.small, -1, w.outer, rows * columns, 1))
        else:
            kernel = self.once(found.small, "operand")
        if strips > 1:
            short = rows // strips
            apart = self.view(kernel, -1, w.outer // self.block * strips, short, columns * self.block)
            kernel, rows = self.b.Pad(apart, [0, 0, 0, 0, 0, 0, pitch - short, 0]), strips * pitch
            pitches = 0, rows
        kernel = self.stack(kernel, w.outer // self.block, (rows, columns), pitches, (0, columns), self.block)
        y = emit_blocked(
            self.b,
            "Conv",
            self._split(data, found, parts, pitch, line * lanes, strips),
            self._split(kernel, found, w.outer, pitch // stride, columns, strips),
            strides=[dilation, 1],
            dilations=[stride, stride_across * lanes],
            pads=[0, 0, reach + 1 - stride, 0],
        )
        y = self.unblock(y, w.outer)
        if found.is_exchanged:
            y = self.b.Transpose(self.view(y, parts, w.outer * taps, lanes), perm=[0, 2, 1])
        else:
            if parts > 1:  # planes first: both Transposes as one go number by number
                y = self.b.Transpose(self.view(y, parts, w.outer, taps * lanes), perm=[1, 0, 2])
            y = self.b.Transpose(self.view(y, w.outer * parts, taps, lanes), perm=[0, 2, 1])
        first, second = (w.inner, w.outer) if found.is_exchanged else (w.outer, w.inner)
        replace_value(self.view(y, first, second, *w.taps), node.outputs[0])

    def _strips(self, image: Var, w: PixelWindows, lanes: int, strips: int, line: int) -> Var:
        """Images as strips, each with the rows that its windows reach of the next: [N, parts, strips, rows, line]."""
        (height, width), (above, before), step = w.big, w.head, w.small[0] // strips
        deep = step + (w.taps[0] - 1) * w.dilations[0]
        below, behind = (strips - 1) * step + deep - above - height, line - before - width
        lines = self.view(image, -1, w.inner // lanes, height, width * lanes)
        lines = self.b.Pad(lines, [0, 0, above, before * lanes, 0, 0, below, behind * lanes])
        return self.b.Gather(lines, step * np.arange(strips)[:, None] + np.arange(deep), axis=2)

    def _split(self, stack: Var, found: Correlation, parts: int, pitch: int, line: int, strips: int) -> Var:
        """All strips of a stack, `pitch` rows each, in several stacks: [parts, stacks, rows, line]."""
        stacks, images = self._count(found.small, strips)
        if isinstance(stacks, int) and isinstance(images, int):
            return self.view(stack, parts, stacks, images * pitch, line)
        return found.stop(self.b, stack, [parts, stacks, images * pitch, line])

    def _count(self, of: ir.Value, strips: int) -> tuple[Var, Var] | tuple[int, int]:
        """The number of stacks, and of strips in each."""
        n = not_none(of.shape)[0]
        divisors = np.arange(self.block - 1, 0, -1)
        if isinstance(n, int):
            stacks = int(divisors[(n * strips % divisors == 0).argmax()])
            return stacks, n * strips // stacks
        key = n.value, strips
        if n.value is None or key not in self._stacks:
            b = self.b
            count = b.Max(b.Shape(of, start=0, end=1), [1]) * strips
            divides = b.Cast(b.Equal(b.Mod(count, divisors), 0), to=int(ir.DataType.INT32))
            found = len(divisors) - b.ArgMax(divides, axis=0, keepdims=1)
            self._stacks[key] = found, count / found
        return self._stacks[key]


def _count_strips(w: PixelWindows) -> int:
    """The number of strips of an image of the kernel, each of which fits into a cache; 1 if strides are more than 1."""
    rows, columns = w.small
    size = columns * min(w.outer, _FILTERS * 16) * 4
    fits = [k for k in range(1, rows + 1) if rows % k == 0 and rows // k * size <= _STRIP]
    is_simple = max(w.strides) == 1 and w.big[0] + w.head[0] <= rows + (w.taps[0] - 1) * w.dilations[0]
    return fits[0] if fits and is_simple and rows * size > _STRIP and rows // fits[0] >= _ROWS else 1


def _find(graph: ir.Graph) -> dict[ir.Node, Correlation]:
    """The sites that gain, by their last nodes; only where there are sites, the processor is tried."""
    found = {node: site for node in graph if (site := Correlation.ending_in(node)) is not None}
    return {node: site for node, site in found.items() if _gains(site, block_size())}


def _gains(site: Correlation, block: int) -> bool:
    """True if the windows of planes overlap, the kernel has whole blocks, and threads have parts of the result."""
    w = site.windows
    if len(w.taps) != 2 or not block or w.outer % block or site.images == 0 or math.prod(w.small) < PIXELS:
        return False
    if w.dilations[-1] != 1 or any((k - 1) * d + 1 < s for k, d, s in zip(w.taps, w.dilations, w.strides)):
        return False
    parts = 1 if w.inner % block else w.inner // block
    if parts * -(-w.outer // (_FILTERS * block)) * w.taps[0] < _PARTS or math.prod(w.taps) < _PARTS:
        return False
    if max(w.strides) > 1 and w.outer >= _FILTERS * block:
        return False
    if w.inner % block:
        return math.prod(w.small) * min(w.outer, _FILTERS * block) <= _CACHED
    return math.prod((*w.small, *w.taps, w.outer, w.inner)) >= _PRODUCTS


WEIGHT_BLOCKS = rewrite_sites(
    "weight_blocks",
    "the cotangent of weights as a convolution in blocks",
    "float32, one group, images, more than two taps, whole blocks of the kernel",
    _find,
    lambda b: _Correlations(b, block_size()).correlate,
)
