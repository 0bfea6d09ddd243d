"""Evaluation of a detector on pictures with boxes: average precision, a confusion matrix, the worst pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, warn_caller
from onnxgrad.training.data import Data
from onnxgrad.training.data.annotations.reading import ANNOTATIONS, read_detection
from onnxgrad.training.data.annotations.samples import DetectionData, picture_size, read_pixels
from onnxgrad.training.data.images import SUFFIXES
from onnxgrad.training.detection.feeds import DetectionFeed
from onnxgrad.training.detection.pictures import draw_boxes
from onnxgrad.training.detection.predict import BoxDecoder, Detector
from onnxgrad.training.measure.misses import Miss
from onnxgrad.training.measure.result import Evaluated
from onnxgrad.training.metrics.boxes import BACKGROUND, DEFINED, OF_MASKS, SHOWN, AveragePrecision, Detections
from onnxgrad.training.metrics.registry import DEFAULTS
from onnxgrad.wording import name_list

#: Columns of the boxes that a detector predicts.
BOX_COLUMNS = ("file", "class", "score", "x1", "y1", "x2", "y2")


def held_out_boxes(detector: Detector, data: Any, classes: Sequence[str] = ()) -> DetectionData:
    """The pictures of `data`, with the classes of `detector`.

    Args:
        detector: names its classes, or has as many as the data.
        data: a path, or opened data; of parts, that for validation is read.
        classes: of a detector that does not name its own, in their order.

    Raises:
        BadInput: it cannot be read, or has other classes.
    """
    if detector.names is not None and classes and list(classes) != list(detector.names):
        raise BadInput(f"the model names its classes, {name_list(detector.names)}; drop classes")
    opened = read_detection(data, classes or None, "val")
    if detector.names is not None and (not opened.names or set(detector.names) & set(opened.names)):
        named = opened.with_classes(detector.names, declared=False)
        for note in named.notes[len(opened.notes) :]:
            warn_caller(f"{opened.source}: {note}, and do not count")
        return named
    count = detector.head.classes
    numbered = any(all(n.isdecimal() for n in names) for names in (opened.names, detector.names or ("0",)))
    if len(opened.names) != count or not numbered:
        own = "" if detector.names is None else f", {name_list(detector.names)}"
        raise BadInput(
            f"{opened.source} has {len(opened.names)} classes, {name_list(opened.names)}; the model has {count}{own}"
        )
    return opened


def box_metrics(detector: Detector, data: DetectionData, asked: Sequence[str] | None) -> Sequence[str]:
    """The metrics of `asked`, or the usual ones: of masks as well, if the model draws them and all objects have them.

    Raises:
        BadInput: metrics are of masks, which the model does not draw.
    """
    if any(name in OF_MASKS for name in asked or ()) and not detector.head.maps:
        raise BadInput("metrics of masks need a detector that draws them, as YOLOv8-seg; this one has none")
    with_masks = detector.head.maps and all(len(row.labels) == 0 or all(row.segments or [0]) for row in data.rows)
    usual = (*DEFAULTS["boxes"], *("mask_map50_95", "mask_map50")[: 2 * bool(with_masks)])
    return usual if asked is None else asked


def compare_boxes(
    detector: Callable[[Sequence[np.ndarray]], list[Detections]],
    data: DetectionData,
    metrics: Sequence[str] | None = None,
    batch_size: int = 16,
    worst: int = 0,
    shown: int = 0,
) -> Evaluated:
    """Compare what `detector` finds in the pictures of `data` with their labels.

    Args:
        detector: finds boxes in pictures.
        data: with the classes of the detector.
        metrics: names of `DEFINED`. Default: the usual ones.
        batch_size: pictures at once.
        worst: the number of pictures with the most errors to draw.
        shown: the number of first pictures to draw.

    Raises:
        BadInput: a metric is none of boxes or masks, or an object has no mask.
    """
    names = list(DEFAULTS["boxes"] if metrics is None else metrics)
    strange = next((n for n in names if n not in DEFINED and n not in OF_MASKS), None)
    if strange is not None:
        raise BadInput(f"{strange} is no metric for a task of boxes; those are {', '.join([*DEFINED, *OF_MASKS])}")
    running = AveragePrecision(data.names)
    masked = AveragePrecision(data.names, masks=True) if any(n in OF_MASKS for n in names) else None
    errors = np.zeros(len(data), np.int64)
    kept: dict[int, Detections] = {}
    for start in range(0, len(data), batch_size):
        rows = range(start, min(start + batch_size, len(data)))
        samples = [data[k] for k in rows]
        for k, sample, found in zip(rows, samples, detector([s["image"] for s in samples])):
            row = data.rows[k]
            known = {**sample, "boxes": row.boxes}
            table = running.add(found, known, row.areas, row.name)
            if masked is not None:
                masked.add(found, {**known, "masks": data.masks(k)}, row.areas, row.name)
            errors[k] = table.sum() - np.trace(table)
            sure = found.scores >= SHOWN
            kept[k] = Detections(found.boxes[sure], found.scores[sure], found.labels[sure])
    result = running.result()
    of_masks = {} if masked is None else masked.result().metrics
    values = result.metrics | {f"mask_{name}": value for name, value in of_masks.items()}
    order = np.argsort(-errors, kind="stable")[:worst]
    misses = [_miss(data, int(k), kept[int(k)], int(errors[k])) for k in order if errors[k]]
    first = [(str(data.rows[k].name), draw_boxes(data[k], kept[k], data.names)) for k in range(min(shown, len(data)))]
    return Evaluated(
        "boxes", {name: values[name] for name in names}, int(data.counts.sum()), "boxes", "boxes",
        result.confusion, result.classes, misses if worst else None, [*data.names, BACKGROUND], result.curves, first,
    )  # fmt: skip


def pictures_at(path: Path) -> list[Path]:
    """The picture file at `path`, those below a folder, or those of a file of annotations; none for other files."""
    if path.suffix.lower() in ANNOTATIONS and not path.is_dir():
        return [row.file for row in read_detection(path, part="val").rows]
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [p for p in found if p.suffix.lower() in SUFFIXES and p.is_file()]


def predict_boxes(detector: Detector, files: Sequence[Path], batch_size: int = 16) -> dict[str, np.ndarray]:
    """The boxes in picture files, a row for each: file, class, score, and x1, y1, x2, y2 in pixels.

    Args:
        detector: names its classes, or numbers them.
        files: of pictures, which are turned as they are looked at.
        batch_size: pictures at once.
    """
    names = detector.names or [str(k) for k in range(detector.head.classes)]
    rows: list[tuple[Any, ...]] = []
    for start in range(0, len(files), batch_size):
        part = files[start : start + batch_size]
        pictures = [read_pixels(f, picture_size(f, "the data")) for f in part]
        for file, found in zip(part, detector(pictures)):
            best = zip(found.boxes, found.scores, found.labels)
            rows += [(str(file), names[c], score, *box) for box, score, c in best if score >= SHOWN]
    columns = list(zip(*rows)) or [()] * 7
    kinds = (object, object, *[np.float64] * 5)
    return {n: np.array(c, kind) for n, c, kind in zip(BOX_COLUMNS, columns, kinds)}


def _miss(data: DetectionData, k: int, found: Detections, errors: int) -> Miss:
    """A picture with its number of errors in place of a loss."""
    row = data.rows[k]
    actual, predicted = (
        ", ".join(f"{n} {data.names[c]}" for c, n in sorted(Counter(labels.tolist()).items())) or "nothing"
        for labels in (row.labels[~row.crowd], found.labels)
    )
    drawn = draw_boxes(data[k], found, data.names).transpose(2, 0, 1) / 255
    return Miss(float(errors), k, actual, predicted, drawn)


class BoxMeter:
    """Metrics of boxes over batches of raw values, as a run measures them.

    Args:
        feed: the pictures that are measured.
        decoder: of the head.
        metrics: names of `DEFINED`.
    """

    def __init__(self, feed: DetectionFeed, decoder: BoxDecoder, metrics: Sequence[str]) -> None:
        self.feed, self.decoder, self.metrics = feed, decoder, metrics
        self._all = AveragePrecision(feed.data.names)

    def add(self, values: Mapping[str, np.ndarray], rows: Sequence[int]) -> None:
        """Add the raw `values` of these rows of the feed."""
        known = [self.feed.data.rows[k] for k in rows]
        placements = [self.feed.letterbox.place(row.size) for row in known]
        for row, found in zip(known, self.decoder(values, placements)):
            self._all.add(found, {"boxes": row.boxes, "labels": row.labels, "crowd": row.crowd}, row.areas, row.name)

    def sums(self) -> dict[str, Any]:
        """The numbers that were added so far."""
        return self._all.sums()

    def join(self, sums: dict[str, Any]) -> None:
        """Add the `sums` of other pictures."""
        self._all.join(sums)

    def result(self) -> dict[str, float]:
        """The metrics by name; those of a size that no object has are left out."""
        found = self._all.result().metrics
        return {name: found[name] for name in self.metrics if not np.isnan(found[name])}


def feed_of(data: Data) -> DetectionFeed | None:
    """The pictures with boxes that `data` reads, if it does."""
    return next((c.together for c in data.columns.values() if isinstance(c.together, DetectionFeed)), None)
