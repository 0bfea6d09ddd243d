"""Dependences of sums of products: elements that share the labels of axes. A constant factor's zeros leave out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from onnxgrad.ir.einsum_labels import einsum_labels
from onnxgrad.ir.match import not_none
from onnxgrad.transforms.sparse.dependence import (
    MOST_ENTRIES,
    Found,
    Operand,
    SizedNode,
    Unknown,
    elementwise,
    matrix,
)

if TYPE_CHECKING:
    from scipy.sparse import csr_array


def _product(s: SizedNode, terms: Sequence[str], out: str) -> Found:
    """The sum of products given by labels of axes; zeros of a constant factor remove their terms."""
    shapes = [not_none(x).shape for x in s.x]
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes):
        for label, n in zip(term, shape):
            sizes[label] = max(sizes.get(label, 1), n)
    for term, shape in zip([*terms, out], [*shapes, s.shapes[0]]):
        if len(set(term)) < len(term) or any(sizes[c] != n for c, n in zip(term, shape)):
            raise Unknown  # a diagonal, or an axis of one element that is repeated
    matrices = {}
    for i, (x, term) in enumerate(zip(s.x, terms)):
        assert x is not None
        if x.asked:
            factors = [(y.const, t) for k, (y, t) in enumerate(zip(s.x, terms)) if k != i and y and y.const is not None]
            mask, own = next(((a != 0, t) for a, t in factors), (None, ""))
            matrices[i] = _link_entries(x, term, out, sizes, mask, own)
    return [matrices]


def _link_entries(
    x: Operand, term: str, out: str, sizes: dict[str, int], mask: np.ndarray | None, own: str
) -> csr_array:
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
    a, b = map(not_none, s.x)
    lead = max(len(a.shape), len(b.shape), 2) - 2
    stack = "abcdefgh"[:lead]
    left = stack[lead - len(a.shape) + 2 :] + "ij" if len(a.shape) > 1 else "j"
    right = stack[lead - len(b.shape) + 2 :] + "jk" if len(b.shape) > 1 else "j"
    return _product(s, [left, right], stack + "i" * (len(a.shape) > 1) + "k" * (len(b.shape) > 1))


def gemm(s: SizedNode) -> Found:
    """A product of two matrices, and the added operand."""
    matrices = _product(
        SizedNode(s.node, s.opset, s.x[:2], s.shapes),
        ["ji" if s.attr("transA", 0) else "ij", "kj" if s.attr("transB", 0) else "jk"],
        "ik",
    )
    return [matrices[0] | elementwise(SizedNode(s.node, s.opset, [None, None, *s.x[2:]], s.shapes))[0]]


def einsum(s: SizedNode) -> Found:
    """The dependences by the equation of an Einsum."""
    terms, out = einsum_labels(s.attr("equation"), [len(x.shape) for x in s.x if x is not None])
    return _product(s, terms, out)
