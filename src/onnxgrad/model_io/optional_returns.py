"""SplitToSequence as PyTorch writes an unbind: pieces of size 1, and ``keepdims=0``.

The specification ignores ``keepdims`` where a size is given, ONNX Runtime does not, nor do exporters. Without the size,
which is 1 anyhow, both mean the same: pieces that have lost the axis.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.graph import scopes
from onnxgrad.ir.match import constant, is_op


def settle_unbinding(model: ir.Model) -> None:
    """Remove the size of pieces that lose their axis, in place; it is 1."""
    for node in (n for graph in scopes(model.graph) for n in graph):
        if is_op(node, "SplitToSequence") and len(node.inputs) > 1:
            size = constant(node.inputs[1])
            ones = size is not None and size.shape == () and int(size) == 1
            if ones and not node.attributes.get_int("keepdims", 1):
                node.resize_inputs(1)
