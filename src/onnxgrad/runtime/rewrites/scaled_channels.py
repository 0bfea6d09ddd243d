"""Sums of images that are scaled channel by channel as depthwise convolutions of one tap.

x·a + c, with a number of a and one of c for each channel, is a convolution with a bias: one pass over x on all threads,
where a Mul and an Add are two. FusedConv, the operator that ONNX Runtime's own optimizer writes, adds to an image that
is there, so x·a + z·b + c, as in the cotangent of BatchNormalization, is two passes rather than four. Each image of a
channel is a call, which small ones do not pay for, and tensors in a cache are multiplied faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_op, not_none, only_reader, sizes
from onnxgrad.ir.shapes import same_dims
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite_sites
from onnxgrad.runtime.setting import Setting

_DOMAIN = "com.microsoft"
#: The fewest pixels of an image, and the fewest numbers for each of several images: fewer stay in a cache.
_PIXELS, _NUMBERS, _IMAGES = 192, 20000, 8


class _Term(NamedTuple):
    """A summand: an image, times a factor for each channel if there is one; None for a number for each channel."""

    is_negative: bool
    image: ir.Value | None
    column: ir.Value | None


def _find(graph: ir.Graph) -> dict[ir.Node, list[_Term]]:
    """The terms of sums, by their last nodes, the last one first: it may read the result of another."""
    sites, inner = {}, set[ir.Value]()
    for node in reversed(graph):
        y = node.outputs[0]
        if is_op(node, ("Add", "Sub")) and y not in inner and _is_large(y):
            sums = set[ir.Value]()
            terms = list(_terms(y, y, False, sums))
            known = [term for term in terms if term is not None]
            if len(known) == len(terms) and _gains(known):
                sites[node] = known
                inner |= sums
    return sites


def _is_large(y: ir.Value) -> bool:
    """True for float32 images of channels, all of known sizes, that are large enough."""
    if y.dtype != ir.DataType.FLOAT or y.shape is None or not 3 <= len(y.shape) <= 5:
        return False
    images, *known = (d if isinstance(d, int) else 0 for d in y.shape.dims)
    numbers = math.prod(known) * (images or _IMAGES)
    return math.prod(known[1:]) >= _PIXELS and numbers >= _NUMBERS * _IMAGES


def _terms(value: ir.Value, y: ir.Value, is_negative: bool, sums: set[ir.Value]) -> Iterator[_Term | None]:
    """The summands of `value`, a part of the sum `y`; None for one of another form. Adds inner `sums`."""
    node = value.producer()
    is_whole = _is_like(value, y)
    if is_whole and is_op(node, ("Add", "Sub")) and (value is y or only_reader(value, ("Add", "Sub")) is not None):
        sums.add(value)
        for k, operand in enumerate(node.inputs):
            yield from _terms(not_none(operand), y, is_negative != (k == 1 and node.op_type == "Sub"), sums)
    elif is_column(value, y):
        yield _Term(is_negative, None, value)
    elif is_whole and not is_op(node, "Expand"):  # which would not be broadcast then
        scaled = is_op(node, "Mul") and only_reader(value, ("Add", "Sub")) is not None
        pairs = (node.inputs, node.inputs[::-1]) if node is not None and scaled else ()
        fits = (pair for pair in pairs if _is_like(pair[0], y) and is_column(pair[1], y))
        yield _Term(is_negative, *next(fits, (value, None)))
    else:
        yield None


def _is_like(value: ir.Value | None, y: ir.Value) -> bool:
    """True if `value` has the shape of y."""
    return value is not None and value.shape is not None and same_dims(value.shape.dims, not_none(y.shape).dims)


def is_column(value: ir.Value | None, y: ir.Value) -> bool:
    """True if `value` has a number for each channel of y."""
    dims, count = sizes(value), len(not_none(y.shape))
    return dims is not None and (1,) * (count - len(dims)) + dims == (1, not_none(y.shape)[1], *[1] * (count - 2))


def _gains(terms: list[_Term]) -> bool:
    """True for a scaled image and another term, with at most one image that is only added."""
    scaled = [t for t in terms if t.image is not None and t.column is not None]
    plain = [t for t in terms if t.column is None]
    return bool(scaled) and len(terms) > 1 and len(plain) <= 1 and not any(t.is_negative for t in plain)


class _Sums:
    def __init__(self, b: Builder) -> None:
        self.b = b
        b.graph.opset_imports[_DOMAIN] = 1

    def write(self, node: ir.Node, terms: list[_Term]) -> None:
        """Replace the sum that ends in `node`."""
        y = node.outputs[0]
        count = len(not_none(y.shape))
        channels = not_none(y.shape)[1]
        assert isinstance(channels, int)
        shift: Var | None = None
        total: ir.Value | None = next((t.image for t in terms if t.column is None), None)
        for term in terms:
            if term.image is None:
                column = self._column(term, [channels])
                shift = column if shift is None else shift + column
        for term in terms:
            if term.image is not None and term.column is not None:
                weights = self._column(term, [channels, 1, *[1] * (count - 2)])
                operands = [term.image, weights, shift, total]
                result = (
                    self.b.Conv(*operands[:3], group=channels)
                    if total is None
                    else self.b.emit("FusedConv", *operands, domain=_DOMAIN, group=channels)
                )
                result.value.type, result.value.shape = y.type, y.shape
                total, shift = result.value, None
        replace_value(self.b.var(not_none(total)), y)

    def _column(self, term: _Term, shape: list[int]) -> Var:
        column = self.b.reshape(self.b.var(not_none(term.column)), np.array(shape, np.int64))
        return -column if term.is_negative else column


SCALED_CHANNELS = replace(
    rewrite_sites(
        "scaled_channels",
        "depthwise convolutions of one tap",
        f"sums of images scaled channel by channel, float32, {_PIXELS} pixels and {_NUMBERS:,} numbers or more",
        _find,
        lambda b: _Sums(b).write,
    ),
    unless=Setting.keeps_functions,
)
