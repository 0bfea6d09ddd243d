"""Scatters that lose sums: updates of one place, of which all but one are overwritten.

PyTorch's older exporter writes ``index_add`` (and ``scatter_add`` below opset 16) as x + ScatterElements(zeros, index,
u), which adds only one of the updates at an index that occurs twice. Gradients are those of all updates.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import constant, is_op, is_zero

_MOVES = ("Expand", "Unsqueeze", "Squeeze", "Reshape", "Identity", "Cast")
_REMEDY = "exports by dynamo=True, and of scatter_add from opset_version=16 on, add all"


def lost_updates(model: ir.Model) -> list[str]:
    """Lines about scatters of `model` that overwrite updates, or do so if an index occurs twice."""
    found: dict[str, None] = {}
    scatters = ("ScatterElements", "Scatter", "ScatterND")
    for node in (n for graph in model.graphs() for n in graph if is_op(n, scatters)):
        if node.attributes.get_string("reduction", "none") != "none":
            continue
        is_added = any(is_op(use.node, "Add") for use in node.outputs[0].uses())
        repeats, adds = _repeats(node), is_added and is_zero(node.inputs[0])
        if adds and repeats is not False:
            when = "that occurs twice" if repeats else "if it occurs twice"
            found[f"{node.op_type} and Add add only one of the updates of an index {when}; {_REMEDY}"] = None
        elif repeats:
            found[f"{node.op_type} writes several updates to one place; ONNX leaves open which one stays"] = None
    return list(found)


def _repeats(node: ir.Node) -> bool | None:
    """True if two updates have one place; None if that depends on the input."""
    value = node.inputs[1]
    while value is not None and constant(value) is None and is_op(moved := value.producer(), _MOVES):
        value = moved.inputs[0]
    index = constant(value)
    if index is None:
        return None
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if node.op_type == "ScatterND":
        if value is not node.inputs[1] or not index.size:
            return None if index.size else False
        places = index.reshape(-1, index.shape[-1])
        return len(np.unique(places, axis=0)) < len(places)
    if value is not node.inputs[1]:  # a vector, expanded to the updates
        return len(np.unique(index)) < index.size
    axis = node.attributes.get_int("axis", 0)
    size = shape[axis] if shape is not None else None
    places = np.sort(index % size if isinstance(size, int) and size else index, axis)
    return bool((np.diff(places, axis=axis) == 0).any())
