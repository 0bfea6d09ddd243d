"""Interval arithmetic on a graph: bounds of a value that are valid for all inputs and weights.

Bounds follow from operators (a Sigmoid, a Clip, an Exp) and from constants that no input can change; weights are
unbounded. The bounds distinguish probabilities from scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.match import constant, is_op, is_standard, single_constant
from onnxgrad.ir.operators import Moves, traits_of
from onnxgrad.training.graph.rounding import rounded
from onnxgrad.training.graph.written_out import share_of

Interval = tuple[float, float]
ANYTHING: Interval = (-math.inf, math.inf)
UNIT: Interval = (0.0, 1.0)
#: How far back is looked.
DEPTH = 48

#: Their results are some of the numbers of their first operand, as of operators that move elements, or means of them.
_CARRIED = {
    *("Dropout", "Cast", "CastLike", "ReduceMean", "ReduceMax", "ReduceMin"),
    *("MaxPool", "TopK", "GlobalAveragePool", "GlobalMaxPool"),
}
_JOINED = frozenset(("Concat", "Mean"))
_RISING: dict[str, Callable[[float], float]] = {
    "Relu": lambda x: max(x, 0.0),
    "Exp": lambda x: math.exp(min(x, 700.0)) if x < 700 else math.inf,
    "Sqrt": lambda x: math.sqrt(max(x, 0.0)),
}


#: Bounds by value and by the depth of the search that found them.
_Known = dict[tuple[ir.Value, int], Interval]
_ARITHMETIC = frozenset((
    *("Neg", "Abs", "Reciprocal", "ReduceSum", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Clip"),
    *("Where", "Max", "Min", "Add", "Sum", "Sub", "Mul", "Div", "Pow", "LpNormalization"),
))  # fmt: skip


def bounds(value: ir.Value, depth: int = DEPTH, known: _Known | None = None) -> Interval:
    """The smallest and the largest number that `value` can provably have."""
    known = {} if known is None else known  # a residual network has as many paths as subsets of its blocks
    if (value, depth) not in known:
        known[value, depth] = _bounds(value, depth, known)
    return known[value, depth]


def _bounds(value: ir.Value, depth: int, known: _Known) -> Interval:
    held = constant(value)
    if held is not None and (held.size == 1 or value.producer() is not None):
        return (float(held.min()), float(held.max())) if held.size and held.dtype.kind in "fiu" else ANYTHING
    node = value.producer()
    if node is None or not depth:
        return ANYTHING
    of = node.op_type
    operands = [v for v in node.inputs if v is not None]
    if of == "If" and is_standard(node):
        either = [bounds(branch.outputs[value.index() or 0], depth - 1, known) for branch in subgraphs(node)]
        return min(low for low, _ in either), max(high for _, high in either)
    if node.domain == "ai.onnx.ml":
        return _classical(node, operands, depth, known)
    if not is_standard(node) or not operands:
        return ANYTHING
    if (inner := rounded(node)) is not None:
        return bounds(inner, depth - 1, known)
    if of == "Cast" and operands[0].dtype == ir.DataType.BOOL:
        return UNIT
    if of in _CARRIED or traits_of(node).moves_at_most(Moves.SELECTION):
        return bounds(operands[0], depth - 1, known)
    if of in _JOINED:
        found = [bounds(v, depth - 1, known) for v in operands]
        return min(low for low, _ in found), max(high for _, high in found)
    if of in _RISING:
        low, high = bounds(operands[0], depth - 1, known)
        return _RISING[of](low), _RISING[of](high)
    return _arithmetic(node, operands, depth, known) if of in _ARITHMETIC else traits_of(node).interval or ANYTHING


def _arithmetic(node: ir.Node, operands: list[ir.Value], depth: int, known: _Known) -> Interval:
    of = node.op_type
    low, high = bounds(operands[0], depth - 1, known)
    if of == "Neg":
        return -high, -low
    if of == "Abs":
        return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
    if of == "Reciprocal":
        return (1 / high if high else math.inf, 1 / low if low else math.inf) if low >= 0 else ANYTHING
    if of in ("ReduceSum", "ReduceProd"):
        return (0.0, math.inf) if low >= 0 else ANYTHING
    if of in ("ReduceL1", "ReduceL2", "ReduceSumSquare"):
        return 0.0, math.inf
    if of == "LpNormalization":
        return UNIT if low >= 0 else (-1.0, 1.0)
    if of == "Pow":
        power = single_constant(node.inputs[1])
        exponent = 0.0 if power is None or low < 0 else float(power.item())
        return (low**exponent, high**exponent) if exponent > 0 else ANYTHING
    if of == "Clip":
        ends = [None if v is None else bounds(v, depth - 1, known) for v in (*node.inputs[1:], None, None)[:2]]
        lowest = -math.inf if ends[0] is None else ends[0][0]
        highest = math.inf if ends[1] is None else ends[1][1]
        return min(max(low, lowest), highest), min(max(high, lowest), highest)
    others = [bounds(v, depth - 1, known) for v in operands[1:]]
    if of == "Where" and len(others) == 2:
        return min(others[0][0], others[1][0]), max(others[0][1], others[1][1])
    if of in ("Max", "Min"):
        choose = max if of == "Max" else min
        return choose(low, *(a for a, _ in others)), choose(high, *(b for _, b in others))
    if of in ("Add", "Sum"):
        return low + sum(a for a, _ in others), high + sum(b for _, b in others)
    if of in ("Div", "Mul") and (share := share_of(node)) is not None and bounds(share[0], depth - 1, known)[0] >= 0:
        return UNIT
    if of == "Div" and low >= 0 and _is_part(operands, depth, known):
        return UNIT
    if len(others) != 1:
        return ANYTHING
    (a, b) = others[0]
    if of == "Sub":
        return low - b, high - a
    if of == "Mul":
        return _product((low, high), (a, b))
    if of == "Div" and a >= 0 and (a > 0 or low >= 0):
        return _product((low, high), (1 / b if b else math.inf, 1 / a if a else math.inf))
    return ANYTHING


def _is_part(operands: list[ir.Value], depth: int, known: _Known) -> bool:
    """True if the second operand is the first plus a term that is not negative."""
    total = operands[1].producer() if len(operands) == 2 else None
    if not is_op(total, "Add"):
        return False
    return operands[0] in total.inputs and all(
        bounds(v, depth - 1, known)[0] >= 0 for v in total.inputs if v is not None
    )


def _product(x: Interval, y: Interval) -> Interval:
    ends = [0.0 if 0 in (i, j) else i * j for i in x for j in y]
    return min(ends), max(ends)


def _classical(node: ir.Node, operands: list[ir.Value], depth: int, known: _Known) -> Interval:
    kind = node.attributes.get_string("norm" if node.op_type == "Normalizer" else "post_transform")
    if node.op_type == "Normalizer":
        low, _ = bounds(operands[0], depth - 1, known)
        return UNIT if low >= 0 else (-1.0, 1.0) if kind in ("L1", "L2") else ANYTHING
    if node.op_type in ("ArrayFeatureExtractor",):
        return bounds(operands[0], depth - 1, known)
    return UNIT if kind in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO") else ANYTHING
