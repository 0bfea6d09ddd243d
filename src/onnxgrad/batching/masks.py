"""Control flow that differs between directions: every branch runs, and a mask selects the results of each direction.

This costs the work of all branches, and requires more: a branch whose result is discarded must not fail, and its
derivative must be finite, since 0·∞ is NaN and would reach the selected results. So masks are used for total operators.
Other operators run in a Scan over the directions, in which each direction takes its own branch.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir import Var
from onnxgrad.ir.graph import subgraphs
from onnxgrad.ir.operators import traits_of


def is_total(graph: ir.Graph) -> bool:
    """True if everything that `graph` computes is total."""
    return all(traits_of(n).total and all(map(is_total, subgraphs(n))) for n in graph)


def mask_of(x: Var) -> Var:
    """The mask of directions from `x`, a stack with one element per direction, as a vector."""
    return x if x.shape is not None and x.rank == 1 else x.builder.Reshape(x, [-1])


def select(mask: Var, x: Var, y: Var) -> Var:
    """`x` for the directions where `mask` is true, else `y`."""
    b = x.builder
    mask = b.Reshape(Var(b, mask.value), [-1, *[1] * (x.rank - 1)])
    if x.dtype == ir.DataType.BOOL:  # ONNX Runtime has no Where of them
        return b.Or(b.And(mask, x), b.And(b.Not(mask), y))
    return b.Where(mask, x, y)


def any_of(mask: Var) -> Var:
    """True if `mask` holds for any direction."""
    b = mask.builder
    return b.ReduceSum(b.Cast(mask, to=int(ir.DataType.INT32)), keepdims=0) > 0
