"""Sums at the end of a group of elementwise operators: their nodes, operands and axes.

A sum is a ReduceSum or ReduceMean, or the product ones·X that the derivative writes for a sum over leading axes.
Reshapes that keep the order of elements may be between the group and the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import constant_tensor, is_op, is_standard
from onnxgrad.runtime.kernels.elementwise_programs import Reduction
from onnxgrad.runtime.kernels.elementwise_steps import AXES, Dims, dims
from onnxgrad.runtime.kernels.steps import letter

#: Treatment of reduced axes, in the order of the kernel's own list.
_GO, _STAY, _FLAT = range(3)

#: Operators that change nothing but the shape.
VIEWS = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})

_CODES = {"ReduceSum": "SUM", "ReduceMean": "MEAN"}

#: Where fewer numbers in a row have something in common, sums by the tile are no quicker than those of ONNX Runtime.
_SHORTEST = 8
#: Of fewer numbers in all, a call takes longer than the sums.
_FEW = 256


def reductions(source: ir.Value) -> Iterator[Reduction]:
    """The sums of `source` that programs have, also of views of it."""
    seen: set[ir.Value] = set()
    todo = [source]
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        for node, place in here.uses():
            if not is_standard(node) or node.graph is not (source.producer() or node).graph:
                continue
            if node.op_type in VIEWS and place == 0 and dims(node.outputs[0]) is not None:
                todo.append(node.outputs[0])
            found = _reduction(source, here, node, place)
            if found is not None:
                yield found


def _reduction(source: ir.Value, seen: ir.Value, node: ir.Node, place: int) -> Reduction | None:
    """`node` as a sum of `source`, whose view `seen` it reads."""
    if node.op_type not in _CODES and node.op_type != "MatMul":
        return None
    shape, view = dims(source), dims(seen)
    if shape is None or view is None or letter(source) not in ("F", "D") or 0 in shape or len(shape) > AXES:
        return None
    if node.op_type in _CODES and place == 0:
        axes = _axes_of(node, len(view))
        keepdims = node.attributes.get("keepdims")
        becomes = _STAY if keepdims is None or keepdims.as_int() else _GO
    elif node.op_type == "MatMul" and place == 1 and len(view) == 2 and _is_ones(node.inputs[0]):
        axes, becomes = {0}, _GO
    else:
        return None
    if not axes:
        return None
    if view != shape:
        gone = _in_base(view, axes, shape)
        if not gone or becomes == _STAY:
            return None
        kept = [d for k, d in enumerate(view) if k not in axes]
        if kept != [d for k, d in enumerate(shape) if k not in gone]:
            if len(kept) != 1:
                return None
            becomes = _FLAT
        axes = gone
    if _shortest_run(shape, axes) < _SHORTEST and math.prod(d if isinstance(d, int) else _FEW for d in shape) >= _FEW:
        return None
    bits = sum(1 << (len(shape) - 1 - k) for k in axes)
    return Reduction(node.outputs[0], source, _CODES.get(node.op_type, "SUM"), bits, becomes)


def _axes_of(node: ir.Node, rank: int) -> set[int] | None:
    """The axes of a ReduceSum or ReduceMean; None if they are not known."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if "axes" in node.attributes:
        numbers: Sequence[int] = node.attributes["axes"].as_ints()
    elif given is None:
        numbers = ()
    elif (tensor := constant_tensor(given)) is None:
        return None
    else:
        numbers = [int(k) for k in tensor.numpy()]
    if not numbers:
        empty = node.attributes.get("noop_with_empty_axes")
        return None if empty is not None and empty.as_int() else set(range(rank))
    return {k + rank if k < 0 else k for k in numbers}


def _is_ones(value: ir.Value | None) -> bool:
    """True if `value` is a row of ones, as long as a run wants it."""
    if value is None or value.is_graph_input() or value.shape is None or len(value.shape) != 1:
        return False
    maker = value.producer()
    if is_op(maker, "Expand"):
        value = maker.inputs[0]
    tensor = constant_tensor(value)
    return tensor is not None and bool(np.all(tensor.numpy() == 1))


def _in_base(view: Dims, axes: set[int], base: Dims) -> set[int] | None:
    """The axes of `base` for `axes` of its view; None if they are only parts of axes there."""
    after_view, after_base = _sizes_from(view), _sizes_from(base)
    found: set[int] = set()
    i, k = len(view), len(base)
    while i or k:  # both are split wherever the sizes of the following axes agree
        to_k, to_i = next(
            ((q, p) for q in range(k - 1, -1, -1) for p in range(i - 1, -1, -1) if after_base[q] == after_view[p]),
            (0, 0),
        )
        kinds = {p in axes for p in range(to_i, i) if view[p] != 1}
        if len(kinds) > 1:
            return None
        if kinds == {True}:
            found |= set(range(to_k, k))
        i, k = to_i, to_k
    return found


def _sizes_from(shape: Dims) -> list[tuple[int, list[str]]]:
    """The number of elements from each axis on: the product of known sizes, and the names of the others."""
    sizes: list[tuple[int, list[str]]] = [(1, [])]
    for d in reversed(shape):
        number, names = sizes[-1]
        sizes.append((number * d, names) if isinstance(d, int) else (number, sorted((*names, d))))
    return sizes[::-1]


def _shortest_run(shape: Dims, axes: set[int]) -> float:
    """The least number of consecutive elements that are reduced alike."""
    length, gone = 1.0, None
    for k in reversed(range(len(shape))):
        d = shape[k]
        if d == 1:
            continue
        if gone is not None and gone != (k in axes):
            break
        gone = k in axes
        length *= d if isinstance(d, int) else math.inf
    return length
