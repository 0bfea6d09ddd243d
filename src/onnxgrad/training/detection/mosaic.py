"""Variants of pictures with boxes while training: mosaics, zoomed, moved, mirrored, of other colours.

Each is drawn by the seed, the epoch and the row alone, as in `onnxgrad.training.data.augment`, whose settings they
share. A box that has lost nine tenths of its area to an edge is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxgrad.training.data.annotations.samples import DetectionData
from onnxgrad.training.data.augment import Augment, uniform
from onnxgrad.training.data.images import load_pillow
from onnxgrad.training.detection.letterbox import Letterbox, Placement, learned

#: The least share of a box that is inside, so that it is learned.
VISIBLE = 0.1
#: Where the corner lies at which the four pictures of a mosaic meet, as shares of the canvas.
_MEETING = (0.25, 0.75)
_DRAWS = 32


@dataclass(frozen=True)
class BoxVariants:
    """Draws a row with its boxes by the settings `how`."""

    how: Augment

    def __call__(
        self, data: DetectionData, letterbox: Letterbox, row: int, draw: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """A canvas, uint8 [H, W, 3], and the labels on it, float32 [n, 5]."""
        chance = iter(uniform(draw, np.array([row]), _DRAWS)[0].tolist())
        if next(chance) < self.how.mosaic:
            others = [min(int(next(chance) * len(data)), len(data) - 1) for _ in range(3)]
            canvas, boxes, labels, crowd = self._mosaic(data, letterbox, [row, *others], chance)
        else:
            canvas, boxes, labels, crowd = self._zoomed(data[row], letterbox, chance)
        if self.how.crop:
            canvas, boxes = _move_all(
                canvas, boxes, [round((2 * next(chance) - 1) * self.how.crop) for _ in range(2)], letterbox
            )
        height, width = canvas.shape[:2]
        kept = _visible(boxes, (0, 0, width, height)) & ~crowd
        rows = learned(boxes[kept], labels[kept], crowd[kept], letterbox)
        if next(chance) < self.how.flip:
            canvas = canvas[:, ::-1]
            rows[:, [1, 3]] = width - rows[:, [3, 1]]
        if next(chance) < self.how.vflip:
            canvas = canvas[::-1]
            rows[:, [2, 4]] = height - rows[:, [4, 2]]
        if self.how.jitter:
            canvas = _recolour(canvas, [self.how.jitter * (2 * next(chance) - 1) for _ in range(3)])
        if self.how.erase:
            flat = replace(self.how, flip=0, vflip=0, crop=0, jitter=0)
            canvas = flat(canvas[None], np.array([row]), draw)[0]
        return np.ascontiguousarray(canvas), rows

    def _zoomed(self, sample: dict[str, Any], letterbox: Letterbox, chance: Any) -> tuple[np.ndarray, ...]:
        """One picture: scaled by 1 ± zoom, and anywhere on the canvas that it fits, or such that it covers it."""
        placement = letterbox.place((sample["image"].shape[1], sample["image"].shape[0]))
        if self.how.zoom:
            factor = 1 + self.how.zoom * (2 * next(chance) - 1)
            scale = (placement.scale[0] * factor, placement.scale[1] * factor)
            spare = [c - s * n for c, s, n in zip((letterbox.width, letterbox.height), scale, placement.picture)]
            placement = Placement(scale, (next(chance) * spare[0], next(chance) * spare[1]), placement.picture)
        canvas = np.full((letterbox.height, letterbox.width, 3), letterbox.fill, np.uint8)
        _paste(canvas, sample["image"], placement, (0, 0, letterbox.width, letterbox.height))
        return canvas, placement.to_canvas(sample["boxes"].astype(np.float64)), sample["labels"], sample["crowd"]

    def _mosaic(
        self, data: DetectionData, letterbox: Letterbox, rows: Sequence[int], chance: Any
    ) -> tuple[np.ndarray, ...]:
        """Four pictures around a corner that they share."""
        width, height = letterbox.width, letterbox.height
        canvas = np.full((height, width, 3), letterbox.fill, np.uint8)
        low, high = _MEETING
        x, y = (round(size * (low + (high - low) * next(chance))) for size in (width, height))
        parts = []
        for k, row in enumerate(rows):
            sample = data[row]
            size = (sample["image"].shape[1], sample["image"].shape[0])
            factor = (0.5 + 0.5 * next(chance)) * (1 + self.how.zoom * (2 * next(chance) - 1))
            scale = [s * factor for s in letterbox.place(size).scale]
            right, below = k % 2, k // 2
            offset = (x if right else x - scale[0] * size[0], y if below else y - scale[1] * size[1])
            region = (x if right else 0, y if below else 0, width if right else x, height if below else y)
            placement = Placement((scale[0], scale[1]), offset, size)
            _paste(canvas, sample["image"], placement, region)
            boxes = placement.to_canvas(sample["boxes"].astype(np.float64))
            kept = _visible(boxes, region) & ~sample["crowd"]
            cut = np.clip(boxes[kept], np.tile(region[:2], 2), np.tile(region[2:], 2))
            parts.append((cut, sample["labels"][kept], sample["crowd"][kept]))
        boxes, labels, crowd = (np.concatenate([p[k] for p in parts]) for k in range(3))
        return canvas, boxes, labels, crowd


def _visible(boxes: np.ndarray, region: tuple[int, int, int, int]) -> np.ndarray:
    """True for boxes of which at least `VISIBLE` is inside of the region x1, y1, x2, y2."""
    cut = np.clip(boxes, np.tile(region[:2], 2), np.tile(region[2:], 2))
    inside, area = (np.prod(b[:, 2:] - b[:, :2], axis=1) for b in (cut, boxes))
    return np.asarray((area > 0) & (inside >= VISIBLE * area))


def _paste(canvas: np.ndarray, picture: np.ndarray, placement: Placement, region: tuple[int, int, int, int]) -> None:
    """Draw the part of `picture` that lies in a region of the canvas."""
    end = [o + s * n for o, s, n in zip(placement.offset, placement.scale, placement.picture)]
    x1, y1 = (max(region[k], int(np.ceil(placement.offset[k] - 0.5))) for k in range(2))
    x2, y2 = (min(region[2 + k], int(np.ceil(end[k] - 0.5))) for k in range(2))
    if x2 <= x1 or y2 <= y1:
        return
    source = placement.to_picture(np.array([x1, y1, x2, y2], np.float64))
    image = load_pillow()
    drawn = image.fromarray(picture).resize((x2 - x1, y2 - y1), image.Resampling.BILINEAR, box=tuple(source.tolist()))
    canvas[y1:y2, x1:x2] = np.asarray(drawn, np.uint8)


def _move_all(
    canvas: np.ndarray, boxes: np.ndarray, by: Sequence[int], letterbox: Letterbox
) -> tuple[np.ndarray, np.ndarray]:
    """Everything moved by (x, y) pixels; the fill of the canvas comes in."""
    height, width = canvas.shape[:2]
    found = np.full_like(canvas, letterbox.fill)
    x, y = (int(np.clip(b, -n, n)) for b, n in zip(by, (width, height)))
    found[max(y, 0) : height + min(y, 0), max(x, 0) : width + min(x, 0)] = canvas[
        max(-y, 0) : height + min(-y, 0), max(-x, 0) : width + min(-x, 0)
    ]
    return found, boxes + np.tile((x, y), 2)


def _recolour(canvas: np.ndarray, by: Sequence[float]) -> np.ndarray:
    """`canvas` with other contrast, brightness and saturation, by 1 + each number."""
    pixels = canvas.astype(np.float32)
    contrast, brightness, saturation = (1 + b for b in by)
    mean = pixels.mean()
    pixels = (mean + contrast * (pixels - mean)) * brightness
    grey = pixels.mean(axis=2, keepdims=True)
    return np.clip(np.rint(grey + saturation * (pixels - grey)), 0, 255).astype(np.uint8)
