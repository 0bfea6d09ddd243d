"""Values whose elements have a constant sum, so that the gradient of the sum is zero."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.match import constant, is_standard
from onnxgrad.ir.operators import Moves, traits_of


def constant_total(value: ir.Value) -> str:
    """The operator that makes the sum of all of `value` constant; empty if there is none.

    Rows of a Softmax sum to 1, and so do they where their elements are only moved, and those of some rows.
    """
    cut: set[int] = set()  # axes that are partly reduced
    node = value.producer()
    while node is not None and is_standard(node) and node.inputs:
        source, result = node.inputs[0], node.outputs[0]
        if node.op_type == "Softmax":
            rank = 0 if result.shape is None else len(result.shape)
            return node.op_type if not cut or (rank and node.attributes.get_int("axis", -1) % rank not in cut) else ""
        if source is None or source.dtype != value.dtype:
            return ""
        if node.op_type == "Slice":
            axes = _cut_by(node)
            if axes is None:
                return ""
            cut |= axes
        elif node.op_type not in ("Cast", "Identity") and (cut or not _permutes(node)):
            return ""
        node = source.producer()
    return ""


def _permutes(node: ir.Node) -> bool:
    """True if the result has the elements of the operand, in any order and shape."""
    return traits_of(node).moves_at_most(Moves.PERMUTATION) and len(node.outputs) == 1


def _cut_by(node: ir.Node) -> set[int] | None:
    """The axes that a Slice cuts; None where that is not known."""
    source, result = node.inputs[0], node.outputs[0]
    axes = node.inputs[3] if len(node.inputs) > 3 else None
    listed = constant(axes)
    if listed is None or source is None or source.shape is None or result.shape is None:
        return None
    named = {int(k) % len(source.shape) for k in listed.flat}
    return {k for k in named if not isinstance(source.shape[k], int) or source.shape[k] != result.shape[k]}
