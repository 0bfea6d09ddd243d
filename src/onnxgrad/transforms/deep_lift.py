"""DeepLIFT by the rescale rule (Shrikumar, Greenside, Kundaje 2017): derivatives are differences from a baseline.

A second forward pass runs the baseline. In the backward pass, the rule of each nonlinear node reads both passes, so
that the change of its output is divided among its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxgrad.engine import reverse
from onnxgrad.engine.activity import active_values
from onnxgrad.engine.resolve import rule_of
from onnxgrad.ir import Var
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import captured, subgraphs
from onnxgrad.ir.match import is_op
from onnxgrad.ir.shapes import sum_to
from onnxgrad.model_io import AnyModel
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import OWN, Cotangents, Elementwise, Linear, Parts, Pulled, Rule, write
from onnxgrad.transforms.derivation import Derivation
from onnxgrad.transforms.keep_functions import transform
from onnxgrad.transforms.select_values import Names

#: elementwise operators that are linear in any one operand, or in all of them together
_AFFINE = ("Add", "Sub", "Neg", "Sum", "Mean", "Mul", "Identity", "Dropout", "Where")
#: operators whose output is one of the elements of the operand
_PICKS = ("MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin")
#: changes of an operand below this size have the gradient as multiplier, as in Captum
_TINY = 1e-10


@transform
def deep_lift(model: AnyModel, *, wrt: Names, of: Names | None = None) -> Any:
    """Attributions to the elements of inputs by DeepLIFT's rescale rule (Shrikumar, Greenside, Kundaje 2017).

    The multiplier of an elementwise function is Δy/Δx between the input and the baseline. Max pooling attributes
    its change to the two maxima, as Captum does; products of two values that both change take the mean of the
    derivatives at both ends. The sum of the attributions is then f(x) - f(x'). Other operators (Softmax,
    normalization over a row) also take that mean, for which the sum is an approximation. Loops have their gradient.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        wrt: names of float inputs.
        of: names of float values, or index expressions on them (``"y[:, 3]"``), whose sum is attributed.

    Returns:
        A model of the argument's kind, with one more input ``{wrt}_baseline`` (x', shape and dtype of `wrt`) per
        `wrt`, whose outputs are ``{wrt}_attribution``.

    Raises:
        BadInput: a `wrt` that is no input.
        OnnxGradError: as `vjp`.
    """
    d = Derivation(model, wrt, of)
    b = d.builder
    d.refuse_computed()
    inner, nodes = list(d.wrt.values()), d.lowered(list(d.of.values()))
    active = active_values(nodes, inner, b)
    ways = {v: b.var(v) - d.input(v, f"{name}_baseline") for name, v in d.wrt.items()}
    copies = Copies({v: w.value.producer().inputs[1] for v, w in ways.items()}, b.names)  # type: ignore[union-attr,misc]
    for node in nodes:
        if not any(v in copies.values for v in (*node.inputs, *captured(node))):
            continue
        copy = copies.node(node)
        d.graph.append(copy)
        rule = rule_of(node, b)
        if rule is not None and not subgraphs(node):
            moving = [v in active and rule.carries(i) for i, v in enumerate(node.inputs)]
            if (own := _rule(node, rule, copy, moving)) is not None:
                node.meta[OWN] = own
    gradients = d.derivatives_of(reverse(b, nodes, d.ones(), inner), d.wrt)
    d.graph.outputs.clear()
    for (name, value), gradient in zip(d.wrt.items(), gradients):
        d.output(gradient * ways[value], f"{name}_attribution", value)
    return d.close()


def _rule(node: ir.Node, rule: Rule, copy: ir.Node, moving: Sequence[bool]) -> Rule | None:
    """The rule of DeepLIFT for `node`, whose operands `moving` differ between the passes; None: its derivative."""
    if is_op(node, _PICKS):
        return _Picked(rule, copy)
    if sum(moving) == 1 and isinstance(rule, Elementwise):
        return None if is_op(node, _AFFINE) else _Rescaled(rule, copy)
    is_affine = isinstance(rule, Linear) and (rule.joint or sum(moving) == 1)
    return None if is_affine or not any(moving) or is_op(node, ("Add", "Sub", "Sum", "Mean")) else _Averaged(rule, copy)


class _Compared(Rule):
    """A rule that reads the operands of the baseline too: those of `copy`."""

    kind = "compared"
    is_custom = True

    def __init__(self, rule: Rule, copy: ir.Node) -> None:
        self.rule, self.copy, self.wrt = rule, copy, rule.wrt

    def at_baseline(self, op: Op) -> Op:
        """The node of the baseline, with the same demands."""
        other = Op(op.builder, self.copy, op.needs[: len(self.copy.inputs)])
        other.active = op.active
        return other

    def gradients(self, op: Op, cotangents: Cotangents) -> Parts:
        """The derivative by each operand."""
        parts = self.rule.vjp(op, cotangents)
        assert not isinstance(parts, dict)
        return [None if p is None else write(p) for p in parts]

    def only(self, op: Op, cotangents: Cotangents) -> Var:
        """The derivative by the only operand that changes."""
        return next(g for g in self.gradients(op, cotangents) if g is not None)

    def _jvp(self, op: Op, tangents: Cotangents) -> Parts | None:
        return self.rule._jvp(op, tangents)


def _multiplied(op: Op, x: Var, gradient: Var, change: Var, way: Var) -> Var:
    """`change` divided by the `way` of `x`; the `gradient` where x stays."""
    stays = op.Abs(way) <= _TINY
    return op.Where(stays, gradient, change / op.Where(stays, op.cast_like(op.const(1.0), x), way))


class _Rescaled(_Compared):
    """g·Δy/Δx, of an elementwise function of one operand that changes."""

    def vjp(self, op: Op, cotangents: Cotangents) -> Pulled:
        """The product, summed to the shape of the operand; None for the others."""
        other = self.at_baseline(op)
        (i,) = [k for k, need in enumerate(op.needs) if need]
        (g,) = [g for g in cotangents if g is not None]
        x, x0 = (x for at in (op, other) if (x := at.inputs[i]) is not None)
        change = sum_to(g * (op.output(0) - other.output(0)), x)
        return [None] * i + [_multiplied(op, x, self.only(op, cotangents), change, x - x0)]


class _Picked(_Compared):
    """The change of a maximum m: m - max(m, m₀) of x₀ at its maximum, and max(m, m₀) - m₀ of x at its own."""

    def vjp(self, op: Op, cotangents: Cotangents) -> Pulled:
        """The changes at both maxima, divided by the change of the element."""
        other, g = self.at_baseline(op), cotangents[0]
        x, x0 = (x for at in (op, other) if (x := at.inputs[0]) is not None)
        assert g is not None
        y, y0 = op.output(0), other.output(0)
        top = (op.Min if is_op(op.node, "ReduceMin") else op.Max)(y, y0)
        own, its, gradient = (
            self.only(at, [part, *cotangents[1:]])
            for at, part in ((op, g * (top - y0)), (other, g * (y - top)), (op, g))
        )
        return [_multiplied(op, x, gradient, own + its, x - x0)]


class _Averaged(_Compared):
    """The mean of the derivatives at both ends, which is exact for a product."""

    def vjp(self, op: Op, cotangents: Cotangents) -> Pulled:
        """The mean by each operand."""
        pairs = zip(self.gradients(op, cotangents), self.gradients(self.at_baseline(op), cotangents))
        return [None if g is None or g0 is None else op.Mul(g + g0, 0.5) for g, g0 in pairs]
