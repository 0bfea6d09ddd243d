"""Elementwise functions, products and extrema of tracked complex arrays.

Arithmetic is recorded as functions of the real and imaginary parts. Of the other functions, which are holomorphic, the
values are numpy's, and a table has their complex derivatives (they cannot be exported as ONNX). Functions are looked up
in the namespace of the arrays.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, values_of
from onnxgrad.eager.core.custom_derivatives import elementwise as by_slopes
from onnxgrad.eager.core.primitives import Macro, standard
from onnxgrad.eager.core.recording import from_parts, of_pairs, pairs_of, parts_of, record, record_complex
from onnxgrad.eager.core.tape import exporting
from onnxgrad.eager.xp.manipulation import join_axes


def bilinear(product: Callable[[Any, Any], Array], x: Array, y: Array) -> Array:
    """(a + bi)·(c + di) = (ac − bd) + (ad + bc)i, for any bilinear `product` of real arrays."""
    (a, b), (c, d) = parts_of(x), parts_of(y)
    return from_parts(product(a, c) - product(b, d), product(a, d) + product(b, c))


def modulus(z: Array) -> Array:
    """|z|, whose derivative at 0 is 0."""
    p = pairs_of(z)
    return record(standard("ReduceL2", ((1, (z.ndim,)),), keepdims=0), [p], np.abs(z._data))


def conjugate(z: Array) -> Array:
    """a − bi."""
    return of_pairs(pairs_of(z) * np.array([1, -1], z._data.real.dtype))


def _multiply(x: Array, y: Array) -> Array:
    return bilinear(operator.mul, x, y)


def _divide(x: Array, y: Array) -> Array:
    """x·conj(y) / |y|², with y scaled by its larger part first: the square would over- or underflow."""
    c, d = y._data.real, y._data.imag
    size = np.maximum(np.abs(c), np.abs(d))
    size = np.where((size == 0) | ~np.isfinite(size), np.ones_like(size), size)
    p = pairs_of(y) / size[..., None]
    w = pairs_of(_multiply(x, of_pairs(p * np.array([1, -1], p.dtype))))
    square = (p[..., 0] ** 2 + p[..., 1] ** 2) * size
    return of_pairs(w / y.__array_namespace__().expand_dims(square, axis=-1))


def _exp(z: Array) -> Array:
    """eᵃ·(cos b + i·sin b)."""
    a, b = parts_of(z)
    xp = z.__array_namespace__()
    size = xp.exp(a)
    return from_parts(size * xp.cos(b), size * xp.sin(b))


def power(z: Array, n: int) -> Array:
    """zⁿ."""
    if n < 0:
        return power(_reciprocal(z), -n)
    return by_squaring(_multiply, z, n) if n else z * 0 + 1


def by_squaring(product: Callable[[Array, Array], Array], x: Array, n: int) -> Array:
    """The product of `n` ≥ 1 factors `x`."""
    if n == 1:
        return x
    half = by_squaring(product, x, n // 2)
    even = product(half, half)
    return product(even, x) if n % 2 else even


def _reciprocal(z: Array) -> Array:
    return _divide(Array(np.ones((), z.dtype)), z)


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "abs": modulus, "conj": conjugate, "exp": _exp, "square": lambda z: _multiply(z, z), "positive": lambda z: z,
    "negative": lambda z: of_pairs(-pairs_of(z)), "reciprocal": _reciprocal,
    "add": lambda x, y: of_pairs(pairs_of(x) + pairs_of(y)), "multiply": _multiply, "divide": _divide,
    "subtract": lambda x, y: of_pairs(pairs_of(x) - pairs_of(y)),
}  # fmt: skip


#: The complex derivatives of holomorphic functions, of their operands and their value.
_SLOPES: dict[str, tuple[Callable[..., Any], ...]] = {
    "acos": (lambda xp, z, y: -1 / xp.sqrt(1 - z * z),), "asin": (lambda xp, z, y: 1 / xp.sqrt(1 - z * z),),
    "atan": (lambda xp, z, y: 1 / (1 + z * z),), "acosh": (lambda xp, z, y: 1 / (xp.sqrt(z - 1) * xp.sqrt(z + 1)),),
    "asinh": (lambda xp, z, y: 1 / xp.sqrt(z * z + 1),), "atanh": (lambda xp, z, y: 1 / (1 - z * z),),
    "cos": (lambda xp, z, y: -xp.sin(z),), "cosh": (lambda xp, z, y: xp.sinh(z),), "sin": (lambda xp, z, y: xp.cos(z),),
    "sinh": (lambda xp, z, y: xp.cosh(z),), "tan": (lambda xp, z, y: 1 + y * y,), "tanh": (lambda xp, z, y: 1 - y * y,),
    "exp2": (lambda xp, z, y: y * math.log(2),), "expm1": (lambda xp, z, y: y + 1,),
    "log": (lambda xp, z, y: 1 / z,), "log10": (lambda xp, z, y: 1 / (z * math.log(10)),),
    "log1p": (lambda xp, z, y: 1 / (1 + z),), "log2": (lambda xp, z, y: 1 / (z * math.log(2)),),
    "sqrt": (lambda xp, z, y: 0.5 / y,),
    "pow": (lambda xp, z, w, y: w * xp.pow(z, w - 1), lambda xp, z, w, y: y * xp.log(xp.where(z == 0, 1.0, z))),
}  # fmt: skip


def prod(z: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    """The product along `axes`: of the halves of the elements, until one is left."""
    y, shape = join_axes(z, axes)
    xp = z.__array_namespace__()
    if not len(y):
        return xp.ones(shape if keepdims else y.shape[1:], dtype=z.dtype)
    while len(y) > 1:
        half = len(y) // 2
        both = y[:half] * y[half : 2 * half]
        y = xp.concat([both, y[-1:]]) if len(y) % 2 else both
    return xp.reshape(y, shape if keepdims else y.shape[1:])


def extremum(kernel: Callable[..., Any], z: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    """The largest or smallest along `axes` in numpy's order, by real parts first (`kernel` is argmax or argmin)."""
    flat, shape = join_axes(z, axes)
    xp = z.__array_namespace__()
    at = as_array(kernel(values_of("an extremum of complex numbers", flat), axis=0, keepdims=True))
    return xp.reshape(xp.take_along_axis(flat, at, axis=0), shape if keepdims else flat.shape[1:])


def elementwise(name: str, kernel: Callable[..., Any], *operands: Array) -> Array:
    """The elementwise function `name`, some of whose operands are complex and on the tape; `kernel` is numpy's."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](*operands)
    if name in _SLOPES and not exporting.get():
        xp = operands[0].__array_namespace__()
        return by_slopes(name, kernel, [functools.partial(slope, xp) for slope in _SLOPES[name]], *operands)
    value = np.asarray(kernel(*(x._data for x in operands)))
    return record_complex(Macro(name), list(operands), value)
