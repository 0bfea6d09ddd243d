"""Elementwise arithmetic: sums, products, powers, elementary functions, extrema, selection, casts."""

from __future__ import annotations

from onnxgrad.rules.registry import elementwise, linear


@elementwise("Add")
def add(op, g):
    """y = a + b: (g, g)"""
    return g, g


@elementwise("Sub")
def sub(op, g):
    """y = a - b: (g, -g)"""
    return g, -g


@elementwise("Mul")
def mul(op, g, a, b):
    """y = a·b: (g·b, g·a)"""
    return g * b, g * a


@elementwise("Div")
def div(op, g, a, b, y):
    """y = a/b: (g/b, -g·y/b)"""
    return g / b, -(g / b) * y


@elementwise("Neg")
def neg(op, g):
    """y = -x: -g"""
    return -g


@elementwise("Reciprocal")
def reciprocal(op, g, x, y):
    """y = 1/x: -g·y²"""
    return -g * (y * y)


@elementwise("Exp")
def exp(op, g, x, y):
    """y = exp x: g·y"""
    return g * y


@elementwise("Log")
def log(op, g, x):
    """y = log x: g/x"""
    return g / x


@elementwise("Sqrt")
def sqrt(op, g, x, y):
    """y = √x: g/(2y)"""
    return g / (y * 2)


@elementwise("Sin")
def sin(op, g, x):
    """y = sin x: g·cos x"""
    return g * op.Cos(x)


@elementwise("Cos")
def cos(op, g, x):
    """y = cos x: -g·sin x"""
    return -g * op.Sin(x)


@linear("Identity")
def identity(op, g):
    """y = x: g"""
    return g


@linear("Cast", "CastLike")
def cast(op, g, x):
    """y = x in another float type: g in the type of x"""
    return op.cast_like(g, x)


@elementwise("Where", wrt=(1, 2))
def where(op, g, condition):
    """y = x₁ where c, else x₂: (g where c else 0, 0 where c else g)"""
    return None, op.Where(condition, g, 0.0), op.Where(condition, 0.0, g)
