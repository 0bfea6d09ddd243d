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
from onnxgrad.ir.graph import add_initializer, dependents, named_values, prune, reads
from onnxgrad.ir.infer.inference import infer_model
from onnxgrad.ir.match import constant, is_op, producer
from onnxgrad.ir.names import Names
from onnxgrad.training.detection.boxes import decode
from onnxgrad.training.detection.head import Head, MapPart
from onnxgrad.training.detection.probe import noise, run_values
from onnxgrad.training.detection.queries import unstack

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
    if head.kind == "detr":
        unstack(model.graph)  # the other layers of a stack have scores of the old classes
    ends = [v.name or "" for v in model.graph.outputs]
    feeds = noise(model, 1, head.size)
    shapes = _shapes_behind(model, head, ends, feeds)
    plain = model.clone()
    new = _widen_scores(model, head, kept, len(names))
    _Sizes(model.graph, head, new, shapes)
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
    new = _widen_scores(model, head, kept, len(names))
    _replace_ending(model, new)
    return new, [
        *notes,
        "the ending of the model fits its classes alone: outputs are now boxes, scores, labels, picture",
    ]


def _shapes_behind(
    model: ir.Model, head: Head, ends: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> dict[str, tuple[int, ...]]:
    """The shapes of `ends`, and of the values between the head and them."""
    named = named_values(model.graph)
    behind = dependents(model.graph, [named[name] for name in head.values])
    inner = [v.name for v in behind if v.name and isinstance(v.type, ir.TensorType)]
    return {n: a.shape for n, a in run_values(model, list(dict.fromkeys([*ends, *inner])), feeds).items()}


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
        others = {lv.boxes.size for lv in head.levels} | {4, 5}
        found |= {n + k: n + c for n in sorted(others, reverse=True)}
    return {each: each - k + c, **found, k: c}


def _channels(head: Head, value: str) -> int:
    parts = [p for lv in head.levels for p in (lv.scores, lv.boxes, lv.objects) if p is not None and p.value == value]
    return max(p.start + p.size for p in parts)


def _widen_scores(model: ir.Model, head: Head, kept: Mapping[int, int], count: int) -> Head:
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
        made.append(replace(level, scores=MapPart(part.value, part.start, size), boxes=boxes, objects=objects))
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
        inner = [v for v in node.inputs if v is not None and constant(v) is None]
        like = [v for v in inner if v.shape is not None and value.shape is not None and v.shape[-1] == value.shape[-1]]
        data = next(iter(like or inner), None)  # a score of quality may be added to those of all classes (D-FINE)
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
    array: np.ndarray, part: MapPart, anchors: int, size: int, first: int, kept: Mapping[int, int], head: Head
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


class _Sizes:
    """Changes the constants behind the head that count classes: shapes, splits, slices, divisors of flat indices.

    Args:
        graph: of the detector, whose layers of scores are new.
        head: as it was.
        new: as it is.
        shapes: of the values behind the head, as they were.

    Attributes:
        changed: values along the way whose sizes change.
        places: indices of scores.
    """

    def __init__(self, graph: ir.Graph, head: Head, new: Head, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.graph, self.shapes, self.sizes = graph, shapes, _sizes(head, new)
        count = head.levels[0].scores.size
        self.single = {count: self.sizes[count]}
        named = named_values(graph)
        self.changed = {named[level.scores.value] for level in head.levels}
        self.places: set[ir.Value] = set()
        for node in graph:
            if not self.changed.isdisjoint(reads(node)) or not self.places.isdisjoint(reads(node)):
                self.follow(node)

    def follow(self, node: ir.Node) -> None:
        """Change the constants of `node`, and note what its outputs are."""
        data = next((v for v in node.inputs if v is not None), None)
        if is_op(node, ("Mod", "Div")) and node.outputs[0].dtype in (ir.DataType.INT64, ir.DataType.INT32):
            _change(self.graph, node, 1, self.single)
        if is_op(node, ("TopK", "ArgMax", "NonZero", "NonMaxSuppression")):
            self.places.update(node.outputs)
            return
        if not self.places.isdisjoint(reads(node)):
            self.places.update(node.outputs)
            picked = [use.node.inputs[0] for v in node.outputs for use in v.uses() if is_op(use.node, _PICKS)]
            if is_op(node, ("Expand", "Tile")) and not self.changed.isdisjoint(picked):
                _change(self.graph, node, 1, self.single)  # an index for the scores of all classes of a place
        if is_op(node, _PICKS):
            self.changed.update(node.outputs if data in self.changed else ())
            return
        if is_op(node, ("Shape", "Size")) or self.changed.isdisjoint(reads(node)):
            return
        if is_op(node, "Split") and self._axis_size(node, node.attributes.get_int("axis", 0)) in self.sizes:
            before = constant(node.inputs[1])
            _change(self.graph, node, 1, self.sizes)
            after = constant(node.inputs[1])
            if before is not None and after is not None:
                self.changed.update(v for v, o, n in zip(node.outputs, before, after) if o != n)
                return
        if is_op(node, "Slice"):
            if self._slice(node):
                self.changed.update(node.outputs)
            return
        if is_op(node, ("Reshape", "Expand", "Tile")) and not _change(self.graph, node, 1, self.sizes):
            joined = producer(node.inputs[1], "Concat")  # a shape that the graph joins: [N, -1, classes, H, W]
            for place in range(0 if joined is None else len(joined.inputs)):
                if _change(self.graph, joined, place, self.sizes):  # type: ignore[arg-type]
                    break
        self.changed.update(node.outputs)

    def _axis_size(self, node: ir.Node, axis: int) -> int | None:
        shape = self.shapes.get(node.inputs[0].name or "" if node.inputs[0] is not None else "")
        return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None

    def _slice(self, node: ir.Node) -> bool:
        """Change the bounds of a Slice of channels. True if the size of its result changes."""
        starts, ends, axes = (constant(v) for v in node.inputs[1:4]) if len(node.inputs) > 3 else (None,) * 3
        if starts is None or ends is None or axes is None or len(axes) != 1:
            return True
        size = self._axis_size(node, int(axes[0]))
        if size not in self.sizes:
            return True
        rest, old = size - next(iter(self.single)), next(iter(self.single))
        bounds = [min(max(int(v) + size if v < 0 else int(v), 0), size) for v in (starts[0], ends[0])]
        moves = {size: self.sizes[size]} | (
            {} if rest in (old, 0) else {old: self.single[old]} if rest not in bounds else {}
        )
        for place, bound, given in zip((1, 2), bounds, (starts[0], ends[0])):
            if bound in moves and 0 < given <= size:
                _change(self.graph, node, place, {int(given): moves[bound]})
        length = [moves.get(v, v) for v in bounds]
        return length[1] - length[0] != bounds[1] - bounds[0]


#: Operators that pick rows of their first operand by indices.
_PICKS = ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND")


def _change(graph: ir.Graph, node: ir.Node, place: int, sizes: Mapping[int, int]) -> bool:
    """Replace the most particular of `sizes` in a constant operand of whole numbers.

    Of several that are equal, the third of five counts ([N, anchors, classes, H, W]), and otherwise the last.
    """
    held = node.inputs[place] if place < len(node.inputs) else None
    array = constant(held)
    if held is None or array is None or array.dtype.kind != "i":
        return False
    flat = array.reshape(-1).copy()
    old = next((size for size in sizes if size in flat), None)
    if old is None:
        return False
    flat[2 if len(flat) == 5 and flat[2] == old else np.flatnonzero(flat == old)[-1]] = sizes[old]
    name = f"{held.name}_{node.name or node.outputs[0].name}_sizes"
    node.replace_input_with(place, add_initializer(graph, ir.tensor(flat.reshape(array.shape), name=name)))
    return True


def _follows(old: tuple[int, ...], new: tuple[int, ...], sizes: Mapping[int, int]) -> bool:
    """True if `new` is the shape `old` with other numbers of classes; rows that scores select may be more or fewer."""
    return len(old) == len(new) and all(n == o or sizes.get(o) == n or k == 0 for k, (o, n) in enumerate(zip(old, new)))


def infer_anew(model: ir.Model) -> None:
    """Infer all shapes again, without those that were declared."""
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
        found.boxes,
        scores,
        np.array([MOST_BOXES]),
        np.array([SUPPRESSED], np.float32),
        np.array([LEAST_SCORE], np.float32),
    )
    picture, label, row = (b.Slice(chosen, [k], [k + 1], [1]) for k in range(3))
    ends = {
        "boxes": b.GatherND(found.boxes, b.Concat(picture, row, axis=1)),
        "scores": b.GatherND(scores, chosen),
        "labels": b.Squeeze(label, [1]),
        "picture": b.Squeeze(picture, [1]),
    }
    for name, var in ends.items():
        var = b.copy(var)
        if (other := named.get(name)) is not None:
            other.name = b.names.fresh(name)
        var.value.name = name
        graph.outputs.append(var.value)
    prune(graph)
