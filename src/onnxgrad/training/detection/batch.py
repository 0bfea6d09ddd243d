"""Batches of any size for a detector that was exported for one picture."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import add_initializer, dependents
from onnxgrad.ir.match import constant, is_op, sizes
from onnxgrad.training.detection.classes import infer_anew
from onnxgrad.training.detection.head import Head
from onnxgrad.training.detection.probe import PORTABLE, noise, picture_input, run_values
from onnxgrad.training.graph.inner_values import inner_values

#: Differences of results for one picture and for two, relative to the largest: sums in another order.
_TOLERANCE = 1e-3


def open_batch(model: ir.Model, head: Head) -> str:
    """Make the batch of `model` dynamic, in place. Returns a note; empty if it is dynamic already.

    Shapes that are written down for one picture begin with 0, the size of their operand; a graph that takes the first
    picture out of its batch prepares all. Two pictures are then run together and each alone. If the results differ, the
    same is tried with shapes that have the batch and another axis in the first; then the model is left as it was.
    """
    image = picture_input(model.graph)
    assert image.shape is not None
    if not isinstance(image.shape[0], int):
        return ""
    if image.shape[0] != 1:
        return f"the model takes batches of {image.shape[0]}"
    before = model.clone()
    for rewrite in (_rewrite, _rewrite_merged):
        image = picture_input(model.graph)
        known = {v: sizes(v) for node in model.graph for v in node.outputs}
        image.shape = ir.Shape(["N", *list(image.shape or ())[1:]])
        rewrite(model.graph, image, known)
        _keep_batch(model.graph, image)
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
        model.graph = before.clone().graph
    return "the model takes one picture at a time: its shapes are written down in more than one way; batches are of 1"


def _keep_batch(graph: ir.Graph, image: ir.Value) -> None:
    """Prepare all pictures where the graph takes one out of its batch and puts it back (torchvision).

    What else reads that picture, as sizes of results do, reads the first one.
    """
    batch: dict[ir.Value, ir.Value] = {image: image}  # a value on the way, and that of all pictures
    alone: set[ir.Value] = set()  # values without the axis of the batch
    for node in list(graph):
        data = node.inputs[0] if node.inputs else None
        if data is None or data not in batch or len(node.outputs) != 1:
            continue
        out, every, b = node.outputs[0], batch[data], Builder(graph, before=node)
        if data not in alone:
            if is_op(node, ("Resize", "Identity")) or (is_op(node, "Concat") and len(node.inputs) == 1):
                batch[out] = out
                size = node.inputs[3] if is_op(node, "Resize") and len(node.inputs) > 3 else None
                if size is not None:
                    ends = b.Slice(b.var(size), [2], [4], [0])  # behind sizes that were traced for one
                    node.replace_input_with(3, b.Concat(b.shape_of(b.var(data), 0, 2), ends, axis=0).value)
            elif is_op(node, "Split") and node.attributes.get_int("axis", 0) == 0:
                batch[out] = every
                node.replace_input_with(0, b.Slice(b.var(data), [0], [1], [0]).value)
            elif is_op(node, "Squeeze") and _is_first(node):
                batch[out] = every
                alone.add(out)
                node.replace_input_with(0, b.Slice(b.var(data), [0], [1], [0]).value)
            elif is_op(node, "Gather") and node.attributes.get_int("axis", 0) == 0 and _is_first(node):
                batch[out] = every
                alone.add(out)
        elif is_op(node, ("Sub", "Div", "Mul", "Add", "Cast")):
            batch[out] = b.append(ir.Node("", node.op_type, [every, *node.inputs[1:]], node.attributes.values()))[
                0
            ].value
            alone.add(out)
        elif is_op(node, "Pad") and len(node.inputs) < 4 and sizes(node.inputs[1]) is not None:
            pads, axes = b.var(node.inputs[1]), sizes(node.inputs[1])[0] // 2  # type: ignore[index, arg-type]
            zero = b.const(np.zeros(1, np.int64))
            wider = b.Concat(
                zero, b.Slice(pads, [0], [axes], [0]), zero, b.Slice(pads, [axes], [2 * axes], [0]), axis=0
            )
            operands = [every, wider.value, *node.inputs[2:]]
            batch[out] = b.append(ir.Node("", "Pad", operands, node.attributes.values()))[0].value
            alone.add(out)
        elif is_op(node, "Unsqueeze") and _is_first(node):
            out.replace_all_uses_with(every)
            batch[every] = every


def _is_first(node: ir.Node) -> bool:
    """True if the constant operand of `node`, an axis or an index, is 0."""
    held = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return held is not None and held.size == 1 and int(held.reshape(-1)[0]) == 0


def _rewrite(graph: ir.Graph, image: ir.Value, known: Mapping[ir.Value, tuple[int, ...] | None]) -> None:
    """Shapes behind the pictures that begin with 1; `known`: the sizes of values for one picture."""
    behind = dependents(graph, [image])
    for node in graph:
        if node.outputs[0] not in behind:
            continue
        if is_op(node, "Reshape") and (shape := constant(node.inputs[1])) is not None:
            if len(shape) > 1 and shape[0] == 1 and not node.attributes.get_int("allowzero", 0):
                _replace(graph, node, 1, np.concatenate([[0], shape[1:]]))
        elif is_op(node, "Resize") and len(node.inputs) > 3 and (size := constant(node.inputs[3])) is not None:
            given = sizes(node.inputs[0])
            if given is not None and size[0] == 1:
                scales = np.array([1.0, *(s / k for s, k in zip(size[1:], given[1:]))], np.float32)
                _replace(graph, node, 2, scales)
                node.replace_input_with(3, None)


def _rewrite_merged(graph: ir.Graph, image: ir.Value, known: Mapping[ir.Value, tuple[int, ...] | None]) -> None:
    """Shapes behind the pictures whose first axis has the batch in it, and tokens that are joined to each picture.

    Attention splits its heads so: [1, T, heads·d] to [heads, T, d], and back.
    """
    behind = dependents(graph, [image])
    rows: Var | None = None
    for node in list(graph):
        data, made = node.inputs[0] if node.inputs else None, known.get(node.outputs[0])
        if node.outputs[0] not in behind or data is None or not made:
            continue
        if is_op(node, "Reshape") and constant(node.inputs[1]) is not None and len(made) > 1:
            given = known.get(data)
            if given and (given[0] == made[0] or 1 in (given[0], made[0])):
                _replace(graph, node, 1, np.array([0 if given[0] == made[0] else -1, *made[1:]]))
        elif is_op(node, "Concat") and node.attributes.get_int("axis", 0) not in (0, -len(made)):
            for place, value in enumerate(node.inputs):
                if value is None or value in behind:
                    continue
                b = Builder(graph, before=node)
                rows = b.shape_of(b.var(image), 0, 1) if rows is None else rows
                ones = np.ones(len(made) - 1, np.int64)
                node.replace_input_with(place, b.Expand(b.var(value), b.Concat(rows, ones, axis=0)).value)
    _rewrite(graph, image, known)


def _replace(graph: ir.Graph, node: ir.Node, place: int, array: np.ndarray) -> None:
    name = f"{node.name or node.outputs[0].name}_of_batch"
    dtype = array.dtype if array.dtype.kind == "f" else np.int64
    node.replace_input_with(place, add_initializer(graph, ir.tensor(array.astype(dtype), name=name)))


def _agrees(model: ir.Model, head: Head, values: list[str]) -> bool:
    """True if two pictures together have the results that each has alone."""
    pair = noise(model, 2, head.size)
    try:
        together = run_values(model, values, pair)
        each = ({n: a[k : k + 1] if len(a) == 2 else a for n, a in pair.items()} for k in range(2))
        alone = list(inner_values(model, values, each, PORTABLE))
    except BadInput:
        return False
    for name, found in together.items():
        parts = [a[name] for a in alone]
        if (
            not found.size
            or any(p.shape[1:] != found.shape[1:] or not p.ndim for p in parts)
            or len(found) != sum(map(len, parts))
        ):
            return False
        wanted = np.concatenate(parts)
        if np.abs(found - wanted).max(initial=0) > _TOLERANCE * max(1.0, float(np.abs(wanted).max(initial=0))):
            return False
    return True
