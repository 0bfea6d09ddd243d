"""Elementwise functions and products of tracked complex arrays, as functions of their real and imaginary parts.

Functions of the parts are looked up in their namespace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array
from onnxgrad.eager.core.primitives import Macro, standard
from onnxgrad.eager.core.recording import from_parts, of_pairs, pairs_of, parts_of, record, record_complex


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
    """zⁿ by squaring."""
    if n < 0:
        return power(_reciprocal(z), -n)
    if n < 2:
        return z if n else z * 0 + 1
    half = power(z, n // 2)
    even = _multiply(half, half)
    return _multiply(even, z) if n % 2 else even


def _reciprocal(z: Array) -> Array:
    return _divide(Array(np.ones((), z.dtype)), z)


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "abs": modulus, "conj": conjugate, "exp": _exp, "square": lambda z: _multiply(z, z), "positive": lambda z: z,
    "negative": lambda z: of_pairs(-pairs_of(z)), "reciprocal": _reciprocal,
    "add": lambda x, y: of_pairs(pairs_of(x) + pairs_of(y)), "multiply": _multiply, "divide": _divide,
    "subtract": lambda x, y: of_pairs(pairs_of(x) - pairs_of(y)),
}  # fmt: skip


def elementwise(name: str, kernel: Callable[..., Any], *operands: Array) -> Array:
    """The elementwise function `name`, some of whose operands are complex and on the tape; `kernel` is numpy's."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](*operands)
    value = np.asarray(kernel(*(x._data for x in operands)))
    return record_complex(Macro(name), list(operands), value)
