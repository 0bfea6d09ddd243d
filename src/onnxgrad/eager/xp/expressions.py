"""Expressions for the elementwise functions that ONNX has no operator for."""

from __future__ import annotations

import math

from onnxgrad.ir import Builder, Var


def log1p_of(b: Builder, x: Var) -> Var:
    return b.Log(x + 1.0)


def expm1_of(b: Builder, x: Var) -> Var:
    return b.Exp(x) - 1.0


def log2_of(b: Builder, x: Var) -> Var:
    return b.Log(x) * (1 / math.log(2))


def log10_of(b: Builder, x: Var) -> Var:
    return b.Log(x) * (1 / math.log(10))


def exp2_of(b: Builder, x: Var) -> Var:
    return b.Exp(x * math.log(2))


def square_of(b: Builder, x: Var) -> Var:
    return x * x


def trunc_of(b: Builder, x: Var) -> Var:
    return b.Sign(x) * b.Floor(b.Abs(x))


def is_finite_of(b: Builder, x: Var) -> Var:
    return b.Not(b.Or(b.IsNaN(x), b.IsInf(x)))


def is_negative_of(b: Builder, x: Var) -> Var:
    return b.Or(x < 0.0, b.Reciprocal(x) < 0.0)


def differ_of(b: Builder, x: Var, y: Var) -> Var:
    return b.Not(b.Equal(x, y))


def floor_divide_of(b: Builder, x: Var, y: Var) -> Var:
    return b.Floor(x / y)


def floor_divide_ints_of(b: Builder, x: Var, y: Var) -> Var:
    return b.Div(b.Sub(x, b.Mod(x, y)), y)


def remainder_of(b: Builder, x: Var, y: Var) -> Var:
    return x - b.Floor(x / y) * y


def divide_ints_of(b: Builder, x: Var, y: Var) -> Var:
    return b.Cast(x, to=11) / b.Cast(y, to=11)


def hypot_of(b: Builder, x: Var, y: Var) -> Var:
    return b.Sqrt(x * x + y * y)


def logaddexp_of(b: Builder, x: Var, y: Var) -> Var:
    return y + b.Softplus(x - y)


def copysign_of(b: Builder, x: Var, y: Var) -> Var:
    return b.Where(b.Equal(is_negative_of(b, x), is_negative_of(b, y)), x, -x)


def atan2_of(b: Builder, y: Var, x: Var) -> Var:
    """The arctangent of the quotient of magnitude at most 1, plus a constant for each octant."""
    flat = b.LessOrEqual(b.Abs(y), b.Abs(x))
    one = b.const(1, x.dtype)
    near = b.Atan(b.Where(flat, y, one) / b.Where(flat, x, one))
    far = b.Atan(b.Where(flat, one, x) / b.Where(flat, one, y))
    sign = b.Where(is_negative_of(b, y), b.Neg(one), one)
    turn = b.Where(is_negative_of(b, x), sign * math.pi, sign * 0.0)
    return b.Where(flat, near + turn, sign * (math.pi / 2) - far)


def bit_left_of(b: Builder, x: Var, y: Var) -> Var:
    return b.BitShift(x, y, direction="LEFT")


def bit_right_of(b: Builder, x: Var, y: Var) -> Var:
    return b.BitShift(x, y, direction="RIGHT")


def always_of(b: Builder, x: Var) -> Var:
    return b.Equal(x, x)


def never_of(b: Builder, x: Var) -> Var:
    return b.Not(b.Equal(x, x))


def below_zero_of(b: Builder, x: Var) -> Var:
    return b.Less(x, 0)


def above_of(b: Builder, x: Var, y: Var) -> Var:
    return b.And(x, b.Not(y))


def below_of(b: Builder, x: Var, y: Var) -> Var:
    return b.And(b.Not(x), y)


def not_above_of(b: Builder, x: Var, y: Var) -> Var:
    return b.Or(b.Not(x), y)


def not_below_of(b: Builder, x: Var, y: Var) -> Var:
    return b.Or(x, b.Not(y))
