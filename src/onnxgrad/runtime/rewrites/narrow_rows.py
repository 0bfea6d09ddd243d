"""A column beside narrow rows is spread over them by a product with a row of ones.

ONNX Runtime walks two operands in spans, along the last axes on which both advance or one of them stays: 10 ns each.
Beside rows of ten numbers, a column (a norm, a coefficient of a neighbour, a point beside the knots of its splines)
makes spans of ten, and each number takes five times as long as in a long span. So does an Expand, ten times. The
product has one term, so it is exact, up to the sign of a zero; for that reason, a divisor is left as it is. A column
times a single row is such a product itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder
from onnxgrad.ir.match import Dim, is_op, not_none
from onnxgrad.ir.shapes import same_dim
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite
from onnxgrad.runtime.setting import Setting

_BINARY = frozenset({"Add", "Div", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul", "Sub"})

#: Wider rows are long enough; the product would take more than it saves.
_WIDEST = 16
#: The fewest rows that are worth another call.
_FEWEST = 1024
#: How many rows a span must have then: if fewer, the other operand stays within it.
_LONG = 4
#: How many rows a product of a batch must have: fewer take as long as its call.
_TALL = 32
#: Size of an axis that has no number.
_OPEN = 16


class _Column(NamedTuple):
    """The operand number `place` of a node, a column beside rows of `width` numbers, or times one row."""

    place: int
    width: int
    is_times_row: bool


def _match(node: ir.Node) -> _Column | None:
    if not is_op(node, _BINARY) or len(node.inputs) != 2:
        return None
    for i, (x, other) in enumerate(zip(node.inputs, reversed(node.inputs))):
        if x is None or other is None or x.shape is None or not other.shape or len(x.shape) < 2:
            continue
        *rows, last = x.shape.dims
        *others, width = other.shape.dims
        if x.dtype != ir.DataType.FLOAT or last != 1 or not isinstance(width, int) or not 1 < width <= _WIDEST:
            continue
        if _count(rows) < _FEWEST or (node.op_type == "Div" and i == 1):
            continue
        if node.op_type == "Mul" and (len(others) < 2 or _count(rows[-1:]) >= _TALL) and others[-1:] in ([], [1]):
            return _Column(i, width, True)
        if _span(rows, others) >= _LONG:
            return _Column(i, width, False)
    return None


def _count(dims: Sequence[Dim]) -> int:
    return math.prod(d if isinstance(d, int) else _OPEN for d in dims)


def _span(one: Sequence[Dim], other: Sequence[Dim]) -> int:
    """The product of the last axes that both have alike."""
    alike = [same_dim(a, b) for a, b in zip(reversed(one), reversed(other))]
    count = alike.index(False) if False in alike else len(alike)
    return _count(one[len(one) - count :])


def _write(b: Builder) -> int:
    places = 0
    for node in list(b.graph):
        if (found := _match(node)) is None:
            continue
        b.before, x = node, b.var(not_none(node.inputs[found.place]))
        if found.is_times_row:
            row = b.var(not_none(node.inputs[1 - found.place]))
            row = b.Unsqueeze(row, [0]) if len(not_none(row.shape)) == 1 else row
            replace_value(b.MatMul(x, row), node.outputs[0])
        else:
            node.replace_input_with(found.place, b.MatMul(x, b.const(np.ones((1, found.width), np.float32))).value)
        places += 1
    return places


NARROW_ROWS = replace(
    rewrite(
        "narrow_rows",
        "a column is spread by a product with ones",
        "elementwise operators of float32 on 1024 rows or more of up to 16 numbers, where no kernel has them",
        lambda graph: any(_match(node) is not None for node in graph),
        _write,
    ),
    unless=Setting.keeps_functions,
)
