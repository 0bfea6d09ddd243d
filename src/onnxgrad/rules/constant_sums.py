"""Values whose elements have a constant sum, so that the gradient of the sum says nothing."""

from __future__ import annotations

import onnx_ir as ir

_MOVES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def constant_total(value: ir.Value) -> str:
    """The operator for which the sum of all of `value` is constant; empty if there is none.

    Rows of a Softmax sum to 1, and so do they where their elements are only moved.
    """
    node = value.producer()
    while node is not None and node.domain in ("", "ai.onnx") and node.inputs:
        if node.op_type == "Softmax":
            return node.op_type
        source = node.inputs[0]
        if node.op_type not in _MOVES or source is None or source.dtype != value.dtype:
            return ""
        node = source.producer()
    return ""
