"""Series of variables: x and its derivatives x₁, …, x_k along a path, with None for a derivative that is zero.

The recurrences are those of Griewank & Walther 2008, "Evaluating Derivatives", chapter 13, for derivatives in place of
Taylor coefficients: products have binomials in them (Leibniz), and no factor is a fraction. (When ONNX Runtime fuses a
product of matrices, it keeps the number by which one is scaled in float32.) Each takes O(k²) products.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onnxgrad.ir import Var
from onnxgrad.ir.match import not_none

Term = Var | None
Series = list[Term]
Product = Callable[[Var, Var], Var]


def plus(a: Term, b: Term) -> Term:
    """a + b."""
    return b if a is None else a if b is None else a + b


def minus(a: Term, b: Term) -> Term:
    """a - b."""
    return a if b is None else -b if a is None else a - b


def scale(a: Term, number: float) -> Term:
    """number·a."""
    return None if a is None or number == 0 else a * float(number) if number != 1 else a


def multiply(a: Var, b: Var) -> Var:
    """a·b, element by element."""
    return a * b


def leibniz(a: Series, b: Series, k: int, product: Product = multiply, first: int = 0, last: int | None = None) -> Term:
    """Σ C(k, j)·a_j·b_(k-j) for j from `first` to `last`: the k-th derivative of a product, or a part of it."""
    total: Term = None
    for j in range(first, (k if last is None else last) + 1):
        x, y = a[j], b[k - j]
        if x is not None and y is not None:
            total = plus(total, scale(product(x, y), math.comb(k, j)))
    return total


def product(a: Series, b: Series, of: Product = multiply) -> Series:
    """a·b."""
    return [leibniz(a, b, k, of) for k in range(min(len(a), len(b)))]


def quotient(a: Series, b: Series, first: Var) -> Series:
    """a/b, which begins with `first`."""
    y: Series = [first]
    divisor = not_none(b[0])
    for k in range(1, len(a)):
        rest = minus(a[k], leibniz(y, b, k, last=k - 1))
        y.append(None if rest is None else rest / divisor)
    return y


def exponential(x: Series, first: Var) -> Series:
    """exp x: y′ = y·x′."""
    y: Series = [first]
    for k in range(1, len(x)):
        y.append(leibniz(y, x[1:], k - 1))
    return y


def logarithm(x: Series, first: Var) -> Series:
    """log x: x·y′ = x′."""
    lead = not_none(x[0])
    slope: Series = []
    for k in range(len(x) - 1):
        rest = minus(x[k + 1], leibniz(slope, x, k, last=k - 1))
        slope.append(None if rest is None else rest / lead)
    return [first, *slope]


def root(x: Series, first: Var) -> Series:
    """√x: y·y = x."""
    y: Series = [first]
    twice = first * 2.0
    for k in range(1, len(x)):
        rest = minus(x[k], leibniz(y, y, k, first=1, last=k - 1))
        y.append(None if rest is None else rest / twice)
    return y


def power(x: Series, exponent: float, first: Var) -> Series:
    """x to a constant exponent: x·y′ = r·y·x′. Where x is 0 the recurrence has no answer."""
    lead = not_none(x[0])
    y: Series = [first]
    for k in range(1, len(x)):
        grown = scale(leibniz(y, x[1:], k - 1), exponent)
        rest = minus(grown, leibniz([None, *x[1:]], [*y[1:], None], k - 1))
        y.append(None if rest is None else rest / lead)
    return y


def power_of_integer(x: Series, exponent: int) -> Series:
    """x to a positive integer, by squaring."""
    result: Series | None = None
    while exponent:
        if exponent & 1:
            result = x if result is None else product(result, x)
        exponent >>= 1
        x = product(x, x) if exponent else x
    return not_none(result)


def along_slope(x: Series, first: Var, slope: Callable[[Series], Term]) -> Series:
    """y with y′ = s·x′; `slope` returns the next derivative of s from the known ones of y."""
    y: Series = [first]
    s: Series = []
    for k in range(1, len(x)):
        s.append(slope(y))
        y.append(leibniz(s, x[1:], k - 1))
    return y


def rotation(x: Series, sine: Var, cosine: Var, sign: float) -> tuple[Series, Series]:
    """s and c with s′ = c·x′ and c′ = sign·s·x′: sine and cosine (-1), or the hyperbolic ones (1)."""
    s: Series = [sine]
    c: Series = [cosine]
    for k in range(1, len(x)):
        ds, dc = leibniz(c, x[1:], k - 1), leibniz(s, x[1:], k - 1)
        s.append(ds)
        c.append(scale(dc, sign))
    return s, c
