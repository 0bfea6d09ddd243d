"""Dependence of result elements on operand elements, by classes of operators.

A rule returns, for each operand, a boolean matrix of (elements of the result, elements of the operand). Operators that
only move elements are run on element numbers, by the onnx package's reference evaluator; products and reductions follow
from labels of axes; windows from their places. Without a rule, every element of the result is assumed to depend on
every element of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxgrad.ir.match import not_none
from onnxgrad.ir.schemas import attribute

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: No matrix may have more entries than this.
MOST_ENTRIES = 2**26

Shape = tuple[int, ...]


class Unknown(Exception):
    """Raised if a rule has no pattern: every element of the result may depend on every element of the operand."""


@dataclass
class Operand:
    """A rule's view of an operand: its shape, its elements if constant, and whether its pattern is needed."""

    shape: Shape
    const: np.ndarray | None
    asked: bool

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of its elements, in its shape."""
        return np.arange(math.prod(self.shape)).reshape(self.shape)

    def constant(self) -> np.ndarray:
        """The elements, which must be constant."""
        if self.const is None:
            raise Unknown
        return self.const


@dataclass
class SizedNode:
    """One node at known shapes."""

    node: ir.Node
    opset: int
    x: list[Operand | None]
    shapes: list[Shape]

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute of the node, or its default."""
        return attribute(self.node, name, default, self.opset)

    def axes(self, rank: int) -> list[int]:
        """The axes of a reduction, all of them if none is named."""
        listed = self.x[1].constant().reshape(-1) if len(self.x) > 1 and self.x[1] is not None else self.attr("axes")
        if listed is None or not len(listed):
            if self.attr("noop_with_empty_axes", 0):
                raise Unknown
            return list(range(rank))
        return [int(a) % rank for a in listed]


#: Gives for each output, and for each operand, a matrix; None: the result has the elements of the operand, one by one.
Found = list[dict[int, "csr_array | None"]]
Dependence = Callable[[SizedNode], Found]


def matrix(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> csr_array:
    """The boolean matrix with entries at these places."""
    from scipy.sparse import coo_array, csr_array

    if rows.size > MOST_ENTRIES:
        raise Unknown
    entries = np.ones(rows.size, bool)
    return csr_array(coo_array((entries, (rows.reshape(-1), columns.reshape(-1))), shape=shape))


def selection_matrix(numbers: np.ndarray, size: int) -> csr_array:
    """Element i of the result is the element ``numbers[i]`` of `size`, none where that is negative."""
    flat = numbers.reshape(-1)
    rows = np.flatnonzero(flat >= 0)
    return matrix(rows, flat[rows], (flat.size, size))


# --- element by element, and moved -----------------------------------------------------------------


def elementwise(s: SizedNode) -> Found:
    """Each element from one element of each operand, after broadcasting."""
    out, matrices = s.shapes[0], {}
    for i, x in enumerate(s.x):
        if x is not None and x.asked:
            matrices[i] = None if x.shape == out else selection_matrix(np.broadcast_to(x.numbers, out), x.numbers.size)
    return [matrices]


def moved_elements(s: SizedNode) -> Found:
    """Each element is one of an operand, or a constant: the operator is run on their numbers, from 1 on."""
    proto = ir.to_proto(s.node)
    feeds: dict[str, np.ndarray] = {}
    start, starts = 1, {}
    for i, (v, x) in enumerate(zip(s.node.inputs, s.x)):
        if v is None or x is None:
            continue
        proto.input[i] = name = f"operand {i}"  # one value may be two operands
        if x.asked:
            feeds[name], starts[i] = x.numbers + start, start
            start += x.numbers.size
        else:
            is_data = v.dtype == s.node.outputs[0].dtype and v.dtype not in (ir.DataType.INT64, ir.DataType.INT32)
            feeds[name] = np.zeros(x.shape, np.int64) if is_data else x.constant()
    try:
        results: Any = ReferenceEvaluator(proto, opsets={"": s.opset}).run(None, feeds)
    except Exception as error:  # the evaluator does not know the form
        raise Unknown from error
    matrices: Found = []
    for y, shape in zip(results, s.shapes):
        if np.shape(y) != shape:
            raise Unknown
        parts: dict[int, Any] = {}
        for i, first in starts.items():
            x = not_none(s.x[i])
            numbers = np.asarray(y, np.int64) - first
            parts[i] = selection_matrix(
                np.where((numbers >= 0) & (numbers < x.numbers.size), numbers, -1), x.numbers.size
            )
        matrices.append(parts)
    return matrices


def scatter_elements(s: SizedNode) -> Found:
    """The data, and every update at the place that its index names."""
    data, indices, updates = map(not_none, s.x[:3])
    at, axis = indices.constant(), s.attr("axis", 0) % len(data.shape)
    places = list(np.indices(at.shape))
    places[axis] = at % data.shape[axis]
    return _scatter_elements(s, data, updates, data.numbers[tuple(places)])


def scatter_nd(s: SizedNode) -> Found:
    """The data, and every slice of the updates at the place that its index names."""
    data, indices, updates = map(not_none, s.x[:3])
    at = indices.constant()
    where = tuple(at[..., k] % data.shape[k] for k in range(at.shape[-1]))
    return _scatter_elements(s, data, updates, data.numbers[where])


def _scatter_elements(s: SizedNode, data: Operand, updates: Operand, targets: np.ndarray) -> Found:
    size, matrices = data.numbers.size, {}
    if data.asked:
        kept = data.numbers.copy()
        if s.attr("reduction", "none") == "none":
            kept.reshape(-1)[targets.reshape(-1)] = -1
        matrices[0] = selection_matrix(kept, size)
    if updates.asked:
        matrices[2] = matrix(targets, updates.numbers, (size, updates.numbers.size))
    return [matrices]


# --- along axes ------------------------------------------------------------------------------------


def _over(x: Operand, axes: Sequence[int]) -> csr_array:
    """Each slice along `axes`, as a row, has all the elements of it."""
    kept = [i for i in range(len(x.shape)) if i not in axes]
    numbers = np.transpose(x.numbers, [*kept, *axes]).reshape(math.prod(x.shape[i] for i in kept), -1)
    rows = np.broadcast_to(np.arange(numbers.shape[0])[:, None], numbers.shape)
    return matrix(rows, numbers, (numbers.shape[0], x.numbers.size))


def reduced(s: SizedNode) -> Found:
    """Each element from all along the axes."""
    x = not_none(s.x[0])
    return [{0: _over(x, s.axes(len(x.shape)))}]


def _spread(s: SizedNode, axes: Sequence[int]) -> csr_array:
    """Each element from all of its slice along `axes`."""
    x = not_none(s.x[0])
    lines = np.arange(math.prod(n for i, n in enumerate(x.shape) if i not in axes))
    lines = lines.reshape([1 if i in axes else n for i, n in enumerate(x.shape)])
    over = _over(x, axes)
    return selection_matrix(np.broadcast_to(lines, x.shape), over.shape[0]) @ over


def along_axis(s: SizedNode) -> Found:
    """Each element from all along one axis."""
    return [{0: _spread(s, [s.attr("axis", -1) % len(not_none(s.x[0]).shape)])}]


def normalized(s: SizedNode) -> Found:
    """Each element from all of its slice along the last axes, and from its scale and bias."""
    assert s.x[0] is not None
    if len(s.shapes) > 1:
        raise Unknown
    rank = len(s.x[0].shape)
    matrices = elementwise(SizedNode(s.node, s.opset, [None, *s.x[1:]], s.shapes))
    if s.x[0].asked:
        matrices[0][0] = _spread(s, list(range(s.attr("axis", -1) % rank, rank)))
    return matrices


def cumulated(s: SizedNode) -> Found:
    """Each element from those up to it."""
    x, axis = not_none(s.x[0]), not_none(s.x[1])
    at = int(axis.constant()) % len(x.shape)
    before = np.tri(x.shape[at], dtype=bool)
    last = np.moveaxis(x.numbers, at, -1)[..., None, :]
    mask = np.broadcast_to(before.T if s.attr("reverse", 0) else before, (*last.shape[:-2], *before.shape))
    rows = np.broadcast_to(np.moveaxis(x.numbers, at, -1)[..., :, None], mask.shape)
    return [{0: matrix(rows[mask], np.broadcast_to(last, mask.shape)[mask], (x.numbers.size, x.numbers.size))}]
