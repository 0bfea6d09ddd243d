"""Circular and hyperbolic functions, their inverses, and the error function."""

from __future__ import annotations

import math

from onnxgrad.rules.registry import elementwise


@elementwise("Sin")
def sin(op, g, x):
    """y = sin x: g·cos x"""
    return g * op.Cos(x)


@elementwise("Cos")
def cos(op, g, x):
    """y = cos x: -g·sin x"""
    return -g * op.Sin(x)


@elementwise("Tan")
def tan(op, g, x, y):
    """y = tan x: g·(1 + y²)"""
    return g * (y * y + 1)


@elementwise("Asin")
def asin(op, g, x):
    """y = asin x: g/√((1 - x)(1 + x))"""
    return g / op.Sqrt((1 - x) * (x + 1))


@elementwise("Acos")
def acos(op, g, x):
    """y = acos x: -g/√((1 - x)(1 + x))"""
    return -g / op.Sqrt((1 - x) * (x + 1))


@elementwise("Atan")
def atan(op, g, x):
    """y = atan x: g/(1 + x²)"""
    return g / (x * x + 1)


@elementwise("Sinh")
def sinh(op, g, x):
    """y = sinh x: g·cosh x"""
    return g * op.Cosh(x)


@elementwise("Cosh")
def cosh(op, g, x):
    """y = cosh x: g·sinh x"""
    return g * op.Sinh(x)


@elementwise("Tanh")
def tanh(op, g, x, y):
    """y = tanh x: g·(1 - y²)"""
    return g * (1 - y * y)


@elementwise("Asinh")
def asinh(op, g, x, y):
    """y = asinh x: g/cosh y, where cosh y = √(x² + 1) without the square that overflows"""
    return g / op.Cosh(y)


@elementwise("Acosh")
def acosh(op, g, x, y):
    """y = acosh x: g/sinh y, where sinh y = √(x² - 1) without the cancellation at 1"""
    return g / op.Sinh(y)


@elementwise("Atanh")
def atanh(op, g, x):
    """y = atanh x: g/((1 - x)(1 + x))"""
    return g / ((1 - x) * (x + 1))


@elementwise("Erf")
def erf(op, g, x):
    """y = erf x: g·(2/√π)·exp(-x²)"""
    return g * (op.Exp(-(x * x)) * (2 / math.sqrt(math.pi)))
