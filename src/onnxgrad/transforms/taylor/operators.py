"""Taylor series of operators: elementary functions by differential equations, products by convolution.

A linear or piecewise linear operator maps each derivative separately, through its rule for tangents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product as combinations
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Var
from onnxgrad.ir.match import not_none
from onnxgrad.ir.operators import ByOperator
from onnxgrad.ir.shapes import expand_to
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import Linear, Rule, as_list
from onnxgrad.transforms.taylor import series
from onnxgrad.transforms.taylor.series import Series, Term, leibniz, minus, plus, scale

#: The series of a result from those of operands (None: a constant operand).
Outcome = list[Series]
Write = Callable[[Op, list[Series | None]], Series]


def term_by_term(op: Op, rule: Rule, xs: Sequence[Series | None], order: int) -> Outcome | None:
    """Every derivative separately; None if the rule does not support it."""
    outcome: Outcome = [[y] for y in op.outputs]
    for k in range(1, order + 1):
        tangents = [None if x is None else x[k] for x in xs]
        if all(t is None for t in tangents):
            results: Any = [None] * len(outcome)
        else:
            results = rule.jvp(op, tangents)
            if results is None:
                return None
        for terms, r in zip(outcome, [*results, *[None] * len(outcome)]):
            terms.append(r)
    return outcome


def multilinear(op: Op, rule: Linear, xs: Sequence[Series | None], order: int) -> Outcome:
    """An operator that is linear in each of several operands: the sum over all products of this order (Leibniz)."""
    moving = [i for i, x in enumerate(xs) if x is not None and rule.carries(i) and i != rule.bias]
    bias = None if rule.bias is None else xs[rule.bias]
    outcome: Outcome = [[y] for y in op.outputs]
    for k in range(1, order + 1):
        added = None if bias is None else bias[k]
        totals: list[Term] = [None] * len(outcome)
        for orders in combinations(range(k + 1), repeat=len(moving)):
            factors = [xs[i][p] for i, p in zip(moving, orders)]  # type: ignore[index]
            if sum(orders) != k or any(f is None for f in factors):
                continue
            factors[0] = scale(factors[0], math.factorial(k) // math.prod(map(math.factorial, orders)))
            operands = list(op.inputs)
            for i, f in zip(moving, factors):
                operands[i] = f
            if rule.bias is not None:
                operands[rule.bias], added = added, None
            totals = [plus(t, r) for t, r in zip(totals, as_list(op.replay(*operands)))]
        if added is not None:  # no product takes it along
            tangents: list[Var | None] = [None] * len(op.inputs)
            tangents[rule.bias or 0] = added
            totals = [plus(t, r) for t, r in zip(totals, rule.jvp(op, tangents) or [])]
        for y, t in zip(outcome, totals):
            y.append(t)
    return outcome


# --- elementary functions --------------------------------------------------------------------------

#: Recurrences that no class of rules implies; operators without one are differentiated once per order.
_equation: ByOperator[Write] = ByOperator()


def _full_series(op: Op, xs: Sequence[Series | None], i: int, order: int) -> Series:
    """The series of operand `i`, constant if it does not move."""
    own = xs[i]
    if own is not None:
        return own
    return [not_none(op.inputs[i]), *[None] * order]


def _order(xs: Sequence[Series | None]) -> int:
    return next(len(x) - 1 for x in xs if x is not None)


def _only(xs: Sequence[Series | None]) -> Series:
    return not_none(xs[0])


def _result(op: Op) -> Var:
    return not_none(op.outputs[0])


@_equation("Mul")
def _mul(op: Op, xs: list[Series | None]) -> Series:
    n = _order(xs)
    return series.product(_full_series(op, xs, 0, n), _full_series(op, xs, 1, n))


@_equation("Div")
def _div(op: Op, xs: list[Series | None]) -> Series:
    n = _order(xs)
    if xs[1] is None:
        b = op.inputs[1]
        return [None if a is None else a / b for a in _full_series(op, xs, 0, n)]
    return series.quotient(_full_series(op, xs, 0, n), _full_series(op, xs, 1, n), _result(op))


@_equation("Reciprocal")
def _reciprocal(op: Op, xs: list[Series | None]) -> Series:
    x = _only(xs)
    one = op.full_like(_result(op), 1)
    return series.quotient([one, *[None] * (len(x) - 1)], x, _result(op))


@_equation("Tanh")
def _tanh(op: Op, xs: list[Series | None]) -> Series:
    y = _result(op)

    def slope(known: Series) -> Term:  # 1 - y²
        k = len(known) - 1
        square = leibniz(known, known, k)
        return 1.0 - square if k == 0 and square is not None else scale(square, -1)

    return series.along_slope(_only(xs), y, slope)


def _logistic_slope(known: Series) -> Term:
    """y - y²"""
    k = len(known) - 1
    return minus(known[k], leibniz(known, known, k))


@_equation("Sigmoid")
def _sigmoid(op: Op, xs: list[Series | None]) -> Series:
    return series.along_slope(_only(xs), _result(op), _logistic_slope)


def _given_slope(write: Callable[[Op, Series], Series]) -> Write:
    """y′ = s·x′ with a series s that is known from x."""

    def apply(op: Op, xs: list[Series | None]) -> Series:
        x = _only(xs)
        s = write(op, x[:-1])
        return series.along_slope(x, _result(op), lambda known: s[len(known) - 1])

    return apply


def _bell(op: Op, x: Series) -> Series:
    """2/√π·exp(-x²)."""
    power = [scale(c, -1) for c in series.product(x, x)]
    e = series.exponential(power, op.Exp(not_none(power[0])))
    return [scale(c, 2 / math.sqrt(math.pi)) for c in e]


def _inverse_square(op: Op, x: Series) -> Series:
    """1/(1 + x²)."""
    square = series.product(x, x)
    below: Series = [not_none(square[0]) + 1.0, *square[1:]]
    first = op.Reciprocal(below[0])
    return series.quotient([op.full_like(first, 1), *[None] * (len(x) - 1)], below, first)


def _logistic(op: Op, x: Series) -> Series:
    """1/(1 + exp(-x))."""
    return series.along_slope(x, op.Sigmoid(x[0]), _logistic_slope)


@_equation("Pow")
def _pow(op: Op, xs: list[Series | None]) -> Series:
    x, exponent = map(not_none, op.inputs[:2])
    if xs[0] is None or xs[1] is not None or exponent.const is None or exponent.const.size != 1:
        raise NotImplementedError
    r = float(exponent.const.reshape(-1)[0])
    if exponent.shape != () and exponent.rank > x.rank:
        raise NotImplementedError
    if r == int(r) and 0 < r <= 64:
        return series.power_of_integer(xs[0], int(r))
    return series.power(xs[0], r, _result(op))


@_equation("Softmax")
def _softmax(op: Op, xs: list[Series | None]) -> Series:
    """y′ = y·(x′ - Σ y·x′), the sum along the axis."""
    x, axis = _only(xs), np.array([op.attr("axis")], np.int64)
    y: Series = [_result(op)]
    rest: Series = []
    for k in range(1, len(x)):
        mean = leibniz(y, x[1:], k - 1)
        mean = None if mean is None else op.ReduceSum(mean, op.const(axis % mean.rank), keepdims=1)
        rest.append(minus(x[k], mean))
        y.append(leibniz(y, rest, k - 1))
    return y


@_equation("ReduceSumSquare")
def _square_sum(op: Op, xs: list[Series | None]) -> Series:
    x = _only(xs)
    how = {"keepdims": op.attr("keepdims"), "noop_with_empty_axes": op.attr("noop_with_empty_axes") or None}
    squares = series.product(x, x)
    axes = op.inputs[1:2]
    return [None if c is None else op.ReduceSum(c, *axes, **how) for c in squares]


_equation("Atan")(_given_slope(_inverse_square))
_equation("Cos")(lambda op, xs: series.rotation(_only(xs), op.Sin(op.inputs[0]), _result(op), -1)[1])
_equation("Cosh")(lambda op, xs: series.rotation(_only(xs), op.Sinh(op.inputs[0]), _result(op), 1)[1])
_equation("Erf")(_given_slope(_bell))
_equation("Exp")(lambda op, xs: series.exponential(_only(xs), _result(op)))
_equation("Log")(lambda op, xs: series.logarithm(_only(xs), _result(op)))
_equation("Sin")(lambda op, xs: series.rotation(_only(xs), _result(op), op.Cos(op.inputs[0]), -1)[0])
_equation("Sinh")(lambda op, xs: series.rotation(_only(xs), _result(op), op.Cosh(op.inputs[0]), 1)[0])
_equation("Softplus")(_given_slope(_logistic))
_equation("Sqrt")(lambda op, xs: series.root(_only(xs), _result(op)))


def has_equation(node: ir.Node, rule: Rule) -> bool:
    """True if `node` has a recurrence, and the built-in rule rather than a user's."""
    return _equation.of(node) is not None and registry.has("", node.op_type, rule)


def by_equation(op: Op, rule: Rule, xs: list[Series | None]) -> Outcome | None:
    """The series of an elementary function; None if it has no recurrence."""
    write = _equation.of(op.node)
    if write is None or not has_equation(op.node, rule):
        return None
    try:
        terms = write(op, xs)
    except NotImplementedError:
        return None
    y = _result(op)
    return [[y, *(None if c is None else expand_to(c, y) for c in terms[1:])]]
