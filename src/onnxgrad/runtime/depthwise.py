"""The cotangent of depthwise weights, found again among the operators that a derived graph says it with.

It is written as products of rows with rows, of which a 0/1 mask picks the diagonals (`rules/conv_weight.py`): the
quickest among standard operators. Where channels lie in blocks there is something quicker, which needs to know
the convolution; so here it is read off the operators.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir


@dataclass(frozen=True)
class RowProducts:
    """W̄[c, i, j] = Σ small[n, c, p, q]·big[n, c, p·s + i·d - head, …], by rows and columns.

    The windows lie flush with the padded `big`: no row or column of it is beyond the last one.
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
    def ending_in(cls, node: ir.Node, block: int) -> RowProducts | None:
        """What `node` is the last operator of; None if it is that of something else, or of too ragged windows."""
        path = ("Reshape", "MatMul", "Reshape", "MatMul", "Transpose", "Reshape", "Transpose", "Concat")
        chain = _up(node, *path)
        columns = chain and _up(chain[3].inputs[1], "Reshape", "Transpose")
        if not chain or not columns:
            return None
        masks, small, out = _constant(chain[1].inputs[1]), columns[1].inputs[0], _constant(node.inputs[1])
        slices = [cut for v in chain[7].inputs if (cut := _producer(v, "Slice")) is not None]
        if masks is None or out is None or len(out) != 4 or len(slices) != len(chain[7].inputs):
            return None
        cuts = [_row_cut(cut) for cut in slices]
        big, above, below = _unpadded(slices[0].inputs[0])
        sizes, small_sizes = _sizes(big), _sizes(small)
        if big is None or small is None or sizes is None or small_sizes is None or sizes[0] % block:
            return None
        if any(_unpadded(cut.inputs[0])[0] is not big for cut in slices):
            return None
        starts, strides = [c[0] for c in cuts if c], {c[1] for c in cuts if c}
        if None in cuts or len(strides) > 1:
            return None
        stride = strides.pop()
        across = masks.shape[1]
        dilation = starts[1] - starts[0] if len(starts) > 1 else 1
        if starts != [i * dilation for i in range(len(starts))] or tuple(out[1:]) != (1, len(starts), across):
            return None
        found = _decoded(masks, sizes[2], small_sizes[2])
        if found is None:
            return None
        s, d, head = found
        this = cls(big, small, (len(starts), across), (stride, s), (dilation, d), (above, head), (sizes, small_sizes))
        flush = sizes[1] + above + below == (small_sizes[1] - 1) * stride + this.reach[0] + 1
        return this if flush and this.reach[0] + 1 >= stride else None


def _up(start: ir.Node | ir.Value | None, *kinds: str) -> list[ir.Node] | None:
    """The nodes of those kinds, each making the first input of the one before, and read by it alone."""
    node = start if isinstance(start, ir.Node) else _producer(start, kinds[0])
    found = []
    for i, kind in enumerate(kinds):
        if node is None or node.op_type != kind or node.domain != "":
            return None
        if i and len(list(node.outputs[0].uses())) > 1:
            return None
        found.append(node)
        first = node.inputs[0] if node.inputs else None
        node = first.producer() if first is not None else None
    return found


def _producer(value: ir.Value | None, kind: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == kind and node.domain == "" else None


def _constant(value: ir.Value | None) -> np.ndarray | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None and not value.is_graph_input() else None
    return None if tensor is None else tensor.numpy()


def _row_cut(node: ir.Node) -> tuple[int, int] | None:
    """Where a Slice of rows starts, and its step."""
    numbers = [_constant(v) for v in node.inputs[1:]]
    known = [int(n[0]) for n in numbers if n is not None and n.size == 1]
    return (known[0], known[3]) if len(known) == 4 and known[2] == 2 else None


def _sizes(value: ir.Value | None) -> tuple[int, int, int] | None:
    """Channels, rows and columns, if they are known."""
    if value is None or value.shape is None or len(value.shape) != 4:
        return None
    sizes = list(value.shape)[1:]
    return tuple(sizes) if all(isinstance(n, int) for n in sizes) else None  # type: ignore[return-value]


def _unpadded(value: ir.Value | None) -> tuple[ir.Value | None, int, int]:
    """What `value` is with rows of zeros above and below it, and how many."""
    pad = _producer(value, "Pad")
    pads = _constant(pad.inputs[1]) if pad is not None else None
    if pad is None or pads is None or len(pads) != 8 or any(np.delete(pads, [2, 6])) or len(pad.inputs) > 2:
        return value, 0, 0
    return pad.inputs[0], int(pads[2]), int(pads[6])


def _decoded(mask: np.ndarray, width: int, narrow: int) -> tuple[int, int, int] | None:
    """Stride, dilation and head of a mask [width·narrow, taps] that is 1 where a column meets a tap."""
    across = mask.shape[1]
    if mask.shape[0] != width * narrow:
        return None
    given = mask.reshape(width, narrow, across)
    at = np.arange(width)[:, None, None]
    for head, s, d in itertools.product(range(8), range(1, 5), range(1, 5)):
        if (narrow - 1) * s + (across - 1) * d + 1 - head < width - s + 1:
            continue
        wanted = at + head == np.arange(narrow)[:, None] * s + np.arange(across) * d
        if (wanted == given).all() and (narrow - 1) * s + (across - 1) * d + 1 - head >= width:
            return s, d, head
    return None
