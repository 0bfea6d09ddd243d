"""Operations noted on the tape; on complex arrays, as operations on (real, imaginary) pairs.

A complex array on the tape is a numpy array of complex numbers whose node stands for the real array of its pairs, along
a last axis as in ONNX's own DFT. An operation on it is recorded as operations on the two parts, so it has derivatives
of every order in both modes and can be exported: derivatives with respect to the parts.

A cotangent c of a complex z = x + iy is the real-linear map dz ↦ Re(c·dz), so a gradient is ∂f/∂x − i·∂f/∂y, and the
pullback of a holomorphic function multiplies by its complex derivative (as in JAX and HIPS autograd). As a cotangent
of the pairs, it is the pairs of its conjugate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.primitives import STOP, Primitive, output, standard
from onnxgrad.eager.core.tape import Node, exporting
from onnxgrad.errors import NotDifferentiable

_HINT = "\n  hint: derivatives pass + − · / @, abs, conj, exp, real, imag, sums, shapes and indices of complex numbers"

#: Operators that are linear with real coefficients act on the two parts separately.
LINEAR = frozenset((
    "Concat", "CumSum", "Expand", "Gather", "GatherElements", "Identity", "Neg", "Pad", "ReduceMean", "ReduceSum",
    "Reshape", "Squeeze", "Stop", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "gathered_flat", "put_flat",
    "rolled", "sliced",
))  # fmt: skip


def record(op: Primitive, operands: Sequence[Array], value: Any) -> Array:
    """`value`, the result of `op` on `operands`, with a node if one of them has one."""
    if type(value) is not np.ndarray:
        value = np.asarray(value)
    tracked = False
    for x in operands:
        if x._node is not None:
            tracked = True
            if x._data.dtype.kind == "c":
                return record_complex(op, operands, value)
    if tracked:
        return Array(value, Node(op, tuple([x._data if x._node is None else x._node for x in operands]), value))
    return Array(value)


def record_several(op: Primitive, operands: Sequence[Array], values: Sequence[Any]) -> tuple[Array, ...]:
    """Record a primitive with any number of outputs, like `record`."""
    if len(values) == 1:
        return (record(op, operands, values[0]),)
    values = tuple(np.asarray(v) for v in values)
    if all(x._node is None for x in operands):
        return tuple(Array(v) for v in values)
    node = Node(op, tuple([x._data if x._node is None else x._node for x in operands]), values)
    return tuple(Array(v, Node(output(i), (node,), v)) for i, v in enumerate(values))


def stop_gradient(x: Any) -> Array:
    """`x` as a constant: no derivative flows through it."""
    x = as_array(x)
    return record(STOP, [x], x._data) if exporting.get() else Array(x._data)


# --- complex arrays --------------------------------------------------------------------------------


class _ComplexOfPairs(Primitive):
    """Complex numbers from their pairs; ONNX has none, so it cannot be written into a graph."""

    __slots__ = ()

    def write(self, b: Any, operands: Sequence[Any]) -> Any:
        raise NotDifferentiable(
            "the result is complex, and ONNX has no complex numbers\n  hint: return its real and imaginary part"
        )


COMPLEX = _ComplexOfPairs("Complex")


def of_pairs(pairs: Array) -> Array:
    """Complex numbers of shape (…) from pairs of shape (…, 2)."""
    data = np.ascontiguousarray(pairs._data).view(np.result_type(pairs.dtype, np.complex64))[..., 0]
    return Array(data) if pairs._node is None else Array(data, Node(COMPLEX, (pairs._node,), data))


def pairs_of(z: Array) -> Array:
    """The pairs of `z`, of shape (…, 2); a real array has zeros for its imaginary part."""
    if z._node is not None and z._node.op is COMPLEX:
        (node,) = z._node.inputs
        return Array(node.value, node)
    if z._node is None:
        return Array(np.stack([z._data.real, z._data.imag], axis=-1))
    if z.dtype.kind == "c":
        raise NotDifferentiable(f"{z._node.op} gave complex numbers, which carry no derivative across it{_HINT}")
    return zero_padded(_with_last_axis(z), 1, z.ndim)


def real_form(x: Array) -> Array:
    """`x` as the tape stores it: complex arrays as pairs of floats."""
    return pairs_of(x) if x._data.dtype.kind == "c" else x


def cotangent_of_pairs(g: Array | None, like: np.dtype) -> Array | None:
    """A cotangent of the real form of an array of dtype `like` as one of the array."""
    return g if g is None or like.kind != "c" else of_pairs(_conjugate(g))


def pairs_of_cotangent(g: Array, like: np.dtype) -> Array:
    """A cotangent of an array of dtype `like` as one of its real form."""
    if like.kind == "c":
        return _conjugate(pairs_of(g))
    return parts_of(g)[0] if g._data.dtype.kind == "c" else g


def _conjugate(pairs: Array) -> Array:
    return pairs * Array(np.array([1, -1], pairs.dtype))


def zero_padded(x: Array, count: int, axis: int) -> Array:
    """`x` with `count` zeros after its elements along `axis`."""
    widths = [(0, count if a == axis else 0) for a in range(x.ndim)]
    op = standard("Pad", ((1, tuple(before for before, _ in widths) + tuple(after for _, after in widths)),))
    return record(op, [x], np.pad(x._data, widths))


def from_parts(real: Array, imaginary: Array) -> Array:
    """Complex numbers from their real and imaginary parts."""
    parts = [_with_last_axis(x) for x in (real, imaginary)]
    data = np.concatenate([x._data for x in parts], axis=-1)
    return of_pairs(record(standard("Concat", axis=data.ndim - 1), parts, data))


def parts_of(z: Array) -> tuple[Array, Array]:
    """The real and the imaginary part of complex numbers."""
    if z._node is None:
        return Array(z._data.real), Array(z._data.imag)
    p = pairs_of(z)
    return p[..., 0], p[..., 1]


def _with_last_axis(x: Array) -> Array:
    return record(standard("Unsqueeze", ((1, (x.ndim,)),)), [x], np.expand_dims(x._data, -1))


def record_complex(op: Primitive, operands: Sequence[Array], value: np.ndarray) -> Array:
    """Record a linear primitive of complex operands as two primitives, of real and imaginary parts."""
    if value.dtype.kind in "biu" and not exporting.get():
        return Array(value)
    name = op.key[0]
    if name not in LINEAR or value.dtype.kind != "c":
        raise NotDifferentiable(f"{name} of complex numbers has no derivative in onnxgrad.eager{_HINT}")
    split = [parts_of(x) if x.dtype.kind == "c" else (x, x) for x in operands]
    halves = enumerate((value.real, value.imag))
    return from_parts(*(record(op, [x[i] for x in split], v) for i, v in halves))
