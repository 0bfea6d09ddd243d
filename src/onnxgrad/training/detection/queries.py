"""Heads of queries (DETR and its descendants): scores [N, Q, K] beside boxes [N, Q, 4].

Both are outputs of the model, or values behind which its own post-processing begins (RT-DETR). Decoders that return the
results of all layers stack them and pick those of the last, which are the head here.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.graph import ancestors, prune, reach, reads
from onnxgrad.ir.match import constant, is_op, not_none, producer
from onnxgrad.training.detection.head import Head, Level, MapPart, UnknownHead, activation_behind


def query_head(model: ir.Model, image: ir.Value, size: tuple[int, int], ends: Sequence[ir.Value]) -> Head:
    """The head of queries of `model`.

    Args:
        model: with types and shapes.
        image: the input of pictures.
        size: (height, width) of pictures.
        ends: results of its last layers.

    Raises:
        UnknownHead: it has no scores beside boxes.
    """
    scores, boxes = _outputs(model.graph) or _behind_post_processing(model.graph, ends)
    shape = scores.shape
    number = None if shape is None else shape[-1]
    if not isinstance(number, int):
        raise UnknownHead("the number of its classes is not declared")
    scores, boxes = (part_of_stack(v) for v in (scores, boxes))
    ended = producer(scores, ("Sigmoid", "Softmax"))
    if ended is None:
        ended = activation_behind(scores)
    elif ended.inputs[0] is not None:
        scores = part_of_stack(ended.inputs[0])
    # decoders that sample features (deformable), or that move points of reference, whose logits are computed
    # (conditional, DAB), have sigmoid scores; the others have a class of no object
    moved = any(is_op(n, "Log") for n in ancestors(model.graph, [boxes]))
    sigmoid = is_op(ended, "Sigmoid") or moved or any(is_op(n, "GridSample") for n in model.graph.all_nodes())
    level = Level((0, 0), MapPart(scores.name or "", 0, number), MapPart(boxes.name or "", 0, 4))
    return Head(
        "detr", number - (not sigmoid), (level,), image.name or "", size, one_to_one=True,
        background=None if sigmoid else -1, varifocal=sigmoid and _varifocal(model.graph, boxes),
    )  # fmt: skip


def _varifocal(graph: ir.Graph, boxes: ir.Value) -> bool:
    """True if queries begin at the places of the encoder whose best class has the largest score (RT-DETR, D-FINE).

    Those of Deformable DETR begin by the first class alone, and LW-DETR's sizes of boxes are exponentials.
    """
    nodes = ancestors(graph, [boxes])
    chosen = (producer(n.inputs[0], "ReduceMax") for n in nodes if is_op(n, "TopK"))
    return any(n is not None for n in chosen) and not any(is_op(n, "Exp") for n in nodes)


def _outputs(graph: ir.Graph) -> tuple[ir.Value, ir.Value] | None:
    """The outputs of scores and of boxes; None if they are others."""
    floats = [v for v in graph.outputs if v.dtype in FLOATS and v.shape is not None and len(v.shape) == 3]
    boxes = [v for v in floats if v.shape is not None and v.shape[-1] == 4]
    boxes = [v for v in boxes if "box" in (v.name or "").lower()] or boxes[:1]
    scores = [v for v in floats if v not in boxes]
    return (scores[0], boxes[0]) if len(boxes) == len(scores) == 1 else None


def _behind_post_processing(graph: ir.Graph, ends: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """The logits and the boxes that the model's own choice of the best queries reads."""

    def is_boxes(value: ir.Value) -> bool:
        return producer(value, "Sigmoid") is not None and _is_rows(value, 4)

    def operands_of(value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        if node is None or value in ends or is_boxes(value) or is_op(node, ("Shape", "Size")):
            return []
        return [part_of_stack(v) for v in reads(node)]

    reached = reach([part_of_stack(v) for v in graph.outputs], operands_of)
    boxes = {v for v in reached if is_boxes(v)}
    logits = {_biased(v) for v in reached if v in ends}
    logits = {v for v in logits if _is_rows(v) and v not in boxes}
    if len(boxes) != 1 or len(logits) != 1:
        raise UnknownHead("its outputs are no boxes [N, Q, 4] beside scores [N, Q, K], and none are before them")
    return logits.pop(), boxes.pop()


def _is_rows(value: ir.Value, width: int | None = None) -> bool:
    """True for [N, Q, width]."""
    return value.shape is not None and len(value.shape) == 3 and width in (None, value.shape[-1])


def _biased(value: ir.Value) -> ir.Value:
    """The sum of the result of a product and its bias, or `value` without one."""
    users = [use.node for use in value.uses()]
    added = len(users) == 1 and is_op(users[0], "Add") and any(constant(v) is not None for v in users[0].inputs)
    return users[0].outputs[0] if added else value


def part_of_stack(value: ir.Value) -> ir.Value:
    """The value that was stacked with others and picked again as `value`; `value` itself if it was not."""
    node = value.producer()
    while is_op(node, "Identity") and node.inputs[0] is not None:
        value, node = node.inputs[0], node.inputs[0].producer()
    if not is_op(node, "Gather") or (index := constant(node.inputs[1])) is None or index.ndim:
        return value
    axis = node.attributes.get_int("axis", 0)
    joined = producer(node.inputs[0], "Concat")
    if (
        joined is None
        or joined.attributes.get_int("axis", 0) != axis
        or not -len(joined.inputs) <= index < len(joined.inputs)
    ):
        return value
    stacked = [producer(v, "Unsqueeze") for v in joined.inputs]
    if any(n is None or _axes(n) != [axis] for n in stacked):
        return value
    return not_none(not_none(stacked[int(index)]).inputs[0])


def _axes(node: ir.Node) -> list[int] | None:
    held = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if held is None else [int(a) for a in held.reshape(-1)]


def unstack(graph: ir.Graph) -> None:
    """Read the results of one layer directly where they are picked out of a stack of all, in place."""
    for node in list(graph):
        picked = node.outputs[0]
        if is_op(node, "Gather") and (part := part_of_stack(picked)) is not picked:
            if picked.is_graph_output():
                direct = ir.Node("", "Identity", [part])
                graph.insert_before(node, direct)
                name, picked.name = picked.name, f"{picked.name}_of_stack"
                part = direct.outputs[0]
                part.name, part.type, part.shape = name, picked.type, picked.shape
            picked.replace_all_uses_with(part, replace_graph_outputs=True)
    prune(graph)
