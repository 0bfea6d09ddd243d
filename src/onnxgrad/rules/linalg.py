"""Products of matrices: MatMul, Gemm, and the determinant.

Products of two matrices are written as Gemm, which transposes for free. The gradient of a matrix that
multiplies a whole batch is one Gemm over all rows of the batch, not a batch of products to be summed.

A sum of no products is 0. But ONNX Runtime returns uninitialized memory if the right operand is a vector, or a batch
beside a left operand that is none or that it transposes. If the sum is known to be empty, no product is written; if it
may be empty, `product` guards against that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrad.ir import Builder, Var, product, reshape_to, sum_to
from onnxgrad.ir.constants import MOST_WRITTEN
from onnxgrad.ir.lowerings import lowering
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear, rule
from onnxgrad.rules.rule import Result, Symbolic, Term, sum_rows

_ROWS = lowering("gemm_of_rows", "the right operand of MatMul", "a Gemm over all rows", "a batch of products, summed")


def transposed(op: Op, x: Var) -> Var:
    """The last two axes of `x` exchanged."""
    axes = list(range(x.rank))
    return op.Transpose(x, perm=[*axes[:-2], axes[-1], axes[-2]])


def gemm(op: Op | Builder, a: Var, b: Var, *, ta: bool = False, tb: bool = False, alpha: Any = 1.0) -> Var:
    """alpha·op(A)·op(B) of two matrices, op being the transposition where asked for."""
    attrs = {"transA": 1 if ta else None, "transB": 1 if tb else None, "alpha": None if alpha == 1 else alpha}
    return op.Gemm(a, b, **attrs)


def rows(op: Op | Builder, x: Var) -> Var:
    """`x` as a matrix: all axes but the last in one."""
    return x if x.rank == 2 else op.Flatten(x, axis=x.rank - 1)


@dataclass(frozen=True)
class ProductSum(Symbolic):
    """α·AᵀB, with A and B the matrices of all rows of `a` and `b`: the cotangent of a matrix that multiplies rows."""

    a: Var
    b: Var
    alpha: float = 1.0

    def write(self) -> Var:
        """Emit one product."""
        o = self.a.builder
        return gemm(o, rows(o, self.a), rows(o, self.b), ta=True, alpha=self.alpha)


@linear("MatMul", wrt=(0, 1))
def matmul(op: Op, g: Var, a: Var, b: Var) -> Result:
    """Y = A·B: (G·Bᵀ, Aᵀ·G), a vector being a row on the left and a column on the right"""
    if g.shape is not None and 0 in g.shape:
        return [op.zeros_like(x) if need else None for x, need in zip((a, b), op.needs)]
    if b.rank == 1:
        return _matrix_vector(op, g, a, b)
    if a.rank == 1:
        if b.rank == 2:
            return _column(op, b, g), op.Unsqueeze(a, [1]) * g
        wide = op.Unsqueeze(g, [-2])
        if isinstance(g.dims[-1], int):
            da, db = _matmul(op, wide, op.Unsqueeze(a, [0]), b)
            return None if da is None else reshape_to(da, a), db
        # row by row: nothing may be summed, and there are batches
        return sum_to(op.ReduceSum(wide * b, [b.rank - 1], keepdims=0), a), op.Unsqueeze(a, [1]) * wide
    return _matmul(op, g, a, b)


def _column(op: Op, b: Var, g: Var) -> Var:
    """B·g for a vector g, which may be empty unless its size is known."""
    return b @ g if isinstance(g.dims[0], int) else op.Squeeze(gemm(op, op.Unsqueeze(g, [0]), b, tb=True), [0])


def _matrix_vector(op: Op, g: Var, a: Var, b: Var) -> tuple[Var | None, Var | None]:
    if a.rank == 1:
        return g * b, g * a
    return op.Unsqueeze(g, [-1]) * b, (g if g.rank == 1 else op.Reshape(g, [-1])) @ rows(op, a)


def _matmul(op: Op, g: Var, a: Var, b: Var) -> tuple[Var | None, Term | None]:
    da: Var | None = None
    db: Term | None = None
    if op.needs[0]:
        da = gemm(op, g, b, tb=True) if g.rank == b.rank == 2 else sum_to(product(g, transposed(op, b)), a)
    if op.needs[1]:
        one = _ROWS.is_enabled and b.rank == 2 and a.rank == g.rank
        db = ProductSum(a, g) if one else sum_to(product(transposed(op, a), g), b)
    return da, db


@linear("Gemm", wrt=(0, 1), bias=2)
def gemm_(op: Op, g: Var, a: Var, b: Var, c: Var | None) -> Result:
    """Y = α·A·B + β·C, A and B transposed on demand: (α·G·Bᵀ, α·Aᵀ·G, β·G summed to the shape of C)"""
    alpha, beta, ta, tb = op.attr("alpha"), op.attr("beta"), bool(op.attr("transA")), bool(op.attr("transB"))
    da: Term | None = None
    db: Term | None = None
    dc: Term | None = None
    if op.needs[0]:
        da = gemm(op, b, g, ta=tb, tb=True, alpha=alpha) if ta else gemm(op, g, b, tb=not tb, alpha=alpha)
    if op.needs[1]:
        if ta:
            db = gemm(op, g, a, ta=True, tb=True, alpha=alpha) if tb else gemm(op, a, g, alpha=alpha)
        else:
            db = ProductSum(g, a, alpha) if tb else ProductSum(a, g, alpha)
    if c is not None and op.needs[2]:
        dc = sum_rows(g, c) if beta == 1 else sum_to(g, c) * beta
    return da, db, dc


@rule("Det", wrt=(0,))
def det(op: Op, g: Var, a: Var) -> Result:
    """y = det A: g·C with the cofactors Cᵢⱼ = det (A with row i replaced by eⱼ)

    Not y·A⁻ᵀ, which has no value where A is singular; so for n·n matrices n² determinants are found, of n⁴
    elements altogether, by the same stable elimination as the primal's, and right to every order.
    """
    n = a.dims[-1] if a.shape is not None and isinstance(a.dims[-1], int) else a.dims[-2]
    if isinstance(n, int) and n * n <= MOST_WRITTEN:
        row = op.const(np.eye(n, dtype=bool).reshape(n, 1, n, 1))
        unit = op.const(np.eye(n).reshape(1, n, 1, n), a.dtype)
    else:
        index = op.Range(op.const(0), op.Squeeze(op.Shape(a, start=-1), [0]), op.const(1))
        eye = op.Equal(op.Unsqueeze(index, [1]), index)
        row, unit = op.Unsqueeze(eye, [1, 3]), op.Unsqueeze(op.Cast(eye, to=int(a.dtype or 0)), [0, 2])
    replaced = op.Where(row, unit, op.Unsqueeze(a, [-4, -3]))  # over i, j, rows, columns
    return op.Unsqueeze(g, [-2, -1]) * op.Det(replaced)
