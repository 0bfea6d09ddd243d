"""Complex numbers on the tape: pairs of a real and an imaginary part, along a last axis, as ONNX's own DFT has them.

A complex array is a numpy array of complex numbers whose node stands for the array of its pairs. What is done to it is
done to the parts, by operators of real numbers: so it has derivatives of every order in both modes, and can be saved
in a model. They are those of a function of real parts. Variables and results of a transform are real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, record
from onnxgrad.eager.core.operators import Macro, Operator, standard
from onnxgrad.eager.core.tape import Node, exporting
from onnxgrad.errors import NotDifferentiable

_HINT = "\n  hint: derivatives pass + − · / @, abs, conj, exp, real, imag, sums, shapes and indices of complex numbers"

#: What a linear operator with real coefficients does to an array, it does to both parts.
LINEAR = frozenset((
    "Concat", "CumSum", "Expand", "Gather", "GatherElements", "Identity", "Neg", "Pad", "ReduceMean", "ReduceSum",
    "Reshape", "Squeeze", "Stop", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "gathered_flat", "put_flat",
    "sliced",
))  # fmt: skip


class _Complex(Operator):
    """Makes complex numbers of pairs; nothing of the kind can be written into a graph."""

    __slots__ = ()

    def write(self, b: Any, operands: Sequence[Any]) -> Any:
        raise NotDifferentiable(
            "the result is complex, and ONNX has no complex numbers\n  hint: return its real and imaginary part"
        )


COMPLEX = _Complex("Complex")


def of_pairs(pairs: Array) -> Array:
    """The complex numbers whose parts are along the last axis of `pairs`."""
    data = np.ascontiguousarray(pairs._data).view(np.result_type(pairs.dtype, np.complex64))[..., 0]
    return Array(data) if pairs._node is None else Array(data, Node(COMPLEX, (pairs._node,), data))


def pairs_of(z: Array) -> Array:
    """The parts of `z` along a new last axis; of real numbers with 0 for the imaginary part."""
    from onnxgrad.eager.xp.shaping import expand_dims

    if z._node is not None and z._node.op is COMPLEX:
        (node,) = z._node.inputs
        return Array(node.value, node)
    if z._node is None:
        return Array(np.stack([z._data.real, z._data.imag], axis=-1))
    if z.dtype.kind == "c":
        raise NotDifferentiable(f"{z._node.op} gave complex numbers, which carry no derivative across it{_HINT}")
    return filled_up(expand_dims(z, axis=-1), 1, z.ndim)


def filled_up(x: Array, more: int, axis: int) -> Array:
    """`x` with `more` zeros after its elements along `axis`."""
    widths = [(0, more if a == axis else 0) for a in range(x.ndim)]
    op = standard("Pad", ((1, tuple(before for before, _ in widths) + tuple(after for _, after in widths)),))
    return record(op, [x], np.pad(x._data, widths))


def joined(real: Array, imaginary: Array) -> Array:
    """Complex numbers of their parts."""
    from onnxgrad.eager.xp.shaping import stack

    return of_pairs(stack([real, imaginary], axis=-1))


def parts(z: Array) -> tuple[Array, Array]:
    """The real and the imaginary part of complex numbers."""
    if z._node is None:
        return Array(z._data.real), Array(z._data.imag)
    p = pairs_of(z)
    return p[..., 0], p[..., 1]


def converted(x: Array, dtype: np.dtype) -> Array:
    """`x`, which is on the tape, as complex numbers of another precision, or instead of real ones."""
    from onnxgrad.eager.xp.elementwise import cast

    return of_pairs(cast(pairs_of(x), np.empty(0, dtype).real.dtype))


def recorded(op: Operator, operands: Sequence[Array], value: np.ndarray) -> Array:
    """`value`, which `op` made of `operands`, some of them complex numbers on the tape."""
    if value.dtype.kind in "biu" and not exporting.get():
        return Array(value)
    name = op.key[0]
    if name not in LINEAR or value.dtype.kind != "c":
        raise NotDifferentiable(f"{name} of complex numbers has no derivative in onnxgrad.eager{_HINT}")
    split = [parts(x) if x.dtype.kind == "c" else (x, x) for x in operands]
    halves = enumerate((value.real, value.imag))
    return joined(*(record(op, [x[i] for x in split], v) for i, v in halves))


def product(multiply: Callable[[Any, Any], Array], x: Array, y: Array) -> Array:
    """(a + bi)·(c + di) = (ac − bd) + (ad + bc)i, of any bilinear product of real arrays."""
    (a, b), (c, d) = parts(x), parts(y)
    return joined(multiply(a, c) - multiply(b, d), multiply(a, d) + multiply(b, c))


# --- functions of elements -------------------------------------------------------------------------


def modulus(z: Array) -> Array:
    """|z|, whose derivative at 0 is 0."""
    p = pairs_of(z)
    return record(standard("ReduceL2", ((1, (z.ndim,)),), keepdims=0), [p], np.abs(z._data))


def conjugate(z: Array) -> Array:
    """The number with the other imaginary part."""
    return of_pairs(pairs_of(z) * np.array([1, -1], z._data.real.dtype))


def _multiply(x: Array, y: Array) -> Array:
    from onnxgrad.eager.xp.elementwise import multiply

    return product(multiply, x, y)


def _divide(x: Array, y: Array) -> Array:
    """x·conj(y) / |y|², both divided by the larger part of y, lest the square over- or underflow."""
    from onnxgrad.eager.xp.shaping import expand_dims

    c, d = y._data.real, y._data.imag
    size = np.maximum(np.abs(c), np.abs(d))
    size = np.where((size == 0) | ~np.isfinite(size), np.ones_like(size), size)
    p = pairs_of(y) / size[..., None]
    w = pairs_of(_multiply(x, of_pairs(p * np.array([1, -1], p.dtype))))
    square = (p[..., 0] ** 2 + p[..., 1] ** 2) * size
    return of_pairs(w / expand_dims(square, axis=-1))


def _exp(z: Array) -> Array:
    from onnxgrad.eager.xp.elementwise import cos, exp, sin

    a, b = parts(z)
    size = exp(a)
    return joined(size * cos(b), size * sin(b))


def power(z: Array, n: int) -> Array:
    """zⁿ by squaring."""
    if n < 0:
        return power(_divide(Array(np.ones((), z.dtype)), z), -n)
    if n < 2:
        return z if n else z * 0 + 1
    half = power(z, n // 2)
    even = _multiply(half, half)
    return _multiply(even, z) if n % 2 else even


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "abs": modulus, "conj": conjugate, "exp": _exp, "square": lambda z: _multiply(z, z), "positive": lambda z: z,
    "negative": lambda z: of_pairs(-pairs_of(z)), "reciprocal": lambda z: _divide(Array(np.ones((), z.dtype)), z),
    "add": lambda x, y: of_pairs(pairs_of(x) + pairs_of(y)), "multiply": _multiply, "divide": _divide,
    "subtract": lambda x, y: of_pairs(pairs_of(x) - pairs_of(y)),
}  # fmt: skip


def elementwise(name: str, kernel: Callable[..., Any], *operands: Array) -> Array:
    """The function `name` of elements, one of which is a complex number on the tape; `kernel` is numpy's."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](*operands)
    value = np.asarray(kernel(*(x._data for x in operands)))
    return recorded(Macro(name), list(operands), value)


def as_complex(x: Any) -> Array:
    """`x` as an array of complex numbers."""
    from onnxgrad.eager.xp.elementwise import cast

    x = as_array(x)
    return x if x.dtype.kind == "c" else cast(x, np.result_type(x.dtype, np.complex64))
