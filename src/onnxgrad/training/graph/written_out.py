"""Activations that exporters write out: sums that are broadcast back, shares of a sum, logarithms of shares.

A softmax is the quotient of exponentials and their sum, a log-softmax the difference to the logarithm of that sum. The
sum loses its axis and gets it back (Unsqueeze, Reshape, Expand), the largest score is subtracted before or not.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import constant, is_number, is_op, is_standard, not_none, rank, single_constant
from onnxgrad.ir.shapes import same_dim, same_dims
from onnxgrad.training.graph.rounding import rounded

#: Nodes that give a reduced value its axis back.
_BROADCASTS = frozenset(("Identity", "Cast", "Unsqueeze", "Reshape", "Expand"))
_SUMS = ("ReduceSum", "ReduceL1")


def share_of(node: ir.Node) -> tuple[ir.Value, int] | None:
    """The e of e divided by its own sum along one axis, and the axis; None for another node."""
    if (found := _match_l1_norm(node)) is not None:
        return found
    above, below = _quotient(node)
    if above is None or below is None:
        return None
    found = match_reduction(skip_guards(below), _SUMS)
    if found is None or skip_guards(found[0]) is not skip_guards(above):
        return None
    return skip_guards(above), found[1]


def _match_l1_norm(node: ir.Node) -> tuple[ir.Value, int] | None:
    """The operand and the axis of a division by the sum of absolute values; None for another node."""
    x = node.inputs[0] if node.inputs else None
    if x is None or x.shape is None:
        return None
    if is_op(node, "LpNormalization") and node.attributes.get_int("p", 2) == 1:
        return skip_guards(x), node.attributes.get_int("axis", -1) % len(x.shape)
    is_ml = node.domain == "ai.onnx.ml" and node.op_type == "Normalizer"
    return (skip_guards(x), len(x.shape) - 1) if is_ml and node.attributes.get_string("norm", "MAX") == "L1" else None


def log_softmax_of(node: ir.Node) -> tuple[ir.Value, int] | None:
    """The scores and the axis of a log-softmax that is written out as a difference; None for another node."""
    if not is_op(node, "Sub") or None in node.inputs[:2]:
        return None
    scores, total = not_none(node.inputs[0]), not_none(node.inputs[1])
    if (found := log_sum_exp(total)) is not None and found[0] is scores:
        return scores, found[1]
    of_log = _producer_of_kind(scores, "Log")  # log e - log Σe
    if of_log is not None and (found := _log_of_sum(total)) is not None and found[0] is of_log.inputs[0]:
        return scores, found[1]
    plus = _producer_of_kind(total, "Add")  # the largest score, and the logarithm of the sum without it
    for most, log in () if plus is None else (plus.inputs[:2], plus.inputs[1::-1]):
        found = None if log is None else log_sum_exp(log)
        less = None if found is None else found[0].producer()
        if found is not None and less is not None and less.op_type == "Sub" and list(less.inputs) == [scores, most]:
            return scores, found[1]
    return None


def log_sum_exp(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The x and the axis of log Σ exp x, broadcast along the axis; None for another value."""
    if (found := match_reduction(value, ("ReduceLogSumExp",))) is not None:
        return found
    if (found := _log_of_sum(value)) is None:
        return None
    exp = skip_guards(found[0]).producer()
    if not is_op(exp, "Exp") or exp.inputs[0] is None:
        return None
    return exp.inputs[0], found[1]


def _log_of_sum(value: ir.Value) -> tuple[ir.Value, int] | None:
    """The x and the axis of log Σ x, broadcast along the axis; None for another value."""
    return match_reduction(value, ("ReduceLogSum",)) or match_reduction(value, _SUMS, through="Log")


def match_reduction(value: ir.Value, kinds: tuple[str, ...], through: str = "") -> tuple[ir.Value, int] | None:
    """Match a reduction of `kinds` that keeps its axis. Returns its operand and axis, or None.

    `through`: a node that must lie between the two.
    """
    seen, node = [value], value.producer()
    while node is not None and is_standard(node) and node.inputs and node.inputs[0] is not None:
        if node.op_type in kinds:
            return None if through else _reduction_operand(node, seen)
        inner = neutral_operand(node)
        if node.op_type == through:
            inner, through = node.inputs[0], ""
        elif inner is None and node.op_type in _BROADCASTS:
            inner = node.inputs[0]
        if inner is None:
            return None
        seen.append(inner)
        node = inner.producer()
    return None


def _reduction_operand(node: ir.Node, seen: list[ir.Value]) -> tuple[ir.Value, int] | None:
    """The operand and axis of the reduction `node`, if the values `seen` behind it keep the axis."""
    x = node.inputs[0]
    axes = _axes(node)
    if x is None or x.shape is None or axes is None or axes.size != 1:
        return None
    count, keeps = len(x.shape), node.attributes.get_int("keepdims", 1)
    axis, in_place = int(axes.flat[0]) % count, bool(keeps)
    for value in reversed(seen):
        dims = [] if value.shape is None else list(value.shape)
        if len(dims) != count:
            if in_place:
                return None
            continue
        if not all(d == 1 if k == axis else same_dim(d, x.shape[k]) for k, d in enumerate(dims)) and not (
            in_place and same_dims(dims, list(x.shape))
        ):
            return None
        in_place = True
    return (x, axis) if in_place else None


def _axes(node: ir.Node) -> np.ndarray | None:
    given = node.attributes.get_ints("axes")
    if given is not None:
        return np.array(given)
    return constant(node.inputs[1]) if len(node.inputs) > 1 else None


def _quotient(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """The operands of a quotient, also as a product with a reciprocal."""
    if not is_standard(node) or len(node.inputs) != 2:
        return None, None
    if node.op_type == "Div":
        return node.inputs[0], node.inputs[1]
    for this, other in (node.inputs, node.inputs[::-1]) if node.op_type == "Mul" else ():
        below = None if other is None else _match_inverse(other)
        if below is not None:
            return this, below
    return None, None


def _match_inverse(value: ir.Value) -> ir.Value | None:
    """The x of 1/x, in one of three written forms, up to an Unsqueeze; None for another value."""
    if (node := _producer_of_kind(value, "Reciprocal")) is not None:
        return node.inputs[0]
    if (node := _producer_of_kind(value, "Div")) is not None:
        return node.inputs[1] if is_number(node.inputs[0], 1) else None
    node = _producer_of_kind(value, "Pow")
    return node.inputs[0] if node is not None and is_number(node.inputs[1], -1) else None


def _producer_of_kind(value: ir.Value, kind: str) -> ir.Node | None:
    """The producer of `value` of this kind, up to an Unsqueeze."""
    node = value.producer()
    while node is not None and node.op_type != kind and node.op_type in _BROADCASTS and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node if is_op(node, kind) else None


def skip_guards(value: ir.Value) -> ir.Value:
    """`value` without guards against division by zero or a logarithm of zero: see `neutral_operand`."""
    while (node := value.producer()) is not None and (inner := neutral_operand(node)) is not None:
        value = inner
    return value


def neutral_operand(node: ir.Node) -> ir.Value | None:
    """The operand of a `node` that does not change probabilities; None for other nodes.

    Such nodes multiply by 1, add a tiny number, clip to [0, 1], add a number where the sum of a row is 0 (as skl2onnx
    writes it), or round to quantized numbers.
    """
    if not is_standard(node) or not node.inputs or node.inputs[0] is None:
        return None
    first, of = node.inputs[0], node.op_type
    if of in ("Identity", "Dropout"):
        return first
    if (inner := rounded(node)) is not None:
        return inner
    numbers = [constant(v) for v in node.inputs]
    single = [None if a is None or a.size != 1 or a.dtype.kind != "f" else float(a.flat[0]) for a in numbers]
    if of == "Clip":
        low, high = (*single[1:], None, None)[:2]
        cuts = [v is not None and n is None for v, n in zip(node.inputs[1:], single[1:])]
        small = low is None or low <= 1e-3
        return first if small and (high is None or high >= 1 - 1e-3) and not any(cuts) else None
    if len(node.inputs) != 2 or node.inputs[1] is None:
        return None
    for this, other, n in ((first, node.inputs[1], single[1]), (node.inputs[1], first, single[0])):
        if rank(node.outputs[0]) != rank(this):
            continue
        if n is not None and (this is first or of not in ("Sub", "Div", "Pow")):
            neutral = {"Mul": n == 1, "Div": n == 1, "Add": 0 <= n <= 1e-3, "Sub": n == 0, "Max": n <= 1e-3}
            if neutral.get(of, of == "Min" and n >= 1 - 1e-3):
                return this
        if of == "Add" and _is_guard(other):
            return this
    return None


def _is_guard(value: ir.Value) -> bool:
    """True if `value` is 1, or another constant, exactly where a sum is 0."""
    node = value.producer()
    if node is not None and node.op_type == "Mul":
        inner = [v for v in node.inputs if v is not None and single_constant(v) is None]
        return len(inner) == 1 and _is_guard(inner[0])
    for of in ("Cast", "Not", "Cast", "ReduceSum"):
        if node is None or node.op_type != of or node.inputs[0] is None:
            return False
        node = node.inputs[0].producer()
    return True
