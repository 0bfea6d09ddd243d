"""Circular and hyperbolic functions, their inverses, and the error function."""

from __future__ import annotations

import math

from onnxgrad.ir import Var
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import elementwise
from onnxgrad.rules.rule import Result


@elementwise("Sin", total=True, interval=(-1, 1))
def sin(op: Op, g: Var, x: Var) -> Result:
    """y = sin x: g·cos x"""
    return g * op.Cos(x)


@elementwise("Cos", total=True, interval=(-1, 1))
def cos(op: Op, g: Var, x: Var) -> Result:
    """y = cos x: -g·sin x"""
    return -g * op.Sin(x)


@elementwise("Tan")
def tan(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = tan x: g·(1 + y²)"""
    return g * (y * y + 1)


@elementwise("Asin")
def asin(op: Op, g: Var, x: Var) -> Result:
    """y = asin x: g/√((1 - x)(1 + x))"""
    return g / op.Sqrt((1 - x) * (x + 1))


@elementwise("Acos")
def acos(op: Op, g: Var, x: Var) -> Result:
    """y = acos x: -g/√((1 - x)(1 + x))"""
    return -g / op.Sqrt((1 - x) * (x + 1))


@elementwise("Atan", total=True)
def atan(op: Op, g: Var, x: Var) -> Result:
    """y = atan x: g/(1 + x²)"""
    return g / (x * x + 1)


@elementwise("Sinh")
def sinh(op: Op, g: Var, x: Var) -> Result:
    """y = sinh x: g·cosh x"""
    return g * op.Cosh(x)


@elementwise("Cosh")
def cosh(op: Op, g: Var, x: Var) -> Result:
    """y = cosh x: g·sinh x"""
    return g * op.Sinh(x)


@elementwise("Tanh", total=True, interval=(-1, 1))
def tanh(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = tanh x: g·(1 - y²)"""
    return g * (1 - y * y)


@elementwise("Asinh")
def asinh(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = asinh x: g/cosh y, where cosh y = √(x² + 1) without the square that overflows"""
    return g / op.Cosh(y)


@elementwise("Acosh")
def acosh(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = acosh x: g/sinh y, where sinh y = √(x² - 1) without the cancellation at 1"""
    return g / op.Sinh(y)


@elementwise("Atanh")
def atanh(op: Op, g: Var, x: Var) -> Result:
    """y = atanh x: g/((1 - x)(1 + x))"""
    return g / ((1 - x) * (x + 1))


@elementwise("Erf", total=True, interval=(-1, 1))
def erf(op: Op, g: Var, x: Var) -> Result:
    """y = erf x: g·(2/√π)·exp(-x²)"""
    return g * (op.Exp(-(x * x)) * (2 / math.sqrt(math.pi)))
