"""Other classes for a detector: new rows in the layers of the scores, and the sizes behind them.

Decoding and suppression stay: the constants in them that count classes or channels are changed, and a run checks the
result. Where a graph is written out for each class, it is replaced by decoding and suppression of our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder
from onnxgrad.ir.graph import add_initializer, named_values, prune, reads
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.match import constant, is_op, producer
from onnxgrad.ir.names import Names
from onnxgrad.training.detection.boxes import decode
from onnxgrad.training.detection.heads import Head, Part
from onnxgrad.training.detection.probe import noise, run_values

#: The probability of a new class before training (Lin et al. 2017).
PRIOR = 0.01
#: Boxes that overlap more are one, scores below are none, and so many boxes a picture has at most.
SUPPRESSED, LEAST_SCORE, MOST_BOXES = 0.6, 0.05, 300


def with_classes(
    model: ir.Model, head: Head, names: Sequence[str], old: Sequence[str] | None
) -> tuple[Head, list[str]]:
    """`head` with classes `names`, written into `model`, and notes.

    Rows of classes whose names are among `old` are kept; others begin near zero, with a small probability.

    Args:
        model: the detector, changed in place.
        head: of it.
        names: of the new classes.
        old: of the present classes, if they are known.

    Raises:
        BadInput: the weights of a layer of scores are not known.
    """
    kept = {} if old is None else {k: list(old).index(n) for k, n in enumerate(names) if n in old}
    if len(kept) == len(names) == head.classes and all(k == at for k, at in kept.items()):
        return head, []
    ends = [v.name or "" for v in model.graph.outputs]
    feeds = noise(model, 1, head.size)
    shapes = {n: a.shape for n, a in run_values(model, ends, feeds).items()}
    plain = model.clone()
    new = _widened(model, head, kept, len(names))
    _rewrite_sizes(model.graph, head, new)
    infer_anew(model)
    what = f"{len(names)} classes in the place of {head.classes}"
    notes = [f"{what}; {len(kept)} of the same names keep their weights" if kept else what]
    wanted = _sizes(head, new)
    try:
        found = {n: a.shape for n, a in run_values(model, ends, feeds).items()}
        if all(_follows(shapes[n], found[n], wanted) for n in ends):
            _declare(model, found)
            return new, notes
    except BadInput:
        pass
    model.graph = plain.graph
    new = _widened(model, head, kept, len(names))
    _replace_ending(model, new)
    return new, [
        *notes,
        "the ending of the model fits its classes alone: outputs are now boxes, scores, labels, picture",
    ]


def _sizes(head: Head, new: Head) -> dict[int, int]:
    """Sizes that count classes, with their new values; what is most particular comes first."""
    level, made = head.levels[0], new.levels[0]
    found: dict[int, int] = {}
    k, c = level.scores.size, made.scores.size
    each = _channels(head, level.scores.value)
    if head.kind == "yolo5":
        found |= {lv.anchors * (5 + k): lv.anchors * (5 + c) for lv in head.levels} | {5 + k: 5 + c, 1 + k: 1 + c}
    elif head.kind in ("ssd", "retinanet"):
        found |= {lv.anchors * k: lv.anchors * c for lv in head.levels}
    else:
        others = {lv.boxes.size for lv in head.levels} | {4, 5, _object_channels(head) + 4}
        found |= {n + k: n + c for n in sorted(others, reverse=True)}
    return {each: each - k + c, **found, k: c}


def _object_channels(head: Head) -> int:
    """The channels of objectness of a place."""
    objects = head.levels[0].objects
    return 0 if objects is None else objects.size


def _channels(head: Head, value: str) -> int:
    parts = [p for lv in head.levels for p in (lv.scores, lv.boxes, lv.objects) if p is not None and p.value == value]
    return max(p.start + p.size for p in parts)


def _widened(model: ir.Model, head: Head, kept: Mapping[int, int], count: int) -> Head:
    """The layers of the scores with `count` classes."""
    graph, named = model.graph, named_values(model.graph)
    background = head.background is not None
    first = 1 if head.background == 0 else 0
    size, made = count + background, []
    seen: dict[tuple[ir.Value | None, int], ir.Value] = {}
    names = Names.of(model)
    for level in head.levels:
        part = level.scores
        node = _layer(named[part.value])
        weight = _source(node.inputs[1])
        for k, operand in enumerate(node.inputs[1:], 1):
            held = _source(operand)
            array = constant(held)
            if held is None or array is None:
                raise BadInput(f"the weights of {part.value!r}, which makes scores, are not known before a run")
            if (weight, k) not in seen:  # maps may share a layer; equal biases of others are apart
                axis = array.ndim - 1 if node.op_type == "MatMul" or _is_column(node) else 0
                rows = _rows(np.moveaxis(array, axis, 0), part, level.anchors, size, first, kept, head)
                name = names.exactly(f"{held.name}_{count}_classes")
                tensor = ir.tensor(np.ascontiguousarray(np.moveaxis(rows, 0, axis)), name=name)
                seen[weight, k] = add_initializer(graph, tensor)
            node.replace_input_with(k, seen[weight, k])
        bias = _bias_behind(node) if node.op_type == "MatMul" else None
        if bias is not None:
            place, held = bias
            rows = _rows(constant(held).reshape(-1), part, 1, size, first, kept, head)  # type: ignore[union-attr]
            tensor = ir.tensor(rows, name=names.exactly(f"{held.name}_{count}_classes"))
            place[0].replace_input_with(place[1], add_initializer(graph, tensor))
        grown = size - part.size
        objects = level.objects
        boxes = level.boxes
        if boxes.value == part.value and boxes.start > part.start:
            boxes = replace(boxes, start=boxes.start + grown)
        made.append(replace(level, scores=Part(part.value, part.start, size), boxes=boxes, objects=objects))
    return replace(head, classes=count, levels=tuple(made))


def _source(value: ir.Value | None) -> ir.Value | None:
    """The value that Identity nodes pass on as `value`."""
    while (node := producer(value, "Identity")) is not None:
        value = node.inputs[0]
    return value


def _layer(value: ir.Value) -> ir.Node:
    """The layer with weights that makes `value`: its producer, or a MatMul before an Add."""
    node = value.producer()
    while node is not None and is_op(node, ("Add", "Reshape", "Squeeze", "Identity")):
        data = next((v for v in node.inputs if constant(v) is None), None)
        node = None if data is None else data.producer()
    if node is None or not is_op(node, ("Conv", "MatMul", "Gemm")):
        raise BadInput(f"{value.name!r} does not come from a layer whose classes can be replaced")
    return node


def _is_column(node: ir.Node) -> bool:
    return node.op_type == "Gemm" and not node.attributes.get_int("transB", 0)


def _bias_behind(node: ir.Node) -> tuple[tuple[ir.Node, int], ir.Value] | None:
    for use in node.outputs[0].uses():
        if is_op(use.node, "Add") and (held := use.node.inputs[1 - use.idx]) is not None and constant(held) is not None:
            return (use.node, 1 - use.idx), held
    return None


def _rows(
    array: np.ndarray, part: Part, anchors: int, size: int, first: int, kept: Mapping[int, int], head: Head
) -> np.ndarray:
    """`array` [a·each, …] with the rows of `part` replaced by `size` rows."""
    each = len(array) // anchors
    apart = array.reshape(anchors, each, *array.shape[1:])
    old = apart[:, part.start : part.start + part.size]
    draw = np.random.default_rng(0)
    new = np.empty((anchors, size, *array.shape[1:]), array.dtype)
    if array.ndim == 1:
        new[:] = 0.0 if head.background is not None else np.log(PRIOR / (1 - PRIOR))
    else:
        new[:] = draw.normal(0, 0.01, new.shape)
    if head.background is not None:
        new[:, head.background] = old[:, head.background]
    for k, at in kept.items():
        new[:, k + first] = old[:, at + first]
    found = [apart[:, : part.start], new, apart[:, part.start + part.size :]]
    return np.concatenate(found, axis=1).reshape(-1, *array.shape[1:])


def _rewrite_sizes(graph: ir.Graph, head: Head, new: Head) -> None:
    """Change the constants behind the head that count classes: shapes, splits, slices, and divisors of flat indices."""
    sizes = _sizes(head, new)
    k, c = head.levels[0].scores.size, new.levels[0].scores.size
    named = named_values(graph)
    reached = {named[name] for name in head.values}
    shaped: list[ir.Node] = []
    for node in graph:
        if reached.isdisjoint(reads(node)):
            continue
        reached.update(node.outputs)
        if is_op(node, ("Reshape", "Expand", "Tile")):
            shaped.append(node)
            _change(graph, node, 1, sizes, one=True)
        elif is_op(node, "Split"):
            _change(graph, node, 1, sizes, one=True)
        elif is_op(node, "Slice"):
            for place in (1, 2):
                _change(graph, node, place, sizes, one=True)
        elif is_op(node, ("Mod", "Div")) and node.outputs[0].dtype in (ir.DataType.INT64, ir.DataType.INT32):
            _change(graph, node, 1, {k: c}, one=True)
    for node in shaped:  # shapes that the graph joins: [N, -1, classes, H, W]
        shape = node.inputs[1]
        joined = None if shape is None else shape.producer()
        if is_op(joined, "Concat"):
            for place in range(len(joined.inputs)):
                if _change(graph, joined, place, sizes, one=True):
                    break


def _change(graph: ir.Graph, node: ir.Node, place: int, sizes: Mapping[int, int], one: bool) -> bool:
    """Replace the most particular of `sizes` in a constant operand of whole numbers."""
    held = node.inputs[place] if place < len(node.inputs) else None
    array = constant(held)
    if held is None or array is None or array.dtype.kind != "i":
        return False
    flat = array.reshape(-1).copy()
    for old, new in sizes.items():
        places = np.flatnonzero(flat == old)
        if len(places):
            flat[places[0] if one else places] = new
            break
    else:
        return False
    name = f"{held.name}_{node.name or node.outputs[0].name}_sizes"
    node.replace_input_with(place, add_initializer(graph, ir.tensor(flat.reshape(array.shape), name=name)))
    return True


def _follows(old: tuple[int, ...], new: tuple[int, ...], sizes: Mapping[int, int]) -> bool:
    """True if `new` is the shape `old` with other numbers of classes; rows that scores select may be more or fewer."""
    return len(old) == len(new) and all(n == o or sizes.get(o) == n or k == 0 for k, (o, n) in enumerate(zip(old, new)))


def infer_anew(model: ir.Model) -> None:
    """Infer all shapes again, whatever was declared."""
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.shape = None
    infer_model(model)


def _declare(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fill in sizes of outputs that inference does not know, as a run has them; the first axis is left open."""
    for value in model.graph.outputs:
        shape = shapes[value.name or ""]
        if value.shape is None:
            value.shape = ir.Shape([None] * len(shape))


def _replace_ending(model: ir.Model, head: Head) -> None:
    """Decoding and suppression of our own, for a graph whose own is written out for each class."""
    graph = model.graph
    model.graph.outputs.clear()
    infer_anew(model)
    b = Builder(graph)
    named = named_values(graph)
    found = decode(b, head, {name: b.var(named[name]) for name in head.values})
    scores = b.Transpose(found.probabilities(b, head), perm=[0, 2, 1])
    chosen = b.NonMaxSuppression(
        found.boxes, scores, np.array([MOST_BOXES]), np.float32([SUPPRESSED]), np.float32([LEAST_SCORE])
    )
    picture, label, row = (b.Slice(chosen, [k], [k + 1], [1]) for k in range(3))
    ends = {
        "boxes": b.GatherND(found.boxes, b.Concat(picture, row, axis=1)),
        "scores": b.GatherND(scores, chosen),
        "labels": b.Squeeze(label, [1]),
        "picture": b.Squeeze(picture, [1]),
    }
    for name, var in ends.items():
        (var,) = b.append(ir.Node("", "Identity", [var.value]))
        if (other := named.get(name)) is not None:
            other.name = b.names.fresh(name)
        var.value.name = name
        graph.outputs.append(var.value)
    prune(graph)
