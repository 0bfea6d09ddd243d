"""Products of matrices: MatMul, Gemm, Einsum."""

from __future__ import annotations

from onnxgrad.ir import sum_to
from onnxgrad.rules.registry import linear


def _transposed(op, x):
    """The last two axes of `x` exchanged."""
    axes = list(range(x.rank))
    return op.Transpose(x, perm=[*axes[:-2], axes[-1], axes[-2]])


@linear("MatMul", wrt=(0, 1))
def matmul(op, g, a, b):
    """Y = A·B: (G·Bᵀ, Aᵀ·G), a vector being a row on the left and a column on the right"""
    if a.rank == 1:
        g = op.Unsqueeze(g, [-2 if b.rank > 1 else 0])
    if b.rank == 1:
        g = op.Unsqueeze(g, [-1])
    row = op.Unsqueeze(a, [0]) if a.rank == 1 else a
    column = op.Unsqueeze(b, [1]) if b.rank == 1 else b
    da = sum_to(g @ _transposed(op, column), row) if op.needs[0] else None
    db = sum_to(_transposed(op, row) @ g, column) if op.needs[1] else None
    if da is not None and a.rank == 1:
        da = op.Squeeze(da, [0])
    if db is not None and b.rank == 1:
        db = op.Squeeze(db, [1])
    return da, db
