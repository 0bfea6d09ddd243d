"""Feeds of a detector: batches of letterboxed pictures, and of their boxes, padded to the most of a batch.

Labels are float32 [N, M, 5]: class, x1, y1, x2, y2 in pixels of the canvas; the class -1 is padding. A box is left out
where it is a crowd, or smaller than a pixel of the canvas in what lies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.training.data.annotations.samples import DetectionData
from onnxgrad.training.data.augment import Augment
from onnxgrad.training.data.columns import Column, Remembered
from onnxgrad.training.data.fields import Field
from onnxgrad.training.detection.letterbox import Letterbox, Placement, learned
from onnxgrad.training.detection.mosaic import BoxVariants

#: The class of padding.
PADDING = -1.0
#: The number of labels of a batch is rounded up to a multiple of it, so that batches differ less in shape.
MULTIPLE = 8

Variant = Callable[[DetectionData, Letterbox, int, Sequence[int]], tuple[np.ndarray, np.ndarray]]


def canvas_labels(sample: dict[str, Any], placement: Placement, letterbox: Letterbox) -> np.ndarray:
    """The boxes of a sample on the canvas that are learned, float32 [n, 5]: class, x1, y1, x2, y2."""
    boxes = placement.to_canvas(np.asarray(sample["boxes"], np.float64))
    return learned(boxes, sample["labels"], sample["crowd"], letterbox)


def padded_labels(rows: Sequence[np.ndarray], most: int | None = None) -> np.ndarray:
    """Labels [n, 5] of each picture as one array [N, M, 5]; `most` fixes M, and further boxes are left out."""
    size = most or max(1, -(-max((len(r) for r in rows), default=1) // MULTIPLE) * MULTIPLE)
    found = np.zeros((len(rows), size, 5), np.float32)
    found[..., 0] = PADDING
    for k, row in enumerate(rows):
        found[k, : len(row)] = row[:size]
    return found


class DetectionFeed:
    """Pictures with boxes as the inputs of a step.

    Args:
        data: the pictures.
        letterbox: how they become arrays.
        images: the name of the input of pictures.
        labels: the name of the input of labels.
        variant: draws a picture and its labels by the row, the seed and the epoch; None leaves them.
        channels_last: the input of pictures is [N, H, W, 3].
    """

    def __init__(
        self,
        data: DetectionData,
        letterbox: Letterbox,
        images: str = "images",
        labels: str = "labels",
        variant: Variant | None = None,
        channels_last: bool = False,
    ) -> None:
        self.data, self.letterbox, self.variant, self.channels_last = data, letterbox, variant, channels_last
        self.images, self.labels = images, labels
        self._read = Remembered(_Drawn(self))
        self._selected: tuple[np.ndarray, DetectionFeed] | None = None

    def columns(self) -> dict[str, Column]:
        """The columns of both inputs, without variants."""
        return {name: _FeedColumn(self, name) for name in (self.images, self.labels)}

    def augmented(self, how: Augment) -> DetectionFeed:
        """The same rows in the variants `how`."""
        return self._with(self.data, BoxVariants(how))

    def select(self, rows: np.ndarray) -> DetectionFeed:
        """Only these rows; the same object for the same rows, which both columns share."""
        if self._selected is None or not np.array_equal(self._selected[0], rows):
            self._selected = (rows.copy(), self._with(self.data.select(rows), self.variant))
        return self._selected[1]

    def _with(self, data: DetectionData, variant: Variant | None) -> DetectionFeed:
        return DetectionFeed(data, self.letterbox, self.images, self.labels, variant, self.channels_last)

    def row(self, k: int, draw: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        """The picture [3, H, W] and the labels [n, 5] of a row: a variant by `draw`, a seed and an epoch."""
        if self.variant is not None and draw is not None:
            pixels, labels = self.variant(self.data, self.letterbox, k, draw)
        else:
            sample = self.data[k]
            pixels, placement = self.letterbox.draw(sample["image"])
            labels = canvas_labels(sample, placement, self.letterbox)
        return {self.images: self.letterbox.to_array(pixels, self.channels_last), self.labels: labels}

    def __call__(
        self, rows: np.ndarray, draw: Sequence[int] | None = None, most: int | None = None
    ) -> dict[str, np.ndarray]:
        """The batch of `rows`; `most` fixes the number of labels of a picture."""
        found = self._read(rows) if draw is None or self.variant is None else [self.row(int(k), draw) for k in rows]
        return {
            self.images: np.stack([r[self.images] for r in found]),
            self.labels: padded_labels([r[self.labels] for r in found], most),
        }


class _Drawn:
    """The rows of a feed without variants, by position."""

    def __init__(self, feed: DetectionFeed) -> None:
        self.feed = feed

    def __getitem__(self, k: int) -> dict[str, np.ndarray]:
        return self.feed.row(k)


class _FeedColumn(Column):
    """One input of a feed; both read a row once for a batch."""

    def __init__(self, feed: DetectionFeed, name: str) -> None:
        self.feed, self.name, self.together = feed, name, feed
        self.row_classes = rarest_classes(feed.data)

    def __len__(self) -> int:
        return len(self.feed.data)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray:
        """These rows as one array."""
        most = field.shape[0] if self.name == self.feed.labels and field.shape else None
        return self.feed(rows, most=most)[self.name]

    def select(self, rows: np.ndarray) -> Column:
        """A column of only these rows."""
        return _FeedColumn(self.feed.select(rows), self.name)


def rarest_classes(data: DetectionData) -> np.ndarray:
    """The class of each picture that has the fewest boxes in all; the number of classes for one without objects."""
    counts = data.counts
    own = [np.unique(row.labels[~row.crowd]) for row in data.rows]
    return np.array([o[counts[o].argmin()] if len(o) else len(counts) for o in own], np.int64)
