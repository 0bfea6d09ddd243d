"""Short Fourier transforms as products with a matrix of cosines and sines.

ONNX Runtime transforms row by row. A product takes .04 to .4 of the time up to 128 numbers, and less where the length
is no power of two (.01 to .06 from 48 to 100), for which its error is also thirty times as large.

The matrix takes in constants around the transform (norms, and the signs of a conjugate, which the derivative writes),
zeros that make a real operand complex, and the choice of the real part: each would be a pass over rows of two numbers.
Half of the products of a real operand or of a real result are not computed either. The frames of a sound (STFT) take
their window in as well: a third of the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import constant, is_op, is_zero, permutation, producer
from onnxgrad.runtime.rewrites.rewrite import NodeRule, replace_value, rewrite

#: Numbers of a matrix: of more, the transform is faster.
_LARGEST = 1 << 18
#: Fewest numbers behind the transformed axis for a product from the left: of fewer columns, it is slow.
_COLUMNS = 32


@dataclass(frozen=True)
class _Transform:
    """A linear map of `x` along `axis` and the last axis to `y`.

    Attributes:
        matrix: of the sizes of both axes of `x`, and of both of `y`.
        keeps_parts: False if `y` has no last axis, because one part was picked.
    """

    x: ir.Value
    y: ir.Value
    axis: int
    matrix: np.ndarray
    keeps_parts: bool = True


def _axis(node: ir.Node, rank: int) -> int | None:
    """The axis of a DFT; None if it is computed, or is the default of an opset that the node does not show."""
    given = node.inputs[2] if len(node.inputs) > 2 else None
    axis = node.attributes.get_int("axis", None) if given is None else constant(given)
    return (1 if rank == 3 else None) if axis is None and given is None else None if axis is None else int(axis) % rank


def _match(node: ir.Node) -> _Transform | None:
    """A DFT of a known length."""
    x = node.inputs[0] if is_op(node, "DFT") else None
    if x is None or x.shape is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    axis, given = _axis(node, len(x.shape)), node.inputs[1] if len(node.inputs) > 1 else None
    parts, have = x.shape[-1], None if axis is None else x.shape[axis]
    length = None if given is None else constant(given)
    if (
        axis is None
        or not isinstance(have, int)
        or not isinstance(parts, int)
        or (given is not None and length is None)
    ):
        return None
    inverse, half = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    size = int(length) if length is not None else 2 * have - 2 if inverse and half else have
    if not 0 < size * have <= _LARGEST or axis == len(x.shape) - 1:
        return None
    basis = np.eye(have * parts).reshape(-1, have, parts)
    values = basis[..., 0] + 1j * basis[..., 1] if parts == 2 else basis[..., 0]
    if inverse and half:
        result = np.fft.irfft(values, size)[..., None]
    else:
        whole = (np.fft.ifft if inverse else np.fft.fft)(values, size)
        kept = whole[:, : size // 2 + 1] if half else whole
        result = np.stack([kept.real, kept.imag], -1)
    matrix = result.reshape(have, parts, *result.shape[1:])
    return _Transform(x, node.outputs[0], axis, matrix) if 0 < matrix.size <= _LARGEST else None


class _Frames(NamedTuple):
    """A windowed transform of frames of `x`: the places of each, and the matrix from a frame to its spectrum."""

    x: ir.Value
    places: np.ndarray
    matrix: np.ndarray


def _match_frames(node: ir.Node) -> _Frames | None:
    """An STFT of a real signal of known length."""
    x = node.inputs[0] if is_op(node, "STFT") else None
    if x is None or x.shape is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    operands = (*node.inputs[1:], None, None)[:3]
    step, window, length = (constant(v) for v in operands)
    size, is_real = x.shape[1], len(x.shape) == 2 or x.shape[2] == 1
    if (
        not is_real
        or not isinstance(size, int)
        or any(v and k is None for v, k in zip(operands, (step, window, length)))
    ):
        return None
    n = int(length) if length is not None else size if window is None else len(window)
    half = bool(node.attributes.get_int("onesided", 1))
    if step is None or not 0 < n <= size or 2 * n * (n // 2 + 1 if half else n) > _LARGEST:
        return None
    spectra = (np.fft.rfft if half else np.fft.fft)(
        np.diag(np.ones(n) if window is None else window.astype(np.float64))
    )
    matrix = np.stack([spectra.real, spectra.imag], -1).reshape(n, -1)
    return _Frames(x, np.arange(0, size - n + 1, int(step))[:, None] + np.arange(n), matrix)


def _emit_frames(b: Builder, found: _Frames) -> Var:
    x = b.var(found.x)
    framed = b.Gather(b.Squeeze(x, [2]) if x.rank == 3 else x, found.places, axis=1)
    return b.Reshape(b.MatMul(framed, b.const(found.matrix, x.dtype)), [0, 0, found.matrix.shape[1] // 2, 2])


def _absorb(found: _Transform) -> _Transform:
    """`found` with the operators before and after it that its matrix can take in."""
    while (before := _absorb_operand(found)) is not None:
        found = before
    while (after := _absorb_result(found)) is not None:
        found = after
    return found


def _absorb_operand(found: _Transform) -> _Transform | None:
    """`found` with the operator that computes its operand."""
    node, x = found.x.producer(), found.x
    source = None if node is None or not node.inputs else node.inputs[0]
    if node is None or source is None or source.shape is None or x.shape is None:
        return None
    if is_op(node, ("Mul", "Div")):
        factors = _factors(node, x, found)
        if factors is None:
            return None
        kept, numbers = factors
        return replace(found, x=kept, matrix=found.matrix * numbers[..., None, None])
    last = len(x.shape) - 1
    if is_op(node, "Concat") and len(node.inputs) == 2 and node.attributes.get_int("axis", 0) in (-1, last):
        zeros = node.inputs[1]
        is_real = zeros is not None and source.shape[-1] == 1 and is_zero(zeros)
        return replace(found, x=source, matrix=found.matrix[:, :1]) if is_real else None
    pads = constant(node.inputs[1]) if is_op(node, "Pad") and len(node.inputs) < 4 else None
    if pads is None or any(v is not None for v in node.inputs[2:]) or len(pads) != 2 * last + 2:
        return None
    around = pads.reshape(2, -1)
    if around.min() < 0 or np.delete(around, [found.axis, last], axis=1).any():
        return None
    if node.attributes.get_string("mode", "constant") != "constant":
        return None
    rows, parts = (slice(a, size - e) for (a, e), size in zip(around[:, [found.axis, last]].T, found.matrix.shape))
    return replace(found, x=source, matrix=found.matrix[rows, parts])


def _absorb_result(found: _Transform) -> _Transform | None:
    """`found` with the only operator that reads its result."""
    y = found.y
    if len(y.uses()) != 1 or y.is_graph_output() or y.shape is None or not found.keeps_parts:
        return None
    (node,) = y.consumers()
    if is_op(node, ("Mul", "Div")):
        factors = _factors(node, y, found, of_result=True)
        return None if factors is None else replace(found, y=node.outputs[0], matrix=found.matrix * factors[1])
    last = len(y.shape) - 1
    if is_op(node, "Slice") and node.inputs[0] is y:
        cuts = _cuts(node, last + 1)
        if cuts is None or not set(cuts) <= {found.axis, last}:
            return None
        kept = (cuts.get(axis, slice(None)) for axis in (found.axis, last))
        matrix = found.matrix[(slice(None), slice(None), *kept)]
        return replace(found, y=node.outputs[0], matrix=matrix) if matrix.size else None
    if node.inputs[0] is not y or node.attributes.get_int("axis", 0) not in (-1, last):
        return None
    if is_op(node, "Split") and not any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        first = node.outputs[0]
        parts = first.shape[-1] if first.shape is not None else None
        return replace(found, y=first, matrix=found.matrix[..., :parts]) if isinstance(parts, int) else None
    place = constant(node.inputs[1]) if is_op(node, "Gather") else None
    if place is None or place.ndim or not -2 <= place < found.matrix.shape[-1]:
        return None
    picked = found.matrix[..., int(place)][..., None]
    return replace(found, y=node.outputs[0], matrix=picked, keeps_parts=False)


def _cuts(node: ir.Node, rank: int) -> dict[int, slice] | None:
    """The part of each axis that a Slice keeps, by axis; None if it is computed, or goes backwards."""
    starts, ends, axes, steps = (constant(v) for v in (*node.inputs[1:], None, None)[:4])
    if starts is None or ends is None or axes is None or (steps is None and len(node.inputs) > 4):
        return None
    steps = np.ones_like(starts) if steps is None else steps
    if steps.min() < 1:
        return None
    return {int(a) % rank: slice(int(i), int(e), int(k)) for a, i, e, k in zip(axes, starts, ends, steps, strict=True)}


def _factors(
    node: ir.Node, value: ir.Value, found: _Transform, of_result: bool = False
) -> tuple[ir.Value, np.ndarray] | None:
    """The tensor that a product or quotient beside a transform has, and its constants for both axes; else None.

    Args:
        node: the operator.
        value: what the transform reads, or its result.
    """
    x, other = node.inputs
    array = constant(other)
    if array is None and node.op_type == "Mul":
        x, other = other, x
        array = constant(other)
    if array is None or x is None or x.shape is None or value.shape is None or (of_result and x is not value):
        return None
    size = found.matrix.shape[2:] if of_result else found.matrix.shape[:2]
    rank = len(value.shape)
    given = (1,) * (rank - array.ndim) + array.shape
    allowed = {found.axis: size[0], rank - 1: size[1]}
    if array.ndim > rank or len(x.shape) != rank or any(x.shape[a] != n for a, n in allowed.items()):
        return None
    if any(n not in (1, allowed.get(a, 1)) for a, n in enumerate(given)):
        return None
    array = array.reshape(given[found.axis], given[-1]).astype(np.float64)
    if not np.isfinite(array).all() or (node.op_type == "Div" and not array.all()):
        return None
    return x, np.broadcast_to(array if node.op_type == "Mul" else 1 / array, size)


class _Layout(NamedTuple):
    """The order of axes in which a product reads an operand: `ahead`, those of the transform, `behind`."""

    ahead: list[int]
    behind: list[int]
    parts_first: bool

    def axes(self, axis: int, parts: int, parts_first: bool) -> list[int]:
        """All axes in order, with those of a transform along `axis` in the middle."""
        return [*self.ahead, *((parts, axis) if parts_first else (axis, parts)), *self.behind]


def _layout(x: Var, axis: int) -> _Layout:
    """A layout in which real and imaginary parts are beside `axis`: that of the memory, if it is so."""
    last = x.rank - 1
    behind = list(range(axis + 1, last))
    ahead = list(range(axis))
    sizes = [x.shape[a] if x.shape is not None else None for a in behind]
    known = [n for n in sizes if isinstance(n, int)]
    if len(known) < len(sizes) or math.prod(known) < _COLUMNS:
        ahead, behind = [*ahead, *behind], []
    turned = producer(x.value, "Transpose")
    memory = None if turned is None else permutation(turned)
    ways = [_Layout(ahead, behind, first) for first in (False, True)]
    if memory is not None:
        for way in ways:
            if [memory[a] for a in way.axes(axis, last, way.parts_first)] == list(range(last + 1)):
                return way
    return ways[0]


def _emit(b: Builder, found: _Transform) -> Var:
    """The result of `found`, by a product from the left if there are axes behind the transformed one."""
    x, axis, last = b.var(found.x), found.axis, len(found.x.shape or ()) - 1
    (n, parts, m, _), layout = found.matrix.shape, _layout(x, axis)
    whole = _pieces(found.x) or [found.x]
    parts_first = layout.parts_first or len(whole) > 1
    if len(whole) > 1 or parts == 1:
        order = [a for a in layout.axes(axis, last, parts_first) if a != last]
        planes = [_ordered(b.Squeeze(v, [last]), order) for v in whole]
        z = planes[0] if len(planes) == 1 else b.Concat(*planes, axis=len(layout.ahead))
    else:
        z = _ordered(x, layout.axes(axis, last, parts_first))
    ahead = [0] * len(layout.ahead)  # as they are
    behind = [d for a in layout.behind if x.shape is not None and isinstance(d := x.shape[a], int)]  # all are known
    puts_first = _reads_planes(found, bool(behind))
    matrix = found.matrix.transpose(*((1, 0) if parts_first else (0, 1)), *((3, 2) if puts_first else (2, 3)))
    sizes, flat = matrix.shape[2:], matrix.reshape(n * parts, -1)
    z = b.Reshape(z, [*ahead, n * parts, *([math.prod(behind)] if behind else [])])
    y = b.MatMul(b.const(flat.T, x.dtype), z) if behind else b.MatMul(z, b.const(flat, x.dtype))
    y = b.Reshape(y, [*ahead, *(sizes if found.keeps_parts else [m]), *behind])
    order = [a for a in layout.axes(axis, last, puts_first) if found.keeps_parts or a != last]
    return _ordered(y, [int(a) for a in np.argsort(order)])


def _ordered(x: Var, perm: list[int]) -> Var:
    return x if perm == sorted(perm) else x.builder.Transpose(x, perm=perm)


def _pieces(x: ir.Value) -> list[ir.Value]:
    """The real and the imaginary part that `x` puts side by side; none if it is not so."""
    node = producer(x, "Concat")
    if node is None or x.shape is None or len(node.inputs) != 2:
        return []
    found = [v for v in node.inputs if v is not None and v.shape is not None and v.shape[-1] == 1]
    return found if len(found) == 2 and node.attributes.get_int("axis", 0) in (-1, len(x.shape) - 1) else []


def _reads_planes(found: _Transform, has_behind: bool) -> bool:
    """True if real and imaginary parts are better ahead of the transformed axis than behind it."""
    readers = found.y.consumers()
    following = _match(readers[0]) if len(found.y.uses()) == 1 and found.keeps_parts else None
    if following is not None and abs(following.axis - found.axis) == 1:
        return following.axis < found.axis
    return has_behind


def _pick(b: Builder, y: Var, node: ir.Node) -> None:
    """Let a Gather of the real or imaginary parts of `y` read them where they are."""
    turned, place = producer(y.value, "Transpose"), constant(node.inputs[1]) if is_op(node, "Gather") else None
    perm = None if turned is None else permutation(turned)
    if turned is None or perm is None or place is None or place.ndim or node.inputs[0] is not y.value:
        return
    if node.attributes.get_int("axis", 0) % len(perm) != len(perm) - 1:
        return
    b.before = node
    picked = b.Gather(turned.inputs[0], place, axis=perm[-1])
    replace_value(_ordered(picked, [a - (a > perm[-1]) for a in perm[:-1]]), node.outputs[0])


def _sites(graph: ir.Graph) -> Iterator[ir.Node]:
    return (node for node in graph if _match(node) is not None or _match_frames(node) is not None)


def _write(b: Builder) -> int:
    places = NodeRule(_match_frames, _emit_frames).apply(b)
    for node in list(b.graph):
        if (found := _match(node)) is not None:
            found = _absorb(found)
            b.before = found.y.producer()
            y = _emit(b, found)
            replace_value(y, found.y)
            for reader in list(y.value.consumers()):
                _pick(b, y, reader)
            places += 1
    return places


SHORT_TRANSFORMS = rewrite(
    "short_transforms",
    "products with cosines and sines",
    "DFT, or STFT, of known length up to 256 numbers, or 512 real ones, with constants around it",
    lambda graph: next(_sites(graph), None) is not None,
    _write,
)
