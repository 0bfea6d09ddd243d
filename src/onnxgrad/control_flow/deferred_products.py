"""Sums over the steps of a backward iteration, computed after it from stacks.

The cotangent of a matrix that every step multiplies is Σₜ AₜᵀBₜ, with Aₜ a value that the step read and Bₜ a cotangent:
one product of all rows of A and all rows of B is many times faster than the sum of many small products. That of a
vector that every step adds is the sum of all rows of B. Rules return both as symbolic terms, of the operands of one
step. The sum over the steps is the same term of stacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.control_flow.iteration import ScanAxis
from onnxgrad.control_flow.reverse_iteration import StepInput
from onnxgrad.ir import Var
from onnxgrad.ir.shapes import same_dims
from onnxgrad.rules.linalg import ProductSum
from onnxgrad.rules.rule import RowSum, Symbolic, Term


@dataclass
class DeferredSum:
    """The sum of `term` over the steps, which return its operand `given`, and read the other one.

    Attributes:
        term: the cotangent of one step.
        given: the operand that is stacked.
        slot: the layout of the stack.
        read: the other operand of a product; None for a sum of rows.
    """

    term: Symbolic
    given: ir.Value
    slot: ScanAxis
    read: StepInput | None = None

    def finish(self, stack: Var) -> Symbolic:
        """The sum, given the stack of `given`."""

        def stacked(x: Var) -> Var:
            outer = self.read.outer if self.read is not None and x.value is self.read.inner else None
            return stack if x.value is self.given else Var(stack.builder, outer or x.value)

        return self.term.map_operands(stacked)


def defer(
    terms: Sequence[Term],
    like: ir.Value,
    columns: Mapping[ir.Value, StepInput],
    free: Mapping[ir.Value, ScanAxis],
) -> list[DeferredSum]:
    """The sums over the steps of `terms`; empty if one of them has to be added up from step to step.

    Args:
        terms: the cotangent of one step.
        like: the captured value that the sum is the cotangent of.
        columns: the values that the steps read, where they are stacked along the first axis.
        free: the values that the steps stack anyway, and their layouts; a stack of another value must not be larger
            than one sum for each step, or than a stack that the steps read.
    """
    sums = [_row_sum(t, free) if isinstance(t, RowSum) else _product(t, columns) for t in terms]
    fits = all(s and (s.given in free or any(_is_small(s.given, v) for v in (like, *columns))) for s in sums)
    return [s for s in sums if s] if fits else []


def _row_sum(term: RowSum, free: Mapping[ir.Value, ScanAxis]) -> DeferredSum:
    rows, first = term.x.value, ScanAxis(0, backwards=True)
    slot = free.get(rows, first)
    return DeferredSum(term, rows, first if slot.axis in (-1, term.x.rank) else slot)  # rows must stay rows


def _product(term: Term, columns: Mapping[ir.Value, StepInput]) -> DeferredSum | None:
    if not isinstance(term, ProductSum):
        return None
    a, b = term.a.value, term.b.value
    read, given = (a, b) if a in columns else (b, a)
    return DeferredSum(term, given, columns[read].slot, columns[read]) if read in columns else None


def _is_small(v: ir.Value, like: ir.Value) -> bool:
    """True if `v` provably has no more elements than `like`; a common first axis may have any size."""
    if v.shape is None or like.shape is None:
        return False
    own, other = list(v.shape), list(like.shape)
    if own and other and same_dims(own[:1], other[:1]):
        own, other = own[1:], other[1:]
    sizes = [[d if isinstance(d, int) else None for d in dims] for dims in (own, other)]
    return None not in sizes[0] and None not in sizes[1] and math.prod(sizes[0]) <= math.prod(sizes[1])  # type: ignore[arg-type]
