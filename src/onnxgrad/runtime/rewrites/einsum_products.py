"""Sums of products as products of matrices: operands with the axes of the batch ahead, in groups, free or summed.

ONNX Runtime transposes both operands of an Einsum in each run, and takes more than two of them from left to right.
Written out, a MatMul reads an operand whose last two groups are exchanged as it is, the Einsums of the gradients share
the other Transposes (of weights and of the cotangent), and the pair whose product is cheapest is multiplied first.

A product that is broadcast and then summed, as [n,p,k,1]·[1,k,j] over k, is an Einsum as well. Its numbers need not be
written, and ONNX Runtime adds up few of them slowly: the grid of a spatial transformer takes 2 % of the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from string import ascii_lowercase
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.einsum_labels import einsum_labels
from onnxgrad.ir.match import Dim, constant, is_op, only_reader, producer
from onnxgrad.ir.shapes import product, same_dim
from onnxgrad.runtime.rewrites.rewrite import NodeRule, rewrite_results

#: Size of an axis that has no number, where costs are compared.
_OPEN = 16
#: Multiplications in the time of moving a number along a single axis, or in rows of `_ROW`.
_MOVED = 8
#: The time of moving one in another way, in that time.
_SCATTERED = 10
_ROW = 16
#: Columns that a product computes at once, if they are there or not.
_COLUMNS = 16
#: The time of a call for one matrix of a batch, in that of moving a number.
_CALL = 128
_MOST_OPERANDS = 4
_DTYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


class _Sum(NamedTuple):
    """An Einsum: `operands` with a letter per axis in `terms`, the letters of the result, and the size of each."""

    operands: list[ir.Value]
    terms: list[str]
    out: str
    sizes: dict[str, Dim]


class _Site(NamedTuple):
    """A sum of products of which the operands have axes of size 1 as well; `ones`: those of the result."""

    sum: _Sum
    ones: list[int]


class _Layout(NamedTuple):
    """The groups of letters of a product [batch, left, summed] · [batch, summed, right]; `turned`: of y and x."""

    turned: bool
    batch: str
    left: str
    summed: str
    right: str

    @property
    def result(self) -> str:
        return self.batch + self.left + self.right


def _match(node: ir.Node) -> _Sum | None:
    """An Einsum of two operands or more whose letters have one size each, if products take less time."""
    if not is_op(node, "Einsum") or not 2 <= len(node.inputs) <= _MOST_OPERANDS:
        return None
    operands = [x for x in node.inputs if x is not None and x.shape is not None and x.dtype in _DTYPES]
    if len(operands) < len(node.inputs):
        return None
    terms, out = einsum_labels(node.attributes["equation"].as_string(), [len(x.shape or ()) for x in operands])
    sizes: dict[str, Dim] = {}
    for x, term in zip(operands, terms):
        if len(set(term)) < len(term):  # a diagonal
            return None
        for letter, size in zip(term, x.shape or ()):
            if size == 0 or not same_dim(size, sizes.setdefault(letter, size)):  # an axis of size 1 may be broadcast
                return None
    lonely = [c for c in sizes if c not in out and sum(c in t for t in terms) == 1]
    if lonely:
        return None
    found = _Sum(operands, terms, out, sizes)
    return found if len(terms) > 2 or _gains(found) else None


def _match_broadcast(node: ir.Node) -> _Site | None:
    """A sum of x·y along axes of both, where x·y has axes of each alone, if a product of matrices takes less time."""
    mul = producer(node.inputs[0], "Mul") if is_op(node, "ReduceSum") and len(node.inputs) > 1 else None
    axes = None if mul is None else constant(node.inputs[1])
    if mul is None or axes is None or only_reader(mul.outputs[0], "ReduceSum") is None:
        return None
    operands = [x for x in mul.inputs if x is not None and x.shape is not None and x.dtype in _DTYPES]
    if len(operands) < 2:
        return None
    dims = [(x.shape or ir.Shape(())).dims for x in operands]
    letters = ascii_lowercase[: max(map(len, dims))]
    pairs = list(zip(letters, *((1,) * (len(letters) - len(d)) + d for d in dims)))
    if any(0 in (n, m) or not (1 in (n, m) or same_dim(n, m)) for _, n, m in pairs):
        return None
    sizes = {c: m if n == 1 else n for c, n, m in pairs if (n, m) != (1, 1)}
    x, y = ("".join(c for c, *both in pairs if both[k] != 1) for k in range(2))
    reduced = {letters[a] for a in axes.reshape(-1).tolist()}
    summed = reduced & set(sizes)
    if not summed or not summed <= set(x) & set(y) or not set(x) - set(y) or not set(y) - set(x):
        return None
    out = "".join(c for c in sizes if c not in summed)
    cost, layout = _layout(x, y, out, sizes)
    if cost + _CALL * _count(layout.batch, sizes) > _count("".join(sizes), sizes):
        return None
    kept = letters if node.attributes.get_int("keepdims", 1) else [c for c in letters if c not in reduced]
    return _Site(_Sum(operands, [x, y], out, sizes), [i for i, c in enumerate(kept) if c not in out])


def _count(letters: str, sizes: dict[str, Dim]) -> int:
    return math.prod(size if isinstance(size := sizes[c], int) else _OPEN for c in set(letters))


def _runs(term: str, arrangement: str) -> list[str]:
    """The letters of `term` in runs that `arrangement` keeps, in the order of `term`."""
    runs: list[str] = []
    for c in term:
        if runs and runs[-1] + c in arrangement:
            runs[-1] += c
        else:
            runs.append(c)
    return runs


def _move(term: str, to: str, sizes: dict[str, Dim], runs: Sequence[str]) -> int:
    """The cost of a Transpose of an operand with these `runs` of letters."""
    if term == to:
        return 0
    order = sorted(runs, key=to.index)
    single = any([r for r in runs if r != one] == [r for r in order if r != one] for one in runs)
    rows = _count(order[-1], sizes) if order[-1] == runs[-1] else 1
    return _count(term, sizes) * (1 if single or rows >= _ROW else _SCATTERED)


def _arranged(term: str, batch: str, one: str, other: str) -> str:
    """The order in which an operand is laid out: the groups as they come in it, which both kinds of product read."""
    first, second = (one, other) if term.find(one[:1]) < term.find(other[:1]) else (other, one)
    return batch + first + second


def _layouts(x: str, y: str, out: str) -> Iterator[_Layout]:
    """All layouts of a product whose groups are in the order of an operand or of the result."""

    def orders(letters: Collection[str], *terms: str) -> list[str]:
        return sorted({"".join(sorted(letters, key=t.index)) for t in terms})

    common = [c for c in x if c in y]
    batches = orders([c for c in common if c in out], x, y, out)
    sums = orders([c for c in common if c not in out], x, y)
    for turned, batch, summed in itertools.product((False, True), batches, sums):
        free = [orders([c for c in t if c not in common], t, out) for t in ((y, x) if turned else (x, y))]
        for left, right in itertools.product(*free):
            yield _Layout(turned, batch, left, summed, right)


def _cost_of_transposes(x: str, y: str, out: str, sizes: dict[str, Dim], layout: _Layout) -> int:
    """The cost of the Transposes around a product."""
    moved = _move(out, layout.result, sizes, _runs(out, layout.result))
    for term, free in zip((y, x) if layout.turned else (x, y), (layout.left, layout.right)):
        to = _arranged(term, layout.batch, free, layout.summed)
        moved += _move(term, to, sizes, _runs(term, to))
    return moved


def _cost_of_transposes_by_runtime(x: str, y: str, out: str, sizes: dict[str, Dim], layout: _Layout) -> int:
    """The same for those of ONNX Runtime, which moves each axis alone, and multiplies no exchanged operand."""
    _, batch, left, summed, right = layout
    first, second = (y, x) if layout.turned else (x, y)
    moved = _move(first, batch + left + summed, sizes, first) + _move(second, batch + summed + right, sizes, second)
    return moved + _move(out, layout.result, sizes, out)


def _work(sizes: dict[str, Dim], layout: _Layout) -> int:
    """The cost of the multiplications of a product."""
    columns = max(_count(layout.right, sizes), _COLUMNS)
    return _count(layout.batch + layout.left + layout.summed, sizes) * columns // _MOVED


def _layout(x: str, y: str, out: str, sizes: dict[str, Dim]) -> tuple[int, _Layout]:
    """The layout of the cheapest product of `x` and `y`, and its cost."""
    return min((_cost_of_transposes(x, y, out, sizes, way) + _work(sizes, way), way) for way in _layouts(x, y, out))


def _gains(found: _Sum) -> bool:
    """True if products take less time than the Einsum."""
    (x, y), out, sizes = found.terms, found.out, found.sizes
    ours, layout = _layout(x, y, out, sizes)
    if layout.summed and not layout.left and not layout.right:  # of vectors
        return True
    if layout.batch and any(not isinstance(sizes[c], int) for c in layout.summed):  # of no size: see `product`
        ours += _count(out, sizes)
    return ours <= min(
        _cost_of_transposes_by_runtime(x, y, out, sizes, way) + _work(sizes, way) for way in _layouts(x, y, out)
    )


def _letters_needed(x: str, y: str, others: list[str], out: str) -> str:
    """The letters of the product of `x` and `y` that `others` or the result need."""
    return "".join(c for c in dict.fromkeys(x + y) if c in out or any(c in t for t in others))


def _pairs(terms: list[str], out: str, sizes: dict[str, Dim]) -> tuple[int, list[tuple[int, int]]]:
    """The cost of the cheapest order of products, and the pairs, whose result is the last term afterwards."""
    if len(terms) == 1:
        return 0, []
    found = []
    for i, j in itertools.combinations(range(len(terms)), 2):
        rest = [t for k, t in enumerate(terms) if k not in (i, j)]
        kept = _letters_needed(terms[i], terms[j], rest, out)
        first, layout = _layout(terms[i], terms[j], kept if rest else out, sizes)
        cost, pairs = _pairs([*rest, layout.result if rest else out], out, sizes)
        cost += first + _count(kept, sizes)
        found.append((cost, [(i, j), *pairs]))
    return min(found)


class _Writer:
    """Writes the products of an Einsum."""

    def __init__(self, b: Builder, found: _Sum) -> None:
        self.b, self.found, self.sizes = b, found, found.sizes
        self.operands = [(b.var(x), term) for x, term in zip(found.operands, found.terms)]

    def size(self, letters: str) -> list[int] | Var:
        """The size of a group of axes, as a vector of one number."""
        if all(isinstance(self.sizes[c], int) for c in letters):
            return [_count(letters, self.sizes)]
        x, term = next((x, t) for x, t in zip(self.found.operands, self.found.terms) if letters[0] in t)
        axis = term.index(letters[0])
        first = self.b.shape_of(self.b.var(x), axis, axis + 1)
        return self.b.Mul(first, self.size(letters[1:])) if letters[1:] else first

    def reshaped(self, x: Var, have: list[str], want: list[str]) -> Var:
        """`x`, whose axes are the groups `have` of letters, with the axes `want`."""
        if have == want:
            return x
        opened = [any(not isinstance(self.sizes[c], int) for c in group) for group in want]
        sizes = [[-1] if is_open and sum(opened) == 1 else self.size(g) for is_open, g in zip(opened, want)]
        return self.b.reshape(x, self.b.join(*sizes))

    def transposed(self, x: Var, term: str, to: str) -> Var:
        """`x` with its axes in the order `to`; numbers move faster where axes that stay side by side are one."""
        if term == to:
            return x
        runs = _runs(term, to)
        if runs[-1][-1] == to[-1] and _count(runs[-1], self.sizes) >= _ROW:  # rows move faster one axis at a time
            return self.b.Transpose(x, perm=[term.index(c) for c in to])
        order = sorted(runs, key=to.index)
        rows, perm = self.reshaped(x, list(term), runs), [runs.index(r) for r in order]
        if len(runs) > 2:
            return self.reshaped(self.b.Transpose(rows, perm=perm), order, list(to))
        # a last axis of 1, or ONNX Runtime merges it with the exchange of `matrix` to one that moves single numbers
        moved = self.b.Transpose(self.b.Reshape(rows, [0, 0, 1]), perm=[*perm, 2])
        return self.reshaped(moved, [*order, ""], list(to))

    def multiply(self, x: Var, y: Var, one: str, other: str, out: str) -> tuple[Var, str]:
        """Σ x·y, and its letters in their order."""
        _, layout = _layout(one, other, out, self.sizes)
        turned, batch, left, summed, right = layout
        if summed and not left and not right:
            z = x * self.transposed(y, other, one)
            z = self.b.ReduceSum(z, [one.index(c) for c in summed], keepdims=0)
            return z, "".join(c for c in one if c in batch)
        pair = [(y, other), (x, one)] if turned else [(x, one), (y, other)]
        first, second = (
            self.matrix(v, term, batch, groups) for (v, term), groups in zip(pair, ((left, summed), (summed, right)))
        )
        z = product(first, second) if summed or (left and right) else first * second
        return self.reshaped(z, [*batch, left, right], list(layout.result)), layout.result

    def matrix(self, x: Var, term: str, batch: str, groups: tuple[str, str]) -> Var:
        """`x` as matrices with the axes `groups`, exchanged by a Transpose that the product reads as it is."""
        order = _arranged(term, batch, *groups)
        arranged = self.transposed(x, term, order)
        if order == batch + "".join(groups):
            return self.reshaped(arranged, list(order), [*batch, *groups])
        rank = len(batch)
        other = self.reshaped(arranged, list(order), [*batch, *reversed(groups)])
        # not `b.Transpose`, which would merge it with one before
        return self.b.emit("Transpose", other, perm=[*range(rank), rank + 1, rank])

    def write(self) -> Var:
        """The result."""
        found, operands = self.found, self.operands
        for i, j in _pairs(found.terms, found.out, found.sizes)[1]:
            (x, one), (y, other) = operands[i], operands[j]
            rest = [operand for k, operand in enumerate(operands) if k not in (i, j)]
            kept = _letters_needed(one, other, [t for _, t in rest], found.out) if rest else found.out
            operands = [*rest, self.multiply(x, y, one, other, kept)]
        ((z, term),) = operands
        return self.transposed(z, term, found.out)


def _write(b: Builder, found: _Sum) -> Var:
    return _Writer(b, found).write()


def _write_broadcast(b: Builder, site: _Site) -> Var:
    found = site.sum
    ones = [[i for i, d in enumerate(x.shape or ()) if d == 1] for x in found.operands]
    operands = [b.Squeeze(b.var(x), axes).value if axes else x for x, axes in zip(found.operands, ones)]
    z = _write(b, found._replace(operands=operands))
    return b.Unsqueeze(z, site.ones) if site.ones else z


EINSUM_PRODUCTS = rewrite_results(
    "einsum_products",
    "products of matrices, of more than two operands in the cheapest order",
    "Einsum of float32 or float64 with sizes that are equal for certain, without diagonals and sums over one operand; "
    "ReduceSum of a product along axes of both operands, each of which has others of its own",
    NodeRule(_match, _write),
    NodeRule(_match_broadcast, _write_broadcast),
)
