"""Sums over the steps of a backward iteration, computed after it by one product.

The cotangent of a matrix that every step multiplies is Σₜ AₜᵀBₜ, with Aₜ a value that the step read and Bₜ a cotangent:
one product of all rows of A and all rows of B is many times faster than the sum of many small products. That of a
vector that every step adds is the sum of all rows of B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.control_flow.iteration import ScanAxis
from onnxgrad.control_flow.reverse_iteration import StepInput
from onnxgrad.ir import Builder, Var, reshape_to, sum_to
from onnxgrad.ir.match import constant, is_op, producer
from onnxgrad.ir.shapes import same_dims
from onnxgrad.rules.rule import add


@dataclass
class Product:
    """α·Σₜ AₜᵀBₜ, or its transpose: the steps read `a` and return `b`."""

    a: StepInput
    b: ir.Value
    alpha: float
    turned: bool

    @property
    def slot(self) -> ScanAxis:
        """The layout of the stacked `b`: that of `a`."""
        return self.a.slot

    def finish(self, o: Builder, stack: Var, like: Var) -> Var:
        """The sum, given the stack of `b`."""
        assert self.a.outer is not None
        left, right = _rows(Var(o, self.a.outer)), _rows(stack)
        if self.turned:
            left, right = right, left
        total = o.Gemm(left, right, transA=1, alpha=None if self.alpha == 1 else self.alpha)
        return reshape_to(total, like)


@dataclass
class RowSum:
    """Σₜ of the rows of `b`, which the steps return."""

    b: ir.Value
    slot: ScanAxis

    def finish(self, o: Builder, stack: Var, like: Var) -> Var:
        """The sum, given the stack of `b`."""
        return sum_to(stack, like)


def products(
    total: ir.Value,
    like: ir.Value,
    columns: Mapping[ir.Value, StepInput],
    free: Mapping[ir.Value, ScanAxis],
) -> list[Product | RowSum]:
    """The products whose sum over the steps is that of `total`; empty if `total` is no such sum.

    Args:
        total: what one step adds.
        like: what the sum is the cotangent of.
        columns: what the steps read, where it is stacked along the first axis.
        free: what the steps stack anyway, and how; a stack of anything else must not be larger than the sum is for
            each step, or than one that the steps read.
    """
    parts: list[Product | RowSum] = []
    for term in _terms(total):
        part = _row_sum(term, like, free) or _product(term, like, columns)
        if part is None or not (part.b in free or any(_is_small(part.b, v) for v in (like, *columns))):
            return []
        parts.append(part)
    return parts


def _product(term: ir.Value, like: ir.Value, columns: Mapping[ir.Value, StepInput]) -> Product | None:
    node = producer(term, "Gemm")
    if like.shape is None or len(like.shape) != 2 or node is None:
        return None
    operands, attrs = [v for v in node.inputs if v is not None], node.attributes
    if len(operands) != 2 or not attrs.get_int("transA") or attrs.get_int("transB"):
        return None
    left, right = map(_before_rows, operands)
    turned = left not in columns
    a, b = (right, left) if turned else (left, right)
    return Product(columns[a], b, attrs.get_float("alpha", 1.0), turned) if a in columns else None


def _row_sum(term: ir.Value, like: ir.Value, free: Mapping[ir.Value, ScanAxis]) -> RowSum | None:
    node = producer(term, "MatMul")
    if like.shape is None or len(like.shape) != 1 or node is None:
        return None
    ones, rows = node.inputs
    if ones is None or rows is None or ones.shape is None or len(ones.shape) != 1 or not _is_ones(ones):
        return None
    b = _before_rows(rows)
    return RowSum(b, free.get(b, ScanAxis(0, backwards=True)))


def _is_ones(value: ir.Value) -> bool:
    """True if all elements provably are 1."""
    node = value.producer()
    if is_op(node, "Expand") and node.inputs[0] is not None:
        value = node.inputs[0]
    number = constant(value)
    return number is not None and bool(np.all(number == 1))


def sum_products(o: Builder, parts: list[Product | RowSum], stacks: list[Var], like: Var) -> Var:
    """The sum of `parts`, given the stacked `b` of each."""
    return add([p.finish(o, s, like) for p, s in zip(parts, stacks)])


def _terms(total: ir.Value) -> Iterator[ir.Value]:
    node = total.producer()
    if is_op(node, "Add"):
        for v in node.inputs:
            if v is not None:
                yield from _terms(v)
    else:
        yield total


def _before_rows(v: ir.Value) -> ir.Value:
    """The operand of a Flatten that keeps the last axis; `v` itself for other producers."""
    node = v.producer()
    if node is not None and node.op_type == "Flatten" and node.inputs[0] is not None:
        before = node.inputs[0]
        if before.shape is not None and node.attributes.get_int("axis", 1) == len(before.shape) - 1:
            return before
    return v


def _is_small(v: ir.Value, like: ir.Value) -> bool:
    """True if `v` provably has no more elements than `like`; a common first axis may have any size."""
    if v.shape is None or like.shape is None:
        return False
    own, other = list(v.shape), list(like.shape)
    if own and other and same_dims(own[:1], other[:1]):
        own, other = own[1:], other[1:]
    sizes = [[d if isinstance(d, int) else None for d in dims] for dims in (own, other)]
    return None not in sizes[0] and None not in sizes[1] and math.prod(sizes[0]) <= math.prod(sizes[1])  # type: ignore[arg-type]


def _rows(x: Var) -> Var:
    return x.builder.Flatten(x, axis=x.rank - 1)
