"""Batches of any size for a detector that was exported for one picture."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import add_initializer, dependents
from onnxgrad.ir.match import constant, is_op, sizes
from onnxgrad.training.detection.classes import infer_anew
from onnxgrad.training.detection.head import Head
from onnxgrad.training.detection.probe import noise, picture_input, run_values

#: Differences of results for one picture and for two, relative to the largest: sums in another order.
_TOLERANCE = 1e-3


def open_batch(model: ir.Model, head: Head) -> str:
    """Make the batch of `model` dynamic, in place. Returns a note; empty if it is dynamic already.

    Shapes that are written down for one picture begin with 0, the size of their operand. Two pictures are then run
    together and each alone. If the results differ, the model is left as it was.
    """
    image = picture_input(model.graph)
    assert image.shape is not None
    if not isinstance(image.shape[0], int):
        return ""
    if image.shape[0] != 1:
        return f"the model takes batches of {image.shape[0]}"
    before = model.clone()
    _rewrite(model.graph, image)
    image.shape = ir.Shape(["N", *list(image.shape)[1:]])
    for value in model.graph.outputs:
        value.shape = None
    try:
        infer_anew(model)
        if _agrees(model, head, head.values):
            ends = [v.name or "" for v in model.graph.outputs]
            whole = "" if _agrees(model, head, ends) else "; its outputs are those of one picture"
            return f"the model was exported for one picture at a time; its batch is now dynamic{whole}"
    except BadInput:
        pass
    model.graph = before.graph
    return "the model takes one picture at a time: its shapes are written down in more than one way; batches are of 1"


def _rewrite(graph: ir.Graph, image: ir.Value) -> None:
    """Shapes behind the pictures that begin with 1."""
    behind = dependents(graph, [image])
    for node in graph:
        if node.outputs[0] not in behind:
            continue
        if is_op(node, "Reshape") and (shape := constant(node.inputs[1])) is not None:
            if len(shape) > 1 and shape[0] == 1 and not node.attributes.get_int("allowzero", 0):
                _replace(graph, node, 1, np.concatenate([[0], shape[1:]]))
        elif is_op(node, "Resize") and len(node.inputs) > 3 and (size := constant(node.inputs[3])) is not None:
            known = sizes(node.inputs[0])
            if known is not None and size[0] == 1:
                scales = np.array([1.0, *(s / k for s, k in zip(size[1:], known[1:]))], np.float32)
                _replace(graph, node, 2, scales)
                node.replace_input_with(3, None)


def _replace(graph: ir.Graph, node: ir.Node, place: int, array: np.ndarray) -> None:
    name = f"{node.name or node.outputs[0].name}_of_batch"
    dtype = array.dtype if array.dtype.kind == "f" else np.int64
    node.replace_input_with(place, add_initializer(graph, ir.tensor(array.astype(dtype), name=name)))


def _agrees(model: ir.Model, head: Head, values: list[str]) -> bool:
    """True if two pictures together have the results that each has alone."""
    pair = noise(model, 2, head.size)
    try:
        together = run_values(model, values, pair)
        alone = [run_values(model, values, {n: a[k : k + 1] for n, a in pair.items()}) for k in range(2)]
    except BadInput:
        return False
    for name, found in together.items():
        parts = [a[name] for a in alone]
        if any(p.shape[1:] != found.shape[1:] or not p.ndim for p in parts) or len(found) != sum(map(len, parts)):
            return False
        wanted = np.concatenate(parts)
        if np.abs(found - wanted).max(initial=0) > _TOLERANCE * max(1.0, float(np.abs(wanted).max(initial=0))):
            return False
    return True
