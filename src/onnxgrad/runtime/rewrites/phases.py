"""Transposed convolutions with strides as a convolution for each place between strides, in blocks of channels.

With a stride of s along an axis, every s-th place of the result, from place a on, is a convolution of stride 1 with the
taps a + head, a + head + s, … turned round. Each of these phases is computed in blocks (see `blocked_layout`), and
their rows are laid side by side. ONNX Runtime's ConvTranspose adds products up place by place on one thread: on two
threads, that takes 1.3 to 2 times as long for weights of 4×4, and on one 1.2 to 1.6 times.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Var
from onnxgrad.ir.match import is_op, not_none, sizes
from onnxgrad.runtime.rewrites.blocked_layout import Blocks, block_size, emit_blocked, is_known_before
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite_sites

#: Fewest products for each number of a result.
_PRODUCTS = 128


class _Phase(NamedTuple):
    """The taps along an axis that reach every s-th place, in the order of a convolution, and its padding."""

    taps: list[int]
    head: int
    tail: int


class _Site(NamedTuple):
    """The phases along each axis, and the sizes of the weights and of the result."""

    phases: list[list[_Phase]]
    weights: tuple[int, ...]
    result: tuple[int, int]
    group: int


def _phases(size: int, result: int, taps: int, stride: int, head: int) -> list[_Phase] | None:
    """The phases along an axis; None if one has no taps, or no padding of its own, or they differ in length."""
    found = []
    for place in range(stride):
        first, skipped = (place + head) % stride, (place + head) // stride
        chosen = list(range(first, taps, stride))[::-1]
        before = len(chosen) - 1 - skipped
        after = result // stride - size - before + len(chosen) - 1
        if result % stride or not chosen or not 0 <= before < len(chosen) or not 0 <= after < len(chosen):
            return None
        found.append(_Phase(chosen, before, after))
    return found


def _find(graph: ir.Graph) -> dict[ir.Node, _Site]:
    found = {node: site for node in graph if (site := _site(node)) is not None}
    return {node: site for node, site in found.items() if _fits(site, block_size())}


def _fits(site: _Site, block: int) -> bool:
    """True for whole blocks of channels, and enough products to pay for the order of the rows."""
    if not block or site.weights[0] % block:
        return False
    inner, out, *taps = site.weights
    products = inner * math.prod(taps) / math.prod(len(phases) for phases in site.phases)
    return site.group > 1 or (out % block == 0 and products >= _PRODUCTS)


def _site(node: ir.Node) -> _Site | None:
    """The phases of a transposed convolution of images with strides; None for other nodes."""
    if not is_op(node, "ConvTranspose"):
        return None
    x, w, y = node.inputs[0], node.inputs[1], node.outputs[0]
    if x is None or w is None or x.dtype != ir.DataType.FLOAT or is_known_before(w):
        return None
    weights, group = sizes(w), node.attributes.get_int("group", 1)
    shapes = x.shape, y.shape
    if weights is None or len(weights) != 4 or min(weights) < 1 or any(s is None or len(s) != 4 for s in shapes):
        return None
    if group != 1 and (group != weights[0] or weights[1] != 1):
        return None
    (height, width), result = (not_none(s).dims[2:] for s in shapes)
    read = node.attributes.get_ints
    strides, dilations, pads = read("strides", [1, 1]), read("dilations", [1, 1]), read("pads", [0] * 4)
    known = all(isinstance(d, int) and d for d in (height, width, *result))
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    if not known or max(strides) < 2 or max(dilations) > 1 or mode != "NOTSET" or "output_shape" in node.attributes:
        return None
    ends = zip((height, width), result, weights[2:], strides, pads[:2])
    phases = [_phases(*end) for end in ends]  # type: ignore[arg-type]
    if None in phases:
        return None
    return _Site(phases, weights, tuple(result), group)  # type: ignore[arg-type]


class _Phases(Blocks):
    def spread(self, node: ir.Node, site: _Site) -> None:
        """Replace a ConvTranspose."""
        x, w, *bias = node.inputs
        image, kernels = self.once(not_none(x), "operand"), self.once(not_none(w), "taps")
        channels = site.weights[1] if site.group == 1 else site.group
        lines = channels // self.block * site.result[0] // len(site.phases[0])
        rows = []
        for down in site.phases[0]:
            line = []
            for across in site.phases[1]:
                taps = [i * site.weights[3] + j for i, j in itertools.product(down.taps, across.taps)]
                inner = site.weights[0] if site.group == 1 else 1
                kernel = self.b.Gather(kernels, np.array(taps), axis=2)
                kernel = self.view(kernel, channels, inner, len(down.taps), len(across.taps))
                pads = [down.head, across.head, down.tail, across.tail]
                line.append(emit_blocked(self.b, "Conv", image, kernel, *bias, pads=pads, group=site.group))
            rows.append(self._side_by_side(line, lines * site.result[1] // len(line), self.block))
        y = self._side_by_side(rows, lines, site.result[1] * self.block)
        y = self.view(y, -1, channels, *site.result)
        replace_value(self.unblock(y, channels), node.outputs[0])

    def _side_by_side(self, parts: list[Var], rows: int, size: int) -> Var:
        return parts[0] if len(parts) == 1 else self.b.Concat(*(self.view(v, -1, rows, size) for v in parts), axis=2)

    def _taps(self, w: ir.Value) -> Var:
        """[C, O, …] as [O/b, C/b, taps, b of C, b of O]; [C, 1, …] as [1, C/b, taps, b of C]"""
        inner, out, *taps = not_none(w.shape).numpy()
        b, count = self.block, int(np.prod(taps))
        if out == 1:
            return self.view(self._operand(self.view(w, 1, inner, count, 1)), 1, inner // b, count, b)
        rows = self.view(self._operand(self.view(w, inner, out, count, 1)), inner // b, b, out // b, count, b)
        return self.b.Transpose(rows, perm=[2, 0, 3, 1, 4])


PHASES = rewrite_sites(
    "phases",
    "transposed convolutions as a convolution in blocks for each place between strides",
    "float32, images of known size, strides, whole blocks of channels, or one channel each, weights that change",
    _find,
    lambda b: _Phases(b, block_size()).spread,
)
