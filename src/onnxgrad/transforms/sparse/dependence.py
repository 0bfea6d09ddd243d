"""Which elements of a result each operator makes from which elements of its operands, by classes of operators.

A rule gives, for each operand, a boolean matrix of (elements of the result, elements of the operand). What only moves
elements is run on their numbers, by the onnx package's reference evaluator; a product and a reduction follow from
labels of axes; a window from the places that it sees. An operator without a rule is taken to make every element of
everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onnxgrad.ir.einsum_labels import einsum_labels
from onnxgrad.ir.schemas import schema_of

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: No matrix may have more entries than this.
MOST_ENTRIES = 2**26

Shape = tuple[int, ...]


class Unknown(Exception):
    """The rule cannot tell: every element of the result may depend on every element of the operand."""


@dataclass
class Operand:
    """What a rule knows of an operand: its shape, its elements if they are constant, and whether it is asked about."""

    shape: Shape
    const: np.ndarray | None
    asked: bool

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of its elements, in its shape."""
        return np.arange(math.prod(self.shape)).reshape(self.shape)

    def known(self) -> np.ndarray:
        """Its elements, which must be constant."""
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
        found = self.node.attributes.get(name)
        if found is None:
            schema = schema_of("", self.node.op_type, self.opset)
            spec = schema.attributes[name].default_value if schema is not None and name in schema.attributes else None
            if spec is None or not spec.name:
                return default
            found = ir.serde.deserialize_attribute(spec)
        return list(found.value) if isinstance(found.value, (list, tuple)) else found.value

    def axes(self, rank: int) -> list[int]:
        """The axes of a reduction, all of them if none is named."""
        given = self.x[1].known().reshape(-1) if len(self.x) > 1 and self.x[1] is not None else self.attr("axes")
        if given is None or not len(given):
            if self.attr("noop_with_empty_axes", 0):
                raise Unknown
            return list(range(rank))
        return [int(a) % rank for a in given]


#: Gives for each output, and for each operand, a matrix; None: the result has the elements of the operand, one by one.
Found = list[dict[int, "csr_array | None"]]
Rule = Callable[[SizedNode], Found]


def matrix(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> csr_array:
    """The boolean matrix with entries at these places."""
    from scipy.sparse import coo_array, csr_array

    if rows.size > MOST_ENTRIES:
        raise Unknown
    entries = np.ones(rows.size, bool)
    return csr_array(coo_array((entries, (rows.reshape(-1), columns.reshape(-1))), shape=shape))


def picked(numbers: np.ndarray, size: int) -> csr_array:
    """Element i of the result is the element ``numbers[i]`` of `size`, none where that is negative."""
    flat = numbers.reshape(-1)
    rows = np.flatnonzero(flat >= 0)
    return matrix(rows, flat[rows], (flat.size, size))


# --- element by element, and moved -----------------------------------------------------------------


def elementwise(s: SizedNode) -> Found:
    """Each element from one element of each operand, after broadcasting."""
    out, found = s.shapes[0], {}
    for i, x in enumerate(s.x):
        if x is not None and x.asked:
            found[i] = None if x.shape == out else picked(np.broadcast_to(x.numbers, out), x.numbers.size)
    return [found]


def moved(s: SizedNode) -> Found:
    """Each element is one of an operand, or a constant: the operator is run on their numbers, from 1 on."""
    proto = ir.to_proto(s.node)
    feeds: dict[str, np.ndarray] = {}
    start, starts = 1, {}
    for i, (v, x) in enumerate(zip(s.node.inputs, s.x)):
        if v is None or x is None:
            continue
        proto.input[i] = name = f"operand {i}"  # one value may stand in two places
        if x.asked:
            feeds[name], starts[i] = x.numbers + start, start
            start += x.numbers.size
        else:
            is_data = v.dtype == s.node.outputs[0].dtype and v.dtype not in (ir.DataType.INT64, ir.DataType.INT32)
            feeds[name] = np.zeros(x.shape, np.int64) if is_data else x.known()
    try:
        results: Any = ReferenceEvaluator(proto, opsets={"": s.opset}).run(None, feeds)
    except Exception as error:  # the evaluator does not know the form
        raise Unknown from error
    found: Found = []
    for y, shape in zip(results, s.shapes):
        if np.shape(y) != shape:
            raise Unknown
        parts: dict[int, Any] = {}
        for i, first in starts.items():
            x = s.x[i]
            assert x is not None
            numbers = np.asarray(y, np.int64) - first
            parts[i] = picked(np.where((numbers >= 0) & (numbers < x.numbers.size), numbers, -1), x.numbers.size)
        found.append(parts)
    return found


def scatter_elements(s: SizedNode) -> Found:
    """The data, and every update at the place that its index names."""
    data, indices, updates = s.x[:3]
    assert data is not None
    assert indices is not None
    assert updates is not None
    at, axis = indices.known(), s.attr("axis", 0) % len(data.shape)
    places = list(np.indices(at.shape))
    places[axis] = at % data.shape[axis]
    return _scattered(s, data, updates, data.numbers[tuple(places)])


def scatter_nd(s: SizedNode) -> Found:
    """The data, and every slice of the updates at the place that its index names."""
    data, indices, updates = s.x[:3]
    assert data is not None
    assert indices is not None
    assert updates is not None
    at = indices.known()
    where = tuple(at[..., k] % data.shape[k] for k in range(at.shape[-1]))
    return _scattered(s, data, updates, data.numbers[where])


def _scattered(s: SizedNode, data: Operand, updates: Operand, targets: np.ndarray) -> Found:
    size, found = data.numbers.size, {}
    if data.asked:
        kept = data.numbers.copy()
        if s.attr("reduction", "none") == "none":
            kept.reshape(-1)[targets.reshape(-1)] = -1
        found[0] = picked(kept, size)
    if updates.asked:
        found[2] = matrix(targets, updates.numbers, (size, updates.numbers.size))
    return [found]


# --- along axes ------------------------------------------------------------------------------------


def _over(x: Operand, axes: Sequence[int]) -> csr_array:
    """Each slice along `axes`, as a row, has all the elements of it."""
    kept = [i for i in range(len(x.shape)) if i not in axes]
    numbers = np.transpose(x.numbers, [*kept, *axes]).reshape(math.prod(x.shape[i] for i in kept), -1)
    rows = np.broadcast_to(np.arange(numbers.shape[0])[:, None], numbers.shape)
    return matrix(rows, numbers, (numbers.shape[0], x.numbers.size))


def reduced(s: SizedNode) -> Found:
    """Each element from all along the axes."""
    x = s.x[0]
    assert x is not None
    return [{0: _over(x, s.axes(len(x.shape)))}]


def _spread(s: SizedNode, axes: Sequence[int]) -> csr_array:
    """Each element from all of its slice along `axes`."""
    x = s.x[0]
    assert x is not None
    lines = np.arange(math.prod(n for i, n in enumerate(x.shape) if i not in axes))
    lines = lines.reshape([1 if i in axes else n for i, n in enumerate(x.shape)])
    over = _over(x, axes)
    return picked(np.broadcast_to(lines, x.shape), over.shape[0]) @ over


def along(s: SizedNode) -> Found:
    """Each element from all along one axis."""
    assert s.x[0] is not None
    return [{0: _spread(s, [s.attr("axis", -1) % len(s.x[0].shape)])}]


def normalized(s: SizedNode) -> Found:
    """Each element from all of its slice along the last axes, and from its scale and bias."""
    assert s.x[0] is not None
    if len(s.shapes) > 1:
        raise Unknown
    rank = len(s.x[0].shape)
    found = elementwise(SizedNode(s.node, s.opset, [None, *s.x[1:]], s.shapes))
    if s.x[0].asked:
        found[0][0] = _spread(s, list(range(s.attr("axis", -1) % rank, rank)))
    return found


def cumulated(s: SizedNode) -> Found:
    """Each element from those up to it."""
    x, axis = s.x[0], s.x[1]
    assert x is not None
    assert axis is not None
    at = int(axis.known()) % len(x.shape)
    before = np.tri(x.shape[at], dtype=bool)
    last = np.moveaxis(x.numbers, at, -1)[..., None, :]
    mask = np.broadcast_to(before.T if s.attr("reverse", 0) else before, (*last.shape[:-2], *before.shape))
    rows = np.broadcast_to(np.moveaxis(x.numbers, at, -1)[..., :, None], mask.shape)
    return [{0: matrix(rows[mask], np.broadcast_to(last, mask.shape)[mask], (x.numbers.size, x.numbers.size))}]


# --- products --------------------------------------------------------------------------------------


def _product(s: SizedNode, terms: Sequence[str], out: str) -> Found:
    """The sum of products that labels of axes describe. A constant factor leaves out what it multiplies by zero."""
    sizes: dict[str, int] = {}
    for x, term in zip(s.x, terms):
        assert x is not None
        for label, n in zip(term, x.shape):
            sizes[label] = max(sizes.get(label, 1), n)
        if len(set(term)) < len(term) or any(sizes[c] != n for c, n in zip(term, x.shape)):
            raise Unknown  # a diagonal, or an axis of one element that is repeated
    if any(sizes[c] != n for c, n in zip(out, s.shapes[0])):
        raise Unknown
    found = {}
    for i, (x, term) in enumerate(zip(s.x, terms)):
        assert x is not None
        if x.asked:
            factors = [(y.const, t) for k, (y, t) in enumerate(zip(s.x, terms)) if k != i and y and y.const is not None]
            mask, own = next(((a != 0, t) for a, t in factors), (None, ""))
            found[i] = _linked(x, term, out, sizes, mask, own)
    return [found]


def _linked(x: Operand, term: str, out: str, sizes: dict[str, int], mask: np.ndarray | None, own: str) -> csr_array:
    """The entries that a constant factor with labels `own` and a `mask` leaves."""
    labels = list(dict.fromkeys([*own, *term, *out])) if mask is not None and not mask.all() else [
        *dict.fromkeys([*term, *out])
    ]  # fmt: skip
    where: dict[str, np.ndarray] = {}
    if mask is not None and not mask.all():
        where = {c: a[:, None] for c, a in zip(own, np.nonzero(mask))}
    free = [c for c in labels if c not in where]
    lead = len(next(iter(where.values()))) if where else 1
    if lead * math.prod(sizes[c] for c in free) > MOST_ENTRIES:
        raise Unknown
    grid = np.indices([sizes[c] for c in free]).reshape(len(free), -1) if free else np.zeros((0, 1), np.int64)
    where |= {c: g[None] for c, g in zip(free, grid)}

    def flat(term: str) -> np.ndarray:
        total = np.zeros((1, 1), np.int64)
        for c in term:
            total = total * sizes[c] + where[c]
        return np.broadcast_to(total, (lead, grid.shape[1]))

    count = math.prod(sizes[c] for c in out)
    return matrix(flat(out), flat(term), (count, x.numbers.size))


def matmul(s: SizedNode) -> Found:
    """A product, of stacks of matrices that broadcast."""
    a, b = s.x
    assert a is not None
    assert b is not None
    lead = max(len(a.shape), len(b.shape), 2) - 2
    stack = "abcdefgh"[:lead]
    left = stack[lead - len(a.shape) + 2 :] + "ij" if len(a.shape) > 1 else "j"
    right = stack[lead - len(b.shape) + 2 :] + "jk" if len(b.shape) > 1 else "j"
    return _product(s, [left, right], stack + "i" * (len(a.shape) > 1) + "k" * (len(b.shape) > 1))


def gemm(s: SizedNode) -> Found:
    """A product of two matrices, and what is added."""
    found = _product(
        SizedNode(s.node, s.opset, s.x[:2], s.shapes),
        ["ji" if s.attr("transA", 0) else "ij", "kj" if s.attr("transB", 0) else "jk"],
        "ik",
    )
    return [found[0] | elementwise(SizedNode(s.node, s.opset, [None, None, *s.x[2:]], s.shapes))[0]]


def einsum(s: SizedNode) -> Found:
    """As its equation says."""
    terms, out = einsum_labels(s.attr("equation"), [len(x.shape) for x in s.x if x is not None])
    return _product(s, terms, out)


# --- windows ---------------------------------------------------------------------------------------


def _windows(s: SizedNode, image: Shape, result: Shape, kernel: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For every place of the result and of the kernel, where it lies in one image, and whether it lies there."""
    rank = len(image)
    strides, dilations = s.attr("strides") or [1] * rank, s.attr("dilations") or [1] * rank
    pads, auto = s.attr("pads") or [0] * (2 * rank), s.attr("auto_pad", "NOTSET")
    place, inside = np.zeros((), np.int64), np.ones((), bool)
    for d in range(rank):
        before = pads[d]
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            total = max((result[d] - 1) * strides[d] + (kernel[d] - 1) * dilations[d] + 1 - image[d], 0)
            before = (total + (auto == "SAME_LOWER")) // 2
        at = np.arange(result[d])[:, None] * strides[d] + np.arange(kernel[d]) * dilations[d] - before
        shape = [1] * (2 * rank)
        shape[d], shape[rank + d] = at.shape
        place = place * image[d] + at.reshape(shape)
        inside = inside & ((at >= 0) & (at < image[d])).reshape(shape)
    full = (math.prod(result), math.prod(kernel))
    return place.reshape(full), np.broadcast_to(inside, (*result, *kernel)).reshape(full)


def pooled(s: SizedNode) -> Found:
    """Each element from the window of its channel."""
    x, y = s.x[0], s.shapes[0]
    assert x is not None
    if len(s.shapes) > 1:
        raise Unknown
    place, inside = _windows(s, x.shape[2:], y[2:], s.attr("kernel_shape"))
    images = x.shape[0] * x.shape[1]
    if images * place.size > MOST_ENTRIES:
        raise Unknown
    rows, k = np.nonzero(inside)
    first = np.arange(images)[:, None]
    columns = first * math.prod(x.shape[2:]) + place[rows, k]
    return [{0: matrix(first * math.prod(y[2:]) + rows, columns, (math.prod(y), x.numbers.size))}]


def _convolved(s: SizedNode, image: Shape, result: Shape, filters: Operand) -> csr_array:
    """What a convolution of an image sees."""
    group, kernel = s.attr("group", 1), filters.shape[2:]
    place, inside = _windows(s, image[2:], result[2:], kernel)
    each, given = result[1] // group, image[1] // group  # channels of a group
    weights = np.ones(filters.shape, bool) if filters.const is None else filters.const != 0
    linked = weights.reshape(group, -1, weights.shape[1], math.prod(kernel))  # [g, out channels, in channels, kernel]
    if linked.shape[:3] != (group, each, given):
        raise Unknown
    g, m, c, k = np.nonzero(linked)
    if image[0] * g.size * place.shape[0] > MOST_ENTRIES:
        raise Unknown
    n = np.arange(image[0])[:, None, None]
    spots = np.arange(place.shape[0])[None, None]
    rows = (n * result[1] + (g * each + m)[:, None]) * place.shape[0] + spots
    columns = (n * image[1] + (g * given + c)[:, None]) * math.prod(image[2:]) + place.T[k][None]
    seen = np.broadcast_to(inside.T[k][None], np.broadcast_shapes(rows.shape, columns.shape))
    rows, columns = (np.broadcast_to(a, seen.shape)[seen] for a in (rows, columns))
    return matrix(rows, columns, (math.prod(result), math.prod(image)))


def convolution(s: SizedNode) -> Found:
    """Each element from the window of the channels of its group; filters that are asked about are not told apart."""
    x, w, *bias = s.x
    assert x is not None
    assert w is not None
    if w.asked or any(b is not None and b.asked for b in bias):
        raise Unknown
    if s.node.op_type == "Conv":
        return [{0: _convolved(s, x.shape, s.shapes[0], w)}]
    if s.attr("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or s.attr("output_shape"):
        raise Unknown  # pads that follow from the shape
    return [{0: _convolved(s, s.shapes[0], x.shape, w).T.tocsr()}]


_MOVES = """
    Compress Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape ReverseSequence
    Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze""".split()  # noqa: SIM905
_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()  # noqa: SIM905

RULES: dict[str, Rule] = {
    **dict.fromkeys(_MOVES, moved),
    **{f"Reduce{name}": reduced for name in _REDUCTIONS},
    **dict.fromkeys(("Cast", "CastLike"), elementwise),
    **dict.fromkeys(("Softmax", "LogSoftmax", "LpNormalization"), along),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), normalized),
    **dict.fromkeys(("CumSum", "CumProd"), cumulated),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), pooled),
    **dict.fromkeys(("Conv", "ConvTranspose"), convolution),
    "Einsum": einsum,
    "Gemm": gemm,
    "MatMul": matmul,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
}
