"""The discrete Fourier transform, a linear map of pairs (real, imaginary).

In its four forms — complex or real to complex, half a spectrum (`onesided`), and back from half a
spectrum — the transpose is a transform again: F is symmetric, so Fᴴ·g = conj(F·conj g) = N·F⁻¹·g. It is always written
with F: the F⁻¹ of ONNX Runtime divides by N in float32, so in float64 it is exact to 3e-8 only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.ir import Var
from onnxgrad.rules.conv.geometry import size
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear
from onnxgrad.rules.rule import Result


def fitted(op: Op, z: Var, axis: int, have: Any, want: Any) -> Var:
    """`z`, of size `have` along `axis`, cut or filled up with zeros to `want` (each a number or a vector of one)."""
    along = _vector(axis)
    if isinstance(have, int) and isinstance(want, int):
        z = op.Slice(z, [0], [want], along) if want < have else z
        return op.Pad(z, [0, want - have], None, along) if want > have else z
    kept = op.Min(op.join(_vector(have)), op.join(_vector(want)))
    return op.Pad(op.Slice(z, [0], kept, along), op.join([0], op.join(_vector(want)) - kept), None, along)


def _vector(n: Any) -> Any:
    return [n] if isinstance(n, int) else n


def _axis(op: Op, x: Var) -> Any:
    """The axis that is transformed, an attribute before opset 20, then an operand; a vector of one if computed."""
    if op.schema is not None and "axis" in op.schema.attributes:
        return op.attr("axis") % x.rank
    held = op.inputs[2]
    if held is None:
        return x.rank - 2
    return op.Reshape(held, [1]) if held.const is None else int(held.const) % x.rank


def _length(op: Op, dft_length: Any, have: Any, from_half: bool) -> Any:
    """N, as a number or a vector of one."""
    if dft_length is not None:
        return op.Reshape(dft_length, [-1]) if dft_length.const is None else int(dft_length.const)
    return (have + have - 2) if from_half else have


def _multiplicity(op: Op, length: Any, axis: int, z: Var) -> Var:
    """The number of elements of the whole spectrum for each element of half of it, `z`: 1 at 0 and N/2, else 2."""
    if isinstance(length, int):
        twice = np.arange(length // 2 + 1) * 2
        numbers = 2.0 - (twice == 0) - (twice == length)
        if isinstance(axis, int):
            return op.const(numbers.reshape(-1, *[1] * (z.rank - 1 - axis)), z.dtype)
        c = op.const(numbers, z.dtype)
    else:
        one = op.Squeeze(length, [0])
        twice = op.Range(op.const(0), op.Div(one, 2) + 1, op.const(1)) * 2
        single = op.Or(op.Equal(twice, 0), op.Equal(twice, one))
        c = op.cast_like(op.Where(single, op.const(1.0), op.const(2.0)), z)
    rank = z.rank
    if isinstance(axis, int):
        return op.Unsqueeze(c, [*range(axis), *range(axis + 1, rank)])
    return op.Reshape(c, op.ScatterElements(op.const(np.ones(rank, np.int64)), axis, [-1], axis=0))


def _conjugate(op: Op, z: Var) -> Var:
    return z * op.const(np.array([1.0, -1.0]), z.dtype)


@linear("DFT")
def dft(op: Op, g: Var, x: Var, dft_length: Var | None) -> Result:
    """Y = F·x, or F⁻¹·x: conj(F·conj g), or F·g/N; the real part for real x; over half a spectrum
    0 is filled in for the other half, and back from half a spectrum c·F·g/N with c = 1 at 0 and N/2, else 2"""
    axis, inverse, half = _axis(op, x), bool(op.attr("inverse")), bool(op.attr("onesided"))
    have = size(x, axis) if isinstance(axis, int) else None
    have = op.Gather(op.Shape(x), _vector(axis)) if have is None else have
    length = _length(op, dft_length, have, inverse and half)
    more = op.inputs[2:]
    count = length if isinstance(length, int) else op.Cast(length, to=int(x.dtype or 0))
    if half and inverse:
        z = op.replay(g, None, *more, inverse=0, onesided=1)
        z = z * _multiplicity(op, length, axis, z) / count
        seen = length // 2 + 1 if isinstance(length, int) else op.Div(length, 2) + 1
        return fitted(op, z, axis, seen, have)
    if half:
        seen = length // 2 + 1 if isinstance(length, int) else op.Div(length, 2) + 1
        g = fitted(op, g, axis, seen, length)
    z = op.replay(g if inverse else _conjugate(op, g), None, *more, inverse=0, onesided=0)
    z = z / count if inverse else _conjugate(op, z) if size(x, x.rank - 1) != 1 else z
    if size(x, x.rank - 1) != 2:
        z = op.Slice(z, [0], [1] if size(x, x.rank - 1) == 1 else op.Shape(x, start=-1), [x.rank - 1])
    return z if dft_length is None else fitted(op, z, axis, length, have)
