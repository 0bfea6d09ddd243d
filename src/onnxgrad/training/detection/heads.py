"""Recognition of a detector's head: the last layers, whose results a loss reads in place of decoded boxes.

The walk goes back from the outputs, through decoding and suppression, to the last convolutions or matrix products. The
kind follows from how many there are for each size of a map, and from their channels:

- ``dfl``: classes, and distances of the four edges as distributions (YOLOv8, v9, v10, v11, NanoDet, PicoDet);
- ``yolox``: classes, an objectness, and offsets with logarithms of sizes (YOLOX, YuNet);
- ``yolo5``: one layer for several anchors, each with box, objectness and classes (YOLOv3, v5, v7);
- ``fcos``: classes, a centre-ness, and distances of the four edges behind Relu, from square anchors (torchvision);
- ``ssd``, ``retinanet``: classes and offsets for anchors, with a background or without;
- ``detr``: queries.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import reach, reads
from onnxgrad.ir.match import constant, constant_tensor, is_op, producer
from onnxgrad.training.detection.anchors import centre_offset, find_anchors, in_pixels, sizes_of_anchors, usual_offset
from onnxgrad.training.detection.head import (
    Head,
    Level,
    MapPart,
    UnknownHead,
    activation_behind,
    nodes_behind,
    unknown_kind,
)
from onnxgrad.training.detection.masks import with_masks
from onnxgrad.training.detection.probe import noise, noted_offset, picture_input, picture_size, run_values
from onnxgrad.training.detection.queries import query_head

_LAYERS = ("Conv", "MatMul", "Gemm")
#: Bins of a distribution over distances, where only the channels tell: of YOLOv8, of NanoDet and PicoDet.
_BINS = (16, 8)


@dataclass(frozen=True)
class _End:
    """A last layer: its result, its number of channels, and the size of its map."""

    value: ir.Value
    channels: int
    shape: tuple[int, ...]


def find_head(
    model: ir.Model,
    image_size: int | tuple[int, int] | None = None,
    source: Any = None,
    offset: float | None = None,
) -> Head:
    """The head of `model`, an opened model.

    Args:
        model: with types and shapes.
        image_size: side of pictures, or height and width, where the model leaves them open.
        source: the path of the model, for messages.
        offset: the centre of a place, in places, of a head of distances in one layer. Default: as the model shows it.

    Raises:
        BadInput: it has none that is known.
    """
    image, size = picture_input(model.graph), picture_size(model, image_size)
    bins = _distribution(model.graph)
    ends = last_layers(model.graph)
    try:
        if any(is_op(v.producer(), ("MatMul", "Gemm")) for v in ends):
            return query_head(model, image, size, ends)
        return _grid(model, image, size, ends, bins, offset)
    except UnknownHead as error:
        maps = ", ".join(repr(v.name) for v in ends) or "none"
        path = f"{os.fspath(source)}: " if isinstance(source, (str, os.PathLike)) else ""
        kind, hint = unknown_kind(model.graph, ends)
        raise BadInput(
            f"{path}the head of the detector is not known: {kind}{error}; its last layers are {maps}\n  hint: {hint}"
        ) from None


def refusal(model: ir.Model) -> str:
    """The reason why a `model` that chooses boxes cannot be trained as a detector; empty for other models."""
    kinds = {n.op_type for n in model.graph.all_nodes()}
    maps = [v for v in last_layers(model.graph) if is_op(v.producer(), "Conv")]
    if not (kinds & {"RoiAlign", "MaxRoiPool", "NonMaxSuppression"} or ("TopK" in kinds and len(maps) > 1)):
        return ""
    try:
        found = find_head(model)
    except BadInput as error:
        return str(error)
    return "" if known_head(model) is not None else f"{found.text}, which is only one map"


def known_head(model: ir.Model) -> Head | None:
    """The head of `model` if it is a detector whose maps have several sizes, or whose queries are boxes; else None."""
    try:
        found = find_head(model)
    except BadInput:
        return None
    return found if len(found.levels) > 1 or found.kind == "detr" else None


def _weights(node: ir.Node) -> ir.TensorProtocol | None:
    return next((t for v in node.inputs[1:2] if (t := constant_tensor(v)) is not None), None)


def _is_projection(node: ir.Node) -> bool:
    """True for the expectation of a distribution: weights 0, 1, 2, …"""
    held = _weights(node)
    if held is None or not 1 < held.size <= 64:
        return False
    return bool(np.array_equal(np.asarray(held.numpy()).ravel(), np.arange(held.size)))


def _distribution(graph: ir.Graph) -> int:
    """The bins of distances whose expectation the graph computes; 0 if it computes none."""
    found = (_weights(n) for n in graph if is_op(n, _LAYERS) and _is_projection(n))
    return next((int(held.size) for held in found if held is not None), 0)


def last_layers(graph: ir.Graph) -> list[ir.Value]:
    """Results of the last layers with weights on all paths to the outputs, in the order of the graph."""

    def is_layer(value: ir.Value) -> bool:
        node = producer(value, _LAYERS)
        return node is not None and _weights(node) is not None and not _is_projection(node)

    def operands_of(value: ir.Value) -> list[ir.Value]:
        node = value.producer()
        return [] if node is None or is_layer(value) or is_op(node, ("Shape", "Size")) else reads(node)

    found = {v for v in reach(graph.outputs, operands_of) if is_layer(v)}
    return [v for node in graph for v in node.outputs if v in found]


def _grid(
    model: ir.Model, image: ir.Value, size: tuple[int, int], ends: Sequence[ir.Value], bins: int, offset: float | None
) -> Head:
    """A head on maps."""
    shapes = run_values(model, [v.name or "" for v in ends], noise(model, 1, size))
    sized = [_End(v, s[1], s[2:]) for v in ends if len(s := shapes[v.name or ""].shape) == 4]
    sized, beside = _without_others(sized, bins)
    others = tuple(e.value.name or "" for e in beside)
    levels = [[e for e in sized if e.shape == shape] for shape in dict.fromkeys(e.shape for e in sized)]
    levels.sort(key=lambda ends: -ends[0].shape[0] * ends[0].shape[1])
    if not levels or len({len(ends) for ends in levels}) > 1:
        raise UnknownHead(f"its maps have {', '.join(str(len(ends)) for ends in levels) or 'no'} layers")
    about = {"image": image.name or "", "size": size, "others": others}
    count = len(levels[0])
    if count == 1:
        return _combined(model, levels, bins, about, offset)
    if count == 2:
        found = _two(model, levels, bins, about)
        return with_masks(model.graph, found, [(e.value, (e.channels, *e.shape)) for e in beside])
    return _fcos(model, levels, about) or _with_objects(levels, about)


def _without_others(ends: list[_End], bins: int) -> tuple[list[_End], list[_End]]:
    """Layers of distances and classes, and those of masks or key points beside them (YOLOv8, YOLO26)."""
    scored = [e for e in ends if is_op(activation_behind(e.value), "Sigmoid")]
    boxes = [e for e in ends if e.channels == 4 * (bins or 1)]
    boxes = [e for e in boxes if not bins and e not in scored] or boxes
    shapes = [e.shape for e in boxes]
    scores = [e for e in scored if e not in boxes and e.shape in shapes]
    if not boxes or len(boxes) != len(scores):
        return ends, []
    return [e for e in ends if e in boxes or e in scores], [e for e in ends if e not in boxes and e not in scores]


def _level(
    ends: Sequence[_End], scores: MapPart, boxes: MapPart, objects: MapPart | None = None, anchors: int = 1
) -> Level:
    return Level((ends[0].shape[0], ends[0].shape[1]), scores, boxes, objects, anchors)


def _all(end: _End) -> MapPart:
    return MapPart(end.value.name or "", 0, end.channels)


def _combined(
    model: ir.Model, levels: list[list[_End]], bins: int, about: dict[str, Any], offset: float | None
) -> Head:
    """One layer for each map: several anchors (YOLOv5), or classes beside distributions (NanoDet, PicoDet)."""
    anchors = [_anchor_count(ends[0]) for ends in levels]
    if all(anchors):
        numbers = {ends[0].channels // a for ends, a in zip(levels, anchors)}
        if len(numbers) == 1 and (each := numbers.pop()) > 5:
            made = []
            for ends, a in zip(levels, anchors):
                name = ends[0].value.name or ""
                made.append(_level(ends, MapPart(name, 5, each - 5), MapPart(name, 0, 4), MapPart(name, 4, 1), a))
            found = Head("yolo5", each - 5, tuple(made), **about)
            return Head("yolo5", each - 5, tuple(made), anchors=sizes_of_anchors(model, found), **about)
    splits = [_split_sizes(ends[0].value) for ends in levels]
    if None in splits or len(set(splits)) > 1 or (pair := splits[0]) is None:
        raise UnknownHead("each map has one layer, whose channels are not told apart")
    at = next((k for k, s in enumerate(pair) if s == 4 * bins or (not bins and s in [4 * b for b in _BINS])), None)
    if at is None:
        raise UnknownHead(f"its channels are {pair}, none of which are distances")
    starts = (0, pair[0])
    made = []
    for ends in levels:
        name = ends[0].value.name or ""
        made.append(_level(ends, MapPart(name, starts[1 - at], pair[1 - at]), MapPart(name, starts[at], pair[at])))
    found = Head("dfl", pair[1 - at], tuple(made), bins=pair[at] // 4, **about)
    centred = offset if offset is not None else noted_offset(model)
    if centred is None:
        centred = centre_offset(model, found)
    return replace(found, offset=usual_offset(model, found) if centred is None else centred)


def _anchor_count(end: _End) -> int:
    """The number of anchors that the Reshape behind a layer separates; 0 for none."""
    for use in end.value.uses():
        asked = constant(use.node.inputs[1]) if is_op(use.node, "Reshape") else None
        shape = None if asked is None else tuple(map(int, asked.ravel()))
        if shape is not None and len(shape) == 5 and shape[1] > 0 and shape[1] * shape[2] == end.channels:
            return shape[1]
    return 0


def _split_sizes(value: ir.Value) -> tuple[int, int] | None:
    """The channels of the two parts that a Split, or Slices, make of a map."""
    bounds: set[int] = set()
    channels = None if value.shape is None else value.shape[1]
    for node in (use.node for use in value.uses()):
        if is_op(node, "Split") and len(node.outputs) == 2:
            parts = [None if v.shape is None else v.shape[1] for v in node.outputs]
            if all(isinstance(p, int) for p in parts):
                return parts[0], parts[1]  # type: ignore[return-value]
        if is_op(node, "Slice"):
            bounds |= {int(c.ravel()[0]) for v in node.inputs[1:3] if (c := constant(v)) is not None and c.size == 1}
    inner = [b for b in bounds if isinstance(channels, int) and 0 < b < channels]
    return (inner[0], channels - inner[0]) if len(inner) == 1 and isinstance(channels, int) else None


def _two(model: ir.Model, levels: list[list[_End]], bins: int, about: dict[str, Any]) -> Head:
    """Two layers for each map: classes and boxes."""
    pairs = [tuple(e.channels for e in ends) for ends in levels]
    wanted = [4 * bins] if bins else [4 * b for b in _BINS]
    same = len({frozenset(p) for p in pairs}) == 1
    width = next((w for w in wanted if same and w in pairs[0]), None)
    if width is not None:
        made = []
        for ends in levels:
            box = next(e for e in _in_order(ends) if e.channels == width)
            score = next(e for e in ends if e is not box)
            made.append(_level(ends, _all(score), _all(box)))
        return Head("dfl", made[0].scores.size, tuple(made), bins=width // 4, one_to_one=_chooses_best(model), **about)
    return _plain_distances(model, levels, about) or _anchored(model, levels, about)


def _plain_distances(model: ir.Model, levels: list[list[_End]], about: dict[str, Any]) -> Head | None:
    """Classes beside distances without distributions (YOLO26), decoded by a grid; None for other layers."""
    made = []
    for ends in levels:
        plain = [e for e in ends if not is_op(activation_behind(e.value), "Sigmoid")]
        boxes = [e for e in (plain if len(plain) == 1 else _in_order(ends)) if e.channels == 4]
        if len(plain) > 1 or not boxes:
            return None
        (scores,) = (e for e in ends if e is not boxes[0])
        made.append(_level(ends, _all(scores), _all(boxes[0])))
    found = Head("dfl", made[0].scores.size, tuple(made), one_to_one=_chooses_best(model), **about)
    if any(is_op(n, "Exp") for n in nodes_behind(model.graph, [e.value for ends in levels for e in ends], _MEETING)):
        return None
    offset = centre_offset(model, found)
    return None if offset is None else replace(found, offset=offset)


def _chooses_best(model: ir.Model) -> bool:
    """True if the model picks the best predictions and suppresses none: each object has one."""
    kinds = {n.op_type for n in model.graph}
    return "TopK" in kinds and "NonMaxSuppression" not in kinds


def _in_order(ends: Sequence[_End]) -> list[_End]:
    """Layers of one map as the Concat behind them joins them, if one does."""
    for node in (use.node for use in ends[0].value.uses()):
        if is_op(node, "Concat") and all(e.value in node.inputs for e in ends):
            return sorted(ends, key=lambda e: node.inputs.index(e.value))
    return list(ends)


def _with_objects(levels: list[list[_End]], about: dict[str, Any]) -> Head:
    """Three layers or more for each map: classes, objectness, boxes, and perhaps key points."""
    made = []
    for ends in levels:
        boxes = [e for e in ends if e.channels == 4]
        single = [e for e in ends if e.channels == 1]
        others = [e for e in ends if e.channels not in (1, 4)]
        if not boxes or not single:
            raise UnknownHead(f"a map has layers of {', '.join(str(e.channels) for e in ends)} channels")
        box = boxes[0]
        named = [e for e in single if "obj" in (e.value.name or "").lower() or _output_name(e.value).startswith("obj")]
        objects = named[0] if named else single[0]
        left = [e for e in (*single, *boxes, *others) if e not in (box, objects)]
        scores = next((e for e in left if e.channels == 1), None) if len(single) > 1 else left[0] if left else None
        if scores is None or (len(ends) > 3 and len(single) < 2):
            raise UnknownHead(f"a map has layers of {', '.join(str(e.channels) for e in ends)} channels")
        made.append(_level(ends, _all(scores), _all(box), _all(objects)))
    return Head("yolox", made[0].scores.size, tuple(made), **about)


def _fcos(model: ir.Model, levels: list[list[_End]], about: dict[str, Any]) -> Head | None:
    """Classes, and distances behind Relu beside a centre-ness of the same features; None for other layers."""
    made = []
    for ends in levels:
        box = next((e for e in ends if e.channels == 4 and any(is_op(u.node, "Relu") for u in e.value.uses())), None)
        if box is None or len(ends) > 3:
            return None
        single = [e for e in ends if e.channels == 1 and _features(e) is _features(box)]
        scores = [e for e in ends if e not in (box, *single)]
        if len(single) != 1 or len(scores) != 1:
            return None
        made.append(_level(ends, _all(scores[0]), _all(box), _all(single[0])))
    found = Head("fcos", made[0].scores.size, tuple(made), **about)
    return replace(found, anchors=in_pixels(find_anchors(model, found), found))


def _features(end: _End) -> ir.Value | None:
    """The operand of a layer."""
    node = end.value.producer()
    return None if node is None else node.inputs[0]


def _output_name(value: ir.Value) -> str:
    """The name of the output that shows `value` alone; empty without one."""
    for _ in range(8):
        if value.is_graph_output():
            return value.name or ""
        users = {use.node for use in value.uses()}
        if len(users) != 1 or is_op(node := users.pop(), "Concat"):
            return ""
        value = node.outputs[0]
    return ""


def _anchored(model: ir.Model, levels: list[list[_End]], about: dict[str, Any]) -> Head:
    """Classes and offsets for anchors that the graph computes or holds."""
    boxes_first = [_is_boxes(model, ends) for ends in levels]
    made = []
    for ends, first in zip(levels, boxes_first):
        box, score = (ends[0], ends[1]) if first else (ends[1], ends[0])
        if box.channels % 4 or score.channels % (box.channels // 4):
            raise UnknownHead(f"a map has layers of {ends[0].channels} and {ends[1].channels} channels")
        count = box.channels // 4
        part = MapPart(score.value.name or "", 0, score.channels // count)
        made.append(_level(ends, part, MapPart(box.value.name or "", 0, 4), None, count))
    numbers = {level.scores.size for level in made}
    if len(numbers) > 1:
        raise UnknownHead(f"its maps have {sorted(numbers)} classes")
    found = Head("retinanet", numbers.pop(), tuple(made), **about)
    anchors = in_pixels(find_anchors(model, found), found)
    tail = nodes_behind(model.graph, [e.value for ends in levels for e in ends])
    softmax = any(is_op(n, "Softmax") for n in tail)
    classes = found.classes - softmax
    kind = "ssd" if softmax else "retinanet"
    return Head(kind, classes, tuple(made), anchors=anchors, background=0 if softmax else None, **about)


def _is_boxes(model: ir.Model, ends: Sequence[_End]) -> bool:
    """True if the first of two layers computes boxes: Exp, of widths and heights, follows it and not the other."""
    first, second = (
        any(is_op(n, "Exp") for n in nodes_behind(model.graph, [e.value], _MEETING)) for e in (ends[0], ends[1])
    )
    if first != second:
        return first
    scored = [
        any(is_op(n, ("Softmax", "Sigmoid")) for n in nodes_behind(model.graph, [e.value], _MEETING)) for e in ends
    ]
    if scored[0] != scored[1]:
        return scored[1]
    fits = [a.channels % 4 == 0 and b.channels % (a.channels // 4) == 0 for a, b in (ends, ends[::-1])]
    return fits[0] if fits[0] != fits[1] else ends[0].channels < ends[1].channels


#: Operators at which scores and boxes meet.
_MEETING = frozenset({"TopK", "NonMaxSuppression", "GatherND", "NonZero", "Where", "Greater", "ArgMax"})
