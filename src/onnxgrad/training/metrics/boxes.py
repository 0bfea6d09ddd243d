"""Average precision of boxes, as COCO defines it: predictions are matched with labels of their class by overlap.

In each picture, predictions are matched from the highest score down, each with the free label of its class that it
overlaps most, if the overlap (IoU) reaches a threshold. A label that is ignored (a crowd, or an object whose area is
out of range) makes its predictions ignored, too, and a crowd may have several. The average precision of a class is the
mean of the precision, made monotone, at 101 recalls; ``map50_95`` is its mean over classes and ten thresholds. Of equal
scores, those of the picture with the lower id come first, in the order of the model. The numbers are pycocotools'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
#: Areas of objects in pixels.
AREAS = {"": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
#: The most predictions of a class in a picture that count.
MOST = (1, 10, 100)
#: Predictions from this score on are shown, and counted in the confusion matrix.
SHOWN = 0.25
#: The name of what is no object in the confusion matrix.
BACKGROUND = "background"
#: Metrics of boxes by name, with their definitions.
DEFINED = {
    "map50_95": "mean average precision over the IoU thresholds 0.5, 0.55, …, 0.95",
    "map50": "mean average precision at the IoU 0.5",
    "map75": "mean average precision at the IoU 0.75",
    **{f"map_{size}": f"map50_95 of {size} objects" for size in ("small", "medium", "large")},
    **{
        f"mar_{most}": f"mean recall over the thresholds, of at most {most} boxes of a class in a picture"
        for most in MOST
    },
    **{f"mar_{size}": f"mar_100 of {size} objects" for size in ("small", "medium", "large")},
}


#: Metrics of masks in the place of boxes.
OF_MASKS = {
    f"mask_{name}": DEFINED[name].replace("boxes", "masks") + ("" if "boxes" in DEFINED[name] else ", of masks")
    for name in ("map50_95", "map50", "map75", "map_small", "map_medium", "map_large", "mar_100")
}
#: The row and the column of the upper left pixel of a mask, and its pixels, bool [h, w].
Window = tuple[int, int, np.ndarray]


@dataclass(frozen=True)
class Detections:
    """The boxes that a model finds in a picture.

    Attributes:
        boxes: [k, 4] as x1, y1, x2, y2 in pixels of the picture.
        scores: [k].
        labels: class numbers [k].
        masks: draws that of the k-th box, where the model has them.
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: Callable[[int], Window] | None = None


@dataclass
class Precisions:
    """The average precision of predictions.

    Attributes:
        metrics: by name; NaN for one that is not defined.
        classes: of each class that occurs: ap50_95, ap50, and precision, recall and f1 at the IoU 0.5 and the score
            where f1 is largest, that score, and the number of boxes.
        curves: the precision at the IoU 0.5 of each class that occurs, at `RECALLS`.
        confusion: [actual, predicted], the last of both is the background: of predictions from the score `SHOWN` on.
    """

    metrics: dict[str, float]
    classes: dict[str, dict[str, float]]
    curves: dict[str, np.ndarray]
    confusion: np.ndarray


def overlaps(boxes: np.ndarray, others: np.ndarray, crowd: np.ndarray | None = None) -> np.ndarray:
    """The IoU of each of `boxes` [n, 4] with each of `others` [m, 4]; of a `crowd` the share of the box in it."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    inner = np.prod(np.maximum(np.minimum(boxes[:, None, 2:], others[None, :, 2:]) - low, 0), axis=2)
    own, area = (np.prod(b[:, 2:] - b[:, :2], axis=1) for b in (boxes, others))
    union = own[:, None] + area[None] - inner
    if crowd is not None:
        union = np.where(crowd[None], own[:, None], union)
    return np.divide(inner, union, out=np.zeros_like(inner), where=inner > 0)


def mask_overlaps(masks: Sequence[Window], objects: np.ndarray, crowd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The IoU of each of `masks` with each of `objects`, bool [m, H, W], as `overlaps`, and the pixels of `masks`."""
    areas = np.array([pixels.sum() for *_, pixels in masks], np.float64)
    inner = np.zeros((len(masks), len(objects)))
    for k, (y, x, pixels) in enumerate(masks):
        part = objects[:, y : y + pixels.shape[0], x : x + pixels.shape[1]]
        inner[k] = (part & pixels).sum((1, 2))
    union = np.where(crowd, areas[:, None], areas[:, None] + objects.sum((1, 2)) - inner)
    return np.divide(inner, union, out=np.zeros_like(inner), where=inner > 0), areas


def match(iou: np.ndarray, ignored: np.ndarray, crowd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Match predictions, the highest score first, with labels.

    Args:
        iou: [predictions, labels].
        ignored: bool [areas, labels].
        crowd: bool [labels].

    Returns:
        Masks [areas, thresholds, predictions]: matched, and matched with an ignored label.
    """
    least = np.minimum(THRESHOLDS, 1 - 1e-10)[None, :, None]
    shape = (len(ignored), len(THRESHOLDS))
    taken = np.zeros((*shape, iou.shape[1]), bool)
    matched, skipped = (np.zeros((*shape, iou.shape[0]), bool) for _ in range(2))
    last = iou.shape[1] - 1
    for k, row in enumerate(iou):
        if last < 0 or row.max() < THRESHOLDS[0]:
            continue
        free = (row >= least) & (~taken | crowd)
        counting = free & ~ignored[:, None]
        chosen = np.where(counting.any(2, keepdims=True), counting, free)
        best = last - np.where(chosen, row, -1.0)[..., ::-1].argmax(2)  # of equal ones the last
        hit = chosen.any(2)
        areas, thresholds = np.nonzero(hit)
        taken[areas, thresholds, best[hit]] = True
        matched[..., k] = hit
        skipped[areas, thresholds, k] = ignored[areas, best[hit]]
    return matched, skipped


class AveragePrecision:
    """The average precision of boxes over pictures.

    Args:
        names: of the classes.
        masks: masks are compared, not boxes.
    """

    def __init__(self, names: Sequence[str], masks: bool = False) -> None:
        self.masks = masks
        self.names: tuple[str, ...] = ()
        self.confusion = np.zeros((1, 1), np.int64)
        self.reserve(names)
        self._parts: dict[int, list[tuple[Any, ...]]] = defaultdict(list)

    def reserve(self, names: Sequence[str]) -> None:
        """Know at least as many classes as `names`."""
        more = len(names) - len(self.names)
        if more > 0:
            self.names = tuple(names)
            own = len(self.confusion) - 1
            self.confusion = np.insert(np.insert(self.confusion, [own] * more, 0, 0), [own] * more, 0, 1)

    def add(self, found: Detections, sample: Any, areas: np.ndarray | None = None, name: Any = None) -> np.ndarray:
        """Add a picture: what was `found` in it, and its labels.

        Args:
            found: the predictions.
            sample: a mapping with ``boxes``, ``labels`` and ``crowd`` (see `training.data.annotations.samples`); where
                masks are compared, also with ``masks``, bool [n, H, W].
            areas: of the objects. Default: those of the boxes.
            name: of the picture, a number or a text, that orders pictures. Default: they stay in this order.

        Returns:
            The confusion matrix of this picture.
        """
        boxes, labels = np.asarray(sample["boxes"], np.float64), np.asarray(sample["labels"])
        crowd = np.asarray(sample["crowd"], bool)
        sizes = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) if areas is None else np.asarray(areas)
        predicted, scores = np.asarray(found.boxes, np.float64).reshape(-1, 4), np.asarray(found.scores, np.float64)
        for c in np.union1d(labels, found.labels).tolist():
            own = labels == c
            mine = np.flatnonzero(np.asarray(found.labels) == c)
            mine = mine[np.argsort(-scores[mine], kind="stable")][: MOST[-1]]
            ranges = np.array(list(AREAS.values()))
            low, high = ranges[:, :1], ranges[:, 1:]
            ignored = crowd[own] | (sizes[own] < low) | (sizes[own] > high)
            if self.masks:
                assert found.masks is not None
                similar, area = mask_overlaps([found.masks(int(k)) for k in mine], sample["masks"][own], crowd[own])
            else:
                similar = overlaps(predicted[mine], boxes[own], crowd[own])
                area = np.prod(predicted[mine, 2:] - predicted[mine, :2], axis=1)
            outside = (area < low) | (area > high)
            self.add_matches(int(c), similar, scores[mine], ignored, crowd[own], outside, name)
        table = confusion(found, boxes, labels, crowd, len(self.names))
        self.confusion += table
        return table

    def add_matches(
        self,
        c: int,
        similar: np.ndarray,
        scores: np.ndarray,
        ignored: np.ndarray,
        crowd: np.ndarray,
        outside: np.ndarray,
        name: Any = None,
    ) -> None:
        """Match predictions of the class `c` in a picture, the highest score first, with labels (see `match`).

        Args:
            c: the class.
            similar: IoU or another similarity [predictions, labels].
            scores: [predictions].
            ignored: see `match`.
            crowd: see `match`.
            outside: predictions [areas, predictions] whose area is out of range.
            name: of the picture (see `add`).
        """
        matched, skipped = match(similar, ignored, crowd)
        skipped |= ~matched & outside[:, None]
        self._parts[c].append((scores, np.arange(len(scores)), matched, skipped, (~ignored).sum(1), name))

    def sums(self) -> dict[str, Any]:
        """The numbers that were added so far."""
        return {"parts": dict(self._parts), "confusion": self.confusion}

    def join(self, sums: Mapping[str, Any]) -> None:
        """Add the `sums` of other pictures."""
        self.reserve([str(k) for k in range(len(sums["confusion"]) - 1)])
        size = len(sums["confusion"]) - 1
        places = np.append(np.arange(size), len(self.confusion) - 1)
        self.confusion[np.ix_(places, places)] += sums["confusion"]
        for c, parts in sums["parts"].items():
            self._parts[int(c)] += parts  # keys are text where another rank sent them

    def result(self) -> Precisions:
        """The average precision of all pictures so far."""
        shape = (len(self.names), len(AREAS), len(THRESHOLDS))
        precision = np.full(shape, np.nan)
        recall = np.full((len(MOST), *shape), np.nan)
        classes, curves = {}, {}
        for c, added in sorted(self._parts.items()):
            parts = sorted(added, key=lambda p: (isinstance(p[5], str), p[5]))
            scores, rank = (np.concatenate([p[k] for p in parts]) for k in (0, 1))
            matched, skipped = (np.concatenate([p[k] for p in parts], axis=2) for k in (2, 3))
            count = np.sum([p[4] for p in parts], axis=0)
            order = np.argsort(-scores, kind="stable")
            scores, rank, matched, skipped = scores[order], rank[order], matched[..., order], skipped[..., order]
            for a in np.flatnonzero(count):
                for m, most in enumerate(MOST):
                    few = rank < most
                    right, wrong = _sums(matched[a][:, few], skipped[a][:, few])
                    recall[m, c, a] = right[:, -1] / count[a] if right.size else 0
                at_recalls = _at_recalls(right, wrong, count[a])
                precision[c, a] = at_recalls.mean(1)
                if a == 0:
                    name = self.names[c]
                    curves[name] = at_recalls[0]
                    classes[name] = {
                        "ap50_95": float(precision[c, 0].mean()),
                        "ap50": float(precision[c, 0, 0]),
                        **_best(right[0], wrong[0], scores, int(count[0])),
                        "boxes": int(count[0]),
                    }
        areas = {f"_{name}": k for k, name in enumerate(AREAS) if name}
        metrics = {"map50_95": precision[:, 0], "map50": precision[:, 0, 0], "map75": precision[:, 0, 5]}
        metrics |= {f"map{name}": precision[:, k] for name, k in areas.items()}
        metrics |= {f"mar_{most}": recall[m, :, 0] for m, most in enumerate(MOST)}
        metrics |= {f"mar{name}": recall[-1, :, k] for name, k in areas.items()}
        means = {n: float(v[~np.isnan(v)].mean()) if not np.isnan(v).all() else np.nan for n, v in metrics.items()}
        return Precisions(means, classes, curves, self.confusion)


class OnePrecision:
    """One of the metrics of an `AveragePrecision`.

    Args:
        name: of the metric.
        classes: the names of the classes.
        masks: masks are compared, not boxes.
    """

    def __init__(self, name: str, classes: Sequence[str] = (), masks: bool = False) -> None:
        self.name, self.all = name, AveragePrecision(classes, masks)

    def result(self) -> float:
        """The metric of all batches so far."""
        return self.all.result().metrics[self.name]

    def sums(self) -> dict[str, Any]:
        """The numbers that were added so far."""
        return self.all.sums()

    def join(self, sums: Mapping[str, Any]) -> None:
        """Add the `sums` of another one."""
        self.all.join(sums)


class MeanPrecision(OnePrecision):
    """One of the metrics that are `DEFINED`, over batches of `Detections` and of samples."""

    def add(self, scores: Sequence[Detections], labels: Sequence[Any]) -> None:
        """Add a batch."""
        for found, sample in zip(scores, labels):
            count = 1 + max((int(n) for a in (found.labels, sample["labels"]) for n in a), default=-1)
            self.all.reserve([str(k) for k in range(count)])
            self.all.add(found, sample)


def _sums(matched: np.ndarray, skipped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """True and false positives [thresholds, predictions] from the highest score down to each."""
    return (matched & ~skipped).cumsum(1, dtype=np.float64), (~matched & ~skipped).cumsum(1, dtype=np.float64)


def _at_recalls(right: np.ndarray, wrong: np.ndarray, count: int) -> np.ndarray:
    """The precision, made monotone, at each recall: [thresholds, recalls]; 0 for a recall that is not reached."""
    precision = right / (right + wrong + np.spacing(1))
    monotone = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    found = np.zeros((len(right), len(RECALLS)))
    for row, recall, target in zip(monotone, right / count, found):
        places = np.searchsorted(recall, RECALLS, side="left")
        reached = places < len(row)
        target[reached] = row[places[reached]]
    return found


def _best(right: np.ndarray, wrong: np.ndarray, scores: np.ndarray, count: int) -> dict[str, float]:
    """precision, recall and f1 at the score where f1 is largest, and that score."""
    if not len(right) or not right[-1]:
        return dict.fromkeys(("precision", "recall", "f1", "score"), 0.0)
    f1 = 2 * right / (right + wrong + count)
    k = int(f1.argmax())
    return {
        "precision": float(right[k] / (right[k] + wrong[k])),
        "recall": float(right[k] / count),
        "f1": float(f1[k]),
        "score": float(scores[k]),
    }


def confusion(found: Detections, boxes: np.ndarray, labels: np.ndarray, crowd: np.ndarray, count: int) -> np.ndarray:
    """The confusion matrix [actual, predicted] of a picture, whose last row and column are the background.

    Of predictions from the score `SHOWN` on, pairs of an IoU of at least 0.5 are matched, also of different classes,
    the largest IoU first. A prediction that lies in a crowd and matches nothing does not count.
    """
    table = np.zeros((count + 1, count + 1), np.int64)
    kept = np.asarray(found.scores) >= SHOWN
    predicted = np.asarray(found.boxes, np.float64).reshape(-1, 4)[kept]
    classes = np.asarray(found.labels)[kept]
    iou = overlaps(predicted, boxes, crowd)
    pairs = np.argwhere((iou >= THRESHOLDS[0]) & ~crowd)
    order = np.argsort(-iou[pairs[:, 0], pairs[:, 1]], kind="stable")
    free, missing = np.ones(len(predicted), bool), ~crowd
    for i, j in pairs[order]:
        if free[i] and missing[j]:
            table[labels[j], classes[i]] += 1
            free[i] = missing[j] = False
    free &= ~((iou >= THRESHOLDS[0]) & crowd).any(1)
    table[count] += np.bincount(classes[free], minlength=count + 1)
    table[:, count] += np.bincount(labels[missing], minlength=count + 1)
    return table
