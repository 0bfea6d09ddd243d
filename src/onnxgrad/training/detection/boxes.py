"""Boxes in graphs: overlaps of x1, y1, x2, y2, and the raw maps of a head as boxes in pixels and scores.

Every function writes nodes with a Builder. Boxes of two sets broadcast against each other, so [N, M, 1, 4] beside
[N, 1, A, 4] gives the overlaps [N, M, A] of all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.engine.resolve import CONSTANT
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import not_none
from onnxgrad.training.detection.head import Head, MapPart

#: Of sizes in a denominator, as in the implementations of Ultralytics.
EPS = 1e-7
#: The largest logarithm of a size that is decoded (torchvision).
_MOST = math.log(1000 / 16)


def hold_constant(b: Builder, x: Var) -> Var:
    """`x` as a constant: no derivative passes."""
    node = ir.Node("", "Identity", [x.value])
    node.metadata_props[CONSTANT] = "an assignment of predictions to boxes is held constant"
    return b.append(node)[0]


def at(b: Builder, x: Var, start: int, end: int) -> Var:
    """Elements `start` to `end` of the last axis."""
    return b.Slice(x, [start], [end], [-1])


def corner(b: Builder, boxes: Var, k: int) -> Var:
    """Coordinate `k` of x1, y1, x2, y2 of each box, without the last axis."""
    return b.Squeeze(at(b, boxes, k, k + 1), [-1])


def from_centres(b: Builder, boxes: Var) -> Var:
    """x1, y1, x2, y2 of boxes as centre and size."""
    centre, half = at(b, boxes, 0, 2), b.Mul(at(b, boxes, 2, 4), 0.5)
    return b.Concat(centre - half, centre + half, axis=-1)


def overlap(b: Builder, one: Var, other: Var, kind: str = "iou", eps: float = EPS) -> Var:
    """Intersection over union of boxes, with the penalty of `kind`.

    Args:
        b: the builder.
        one: boxes [..., 4].
        other: boxes [..., 4].
        kind: iou, giou (Rezatofighi et al. 2019), diou or ciou (Zheng et al. 2020).
        eps: added to heights and denominators; none for iou.
    """
    x1, y1, x2, y2 = (corner(b, one, k) for k in range(4))
    u1, v1, u2, v2 = (corner(b, other, k) for k in range(4))
    wide, high = b.Min(x2, u2) - b.Max(x1, u1), b.Min(y2, v2) - b.Max(y1, v1)
    shared = b.Relu(wide) * b.Relu(high)
    w, h, s, t = x2 - x1, y2 - y1, u2 - u1, v2 - v1
    if kind == "ciou":
        h, t = h + eps, t + eps
    union = w * h + s * t - shared
    iou = shared / (union + eps if eps else union)
    if kind == "iou":
        return iou
    around, tall = b.Max(x2, u2) - b.Min(x1, u1), b.Max(y2, v2) - b.Min(y1, v1)
    if kind == "giou":
        area = around * tall + eps
        return iou - (area - union) / area
    apart = (u1 + u2 - x1 - x2) ** 2.0 + (v1 + v2 - y1 - y2) ** 2.0
    distance = b.Mul(apart, 0.25) / (around * around + tall * tall + eps)
    if kind == "diou":
        return iou - distance
    shape = b.Mul((b.Atan(s / t) - b.Atan(w / h)) ** 2.0, 4 / math.pi**2)
    share = hold_constant(b, shape / (shape - iou + (1 + eps)))
    return iou - (distance + shape * share)


@dataclass(frozen=True)
class Decoded:
    """The predictions of a batch.

    Attributes:
        boxes: [N, A, 4], x1, y1, x2, y2 in pixels of the canvas.
        scores: logits [N, A, K].
        objects: logits [N, A, 1] of the objectness, or None.
        encoded: what the boxes were decoded from, [N, A, …].
        places: centre and stride of each prediction, [A, 4] as x, y, stride, stride; None for queries.
    """

    boxes: Var
    scores: Var
    objects: Var | None
    encoded: Var
    places: Var | None

    def probabilities(self, b: Builder, head: Head) -> Var:
        """Probabilities [N, A, classes] of the classes, background left out."""
        if head.background is not None:
            found = b.Softmax(self.scores, axis=-1)
            return at(b, found, 1, head.classes + 1) if head.background == 0 else at(b, found, 0, head.classes)
        found = b.Sigmoid(self.scores)
        joint = found if self.objects is None else found * b.Sigmoid(self.objects)
        return b.Sqrt(joint) if head.kind == "fcos" else joint


def decode(b: Builder, head: Head, values: Mapping[str, Var]) -> Decoded:
    """The predictions of `head`, given its raw values by name."""
    if head.kind == "detr":
        level = head.levels[0]
        scale = np.array([head.size[1], head.size[0]] * 2, np.float32)
        boxes, scores = values[level.boxes.value], values[level.scores.value]
        return Decoded(from_centres(b, boxes) * b.const(scale), scores, None, boxes, None)
    rows = {
        name: b.Concat(*(rows_of(b, getattr(level, name), values, level.anchors) for level in head.levels), axis=1)
        for name in ("boxes", "scores", "objects") if getattr(head.levels[0], name) is not None
    }  # fmt: skip
    places = b.const(places_of(head))
    boxes = _DECODINGS[head.kind](b, head, rows["boxes"], places)
    return Decoded(boxes, rows["scores"], rows.get("objects"), rows["boxes"], places)


def places_of(head: Head) -> np.ndarray:
    """Centre and stride of each prediction, float32 [A, 4] as x, y, stride, stride, in the order of `decode`."""
    found = []
    for level, stride in zip(head.levels, head.strides):
        offset = 0.0 if head.kind in ("yolox", "yolo5") else head.offset
        y, x = np.meshgrid(*(np.arange(n) for n in level.shape), indexing="ij")
        centres = (np.stack([x, y], -1).reshape(-1, 1, 2) + offset) * stride
        both = np.concatenate([centres, np.full_like(centres, stride)], -1)
        found.append(np.repeat(both, level.anchors, axis=1).reshape(-1, 4))
    return np.concatenate(found).astype(np.float32)


def rows_of(b: Builder, part: MapPart, values: Mapping[str, Var], anchors: int) -> Var:
    """MapPart of a map [N, a·c, H, W], or of [N, a·each, H, W], as rows [N, H·W·a, size]."""
    value = values[part.value]
    channels = not_none(value.shape)[1]
    assert isinstance(channels, int)
    each = channels // anchors
    apart = b.Reshape(value, [0, anchors, each, -1])
    if (part.start, part.size) != (0, each):
        apart = b.Slice(apart, [part.start], [part.start + part.size], [2])
    return b.Reshape(b.Transpose(apart, perm=[0, 3, 1, 2]), [0, -1, part.size])


def _by_distances(b: Builder, head: Head, encoded: Var, places: Var) -> Var:
    """Boxes by the distances of their edges, in strides, from the centre of a place."""
    centre, stride = at(b, places, 0, 2), at(b, places, 2, 4)
    distances = encoded
    if head.bins > 1:
        shares = b.Softmax(b.Reshape(encoded, [0, -1, 4, head.bins]), axis=-1)
        distances = b.Squeeze(b.MatMul(shares, b.const(np.arange(head.bins, dtype=np.float32)[:, None])), [-1])
    first, last = at(b, distances, 0, 2) * stride, at(b, distances, 2, 4) * stride
    return b.Concat(centre - first, centre + last, axis=-1)


def _by_offsets(b: Builder, head: Head, encoded: Var, places: Var) -> Var:
    """Boxes of YOLOX: offsets of the centre, and logarithms of sizes, in strides."""
    corner_of_place, stride = at(b, places, 0, 2), at(b, places, 2, 4)
    centre = at(b, encoded, 0, 2) * stride + corner_of_place
    return from_centres(b, b.Concat(centre, b.Exp(at(b, encoded, 2, 4)) * stride, axis=-1))


def _by_anchor_sizes(b: Builder, head: Head, encoded: Var, places: Var) -> Var:
    """Boxes of YOLOv5: centres in [-0.5, 1.5] of a place, sizes up to four times those of an anchor."""
    sizes = [np.tile(a, (h * w, 1)) for (h, w), a in zip((lv.shape for lv in head.levels), not_none(head.anchors))]
    twice = b.Mul(b.Sigmoid(encoded), 2.0)
    centre = (at(b, twice, 0, 2) - 0.5) * at(b, places, 2, 4) + at(b, places, 0, 2)
    size = at(b, twice, 2, 4) ** 2.0 * b.const(np.concatenate(sizes).astype(np.float32))
    return from_centres(b, b.Concat(centre, size, axis=-1))


#: Variances by which offsets are divided: of SSD, and of RetinaNet.
VARIANCES = {"ssd": (0.1, 0.1, 0.2, 0.2), "retinanet": (1.0, 1.0, 1.0, 1.0)}


def _by_anchors(b: Builder, head: Head, encoded: Var, places: Var) -> Var:
    """Boxes of SSD and RetinaNet: offsets of centres and logarithms of sizes, relative to anchors."""
    anchors = b.const(not_none(head.anchors))  # as one constant, by which the head is recognised again
    size = at(b, anchors, 2, 4) - at(b, anchors, 0, 2)
    scaled = encoded * b.const(np.array(VARIANCES[head.kind], np.float32))
    grown = b.Exp(b.Min(at(b, scaled, 2, 4), _MOST)) * size
    centre = at(b, scaled, 0, 2) * size + at(b, anchors, 0, 2) + b.Mul(size, 0.5)
    return from_centres(b, b.Concat(centre, grown, axis=-1))


def _by_squares(b: Builder, head: Head, encoded: Var, places: Var) -> Var:
    """Boxes of FCOS: distances of the edges from the centre of an anchor, in its sizes."""
    assert head.anchors is not None
    centre, size = (head.anchors[:, :2] + head.anchors[:, 2:]) / 2, head.anchors[:, 2:] - head.anchors[:, :2]
    distances = b.Relu(encoded) * b.const(np.concatenate([size, size], 1))
    return b.Concat(b.const(centre) - at(b, distances, 0, 2), b.const(centre) + at(b, distances, 2, 4), axis=-1)


_DECODINGS = {
    "dfl": _by_distances, "yolox": _by_offsets, "yolo5": _by_anchor_sizes,
    "ssd": _by_anchors, "fcos": _by_squares, "retinanet": _by_anchors,
}  # fmt: skip
