"""Operators that move elements without changing them."""

from __future__ import annotations

import numpy as np

from onnxgrad.ir import sum_to
from onnxgrad.rules.registry import linear


@linear("Transpose")
def transpose(op, g):
    """y = x with axes permuted: g with the inverse permutation"""
    perm = op.attr("perm")
    return op.Transpose(g, perm=None if perm is None else [int(i) for i in np.argsort(perm)])


@linear("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(op, g, x):
    """y = x in another shape: g in the shape of x"""
    return op.reshape(g, op.shape_of(x))


@linear("Expand")
def expand(op, g, x):
    """y = x broadcast to a shape: g summed over the broadcast axes"""


    return sum_to(g, x)
