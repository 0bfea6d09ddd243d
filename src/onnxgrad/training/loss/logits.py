"""The logits of probabilities: the value before the activation that a prediction ends in.

Networks that are exported for inference end in probabilities, and the last node is seldom the activation itself: an
Identity that renames it, a Cast, a Reshape, a Clip against log 0, ``Concat(1 - p, p)`` for two classes, a row divided
by its sum. A loss that contains the activation is taken of the logits behind all that: the nodes in between that only
move numbers are written again, on the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.match import constant, is_number, is_op, is_standard, not_none, permutation, producer, single_constant
from onnxgrad.ir.shapes import same_dims
from onnxgrad.training.graph.bounds import bounds
from onnxgrad.training.graph.written_out import log_softmax_of, match_reduction, neutral_operand, share_of, skip_guards

Get = Callable[[ir.Value], Var]


@dataclass(frozen=True)
class Ending:
    """Numbers that a prediction is an activation of.

    Attributes:
        leaves: the values of the model that they are computed from.
        write: emits them, given a builder and what stands for a leaf.
    """

    leaves: tuple[ir.Value, ...]
    write: Callable[[Builder, Get], Var]

    def then(self, write: Callable[[Builder, Var], Var]) -> Ending:
        """The numbers after one more step."""
        before = self.write
        return Ending(self.leaves, lambda b, get: write(b, before(b, get)))


#: Nodes that move numbers, element by element, to where they are in the result.
_MOVES = frozenset(["Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"])
#: Reductions that return a single number unchanged.
_REDUCTIONS = frozenset(["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"])
#: Reductions that leave numbers out.
_PICKS = frozenset(["Slice", "Gather"])


def scores(value: ir.Value, axis: int) -> Ending | None:
    """The s such that `value` is the (log-)softmax of s along `axis`; None without a match."""
    node = value.producer()
    if node is None:
        return None
    if value.shape is None:  # axes cannot be distinguished; a plain activation is trusted
        known = is_op(node, ("Softmax", "LogSoftmax")) and node.inputs[0] is not None
        return _leaf(node.inputs[0]) if known and node.inputs[0] is not None else None
    if not -len(value.shape) <= axis < len(value.shape):
        return None
    axis %= len(value.shape)
    if (inner := neutral_operand(node)) is not None:
        return scores(inner, axis)
    first = node.inputs[0] if node.inputs else None
    if first is None or not (is_standard(node) or node.domain == "ai.onnx.ml"):
        return None
    of = node.op_type
    if of in ("Softmax", "LogSoftmax"):
        return _leaf(first) if node.attributes.get_int("axis", -1) % len(value.shape) == axis else None
    if (found := _log_softmax(node if of == "Sub" else first.producer() if of == "Exp" else None, axis)) is not None:
        return found
    if of == "Log":
        return scores(first, axis)
    if of in _MOVES:
        before = _axis_before(node, axis)
        found = None if before is None else scores(first, before)
        return None if found is None else _replay_move(node, found)
    if of == "Concat" and node.attributes.get_int("axis", 0) % len(value.shape) == axis:
        return _pair(node, axis)
    share = share_of(node)
    if share is not None and share[1] % len(value.shape) == axis:
        return _log_of_positive(share[0], axis)
    return None


def sums_to_one(value: ir.Value, axis: int) -> bool:
    """True if `value` is divided by its own sum along `axis`, so that it is no logits."""
    node = value.producer()
    if node is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return False
    axis %= len(value.shape)
    if (inner := neutral_operand(node)) is not None:
        return sums_to_one(inner, axis)
    if is_op(node, _MOVES) and node.inputs[0] is not None:
        before = _axis_before(node, axis)
        return before is not None and sums_to_one(node.inputs[0], before)
    share = share_of(node) if is_op(node, ("Div", "Mul")) else None
    return share is not None and share[1] % len(value.shape) == axis


def _log_of_positive(value: ir.Value, axis: int) -> Ending | None:
    """log `value`, but for a number that is the same along `axis`; None where `value` is not known to be positive."""
    found = scores(value, axis) if bounds(value)[0] >= 0 else None
    return found or logarithm(value, axis)


def _log_softmax(node: ir.Node | None, axis: int) -> Ending | None:
    """The scores of a log-softmax along `axis` that is written out; of its exponential, which is a softmax, as well."""
    if node is None:
        return None
    if node.op_type == "LogSoftmax" and node.inputs[0] is not None and node.outputs[0].shape is not None:
        rank = len(node.outputs[0].shape)
        return _leaf(node.inputs[0]) if node.attributes.get_int("axis", -1) % rank == axis else None
    found = log_softmax_of(node)
    if found is None or found[1] != axis:
        return None
    log = producer(found[0], "Log")
    inner = None if log is None or log.inputs[0] is None else logarithm(log.inputs[0], axis)
    return inner or _leaf(_remove_shift(found[0], axis))


def _remove_shift(value: ir.Value, axis: int) -> ir.Value:
    """The x of x - m for an m that is the same along `axis`, which no softmax notices."""
    node = producer(value, "Sub")
    if node is None or None in node.inputs:
        return value
    x, shift = map(not_none, node.inputs)
    most = match_reduction(shift, ("ReduceMax",))
    return x if most is not None and most[1] == axis and most[0] is x else value


def logit(value: ir.Value) -> Ending | None:
    """The s such that `value` is the sigmoid of s; None without a match."""
    value = skip_guards(value)
    node = value.producer()
    first = node.inputs[0] if node is not None and node.inputs else None
    if node is None or first is None or not (is_standard(node) or node.domain == "ai.onnx.ml"):
        return None
    if node.op_type == "Sigmoid":
        return _leaf(first)
    if (found := _by_hand(node)) is not None:
        return found
    if (other := _complement(node)) is not None:
        found = logit(other)
        return None if found is None else found.then(lambda b, x: -x)
    if node.op_type in _MOVES | _PICKS or _reduces_nothing(node):
        found = logit(first)
        return None if found is None else _replay_move(node, found)
    if node.op_type == "Concat":
        return _join_endings(node, logit)
    if node.op_type == "Where":
        return _either(node)
    return _of_two(value)


def logarithm(value: ir.Value, axis: int | None = None) -> Ending | None:
    """log `value`, without overflow, for a `value` that is positive by its activation; None for others.

    With an `axis`, but for a number that is the same along it.
    """
    value = skip_guards(value)
    node = value.producer()
    first = node.inputs[0] if node is not None and node.inputs else None
    if node is None or first is None:
        return None
    if is_op(node, "Exp"):
        return _leaf(first if axis is None else _remove_shift(first, axis))
    if is_op(node, "Pow") and node.inputs[1] is not None:
        return _log_of_power(first, node.inputs[1], axis)
    if (found := logit(value)) is not None:
        return found.then(lambda b, x: -b.Softplus(-x))
    if is_op(node, _MOVES | _PICKS):
        found = logarithm(first)
        return None if found is None else _replay_move(node, found)
    return _join_endings(node, logarithm) if is_op(node, "Concat") else None


def _log_of_power(base: ir.Value, exponent: ir.Value, axis: int | None) -> Ending | None:
    """log xᶜ = c·log x, or log cˣ = x·log c, for a number c."""
    number, power = single_constant(base), single_constant(exponent)
    if number is not None and number > 0:
        return _leaf(exponent).then(partial(_scale, factor=math.log(number.item())))
    if power is None:
        return None
    found = logarithm(base) if axis is None else _log_of_positive(base, axis)
    return None if found is None else found.then(partial(_scale, factor=float(power.item())))


def _scale(b: Builder, x: Var, factor: float) -> Var:
    return b.Mul(x, factor)


def mixed(value: ir.Value, depth: int = 16) -> tuple[ir.Value, ir.Value] | None:
    """The two operands of a Concat of which one is between 0 and 1 and the other is not; None without these.

    So detectors return boxes and the scores of classes.
    """
    node = value.producer()
    if node is None or not depth or not is_standard(node):
        return None
    if node.op_type in _MOVES | _PICKS or neutral_operand(node) is not None:
        inner = neutral_operand(node) or node.inputs[0]
        return None if inner is None else mixed(inner, depth - 1)
    if node.op_type != "Concat":
        return None
    parts = [v for v in node.inputs if v is not None]
    limited = [0 <= low < high <= 1 for low, high in map(bounds, parts)]
    if any(limited) and not all(limited):
        return parts[limited.index(True)], parts[limited.index(False)]
    return next((found for v in parts if (found := mixed(v, depth - 1)) is not None), None)


def _leaf(value: ir.Value) -> Ending:
    return Ending((value,), lambda b, get: get(value))


def _pair(node: ir.Node, axis: int) -> Ending | None:
    """(1 - p, p) or (p, 1 - p) along `axis`: the softmax of (0, s) or (s, 0)."""
    if len(node.inputs) != 2:
        return None
    values = [v for v in node.inputs if v is not None]
    sides = [None if (n := v.producer()) is None else _complement(n) for v in values]
    plain = [None if side is None else skip_guards(side) for side in sides]
    for k in (0, 1):
        if plain[k] is skip_guards(values[1 - k]):
            found = logit(values[1 - k])
            if found is not None:
                return found.then(partial(_beside_zero, first=bool(k), axis=axis))
    return None


def _of_two(value: ir.Value) -> Ending | None:
    """The difference to the other class, for a softmax over two classes."""
    rank = 0 if value.shape is None else len(value.shape)
    for axis in range(rank):
        if value.shape is not None and value.shape[axis] == 2 and (found := scores(value, axis)) is not None:
            return found.then(lambda b, x, axis=axis: x - b.Gather(x, [1, 0], axis=axis))  # type: ignore[misc]
    return None


def _beside_zero(b: Builder, x: Var, first: bool, axis: int) -> Var:
    pair = (x, b.zeros_like(x)) if first else (b.zeros_like(x), x)
    return b.Concat(*pair, axis=axis)


def _join_endings(node: ir.Node, of: Callable[[ir.Value], Ending | None]) -> Ending | None:
    parts = [of(v) for v in node.inputs if v is not None]
    found = [p for p in parts if p is not None]
    if len(found) != len(parts) or not found:
        return None
    axis = node.attributes.get_int("axis", 0)
    leaves = tuple(dict.fromkeys(v for p in found for v in p.leaves))
    return Ending(leaves, lambda b, get: b.Concat(*(p.write(b, get) for p in found), axis=axis))


def _either(node: ir.Node) -> Ending | None:
    """Match a sigmoid written in one way for positive numbers, and in another for negative ones."""
    condition, *values = node.inputs
    one, other = (None if v is None else logit(v) for v in values)
    if condition is None or one is None or other is None:
        return None
    of, either, leaves = condition, (one.write, other.write), tuple(dict.fromkeys((*one.leaves, *other.leaves)))
    return Ending(leaves, lambda b, get: b.Where(b.var(of), *(write(b, get) for write in either)))


def _reduces_nothing(node: ir.Node) -> bool:
    """True for a reduction along axes of one element: the mean of one number is that number."""
    x = node.inputs[0]
    if node.op_type not in _REDUCTIONS or x is None or x.shape is None:
        return False
    axes = node.attributes.get_ints("axes")
    if axes is None and len(node.inputs) > 1:
        given = constant(node.inputs[1])
        axes = None if given is None else given.reshape(-1).tolist()
    return bool(axes) and all(-len(x.shape) <= a < len(x.shape) and x.shape[a] == 1 for a in axes or ())


def _replay_move(node: ir.Node, before: Ending) -> Ending:
    """`node`, which only moves numbers, on the logits instead of the probabilities."""
    attributes: dict[str, Any] = dict(node.attributes.items())
    return before.then(lambda b, x: b.emit(node.op_type, x, *(v and b.var(v) for v in node.inputs[1:]), **attributes))


def _complement(node: ir.Node) -> ir.Value | None:
    """The p of 1 - p."""
    if not is_op(node, "Sub") or len(node.inputs) != 2 or node.inputs[0] is None:
        return None
    return node.inputs[1] if _number(node.inputs[0]) == 1 else None


def _by_hand(node: ir.Node) -> Ending | None:
    """The s of a sigmoid that is written out: 1/(1 + exp -s), exp s/(1 + exp s), (1 + tanh s/2)/2, exp -softplus -s."""
    if (half := _of_tanh(node)) is not None:
        return _leaf(half).then(partial(_scale, factor=2.0))
    if node.op_type == "Exp":
        return _of_softplus(node.inputs[0])
    above, below = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type == "Reciprocal":
        above, below = None, node.inputs[0]
    add = below.producer() if below is not None and node.op_type in ("Reciprocal", "Div") else None
    if add is None or add.op_type != "Add":
        return None
    for this, other in (add.inputs, add.inputs[::-1]):
        if this is None or other is None or _number(other) != 1:
            continue
        exp = this.producer()
        if exp is None or exp.op_type != "Exp" or exp.inputs[0] is None:
            return None
        if not _same_size(exp.inputs[0], node.outputs[0]):
            return None
        if above is not None and this is above:
            return _leaf(exp.inputs[0])
        if above is None or _number(above) == 1:
            return _leaf(exp.inputs[0]).then(lambda b, x: -x)
    return None


def _of_softplus(value: ir.Value | None) -> Ending | None:
    """The s of log σ(s), written as -softplus(-s) or s - softplus(s); None for another value."""
    node = producer(value, ("Neg", "Sub"))
    softplus = None if node is None else producer(node.inputs[-1], "Softplus")
    x = None if softplus is None else softplus.inputs[0]
    if node is None or x is None or (node.op_type == "Sub" and node.inputs[0] is not x):
        return None
    return _leaf(x) if node.op_type == "Sub" else _leaf(x).then(lambda b, y: -y)


def _of_tanh(node: ir.Node) -> ir.Value | None:
    """The x of (1 + tanh x)/2, or 1/2 + (tanh x)/2; None for another node."""
    for outer, inner, ends in (("Mul", "Add", (0.5, 1)), ("Div", "Add", (2, 1)), ("Add", "Mul", (0.5, 0.5))):
        if node.op_type == outer and (found := _beside(node, ends[0])) is not None:
            tanh = _beside(producer(found, inner), ends[1])
            if (made := producer(tanh, "Tanh")) is not None:
                return made.inputs[0]
    return None


def _beside(node: ir.Node | None, number: float) -> ir.Value | None:
    """The operand of `node` that is combined with this number; None without such a number."""
    if node is None or len(node.inputs) != 2:
        return None
    first, second = node.inputs
    if is_number(second, number):
        return first
    return second if is_number(first, number) and node.op_type != "Div" else None


def _same_size(x: ir.Value, y: ir.Value) -> bool:
    """False where one is known to be broadcast to the other."""
    return x.shape is None or y.shape is None or same_dims(list(x.shape), list(y.shape))


def _axis_before(node: ir.Node, axis: int) -> int | None:
    """The axis of the operand from which `node` computes `axis`; None if that is not known."""
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or result.shape is None:
        return None
    if node.op_type == "Cast":
        return axis if source.dtype in FLOATS and result.dtype in FLOATS else None
    if node.op_type == "Transpose":
        order = permutation(node)
        return None if order is None else order[axis]
    before, after = list(source.shape), list(result.shape)
    wanted = _volume(after[axis + 1 :])
    same = [
        i for i, d in enumerate(before) if _volume([d]) == _volume([after[axis]]) and _volume(before[i + 1 :]) == wanted
    ]
    return same[0] if same and wanted is not None and _volume([after[axis]]) is not None else None


def _volume(dims: list[int | ir.SymbolicDim]) -> tuple[int, tuple[str, ...]] | None:
    """A product of sizes, as a number and names; None if one is unknown."""
    if any(not isinstance(d, int) and not d.value for d in dims):
        return None
    names = tuple(sorted(str(d.value) for d in dims if not isinstance(d, int)))
    return math.prod(d for d in dims if isinstance(d, int)), names


def _number(value: ir.Value) -> float | None:
    held = constant(value)
    known = held is not None and np.size(held) > 0 and held.dtype.kind == "f" and (held == held.flat[0]).all()
    return float(held.flat[0]) if known else None  # type: ignore[union-attr]
