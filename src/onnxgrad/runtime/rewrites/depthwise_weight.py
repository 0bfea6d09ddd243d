"""The cotangent of depthwise weights: match the operators of a derived graph, and replace them.

It is written as products of rows with rows, whose diagonals a 0/1 mask selects (`rules/conv/weight.py`): the fastest
form in standard operators. In the blocked layout a faster form exists, which needs the parameters of the convolution.
So these are read off the operators, and the cotangent is written as one depthwise convolution.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import constant, is_op, producer
from onnxgrad.runtime.rewrites.blocked_layout import Blocks, block_size, emit_blocked
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite_sites


@dataclass(frozen=True)
class RowProducts:
    """W̄[c, i, j] = Σ small[n, c, p, q]·big[n, c, p·s + i·d - head, …], by rows and columns.

    The windows end flush with the padded `big`: no row or column of it is beyond the last window.
    """

    big: ir.Value
    small: ir.Value
    taps: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    head: tuple[int, int]
    sizes: tuple[tuple[int, int, int], tuple[int, int, int]]

    @property
    def reach(self) -> tuple[int, int]:
        """From the first to the last tap."""
        return (self.taps[0] - 1) * self.dilations[0], (self.taps[1] - 1) * self.dilations[1]

    @classmethod
    def ending_in(cls, node: ir.Node) -> RowProducts | None:
        """Match the operators that end in `node`. Returns None without a match, or for too ragged windows."""
        path = ("Reshape", "MatMul", "Reshape", "MatMul", "Transpose", "Reshape", "Transpose", "Concat")
        chain = _up(node, *path)
        columns = chain and _up(chain[3].inputs[1], "Reshape", "Transpose")
        if not chain or not columns:
            return None
        masks, small, out = constant(chain[1].inputs[1]), columns[1].inputs[0], constant(node.inputs[1])
        slices = [cut for v in chain[7].inputs if (cut := producer(v, "Slice")) is not None]
        if masks is None or masks.ndim != 2 or out is None or len(out) != 4 or len(slices) != len(chain[7].inputs):
            return None
        cuts = [_row_cut(cut) for cut in slices]
        big, above, below = _skip_padding(slices[0].inputs[0])
        sizes, small_sizes = _sizes(big), _sizes(small)
        if big is None or small is None or sizes is None or small_sizes is None:
            return None
        if any(_skip_padding(cut.inputs[0])[0] is not big for cut in slices):
            return None
        starts, strides = [c[0] for c in cuts if c], {c[1] for c in cuts if c}
        if None in cuts or len(strides) > 1:
            return None
        stride = strides.pop()
        across = masks.shape[1]
        dilation = starts[1] - starts[0] if len(starts) > 1 else 1
        if starts != [i * dilation for i in range(len(starts))] or tuple(out[1:]) != (1, len(starts), across):
            return None
        sizes_of_mask = _decode_mask(masks, sizes[2], small_sizes[2])
        if sizes_of_mask is None:
            return None
        s, d, head = sizes_of_mask
        this = cls(big, small, (len(starts), across), (stride, s), (dilation, d), (above, head), (sizes, small_sizes))
        flush = sizes[1] + above + below == (small_sizes[1] - 1) * stride + this.reach[0] + 1
        return this if flush and this.reach[0] + 1 >= stride else None


def _up(start: ir.Node | ir.Value | None, *kinds: str) -> list[ir.Node] | None:
    """The nodes of those kinds, each making the first input of the one before, and read by it alone."""
    node = start if isinstance(start, ir.Node) else producer(start, kinds[0])
    values = []
    for i, kind in enumerate(kinds):
        if node is None or not is_op(node, kind):
            return None
        if i and len(list(node.outputs[0].uses())) > 1:
            return None
        values.append(node)
        first = node.inputs[0] if node.inputs else None
        node = first.producer() if first is not None else None
    return values


def _row_cut(node: ir.Node) -> tuple[int, int] | None:
    """The start and the step of a Slice of rows."""
    numbers = [constant(v) for v in node.inputs[1:]]
    single = [int(n[0]) for n in numbers if n is not None and n.size == 1]
    return (single[0], single[3]) if len(single) == 4 and single[2] == 2 else None


def _sizes(value: ir.Value | None) -> tuple[int, int, int] | None:
    """Channels, rows and columns, if they are known."""
    if value is None or value.shape is None or len(value.shape) != 4:
        return None
    sizes = list(value.shape)[1:]
    return tuple(sizes) if all(isinstance(n, int) for n in sizes) else None  # type: ignore[return-value]


def _skip_padding(value: ir.Value | None) -> tuple[ir.Value | None, int, int]:
    """The value that `value` pads with rows of zeros above and below, and their numbers."""
    pad = producer(value, "Pad")
    pads = constant(pad.inputs[1]) if pad is not None else None
    if pad is None or pads is None or len(pads) != 8 or any(np.delete(pads, [2, 6])) or len(pad.inputs) > 2:
        return value, 0, 0
    return pad.inputs[0], int(pads[2]), int(pads[6])


def _decode_mask(mask: np.ndarray, width: int, narrow: int) -> tuple[int, int, int] | None:
    """Stride, dilation and head of a mask [width·narrow, taps] that is 1 where a column and a tap coincide."""
    across = mask.shape[1]
    if mask.shape[0] != width * narrow:
        return None
    cells = mask.reshape(width, narrow, across)
    at = np.arange(width)[:, None, None]
    for head, s, d in itertools.product(range(8), range(1, 5), range(1, 5)):
        if (narrow - 1) * s + (across - 1) * d + 1 - head < width - s + 1:
            continue
        wanted = at + head == np.arange(narrow)[:, None] * s + np.arange(across) * d
        if (wanted == cells).all() and (narrow - 1) * s + (across - 1) * d + 1 - head >= width:
            return s, d, head
    return None


class _Correlations(Blocks):
    def correlate(self, node: ir.Node, found: RowProducts) -> None:
        """Replace the match that ends in `node`.

        The images are laid one below the other, with as many rows of zeros between them as a window reaches over;
        the cotangents likewise. Then one depthwise convolution has them all, and Σ over the batch is inside it. Columns
        of zeros are written, because the places that a convolution pads are computed one by one, each from all images.
        """
        (channels, height, width), (_, rows, columns) = found.sizes
        (stride, stride_across), (above, before), reach = found.strides, found.head, found.reach
        pitch = max(above + height, (rows - 1) * stride + reach[0] + 1 - above)
        pitch += -pitch % stride
        parts = channels // self.block
        operands = self.once(found.big, "operand"), self.once(found.small, "operand")
        line = (columns - 1) * stride_across + reach[1] + 1
        big = self.stack(operands[0], parts, (height, width), (above, pitch), (before, line), self.block)
        small = self.stack(operands[1], parts, (rows, columns), (0, pitch // stride), (0, columns), self.block)
        y = emit_blocked(
            self.b,
            "Conv",
            self.view(big, 1, channels, -1, line),
            self.view(small, channels, 1, -1, columns),
            group=channels,
            strides=list(found.dilations),
            dilations=list(found.strides),
            pads=[0, 0, reach[0] + 1 - stride, 0],
        )
        replace_value(self.view(self.unblock(y, channels), channels, 1, *found.taps), node.outputs[0])


def _find(graph: ir.Graph) -> dict[ir.Node, RowProducts]:
    """The matches, by their last nodes; only where there are some, the processor is measured."""
    found = {node: products for node in graph if (products := RowProducts.ending_in(node)) is not None}
    block = block_size() if found else 0
    return {node: products for node, products in found.items() if block and products.sizes[0][0] % block == 0}


DEPTHWISE_WEIGHT = rewrite_sites(
    "depthwise_weight",
    "the cotangent of depthwise weights as one depthwise convolution in blocks",
    "windows that end with the padded operand, whole blocks",
    _find,
    lambda b: _Correlations(b, block_size()).correlate,
)
