"""Between which numbers a value lies, whatever the inputs and the weights are: interval arithmetic on a graph.

Only what the operators themselves assert counts (a Sigmoid, a Clip, an Exp, constants that no input can change); a
weight may become anything. It tells probabilities from scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.constants import constant
from onnxgrad.ir.graph import subgraphs
from onnxgrad.training.graph.rounding import rounded

Interval = tuple[float, float]
ANYTHING: Interval = (-math.inf, math.inf)
UNIT: Interval = (0.0, 1.0)
#: How far back is looked.
DEPTH = 48

_FIXED = {
    **dict.fromkeys(("Softmax", "Sigmoid", "HardSigmoid", "Hardmax"), UNIT),
    **dict.fromkeys(("Tanh", "Sin", "Cos", "Erf", "Softsign"), (-1.0, 1.0)),
    "LogSoftmax": (-math.inf, 0.0),
    "Softplus": (0.0, math.inf),
}
#: Their results are some of the numbers of their first operand, or means of them.
_CARRIED = {
    *("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Gather", "GatherElements"),
    *("GatherND", "Expand", "Tile", "Split", "Dropout", "Cast", "CastLike", "ReduceMean", "ReduceMax", "ReduceMin"),
    *("MaxPool", "TopK", "GlobalAveragePool", "GlobalMaxPool", "DepthToSpace", "SpaceToDepth"),
}
_JOINED = frozenset(("Concat", "Mean"))
_RISING: dict[str, Callable[[float], float]] = {
    "Relu": lambda x: max(x, 0.0),
    "Exp": lambda x: math.exp(min(x, 700.0)) if x < 700 else math.inf,
    "Sqrt": lambda x: math.sqrt(max(x, 0.0)),
}


#: What `bounds` knows already: how far back it looked decides what it found.
_Known = dict[tuple[ir.Value, int], Interval]
_ARITHMETIC = frozenset((
    *("Neg", "Abs", "Reciprocal", "ReduceSum", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Clip"),
    *("Where", "Max", "Min", "Add", "Sum", "Sub", "Mul", "Div"),
))  # fmt: skip


def bounds(value: ir.Value, depth: int = DEPTH, known: _Known | None = None) -> Interval:
    """The smallest and the largest number that `value` can provably hold."""
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
    if node.domain in ("", "ai.onnx") and of in _FIXED:
        return _FIXED[of]
    operands = [v for v in node.inputs if v is not None]
    if of == "If" and node.domain in ("", "ai.onnx"):
        either = [bounds(branch.outputs[value.index() or 0], depth - 1, known) for branch in subgraphs(node)]
        return min(low for low, _ in either), max(high for _, high in either)
    if node.domain == "ai.onnx.ml":
        return _classical(node, operands, depth, known)
    if node.domain not in ("", "ai.onnx") or not operands:
        return ANYTHING
    if (inner := rounded(node)) is not None:
        return bounds(inner, depth - 1, known)
    if of == "Cast" and operands[0].dtype == ir.DataType.BOOL:
        return UNIT
    if of in _CARRIED:
        return bounds(operands[0], depth - 1, known)
    if of in _JOINED:
        found = [bounds(v, depth - 1, known) for v in operands]
        return min(low for low, _ in found), max(high for _, high in found)
    if of in _RISING:
        low, high = bounds(operands[0], depth - 1, known)
        return _RISING[of](low), _RISING[of](high)
    return _arithmetic(node, operands, depth, known) if of in _ARITHMETIC else ANYTHING


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
    if of == "Div" and low >= 0 and share_of(node) is not None:
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


def _product(x: Interval, y: Interval) -> Interval:
    ends = [0.0 if 0 in (i, j) else i * j for i in x for j in y]
    return min(ends), max(ends)


def _classical(node: ir.Node, operands: list[ir.Value], depth: int, known: _Known) -> Interval:
    given = node.attributes.get("norm" if node.op_type == "Normalizer" else "post_transform")
    kind = None if given is None else given.as_string()
    if node.op_type == "Normalizer":
        low, _ = bounds(operands[0], depth - 1, known)
        return UNIT if low >= 0 else (-1.0, 1.0) if kind in ("L1", "L2") else ANYTHING
    if node.op_type in ("ArrayFeatureExtractor",):
        return bounds(operands[0], depth - 1, known)
    return UNIT if kind in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO") else ANYTHING


def share_of(node: ir.Node) -> tuple[ir.Value, int] | None:
    """What a Div of e by its own sum along one axis divides, and the axis; None for another node."""
    if node.op_type != "Div" or len(node.inputs) != 2 or node.inputs[0] is None or node.inputs[1] is None:
        return None
    above, below = (unguarded(v) for v in node.inputs if v is not None)
    total = below.producer()
    if total is None or total.op_type != "ReduceSum" or len(total.inputs) != 2 or total.inputs[0] is None:
        return None
    axes = None if total.inputs[1] is None else constant(total.inputs[1])
    keeps = total.attributes.get("keepdims")
    if axes is None or axes.size != 1 or (keeps is not None and not keeps.as_int()):
        return None
    return (above, int(axes.flat[0])) if unguarded(total.inputs[0]) is above else None


def unguarded(value: ir.Value) -> ir.Value:
    """`value` without what keeps it from a division by zero or a logarithm of it: see `spared`."""
    while (node := value.producer()) is not None and (inner := spared(node)) is not None:
        value = inner
    return value


def spared(node: ir.Node) -> ir.Value | None:
    """The operand of a `node` that leaves probabilities what they are: times 1, plus a tiny number, cut to [0, 1], or
    plus a number where the sum of a row is 0 (as skl2onnx writes it), rounded to quantized numbers; None for another
    node."""
    if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return None
    first, of = node.inputs[0], node.op_type
    if of in ("Identity", "Dropout"):
        return first
    if (inner := rounded(node)) is not None:
        return inner
    numbers = [None if v is None else constant(v) for v in node.inputs]
    single = [None if a is None or a.size != 1 or a.dtype.kind != "f" else float(a.flat[0]) for a in numbers]
    if of == "Clip":
        low, high = (*single[1:], None, None)[:2]
        cuts = [v is not None and n is None for v, n in zip(node.inputs[1:], single[1:])]
        small = low is None or low <= 1e-3
        return first if small and (high is None or high >= 1 - 1e-3) and not any(cuts) else None
    if len(node.inputs) != 2 or node.inputs[1] is None:
        return None
    for this, other, n in ((first, node.inputs[1], single[1]), (node.inputs[1], first, single[0])):
        if _rank(node.outputs[0]) != _rank(this):
            continue
        if n is not None and (this is first or of not in ("Sub", "Div", "Pow")):
            neutral = {"Mul": n == 1, "Div": n == 1, "Add": 0 <= n <= 1e-3, "Sub": n == 0, "Max": n <= 1e-3}
            if neutral.get(of, of == "Min" and n >= 1 - 1e-3):
                return this
        if of == "Add" and _is_guard(other):
            return this
    return None


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _is_guard(value: ir.Value) -> bool:
    """Whether `value` is 1, or another constant, just where a sum is 0."""
    node = value.producer()
    if node is not None and node.op_type == "Mul":
        inner = [v for v in node.inputs if v is not None and not _is_number(v)]
        return len(inner) == 1 and _is_guard(inner[0])
    for of in ("Cast", "Not", "Cast", "ReduceSum"):
        if node is None or node.op_type != of or node.inputs[0] is None:
            return False
        node = node.inputs[0].producer()
    return True


def _is_number(value: ir.Value) -> bool:
    held = constant(value)
    return held is not None and bool(np.size(held) == 1)
