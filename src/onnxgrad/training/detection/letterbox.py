"""Letterbox: a picture of any size on the canvas that a detector takes, and boxes there and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.images import MOST_PIXELS, load_pillow

#: The least width and height of a box that is learned, in pixels of the canvas.
LEAST = 1.0


@dataclass(frozen=True)
class Placement:
    """The place of a picture on a canvas: x becomes scale · x + offset.

    Attributes:
        scale: of x and y.
        offset: of x and y, in pixels of the canvas.
        picture: (width, height) of the picture.
    """

    scale: tuple[float, float]
    offset: tuple[float, float]
    picture: tuple[int, int]

    def to_canvas(self, corners: np.ndarray) -> np.ndarray:
        """Boxes [..., 4], or points [..., 2], of the picture in pixels of the canvas."""
        repeat = corners.shape[-1] // 2
        return corners * np.tile(self.scale, repeat) + np.tile(self.offset, repeat)

    def to_picture(self, corners: np.ndarray) -> np.ndarray:
        """Boxes [..., 4], or points [..., 2], of the canvas in pixels of the picture, cut off at its edges."""
        repeat = corners.shape[-1] // 2
        found = (corners - np.tile(self.offset, repeat)) / np.tile(self.scale, repeat)
        return np.clip(found, 0, np.tile(self.picture, repeat))


@dataclass(frozen=True)
class Letterbox:
    """The preparation of pictures for a detector.

    Attributes:
        height: of the canvas.
        width: of the canvas.
        keep_ratio: a picture keeps its proportions, and edges are filled; otherwise it is stretched.
        centered: it stands in the middle of the canvas; otherwise in the upper left corner.
        fill: the value of the edges, 0 to 255.
        bgr: channels are blue, green, red.
        mean: the array is (pixels / 255 - mean) / std; of one number, or one per channel in the order of the array.
        std: see `mean`; 1 / 255 keeps numbers from 0 to 255.
    """

    height: int
    width: int
    keep_ratio: bool = True
    centered: bool = True
    fill: int = 114
    bgr: bool = False
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1 or self.height * self.width > MOST_PIXELS:
            raise BadInput(f"a picture of {self.width} by {self.height} pixels cannot be made")
        if not {len(self.mean), len(self.std)} <= {1, 3} or 0 in self.std:
            raise BadInput(f"mean and std have one number, or one per channel, not {self.mean} and {self.std}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Letterbox:
        """The letterbox that `to_json` wrote. Raises BadInput for other values."""
        try:
            keep_ratio, centered, bgr = (bool(values[n]) for n in ("keep_ratio", "centered", "bgr"))
            mean, std = (tuple(float(v) for v in values[n]) for n in ("mean", "std"))
            height, width, fill = (int(values[n]) for n in ("height", "width", "fill"))
            return cls(height, width, keep_ratio, centered, fill, bgr, mean, std)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"no preparation of pictures: {values!r}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain values, which `of` reads."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    def place(self, size: tuple[int, int]) -> Placement:
        """The place of a picture of (width, height) on the canvas."""
        width, height = size
        if not self.keep_ratio:
            return Placement((self.width / width, self.height / height), (0.0, 0.0), size)
        ratio = min(self.width / width, self.height / height)
        inner = (max(1, round(width * ratio)), max(1, round(height * ratio)))
        margins = ((self.width - inner[0]) // 2, (self.height - inner[1]) // 2) if self.centered else (0, 0)
        return Placement((inner[0] / width, inner[1] / height), (float(margins[0]), float(margins[1])), size)

    def draw(self, picture: np.ndarray) -> tuple[np.ndarray, Placement]:
        """`picture`, uint8 [H, W, 3], on the canvas, uint8 [height, width, 3], and its place there."""
        placement = self.place((picture.shape[1], picture.shape[0]))
        inner = (round(picture.shape[1] * placement.scale[0]), round(picture.shape[0] * placement.scale[1]))
        canvas = np.full((self.height, self.width, 3), self.fill, np.uint8)
        x, y = map(int, placement.offset)
        canvas[y : y + inner[1], x : x + inner[0]] = resized(picture, inner)
        return canvas, placement

    def to_array(self, pixels: np.ndarray, channels_last: bool = False) -> np.ndarray:
        """float32 [3, H, W] of `pixels`, uint8 [H, W, 3]: as the model takes them; or [H, W, 3]."""
        ordered = pixels[..., ::-1] if self.bgr else pixels
        scaled = ((ordered / 255 - np.array(self.mean)) / np.array(self.std)).astype(np.float32)
        return np.ascontiguousarray(scaled if channels_last else scaled.transpose(2, 0, 1))


def resized(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """`picture`, uint8 [H, W] or [H, W, 3], scaled to (width, height)."""
    if (picture.shape[1], picture.shape[0]) == size:
        return picture
    image = load_pillow()
    return np.asarray(image.fromarray(picture).resize(size, image.Resampling.BILINEAR), np.uint8)


def learned(boxes: np.ndarray, labels: np.ndarray, crowd: np.ndarray, letterbox: Letterbox) -> np.ndarray:
    """Rows of class, x1, y1, x2, y2 of the `boxes` that are no crowd and not too small, cut off at the edges."""
    cut = np.clip(boxes, 0, np.tile((letterbox.width, letterbox.height), 2))
    kept = ~np.asarray(crowd, bool) & (cut[:, 2:] - cut[:, :2] >= LEAST).all(1)
    return np.concatenate([labels[kept, None], cut[kept]], axis=1).astype(np.float32)
