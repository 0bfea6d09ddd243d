"""Dequantization: linear in the scale. The quantized numbers are integers and have no derivative.

Quantization itself rounds, so its derivative is zero (see `zero`); DynamicQuantizeLinear has one through
its scale, which its function body in the specification gives.
"""

from __future__ import annotations

from onnxgrad.ir import sum_to
from onnxgrad.rules.registry import linear


@linear("DequantizeLinear", wrt=(1,))
def dequantize_linear(op, g, x, scale, zero_point):
    """y = (x - z)·s: Σ g·(x - z) over what shares a scale: everything, a slice along the axis, or a block"""
    moved = op.cast_like(g * op.replay(x, op.full_like(scale, 1), zero_point), scale)
    if scale.rank == 0 or (scale.rank == 1 and scale.shape[0] == 1):
        return None, sum_to(moved, scale)
    axis = op.attr("axis") % x.rank
    if not op.attr("block_size"):
        return None, op.ReduceSum(moved, [a for a in range(x.rank) if a != axis], keepdims=0)
    return None, _sum_blocks(op, moved, scale, axis, op.attr("block_size"))


def _sum_blocks(op, z, scale, axis, size):
    """Sums of `z` over blocks of `size` along `axis`, of which the last may be short."""
    shape = op.shape_of(z)
    have, blocks = (op.Slice(op.shape_of(v), [axis], [axis + 1]) for v in (z, scale))
    whole = z.shape is not None and isinstance(z.shape[axis], int) and z.shape[axis] % size == 0
    if not whole:
        z = op.Pad(z, op.Concat([0], blocks * size - have, axis=0), None, [axis])
    before, after = op.Slice(shape, [0], [axis]), op.Slice(shape, [axis + 1], [z.rank])
    split = op.Reshape(z, op.Concat(before, blocks, [size], after, axis=0), allowzero=1)
    return op.ReduceSum(split, [axis + 1], keepdims=0)
