"""Pictures with boxes: what all readers of annotations give, checked.

A sample is a dict: ``image`` uint8 [H, W, 3], ``boxes`` float32 [n, 4] as x1, y1, x2, y2 in pixels of the picture,
``labels`` int64 [n], and ``crowd`` bool [n], which marks groups and objects that are too hard: they are not learned,
and a prediction on one of them counts as neither right nor wrong.

Boxes stay as they were written, also where they reach out of their picture or have no area: metrics compare with them.
Feeds for training cut them off, or leave them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, UnknownName, as_bad_input
from onnxgrad.files import open_ordinary
from onnxgrad.training.data.annotations.outlines import draw_outline
from onnxgrad.training.data.images import FORMATS, deep_pixels, load_pillow, upright, upright_size
from onnxgrad.wording import name_list


@dataclass(frozen=True)
class BoxRow:
    """A picture's file with its boxes.

    Attributes:
        file: of the picture.
        size: (width, height) that the boxes refer to.
        boxes: float64 [n, 4], x1, y1, x2, y2 in pixels.
        labels: class numbers [n].
        crowd: bool [n], boxes that are not learned and not counted.
        areas: float64 [n] of the objects, which may be smaller than their boxes.
        segments: the outline of each object as its file has it: polygons of x, y, or a COCO run-length code; or None.
        points: key points [n, K, 3] as x, y, visibility (0: not labelled), where the file has them.
        name: of the row in its file (an image id, a path).
    """

    file: Path
    size: tuple[int, int]
    boxes: np.ndarray
    labels: np.ndarray
    crowd: np.ndarray
    areas: np.ndarray
    segments: tuple[Any, ...] | None = None
    points: np.ndarray | None = None
    name: Any = None

    def only(self, kept: np.ndarray, labels: np.ndarray) -> BoxRow:
        """The boxes at the places `kept`, with `labels`."""
        return replace(
            self,
            boxes=self.boxes[kept],
            labels=labels,
            crowd=self.crowd[kept],
            areas=self.areas[kept],
            segments=None if self.segments is None else tuple(self.segments[k] for k in kept),
            points=None if self.points is None else self.points[kept],
        )


@dataclass
class Remarks:
    """Lines about annotations that are usable but odd: how many of a kind there are, and the first."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, kind: str, place: str, count: int = 1) -> None:
        """Count `count` of `kind`; the first of all is at `place`."""
        before, first = self.found.get(kind, (0, place))
        self.found[kind] = (before + count, first)

    def lines(self) -> list[str]:
        """A line for each kind."""
        return [f"{count} {kind}; the first: {first}" for kind, (count, first) in self.found.items()]


def box_row(
    file: Path,
    size: tuple[int, int],
    boxes: Sequence[Sequence[float]],
    labels: Sequence[int],
    place: Callable[[int], str],
    remarks: Remarks,
    *,
    crowd: Sequence[bool] | None = None,
    areas: Sequence[float] | None = None,
    **others: Any,
) -> BoxRow:
    """The checked row of a picture.

    Args:
        file: of the picture.
        size: its (width, height).
        boxes: x1, y1, x2, y2 of each.
        labels: class numbers.
        place: the file and the line, or the annotation, of the k-th box, for messages.
        remarks: collects what is odd and usable.
        crowd: see `BoxRow`. Default: none is.
        areas: see `BoxRow`. Default: those of the boxes.
        others: attributes of the row.

    Raises:
        BadInput: a box that is not finite, has a negative size, or lies outside of its picture.
    """
    width, height = size
    corners = np.asarray(boxes, np.float64).reshape(-1, 4)
    low, high = corners[:, :2], corners[:, 2:]
    outside = (high < 0).any(1) | (low > (width, height)).any(1)
    for bad, problem in (
        (~np.isfinite(corners).all(1), "numbers that are not finite"),
        ((high < low).any(1), "a negative width or height"),
        (outside, f"no part inside of its picture of {width} × {height} pixels"),
    ):
        if bad.any():
            k = int(bad.argmax())
            raise BadInput(f"{place(k)} is a box with {problem}: {', '.join(f'{v:g}' for v in corners[k])}")
    for odd, kind in (
        ((low < -1).any(1) | (high > (width + 1, height + 1)).any(1), "boxes reach out of their pictures"),
        ((high == low).any(1), "boxes have no area"),
    ):
        if odd.any():
            remarks.add(kind, place(int(odd.argmax())), int(odd.sum()))
    flags = np.zeros(len(corners), bool) if crowd is None else np.asarray(crowd, bool).reshape(-1)
    sizes = np.prod(high - low, axis=1) if areas is None else np.asarray(areas, np.float64).reshape(-1)
    return BoxRow(file, size, corners, np.asarray(labels, np.int64).reshape(-1), flags, sizes, **others)


class DetectionData:
    """Pictures with boxes; pictures are read when they are asked for.

    Args:
        rows: one for each picture.
        names: of the classes, in the order of their numbers.
        source: the data in messages.
        notes: lines about odd annotations.
    """

    def __init__(self, rows: Sequence[BoxRow], names: Sequence[str], source: str, notes: Iterable[str] = ()) -> None:
        self.rows, self.names, self.source, self.notes = list(rows), tuple(names), source, list(notes)
        if not self.rows:
            raise BadInput(f"{source} has no pictures")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, k: int) -> dict[str, Any]:
        row = self.rows[k]
        found = {
            "image": read_pixels(row.file, row.size),
            "boxes": row.boxes.astype(np.float32),
            "labels": row.labels,
            "crowd": row.crowd,
        }
        return found if row.points is None else {**found, "points": row.points}

    def masks(self, k: int) -> np.ndarray:
        """The masks of the objects in a picture, bool [n, H, W]. Raises BadInput for an object without an outline."""
        row = self.rows[k]
        place = f"of the picture {row.name!r} of {self.source}"
        found = np.zeros((len(row.labels), *row.size[::-1]), bool)
        for i in range(len(found)):
            found[i] = draw_outline(None if row.segments is None else row.segments[i], row.size, f"object {i} {place}")
        return found

    def select(self, rows: Iterable[int]) -> DetectionData:
        """Only these pictures."""
        return DetectionData([self.rows[int(k)] for k in rows], self.names, self.source, self.notes)

    def with_classes(self, classes: Sequence[str], declared: bool = True) -> DetectionData:
        """The same pictures with the boxes of `classes` alone, numbered in this order.

        Args:
            classes: names.
            declared: the data declare all of their classes; otherwise those are known that occur.

        Raises:
            UnknownName: the data declare no such class. BadInput: no class occurs, or one is named twice.
        """
        if len(set(classes)) < len(classes) or not classes:
            raise BadInput(f"classes are different names, not {', '.join(map(repr, classes)) or 'none'}")
        if not self.names:  # of pictures without objects
            return DetectionData(self.rows, classes, self.source, self.notes)
        unknown = [c for c in classes if c not in self.names]
        if unknown and (declared or len(unknown) == len(classes)):
            raise UnknownName(unknown[0], self.names, f"class in {self.source}")
        number = np.array([classes.index(n) if n in classes else -1 for n in self.names], np.int64)
        rows, dropped = [], 0
        for row in self.rows:
            labels = number[row.labels]
            kept = np.flatnonzero(labels >= 0)
            dropped += len(labels) - len(kept)
            rows.append(row.only(kept, labels[kept]))
        notes = [f"{dropped} boxes are of other classes than {name_list(classes)}"] if dropped else []
        return DetectionData(rows, classes, self.source, [*self.notes, *notes])

    @property
    def counts(self) -> np.ndarray:
        """The number of boxes of each class that are learned."""
        found = np.zeros(len(self.names), np.int64)
        for row in self.rows:
            found += np.bincount(row.labels[~row.crowd], minlength=len(found))
        return found


def picture_size(file: Path, place: str) -> tuple[int, int]:
    """(width, height) of the picture in `file` as it is looked at, from its header. Raises BadInput."""
    load_pillow()
    if not file.exists():
        raise BadInput(f"{place} names the picture {str(file)!r}, which is not there")
    with as_bad_input(f"{place}: cannot read the picture {str(file)!r}", nested=True):
        return upright_size(file)


def read_pixels(file: Path, size: tuple[int, int]) -> np.ndarray:
    """The picture in `file`, uint8 [H, W, 3]: turned by its EXIF orientation, unless `size` is that before it.

    Raises:
        BadInput: it cannot be read, or is of another size.
    """
    image = load_pillow()
    failing = as_bad_input(f"cannot read the picture {str(file)!r}", nested=True)
    with failing, open_ordinary(file) as opened, image.open(opened, formats=FORMATS) as picture:
        own, shown = picture.size, upright(picture, lambda: size)
        if shown.size != size:
            raise BadInput(f"it has {own[0]} by {own[1]} pixels, and its annotation says {size[0]} by {size[1]}")
        shown = deep_pixels(shown).convert("L") if shown.mode[0] in "IF" else shown
        return np.asarray(shown.convert("RGB"), np.uint8)
