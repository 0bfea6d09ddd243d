"""Elementwise arithmetic: sums, products, quotients, powers, exponentials, selection, casts."""

from __future__ import annotations

from typing import Any

from onnxgrad.ir import Var
from onnxgrad.ir.operators import Kind
from onnxgrad.rules.double_where import guard_factor, may_be_discarded
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import elementwise, linear
from onnxgrad.rules.rule import Result


@elementwise("Add", total=True, piecewise_linear=True)
def add(op: Op, g: Var) -> Result:
    """y = a + b: (g, g)"""
    return g, g


@elementwise("Sub", total=True, piecewise_linear=True)
def sub(op: Op, g: Var) -> Result:
    """y = a - b: (g, -g)"""
    return g, -g


@elementwise("Mul", total=True)
def mul(op: Op, g: Var, a: Var, b: Var) -> Result:
    """y = a·b: (g·b, g·a)"""
    return g * b, g * a


@elementwise("Div")
def div(op: Op, g: Var, a: Var, b: Var, y: Var) -> Result:
    """y = a/b: (g/b, -g·y/b)"""
    if not may_be_discarded(op, y.value) or (b.const is not None and (b.const != 0).all()):
        return g / b, -(g / b) * y
    share = g * guard_factor(op, g, op.Reciprocal(b))
    return share, -share * guard_factor(op, g, y)


@elementwise("Mod")
def mod(op: Op, g: Var, a: Var, b: Var, y: Var) -> Result:
    """y = a - b·n with the integer n = (a - y)/b: (g, -g·n)"""
    n = op.Floor((a - y) / b + 0.5)
    if not op.attr("fmod"):  # with the sign of b: y = b, as for infinite b, is a + b
        n = op.Where(op.Equal(y, b), -1.0, n)
    return g, -(g * n)


@elementwise("Neg", total=True, piecewise_linear=True)
def neg(op: Op, g: Var) -> Result:
    """y = -x: -g"""
    return -g


@elementwise("Sum", total=True, piecewise_linear=True)
def sum_(op: Op, g: Var) -> Result:
    """y = x₁ + … + xₙ: g for each"""
    return [g] * len(op.inputs)


@elementwise("Mean", total=True, piecewise_linear=True)
def mean(op: Op, g: Var) -> Result:
    """y = (x₁ + … + xₙ)/n: g/n for each"""
    return [g * (1 / len(op.inputs))] * len(op.inputs)


@elementwise("Reciprocal")
def reciprocal(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = 1/x: -g·y²"""
    y = guard_factor(op, g, y)
    return -g * (y * y)


@elementwise("Exp")
def exp(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = exp x: g·y"""
    return g * guard_factor(op, g, y)


@elementwise("Log")
def log(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = log x: g/x"""
    return g * guard_factor(op, g, op.Reciprocal(x)) if may_be_discarded(op, y.value) else g / x


@elementwise("Sqrt")
def sqrt(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = √x: g/(2y), with 0 where g = y = 0: a root that a Where behind it discards does no harm"""
    if may_be_discarded(op, y.value):
        return g * guard_factor(op, g, op.Reciprocal(y * 2))
    idle = op.And(op.Equal(g, 0.0), op.Equal(y, 0.0))
    return g / (op.Where(idle, 1.0, y) * 2)


@elementwise("Pow")
def pow_(op: Op, g: Var, x: Var, k: Var, y: Var) -> Result:
    """y = xᵏ: (g·k·xᵏ⁻¹, g·y·log x), in which 0⁰⁻¹ counts as 0 and log 0 as 0.

    So both are finite wherever the derivative is. The two operands may differ in type; `g` has the type of y in reverse
    mode, and in forward mode that of the operand with a tangent.
    """
    return _pow_base(op, g, x, k), _pow_exponent(op, g, x, k, y) if op.is_float(k) else None


def _pow_base(op: Op, g: Var, x: Var, k: Any) -> Any:
    """g·k·xᵏ⁻¹, with 0 for x = k = 0; written out where k is one known number."""
    known = k.const
    if known is not None and known.size == 1:
        number = float(known.reshape(()))
        return None if number == 0 else g if number == 1 else (g * number) * guard_factor(op, g, x ** (number - 1))
    k = op.cast_like(k, x)
    if known is None or (known == 0).any():
        x = op.Where(op.And(op.Equal(x, 0.0), op.Equal(k, 0.0)), 1.0, x)
    return g * (k * guard_factor(op, g, op.Pow(x, k - 1)))


def _pow_exponent(op: Op, g: Var, x: Var, k: Any, y: Var) -> Any:
    """g·y·log x, with 0 for x = 0."""
    known = x.const
    log_x = op.Log(x if known is not None and (known != 0).all() else op.Where(op.Equal(x, 0.0), 1.0, x))
    moved = op.cast_like(g, x) * (guard_factor(op, g, y) * guard_factor(op, g, log_x))
    return op.cast_like(moved, k) if g.dtype == x.dtype else moved


@linear("Identity", kind=Kind.ELEMENTWISE)
def identity(op: Op, g: Var) -> Result:
    """y = x: g"""
    return g


@linear("Cast", "CastLike", kind=Kind.ELEMENTWISE, total=True)
def cast(op: Op, g: Var, x: Var) -> Result:
    """y = x in another float type: g in the type of x"""
    return op.cast_like(g, x)


@elementwise("Where", wrt=(1, 2), total=True, piecewise_linear=True, discards=(1, 2))
def where(op: Op, g: Var, condition: Var) -> Result:
    """y = x₁ where c, else x₂: (g where c else 0, 0 where c else g)"""
    return None, op.Where(condition, g, 0.0), op.Where(condition, 0.0, g)
