"""Convolutions to few channels as transposed ones, which add products up in place of copying windows.

ONNX Runtime lays out the windows of a convolution, all channels of the operand for each tap, and multiplies by the
weights. To few channels (the scores of a segmentation, a picture that is generated, the cotangent of one) that is much
copying for little work. A ConvTranspose with the weights turned round multiplies first, and adds up what each tap gives
to each channel of the result: for up to a fifth of the channels, .1 to .3 of the time on one thread. On two it is .2 to
.5, since it adds up on one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_op
from onnxgrad.runtime.rewrites.blocked_layout import block_size, fits_blocks, is_known_before, original_filter
from onnxgrad.runtime.rewrites.rewrite import NodeRule, rewrite_results

#: Fewest taps: of fewer, no windows are laid out. How many times the channels of the result the operand has.
_TAPS, _TIMES = 3, 5


class _Site(NamedTuple):
    """A convolution of stride 1, and the padding of its transpose."""

    node: ir.Node
    dilations: list[int]
    pads: list[int]


def _match(node: ir.Node) -> _Site | None:
    if not is_op(node, "Conv") or node.attributes.get_int("group", 1) != 1:
        return None
    x, w = node.inputs[:2]
    if x is None or w is None or x.dtype != ir.DataType.FLOAT or w.shape is None or is_known_before(w):
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    sizes, rank = [n for n in w.shape if isinstance(n, int)], len(w.shape) - 2
    if len(sizes) < rank + 2 or min(sizes) < 1 or _TIMES * sizes[0] > sizes[1] or math.prod(sizes[2:]) < _TAPS:
        return None
    read = node.attributes.get_ints
    strides, dilations = ([*(read(name) or [1] * rank)] for name in ("strides", "dilations"))
    reach = [(k - 1) * d for k, d in zip(sizes[2:], dilations)]
    pads = [r - p for r, p in zip(2 * reach, read("pads") or [0] * 2 * rank, strict=True)]
    if max(strides) > 1 or min(pads) < 0 or fits_blocks(sizes[0], sizes[1], sizes[2:], block_size()):
        return None
    return _Site(node, dilations, pads)


def _write(b: Builder, site: _Site) -> Var:
    x, w, *bias = site.node.inputs
    assert w is not None
    turned = original_filter(w)
    weights = b.var(w if turned is None else turned)
    if turned is None:
        rank = len(site.dilations)
        axes, back = list(range(2, rank + 2)), [-1] * rank
        weights = b.Transpose(weights, perm=[1, 0, *axes])
        weights = b.Slice(weights, back, [int(np.iinfo(np.int64).min)] * rank, axes, back)
    return b.ConvTranspose(x, weights, *bias, dilations=site.dilations, pads=site.pads)


FEW_CHANNELS = rewrite_results(
    "few_channels",
    "transposed convolutions, with the weights turned round",
    "convolutions of stride 1, float32, one group, weights that change, to a fifth of the channels or fewer",
    NodeRule(_match, _write),
)
