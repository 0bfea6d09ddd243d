"""SplitToSequence as PyTorch writes an unbind: pieces of size 1, and ``keepdims=0``.

The specification ignores ``keepdims`` where a size is given, ONNX Runtime does not, nor do exporters. Without the size,
which is 1 anyhow, both mean the same: pieces that have lost the axis.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.graph import scopes


def settle_unbinding(model: ir.Model) -> None:
    """Drop the size of pieces that are to lose their axis, in place; it is 1."""
    for node in (n for graph in scopes(model.graph) for n in graph):
        if node.op_type == "SplitToSequence" and not node.domain and len(node.inputs) > 1:
            size = node.inputs[1]
            known = None if size is None or size.is_graph_input() else ir.convenience.get_const_tensor(size)
            ones = known is not None and not known.shape and int(known.numpy()) == 1
            if ones and not node.attributes.get_int("keepdims", 1):
                node.resize_inputs(1)
