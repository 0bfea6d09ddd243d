"""Assignment of predictions to labelled boxes, inside the graph: TaskAligned, SimOTA and matching of anchors.

Labels are [N, M, 5]: class (-1: padding), x1, y1, x2, y2. A result pairs each of A predictions with at most one label;
no derivative passes through it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import not_none
from onnxgrad.training.detection.boxes import Decoded, at, corner, hold_constant, overlap
from onnxgrad.training.detection.head import Head

#: Exponents of scores and overlaps, and candidates of each label, in TaskAligned (Feng et al. 2021; Ultralytics).
TAL_ALPHA, TAL_BETA, TAL_CANDIDATES, TAL_PLAIN = 0.5, 6.0, 10, 7
#: Candidates of each label, the radius of its centre in strides, the cost outside of it, in SimOTA (Ge et al. 2021).
OTA_CANDIDATES, OTA_RADIUS, OTA_OUTSIDE = 10, 2.5, 1e5
#: The radius of the centre of a label, in sizes of anchors (torchvision's FCOS).
FCOS_RADIUS = 1.5
#: A cost of pairs that are not allowed.
_NEVER = 1e9
#: The overlap of an anchor with a label that it matches.
_MATCH = 0.5


@dataclass(frozen=True)
class Labels:
    """The labels of a batch.

    Attributes:
        classes: [N, M] as floats.
        boxes: [N, M, 4].
        there: [N, M] of 1 and 0, for padding.
        one_hot: classes [N, M, K].
    """

    classes: Var
    boxes: Var
    there: Var
    one_hot: Var

    @classmethod
    def of(cls, b: Builder, labels: Var, classes: int) -> Labels:
        """The labels [N, M, 5]."""
        numbers = corner(b, labels, 0)
        there = number(b, numbers >= 0.0)
        one_hot = number(b, b.Equal(at(b, labels, 0, 1), b.const(np.arange(classes, dtype=np.float32))))
        return cls(numbers, at(b, labels, 1, 5), there, one_hot)


@dataclass(frozen=True)
class Assigned:
    """Predictions with their labels.

    Attributes:
        positive: [N, A] of 1 and 0.
        boxes: of the label of each prediction, [N, A, 4]; zeros without one.
        classes: one-hot [N, A, K].
        weight: [N, A], how well a prediction fits (TaskAligned), its overlap (SimOTA), or 1.
        ignored: [N, A] of 1 and 0, predictions that are neither; None where there are none.
    """

    positive: Var
    boxes: Var
    classes: Var
    weight: Var
    ignored: Var | None = None


def number(b: Builder, condition: Var) -> Var:
    """1.0 where `condition` holds, else 0.0."""
    return b.Cast(condition, to=1)


def both(b: Builder, *conditions: Var) -> Var:
    """The conjunction."""
    found = conditions[0]
    for other in conditions[1:]:
        found = b.And(found, other)
    return found


def _inside(b: Builder, points: Var, boxes: Var, eps: float) -> Var:
    """Points [A, 2] inside of boxes [N, M, 4], a condition [N, M, A]."""
    low, high = (b.Unsqueeze(at(b, boxes, k, k + 2), [2]) for k in (0, 2))
    least = b.ReduceMin(b.Concat(points - low, high - points, axis=-1), [-1], keepdims=0)
    return least > eps


def _one_label(b: Builder, mask: Var, rivals: Var) -> Var:
    """`mask` [N, M, A] with the label of the largest of `rivals` alone, where it has several."""
    several = b.ReduceSum(mask, [1], keepdims=1) > 1.5
    best = b.ArgMax(rivals, axis=1, keepdims=1)
    return b.Where(several, number(b, b.Equal(b.Reshape(b.places_along(mask, 1), [1, -1, 1]), best)), mask)


def _paired(b: Builder, mask: Var, labels: Labels, weight: Var, ignored: Var | None = None) -> Assigned:
    """The labels that a `mask` [N, M, A], of one label for each prediction at most, chooses."""
    to_labels = b.Transpose(mask, perm=[0, 2, 1])
    boxes, classes = b.MatMul(to_labels, labels.boxes), b.MatMul(to_labels, labels.one_hot)
    positive = b.ReduceMax(mask, [1], keepdims=0)
    return Assigned(
        hold_constant(b, positive),
        hold_constant(b, boxes),
        hold_constant(b, classes),
        hold_constant(b, weight),
        None if ignored is None else hold_constant(b, ignored),
    )


def _pairs(b: Builder, labels: Labels, boxes: Var, kind: str, eps: float) -> Var:
    return overlap(b, b.Unsqueeze(labels.boxes, [2]), b.Unsqueeze(boxes, [1]), kind, eps)


def _kth(b: Builder, values: Var, count: int, largest: bool = True) -> Var:
    """The `count` largest or smallest of [N, M, A], in order, [N, M, count]; all where A is less."""
    few = b.Min(b.const(np.array([count])), b.shape_of(values, 2, 3))
    return b.TopK(values, few, outputs=2, largest=int(largest))[0]


def task_aligned(b: Builder, head: Head, found: Decoded, labels: Labels) -> Assigned:
    """The predictions inside of a label with the largest score^0.5 · CIoU^6, at most ten.

    A one-to-one head has one for each label: the largest (YOLOv10), or the largest of seven without those that went to
    another label (YOLO26).
    """
    there = b.Unsqueeze(labels.there, [2])
    overlaps = b.Relu(_pairs(b, labels, found.boxes, "ciou", 1e-7))
    least = sorted(head.strides)[min(1, len(head.levels) - 1)]
    corners = [corner(b, labels.boxes, k) for k in range(4)]
    grown = []
    for low, high in zip(corners[:2], corners[2:]):  # tiny boxes are as large as two places
        half = b.Where((high - low) < least, least / 2, b.Mul(high - low, 0.5))
        grown.append((b.Mul(low + high, 0.5) - half, b.Mul(low + high, 0.5) + half))
    wide = b.Concat(*(b.Unsqueeze(v, [-1]) for v in (grown[0][0], grown[1][0], grown[0][1], grown[1][1])), axis=-1)
    inside = number(b, _inside(b, at(b, not_none(found.places), 0, 2), wide, 1e-9)) * there
    scores = b.MatMul(labels.one_hot, b.Transpose(b.Sigmoid(found.scores), perm=[0, 2, 1]))
    overlaps = overlaps * inside
    fit = b.Pow(scores, TAL_ALPHA) * b.Pow(overlaps, TAL_BETA) * inside
    plain = head.one_to_one and head.bins == 1
    best = _kth(b, fit, TAL_PLAIN if plain else 1 if head.one_to_one else TAL_CANDIDATES)
    worst = at(b, best, -1, np.iinfo(np.int32).max)
    mask = _one_label(b, number(b, both(b, fit >= worst, fit > 0.0)), overlaps)
    if plain:  # the best of those whose label is settled
        fit = fit * mask
        mask = mask * number(b, fit >= b.ReduceMax(fit, [2], keepdims=1))
    fit, overlaps = fit * mask, overlaps * mask
    scale = b.ReduceMax(overlaps, [2], keepdims=1) / (b.ReduceMax(fit, [2], keepdims=1) + 1e-9)
    return _paired(b, mask, labels, b.ReduceMax(fit * scale, [1], keepdims=0))


def sim_ota(b: Builder, head: Head, found: Decoded, labels: Labels) -> Assigned:
    """The cheapest predictions of each label, as many as the overlaps of the best ten add up to."""
    assert found.places is not None
    there = b.Unsqueeze(labels.there, [2])
    stride = at(b, found.places, 2, 4)
    centres = at(b, found.places, 0, 2) + b.Mul(stride, 0.5)
    in_boxes = _inside(b, centres, labels.boxes, 0.0)
    middle = b.Unsqueeze(b.Mul(at(b, labels.boxes, 0, 2) + at(b, labels.boxes, 2, 4), 0.5), [2])
    away = b.ReduceMax(b.Abs(centres - middle) / stride, [-1], keepdims=0)
    in_centres = away < OTA_RADIUS
    exists = b.Expand(there > 0.5, b.Shape(in_boxes))
    near = number(b, both(b, b.Or(in_boxes, in_centres), exists))
    candidate = b.ReduceMax(near, [1], keepdims=1) * there
    overlaps = _pairs(b, labels, found.boxes, "iou", 1e-16) * candidate
    joint = b.Sqrt(b.Sigmoid(found.scores) * b.Sigmoid(not_none(found.objects)))
    missed = b.Max(b.Log(joint), -100.0)
    spared = b.Max(b.Log(1.0 - joint), -100.0)
    gained = b.Transpose(missed - spared, perm=[0, 2, 1])
    cost = b.Neg(b.MatMul(labels.one_hot, gained) + b.Unsqueeze(b.ReduceSum(spared, [2], keepdims=0), [1]))
    cost = cost - 3.0 * b.Log(overlaps + 1e-8) + b.Mul(number(b, b.Not(both(b, in_boxes, in_centres))), OTA_OUTSIDE)
    cost = b.Where(candidate > 0.5, cost, _NEVER)
    many = b.Floor(b.ReduceSum(_kth(b, overlaps, OTA_CANDIDATES), [2], keepdims=1))
    cheapest = _kth(b, cost, OTA_CANDIDATES, largest=False)
    last = b.Min(b.Max(b.Cast(many, to=7), 1), b.shape_of(cheapest, 2, 3)) - 1  # also of overlaps that are no numbers
    bound = b.GatherElements(cheapest, last, axis=2)
    mask = _one_label(b, number(b, both(b, cost <= bound, candidate > 0.5)), b.Neg(cost))
    return _paired(b, mask, labels, b.ReduceSum(mask * overlaps, [1], keepdims=0))


def sample_centres(b: Builder, head: Head, labels: Labels) -> Assigned:
    """Anchors near the centre of a label and inside of it, whose level is for its size; the smallest of several."""
    anchors = not_none(head.anchors).astype(np.float32)
    size = anchors[:, 2] - anchors[:, 0]
    counts = [level.shape[0] * level.shape[1] * level.anchors for level in head.levels]
    least, most = 4 * size, 8 * size
    least[: counts[0]], most[-counts[-1] :] = 0, np.inf
    points = b.const((anchors[:, :2] + anchors[:, 2:]) / 2)
    low, high = (b.Unsqueeze(at(b, labels.boxes, k, k + 2), [2]) for k in (0, 2))
    away = b.ReduceMax(b.Abs(points - b.Mul(low + high, 0.5)), [-1], keepdims=0)
    farthest = b.ReduceMax(b.Concat(points - low, high - points, axis=-1), [-1], keepdims=0)
    fits = both(b, away < b.const(FCOS_RADIUS * size), farthest > b.const(least), farthest < b.const(most))
    mask = number(b, both(b, fits, _inside(b, points, labels.boxes, 0.0))) * b.Unsqueeze(labels.there, [2])
    area = b.ReduceProd(high - low, [-1], keepdims=0)
    mask = _one_label(b, mask, mask * (1e8 - area))  # rounded as in the original
    return _paired(b, mask, labels, b.ReduceMax(mask, [1], keepdims=0))


def match_anchors(b: Builder, head: Head, labels: Labels, low: float, ties: bool) -> Assigned:
    """Match anchors with labels: those with an overlap of at least 0.5, and the best one of each label.

    Args:
        b: the builder.
        head: with anchors.
        labels: of the batch.
        low: an anchor with an overlap from `low` to below 0.5 is ignored.
        ties: all anchors that overlap a label as much as its best one are matched (RetinaNet), each with its own best
            label; otherwise the best one is matched with this label (SSD).
    """
    anchors = b.const(not_none(head.anchors)[None])
    there = b.Unsqueeze(labels.there, [2])
    overlaps = b.Where(there > 0.5, _pairs(b, labels, anchors, "iou", 0.0), -1.0)
    most = b.ReduceMax(overlaps, [1], keepdims=1)
    places = b.Reshape(b.places_along(overlaps, 1), [1, -1, 1])
    own = number(b, b.Equal(places, b.ArgMax(overlaps, axis=1, keepdims=1)))
    mask = own * number(b, most >= _MATCH)
    best = b.ReduceMax(overlaps, [2], keepdims=1)
    forced: Var
    if ties:
        chosen = number(b, both(b, b.Equal(overlaps, best), b.Expand(there > 0.5, b.Shape(overlaps))))
        forced = b.ReduceMax(chosen, [1], keepdims=1)
        mask = b.Max(mask, own * forced)
    else:
        first = b.Equal(b.Reshape(b.places_along(overlaps, 2), [1, 1, -1]), b.ArgMax(overlaps, axis=2, keepdims=1))
        chosen = number(b, first) * there
        later = b.CumSum(chosen, b.const(np.int64(1)), reverse=1, exclusive=1)  # the last label of an anchor counts
        chosen = chosen * number(b, later < 0.5)
        forced = b.ReduceMax(chosen, [1], keepdims=1)
        mask = mask * (1.0 - forced) + chosen
    positive = b.ReduceMax(mask, [1], keepdims=0)
    unsure = number(b, both(b, most >= low, most < _MATCH))
    ignored = b.Squeeze(unsure, [1]) * (1.0 - positive) if low < _MATCH else None
    return _paired(b, mask, labels, positive, ignored)
