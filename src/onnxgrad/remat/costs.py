"""The cost of running a node again: an estimate in seconds, good for comparing nodes with each other."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from onnxgrad.ir.operators import traits_of

#: For one core: products and sums of matrix products, bytes moved by simpler operators, and the overhead per node.
FLOPS, BYTES, START = 5e10, 5e9, 3e-6

#: How much longer a slow operator takes per byte.
SLOW = 4.0


def seconds(node: ir.Node, size: Mapping[ir.Value, int]) -> float:
    """The estimated time of `node`."""
    moved = sum(size.get(v, 0) for v in (*node.inputs, *node.outputs) if v is not None)
    traits = traits_of(node)
    found = START + moved / BYTES * (SLOW if traits.slow else 1.0)
    if traits.is_product:
        found += 2 * size.get(node.outputs[0], 0) / 4 * _terms(node) / FLOPS
    return found


def _terms(node: ir.Node) -> float:
    """The number of products that are summed for an element of the result."""
    weights = node.inputs[1]
    dims = [d if isinstance(d, int) else 1 for d in weights.shape or ()] if weights is not None else []
    if node.op_type == "Conv":
        return math.prod(dims[1:])
    if node.op_type == "ConvTranspose":
        return math.prod(dims) / max(1, dims[1] if len(dims) > 1 else 1)
    if node.op_type == "Gemm" and len(dims) == 2:
        return dims[1] if node.attributes.get_int("transB", 0) else dims[0]
    return dims[-2] if len(dims) > 1 else 64


def meanwhile(node: ir.Node, size: Mapping[ir.Value, int]) -> int:
    """The workspace of ONNX Runtime while `node` runs, in bytes, without operands and results.

    The runtime writes a loss out, as operators of its own.
    """
    if node.domain:
        return 0
    if node.op_type == "SoftmaxCrossEntropyLoss":
        scores = node.inputs[0]
        return 2 * size.get(scores, 0) if scores is not None else 0
    return 0
