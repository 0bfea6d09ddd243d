"""Losses of detectors as graphs: of boxes, classes and objectness, against the labels that an assigner pairs.

A loss is a model whose inputs are raw values of the detector, by their names there, and labels [N, M, 5]. Its first
result is the sum; the terms are further results. Each kind of head has the loss that its authors trained it with:

- ``dfl``: CIoU, distribution focal loss and cross entropy, TaskAligned (Ultralytics: 7.5, 1.5, 0.5);
- ``yolox``: 1 - IoU², cross entropies of objectness and classes, SimOTA (5, 1, 1);
- ``yolo5``: CIoU, objectness by the overlap, classes (0.05, 1, 0.5 times 3 / levels, …);
- ``ssd``: smooth L1 and softmax with three hard negatives for each positive;
- ``retinanet``: L1 and focal loss;
- ``fcos``: GIoU, focal loss, and cross entropy of the centre-ness;
- ``detr``: classes, L1 and GIoU of the cheapest pairing (1, 5, 2).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import named_values, prune
from onnxgrad.ir.match import not_none
from onnxgrad.training.detection.assigners import (
    Labels,
    match_anchors,
    number,
    sample_centres,
    sim_ota,
    task_aligned,
)
from onnxgrad.training.detection.boxes import EPS, VARIANCES, Decoded, at, decode, hold_constant, overlap
from onnxgrad.training.detection.head import Head
from onnxgrad.training.detection.matching import query_loss
from onnxgrad.training.detection.recipe import BOX_LOSSES
from onnxgrad.training.detection.terms import Positives, cross_entropies, focal, smooth
from onnxgrad.training.loss.loss_function import total

Terms = dict[str, Var]


def labels_of(model: ir.Model) -> str:
    """The name of the input of labels: one that no value of `model` has."""
    held = {v.name for v in model.graph.inputs} | set(named_values(model.graph))
    return next(name for name in ("labels", "boxes_to_learn", "onnxgrad_labels") if name not in held)


def detection_loss(model: ir.Model, head: Head, box_loss: str | None = None) -> ir.Model:
    """The loss of `head`, a graph.

    Args:
        model: the detector, which declares the raw values.
        head: of it.
        box_loss: the overlap of predicted and labelled boxes: see `BOX_LOSSES`. Default: as the authors of the head.

    Raises:
        BadInput: there is no such overlap, or it is not a part of this loss.
    """
    if box_loss is not None and (box_loss not in BOX_LOSSES or head.kind in ("ssd", "retinanet")):
        raise BadInput(f"box_loss is {', '.join(BOX_LOSSES)}, of heads without anchors of SSD, not {box_loss!r}")
    named = named_values(model.graph)
    imports = {"": model.graph.opset_imports[""]}
    graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="detection")
    loss = ir.Model(graph, ir_version=10)
    values: dict[str, Var] = {}
    builder = Builder(graph)
    for name in head.values:
        like = named[name]
        shape = None if like.shape is None else ir.Shape(["N", *list(like.shape)[1:]])
        value = ir.Value(name=name, type=like.type, shape=shape)
        graph.inputs.append(value)
        values[name] = builder.var(value)
    given = ir.Value(name=labels_of(model), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", "M", 5]))
    graph.inputs.append(given)
    found = decode(builder, head, values)
    labels = Labels.of(builder, builder.var(given), head.classes)
    write = query_loss if head.kind == "detr" else _LOSSES[head.kind]
    terms = write(builder, head, found, labels, box_loss)
    total: Var | None = None
    for name, term in terms.items():
        term = builder.copy(term)
        term.value.name = f"{name}_loss"
        terms[name] = term
        total = term if total is None else total + term
    assert total is not None
    total = builder.copy(total)
    total.value.name = "detection_loss"
    graph.outputs.extend([total.value, *(t.value for t in terms.values())])
    prune(graph)
    return loss


def _of_distances(b: Builder, head: Head, found: Decoded, labels: Labels, box_loss: str | None) -> Terms:
    paired = task_aligned(b, head, found, labels)
    targets = paired.classes * b.Unsqueeze(paired.weight, [-1])
    count = b.Max(total(b, targets), 1.0)
    rows = Positives(b, paired.positive)
    places, boxes = rows.places(not_none(found.places)), rows(paired.boxes)
    weight, stride = rows(paired.weight), at(b, places, 2, 4)
    twice = b.Concat(stride, stride, axis=-1)
    overlaps = overlap(b, rows(found.boxes) / twice, boxes / twice, box_loss or "ciou")
    centre = at(b, places, 0, 2)
    wanted = b.Concat(centre - at(b, boxes, 0, 2), at(b, boxes, 2, 4) - centre, axis=-1) / twice
    terms = {
        "box": b.Mul(total(b, (1.0 - overlaps) * weight) / count, 7.5),
        "classes": b.Mul(total(b, cross_entropies(b, found.scores, targets)) / count, 0.5),
    }
    if head.bins > 1:  # axes from 0: ONNX Runtime reduces no rows along -1 to a wrong shape
        wanted = b.Clip(wanted, 0.0, head.bins - 1.01)
        low = b.Floor(wanted)
        shares = b.Unsqueeze(wanted - low, [-1])
        steps = b.const(np.arange(head.bins, dtype=np.float32))
        low = b.Unsqueeze(low, [-1])
        expected = number(b, b.Equal(steps, low)) * (1.0 - shares) + number(b, b.Equal(steps, low + 1.0)) * shares
        logs = b.LogSoftmax(b.Reshape(rows(found.encoded), [0, 4, head.bins]), axis=-1)
        misses = b.Neg(b.ReduceMean(b.ReduceSum(logs * expected, [2], keepdims=0), [1], keepdims=0))
    else:  # distances as shares of the picture (Ultralytics, without distributions)
        scale = twice / b.const(np.array([head.size[1], head.size[0]] * 2, np.float32))
        misses = b.ReduceMean(b.Abs((rows(found.encoded) - wanted) * scale), [1], keepdims=0)
    return {**terms, "distances": b.Mul(total(b, misses * weight) / count, 1.5)}


def _of_offsets(b: Builder, head: Head, found: Decoded, labels: Labels, box_loss: str | None) -> Terms:
    paired = sim_ota(b, head, found, labels)
    count = b.Max(total(b, paired.positive), 1.0)
    rows = Positives(b, paired.positive)
    overlaps = overlap(b, rows(found.boxes), rows(paired.boxes), box_loss or "iou", 1e-16 if box_loss is None else EPS)
    misses = 1.0 - (overlaps**2.0 if box_loss is None else overlaps)
    targets = rows(paired.classes * b.Unsqueeze(paired.weight, [-1]))
    return {
        "box": b.Mul(total(b, misses) / count, 5.0),
        "objects": total(b, cross_entropies(b, not_none(found.objects), b.Unsqueeze(paired.positive, [-1]))) / count,
        "classes": total(b, cross_entropies(b, rows(found.scores), targets)) / count,
    }


#: Balance of the objectness of three levels, or of four and five (YOLOv5).
_BALANCE = {3: (4.0, 1.0, 0.4)}
_BALANCE_OF_MORE = (4.0, 1.0, 0.25, 0.06, 0.02)


def _of_anchor_sizes(b: Builder, head: Head, found: Decoded, labels: Labels, box_loss: str | None) -> Terms:
    """Every anchor of a similar shape, in the place of a centre and the two places that are next to it."""
    levels, start = len(head.levels), 0
    balance = _BALANCE.get(levels, _BALANCE_OF_MORE)
    boxes = objects = classes = b.const(np.float32(0))
    middle = b.Mul(at(b, labels.boxes, 0, 2) + at(b, labels.boxes, 2, 4), 0.5)
    size = at(b, labels.boxes, 2, 4) - at(b, labels.boxes, 0, 2)
    for k, (level, stride) in enumerate(zip(head.levels, head.strides)):
        count = level.shape[0] * level.shape[1] * level.anchors
        part = slice(start, start + count)
        start += count
        anchors = np.tile(not_none(head.anchors)[k], (level.shape[0] * level.shape[1], 1)).astype(np.float32)
        ratio = b.Unsqueeze(size, [2]) / b.const(anchors[None, None])
        fits = b.ReduceMax(b.Max(ratio, b.Reciprocal(ratio)), [-1], keepdims=0) < 4.0
        cells = b.Div(middle, stride)
        borders = np.array([level.shape[1], level.shape[0]], np.float32)
        near = _neighbours(b, cells, borders, np.repeat(_cells(level.shape), level.anchors, axis=0))
        mask = number(b, fits) * near * b.Unsqueeze(labels.there, [2])  # [N, M, a·H·W]
        rows = b.Transpose(b.NonZero(hold_constant(b, mask)), perm=[1, 0])  # several labels of a place count each
        of_place = b.Concat(at(b, rows, 0, 1), at(b, rows, 2, 3), axis=-1)
        of_label = at(b, rows, 0, 2)

        def take(x: Var, part: slice = part, of_place: Var = of_place) -> Var:
            return b.GatherND(b.Slice(x, [part.start], [part.stop], [1]), of_place)

        many = b.Max(b.cast_like(b.size_of(rows, 0), mask), 1.0)
        own = b.Div(b.GatherND(labels.boxes, of_label), stride)
        overlaps = overlap(b, b.Div(take(found.boxes), stride), own, box_loss or "ciou")
        boxes = boxes + total(b, 1.0 - overlaps) / many
        if head.classes > 1:
            entropies = cross_entropies(b, take(found.scores), b.GatherND(labels.one_hot, of_label))
            classes = classes + total(b, entropies) / (many * float(head.classes))
        logits = b.Squeeze(b.Slice(not_none(found.objects), [part.start], [part.stop], [1]), [-1])
        goal = b.ScatterND(b.zeros_like(logits), of_place, hold_constant(b, b.Relu(overlaps)))
        objects = objects + b.Mul(b.ReduceMean(cross_entropies(b, logits, goal), keepdims=0), balance[k])
    gains = 3 / levels
    area = head.size[0] * head.size[1] / 640**2
    return {
        "box": b.Mul(boxes, 0.05 * gains),
        "objects": b.Mul(objects, area * gains),
        "classes": b.Mul(classes, 0.5 * head.classes / 80 * gains),
    }


def _cells(shape: tuple[int, int]) -> np.ndarray:
    y, x = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    return np.stack([x, y], -1).reshape(-1, 2).astype(np.float32)


def _neighbours(b: Builder, cells: Var, borders: np.ndarray, places: np.ndarray) -> Var:
    """1 for the places [A, 2] of centres [N, M, 2], and for those next to the nearer edges; [N, M, A]."""
    own = b.Floor(cells)
    share = cells - own
    found = number(b, _same(b, own, places))
    back, ahead = b.const(borders) - cells, b.const(borders)
    behind = back - b.Floor(back)
    for axis in (0, 1):
        step = np.eye(2, dtype=np.float32)[axis]
        for part, distance, sign in ((share, cells, -1.0), (behind, back, 1.0)):
            close = b.And(part < 0.5, distance > 1.0)
            here = b.Unsqueeze(number(b, b.Squeeze(at(b, b.Cast(close, to=1), axis, axis + 1), [-1]) > 0.5), [2])
            found = found + here * number(b, _same(b, own + b.const(sign * step), places))
    assert ahead is not None
    return found


def _same(b: Builder, cells: Var, places: np.ndarray) -> Var:
    away = b.Abs(b.Unsqueeze(cells, [2]) - b.const(places[None, None]))
    return b.ReduceMax(away, [-1], keepdims=0) < 0.5


def _offsets(b: Builder, head: Head, boxes: Var) -> Var:
    """Boxes [N, A, 4] as offsets of the anchors; of those without a label, of any value."""
    assert head.anchors is not None
    size = head.anchors[:, 2:] - head.anchors[:, :2]
    centre = b.Mul(at(b, boxes, 0, 2) + at(b, boxes, 2, 4), 0.5)
    extent = b.Max(at(b, boxes, 2, 4) - at(b, boxes, 0, 2), 1e-6)
    moved = (centre - b.const(head.anchors[:, :2] + size / 2)) / b.const(size)
    return b.Concat(moved, b.Log(extent / b.const(size)), axis=-1) / b.const(np.array(VARIANCES[head.kind], np.float32))


def _of_ssd(b: Builder, head: Head, found: Decoded, labels: Labels, box_loss: str | None) -> Terms:
    paired = match_anchors(b, head, labels, 0.5, ties=False)
    rows = Positives(b, paired.positive)
    count = b.Max(total(b, paired.positive), 1.0)
    misses = total(b, smooth(b, rows(found.encoded) - rows(_offsets(b, head, paired.boxes))))
    one_hot = b.Concat(1.0 - b.Unsqueeze(paired.positive, [-1]), paired.classes, axis=-1)  # the background first
    entropies = b.Neg(b.ReduceSum(b.LogSoftmax(found.scores, axis=-1) * one_hot, [-1], keepdims=0))
    negative = hold_constant(b, b.Where(paired.positive > 0.5, -np.inf, entropies))
    order = b.TopK(negative, b.shape_of(negative, 1, 2), axis=1, outputs=2)[1]
    ranks = b.TopK(b.Neg(b.Cast(order, to=1)), b.shape_of(negative, 1, 2), axis=1, outputs=2)[1]
    hard = number(b, b.Cast(ranks, to=1) < b.Mul(b.ReduceSum(paired.positive, [1], keepdims=1), 3.0))
    return {"box": misses / count, "classes": total(b, entropies * b.Max(paired.positive, hard)) / count}


def _of_retinanet(b: Builder, head: Head, found: Decoded, labels: Labels, box_loss: str | None) -> Terms:
    paired = match_anchors(b, head, labels, 0.4, ties=True)
    counts = b.Max(b.ReduceSum(paired.positive, [1], keepdims=0), 1.0)
    wanted = _offsets(b, head, paired.boxes)
    apart = b.ReduceSum(b.Abs(found.encoded - hold_constant(b, wanted)), [-1], keepdims=0) * paired.positive
    entropies = b.ReduceSum(focal(b, found.scores, paired.classes), [-1], keepdims=0) * (1.0 - not_none(paired.ignored))
    return {
        name: b.ReduceMean(b.ReduceSum(x, [1], keepdims=0) / counts, keepdims=0)
        for name, x in (("box", apart), ("classes", entropies))
    }


def _of_fcos(b: Builder, head: Head, found: Decoded, labels: Labels, box_loss: str | None) -> Terms:
    assert head.anchors is not None
    paired = sample_centres(b, head, labels)
    rows = Positives(b, paired.positive)
    count = b.Max(total(b, paired.positive), 1.0)
    boxes = rows(paired.boxes)
    centre = rows.places(b.const(((head.anchors[:, :2] + head.anchors[:, 2:]) / 2).astype(np.float32)))
    first, last = centre - at(b, boxes, 0, 2), at(b, boxes, 2, 4) - centre
    shares = b.Min(first, last) / b.Max(first, last)
    goal = b.Sqrt(at(b, shares, 0, 1) * at(b, shares, 1, 2))
    overlaps = overlap(b, rows(found.boxes), boxes, box_loss or "giou")
    return {
        "box": total(b, 1.0 - overlaps) / count,
        "objects": total(b, cross_entropies(b, rows(not_none(found.objects)), goal)) / count,
        "classes": total(b, focal(b, found.scores, paired.classes)) / count,
    }


_LOSSES: dict[str, Callable[[Builder, Head, Decoded, Labels, str | None], Terms]] = {
    "dfl": _of_distances, "yolox": _of_offsets, "yolo5": _of_anchor_sizes,
    "ssd": _of_ssd, "fcos": _of_fcos, "retinanet": _of_retinanet,
}  # fmt: skip
