"""Sums over the steps of the backward iteration that become one matrix product after it.

The cotangent of a matrix that every step multiplies is Σₜ AₜᵀBₜ, with Aₜ a value that the step read and Bₜ a cotangent:
one product of all rows of A and all rows of B is many times faster than the sum of many small products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.control_flow.reverse_iteration import StepInput
from onnxgrad.ir import Builder, Var, reshape_to
from onnxgrad.rules.rule import add


@dataclass
class Product:
    """α·Σₜ AₜᵀBₜ, or its transpose: the steps read `a` and return `b`."""

    a: StepInput
    b: ir.Value
    alpha: float
    turned: bool

    def after(self, o: Builder, stack: Var) -> Var:
        """The sum, given the stack of `b`."""
        assert self.a.outer is not None
        left, right = _rows(Var(o, self.a.outer)), _rows(stack)
        if self.turned:
            left, right = right, left
        return o.Gemm(left, right, transA=1, alpha=None if self.alpha == 1 else self.alpha)


def products(
    total: ir.Value, like: ir.Value, columns: Mapping[ir.Value, StepInput], free: set[ir.Value]
) -> list[Product]:
    """The products whose sum over the steps is that of `total`; empty if `total` is no such sum.

    Args:
        total: what one step adds.
        like: what the sum is the cotangent of.
        columns: what the steps read, where it is stacked along the first axis.
        free: what the steps stack anyway; of other values, a stack must not be larger for each step than the sum.
    """
    if like.shape is None or len(like.shape) != 2:
        return []
    found = []
    for term in _terms(total):
        node = term.producer()
        if node is None or node.op_type != "Gemm" or node.domain or len([v for v in node.inputs if v is not None]) != 2:
            return []
        attrs = node.attributes
        if not attrs.get_int("transA") or attrs.get_int("transB"):
            return []
        left, right = (_before_rows(v) for v in node.inputs if v is not None)
        turned = left not in columns
        a, b = (right, left) if turned else (left, right)
        if a not in columns or not (b in free or _is_small(b, like)):
            return []
        found.append(Product(columns[a], b, attrs.get_float("alpha", 1.0), turned))
    return found


def summed(o: Builder, parts: list[Product], stacks: list[Var], like: Var) -> Var:
    """The sum of `parts`, given the stacked `b` of each."""
    total = add([p.after(o, s) for p, s in zip(parts, stacks)])
    return reshape_to(total, like)


def _terms(total: ir.Value) -> list[ir.Value]:
    node = total.producer()
    if node is not None and node.op_type == "Add" and not node.domain:
        return [t for v in node.inputs if v is not None for t in _terms(v)]
    return [total]


def _before_rows(v: ir.Value) -> ir.Value:
    """What `v` has all rows of."""
    node = v.producer()
    if node is not None and node.op_type == "Flatten" and node.inputs[0] is not None:
        before = node.inputs[0]
        if before.shape is not None and node.attributes.get_int("axis", 1) == len(before.shape) - 1:
            return before
    return v


def _is_small(v: ir.Value, like: ir.Value) -> bool:
    """Whether `v` has provably no more elements than `like`."""
    if v.shape is None or like.shape is None:
        return False
    sizes = [[d if isinstance(d, int) else None for d in x.shape or ()] for x in (v, like)]
    return None not in sizes[0] and None not in sizes[1] and math.prod(sizes[0]) <= math.prod(sizes[1])  # type: ignore[arg-type]


def _rows(x: Var) -> Var:
    return x.builder.Flatten(x, axis=x.rank - 1)
