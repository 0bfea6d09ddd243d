"""Reductions along axes."""

from __future__ import annotations

from onnxgrad.ir import expand_to
from onnxgrad.rules.registry import linear


def restored(op, g, x, axes):
    """`g`, the cotangent of a reduction of `x` along `axes`, with the reduced axes back as size 1."""
    if op.attr("keepdims") or g.rank == x.rank:
        return g
    if axes is None:
        return op.reshape(g, [1] * x.rank)
    return op.Unsqueeze(g, axes)


@linear("ReduceSum")
def reduce_sum(op, g, x, axes):
    """y = Σ x along axes: g, expanded to the shape of x"""
    return expand_to(restored(op, g, x, axes), x)
