"""Operators that move every element to a new place: permutations, reshapes, copies, joins and cuts."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrad.ir import Var, reshape_to, sum_to
from onnxgrad.ir.operators import Kind
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear
from onnxgrad.rules.rule import Result


@linear("Transpose")
def transpose(op: Op, g: Var) -> Result:
    """y = x with axes permuted: g with the inverse permutation"""
    perm = op.attr("perm")
    return op.Transpose(g, perm=None if perm is None else [int(i) for i in np.argsort(perm)])


@linear("Reshape", "Flatten")
def reshape(op: Op, g: Var, x: Var) -> Result:
    """y = x in another shape: g in the shape of x"""
    return reshape_to(g, x)


@linear("Squeeze")
def squeeze(op: Op, g: Var, x: Var, axes: Var | None) -> Result:
    """y = x without axes of size 1: g with these axes"""
    return reshape_to(g, x) if axes is None else op.Unsqueeze(g, axes)


@linear("Unsqueeze")
def unsqueeze(op: Op, g: Var, x: Var, axes: Var) -> Result:
    """y = x with more axes of size 1: g without these axes"""
    return op.Squeeze(g, op.Reshape(axes, [-1]) if axes.rank == 0 else axes)  # one number, as exporters write it


@linear("Expand")
def expand(op: Op, g: Var, x: Var) -> Result:
    """y = x broadcast to a shape: g summed over the broadcast axes"""
    return sum_to(g, x)


@linear("Tile")
def tile(op: Op, g: Var, x: Var, repeats: Var) -> Result:
    """y[r·n + i] = x[i] along each axis: Σᵣ g[r·n + i]"""
    times = repeats.const
    axes: list[int] = []
    parts: list[Any] = []
    for axis in range(x.rank):
        if times is None or times[axis] != 1:
            axes.append(len(parts))
            parts.append(op.Slice(repeats, [axis], [axis + 1]) if times is None else [int(times[axis])])
        parts.append(op.shape_of(x, axis, axis + 1))
    return op.ReduceSum(op.reshape(g, op.join(*parts)), axes, keepdims=0) if axes else g


@linear("Concat", wrt=None, joint=True)
def concat(op: Op, g: Var, *xs: Var) -> Result:
    """y = [x₁ … xₙ] along an axis: g cut into the sizes of the parts"""
    if len(op.inputs) == 1:
        return g
    axis = op.attr("axis")
    sizes = op.join(*[op.shape_of(x, axis, axis + 1 or None) for x in op.operands])
    return op.emit("Split", g, sizes, axis=axis, outputs=len(op.inputs))


@linear("Split", kind=Kind.ALONG_AXIS)
def split(op: Op, g: Any, x: Var) -> Result:
    """(y₁ … yₙ) = x cut along an axis: [g₁ … gₙ], with zeros where a part has no cotangent"""
    parts = [g] if op.single else list(g)
    parts = [op.zeros_like(op.output(i)) if part is None else part for i, part in enumerate(parts)]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=op.attr("axis"))


@linear("DepthToSpace", kind=Kind.ROWS)
def depth_to_space(op: Op, g: Var, x: Var) -> Result:
    """y = blocks of x's channels spread over space: the blocks of g gathered into channels"""
    size = op.attr("blocksize")
    back = op.SpaceToDepth(g, blocksize=size)
    if op.attr("mode") == "DCR":
        return back
    apart = op.join(op.shape_of(x, 0, 1), [size * size, -1], op.shape_of(x, 2))  # from (s, s, c) to (c, s, s)
    return reshape_to(op.Transpose(op.reshape(back, apart), perm=[0, 2, 1, 3, 4]), x)


@linear("SpaceToDepth", kind=Kind.ROWS)
def space_to_depth(op: Op, g: Var) -> Result:
    """y = blocks of x gathered into channels: g's channels spread over space"""
    return op.DepthToSpace(g, blocksize=op.attr("blocksize"), mode=op.attr("mode"))  # a mode came with opset 28


@linear("Trilu")
def trilu(op: Op, g: Var, x: Var, k: Var) -> Result:
    """y = x on one side of a diagonal, else 0: g on that side, else 0"""
    return op.replay(g, k)


@linear("ReverseSequence")
def reverse_sequence(op: Op, g: Var, x: Var, lengths: Var) -> Result:
    """y = the first lᵢ steps of each sequence in reverse order, a permutation P = P⁻¹: P·g"""
    return op.replay(g, lengths)
