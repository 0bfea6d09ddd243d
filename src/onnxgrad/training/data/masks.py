"""Pictures with masks: a folder of pictures beside a folder of their masks, files of the same names.

| pictures | masks |
|---|---|
| ``images`` | ``masks``, or ``labels`` or ``annotations`` with pictures in them |
| ``JPEGImages`` | ``SegmentationClass`` (Pascal VOC), of some of the pictures |

COCO's JSON, and text files of YOLO in ``labels``, have outlines in place of masks: they are drawn, the smaller objects
over the larger ones.

The values of a mask are class numbers, also where a palette colors them. For labels between 0 and 1, 255 is 1 as well;
for other numbers (depth), a mask of 16 bits has its values as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, as_bad_input
from onnxgrad.files import open_ordinary
from onnxgrad.training.data.annotations.coco import read_coco
from onnxgrad.training.data.annotations.outlines import draw_outline
from onnxgrad.training.data.annotations.samples import BoxRow, DetectionData, read_pixels
from onnxgrad.training.data.annotations.yolo_folder import read_yolo
from onnxgrad.training.data.columns import Column, Columns, stacked
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.images import FORMATS, SUFFIXES, Images, Pictures, load_pillow, upright
from onnxgrad.training.data.labels import NamedClasses, places_in
from onnxgrad.wording import name_list

#: Folders of pictures, and of their masks.
_PAIRS = (
    ("images", "masks"),
    ("images", "labels"),
    ("images", "annotations"),
    ("JPEGImages", "SegmentationClass"),
)
#: Names of the class of pixels without an object.
GROUND = ("background", "_background_", "__background__")
#: Modes of Pillow whose values are numbers of one channel.
_MODES = ("1", "L", "P", "I", "I;16")


class Masks(Column):
    """A column of masks, read when a batch needs them; their size is that of the pictures in the batch."""

    def __init__(self, paths: list[Path], how: Images) -> None:
        self.paths, self.how = paths, how

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These masks, decoded now."""
        return stacked([self._read(self.paths[i], field) for i in rows])

    def _read(self, path: Path, field: Field) -> np.ndarray:
        """The mask in the file at `path` as one row of `field`. Raises BadInput if it cannot be read."""
        self._layout(field)
        image = load_pillow()
        failing = as_bad_input(f"cannot read the mask {str(path)!r}", nested=True)
        with failing, open_ordinary(path) as file, image.open(file, formats=FORMATS) as mask:
            mask = upright(mask)
            if mask.mode not in _MODES:
                values = np.asarray(mask.convert("RGB"))
                if np.ptp(values, axis=2).any():
                    raise BadInput("it has colors, where a mask has a class number at each pixel")
                mask = image.fromarray(values[..., 0])
            values = self._resized(mask, field)
        numbers = values.astype(field.dtype)
        if field.binary and numbers.max(initial=0) > 1:
            numbers = numbers / np.asarray(255, field.dtype)
        return numbers

    def _layout(self, field: Field) -> tuple[list[int], list[int | None]]:
        """The axes of size 1 beside height and width, at most one, and these two. Raises BadInput for other labels."""
        shape = field.shape or (None, None)  # of labels whose shape is asked for
        channels = [axis for axis, size in enumerate(shape) if size == 1][:1] if len(shape) == 3 else []
        if len(shape) - len(channels) != 2:
            raise BadInput(f"masks cannot be the labels {field.name!r}, which are {field.wanted}")
        return channels, [size for axis, size in enumerate(shape) if axis not in channels]

    def _resized(self, mask: Any, field: Field) -> np.ndarray:
        """A `mask` of Pillow in the size and layout of `field`, by the nearest pixels."""
        channels, dims = self._layout(field)
        own = self.how.size or (None, None)
        size = (dims[1] or own[1] or mask.width, dims[0] or own[0] or mask.height)
        values = np.asarray(mask if mask.size == size else mask.resize(size, load_pillow().Resampling.NEAREST))
        return np.expand_dims(values, channels[0]) if channels else values


class ObjectMasks(Masks, NamedClasses):
    """A column of masks that are drawn from outlines of objects; crowds have the label that is ignored.

    Args:
        objects: pictures with outlines; a class called like one of `GROUND`, the first, is the background.
        how: see `Masks`.
        numbers: of the classes of `objects` in `names`; default: behind the background.
        names: of the classes.
    """

    def __init__(
        self, objects: DetectionData, how: Images, numbers: np.ndarray | None = None, names: Sequence[str] = ()
    ) -> None:
        super().__init__([row.file for row in objects.rows], how)
        first = 0 if objects.names[0].lower() in GROUND else 1
        self.objects = objects
        self.numbers = np.arange(len(objects.names)) + first if numbers is None else numbers
        self.names = tuple(names) or (*GROUND[:first], *objects.names)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These masks, drawn now."""
        self._layout(field)
        return stacked([self._draw(self.objects.rows[i], field) for i in rows])

    def select(self, rows: np.ndarray) -> ObjectMasks:
        """Only these rows, of the same classes."""
        return ObjectMasks(self.objects.select(rows), self.how, self.numbers, self.names)

    def renumbered(self, names: Sequence[str], where: str) -> ObjectMasks:
        """The same classes by their numbers in `names`; of names without a background, others belong to it."""
        own = self.names
        if own[0].lower() in GROUND and names[0].lower() not in GROUND:
            names = (own[0], *names)
            missing = [n for n in names[1:] if n not in own]
            if missing:
                raise BadInput(f"{where} has no class {missing[0]!r}; it has {name_list(own[1:])}")
            own = tuple(n if n in names else names[0] for n in own)
        places = places_in(names, own, where)
        return ObjectMasks(self.objects, self.how, places[self.numbers], names)

    def merged(self) -> ObjectMasks:
        """One class of all objects."""
        own = [n for n, number in zip(self.objects.names, self.numbers) if number]
        names = (self.names[0], own[0] if len(own) == 1 else "object")
        return ObjectMasks(self.objects, self.how, np.minimum(self.numbers, 1), names)

    def _draw(self, row: BoxRow, field: Field) -> np.ndarray:
        """The mask of a picture as one row of `field`. Raises BadInput for an object without an outline."""
        mask = np.zeros(row.size[::-1], np.int32)
        order = np.argsort(-row.areas, kind="stable")
        for k in sorted(order, key=lambda k: not row.crowd[k]):  # crowds are behind objects
            place = f"object {k} of the picture {row.name!r} of {self.objects.source}"
            number = self.numbers[row.labels[k]]
            if row.crowd[k] and not field.binary:
                if field.ignored is None:
                    raise BadInput(
                        f"{place} is a crowd, and no label says what does not count\n"
                        "  hint: an option of the loss does, as in dice:ignore_index=255; for evaluate, --ignore-index"
                    )
                number = field.ignored
            mask[draw_outline(None if row.segments is None else row.segments[k], row.size, place)] = number
        return self._resized(load_pillow().fromarray(mask), field).astype(field.dtype)


class ObjectPictures(Pictures):
    """A column of the pictures that `ObjectMasks` are drawn for: turned as their annotations are."""

    def __init__(self, objects: DetectionData, how: Images) -> None:
        files = [row.file for row in objects.rows]
        folder = Path(os.path.commonpath([file.parent for file in files]))
        super().__init__(files, how, folder)
        self.objects = objects

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These pictures, decoded now."""
        known = [self.objects.rows[i] for i in rows]
        image = load_pillow()
        return stacked([self.how.convert(image.fromarray(read_pixels(r.file, r.size)), field) for r in known])

    def select(self, rows: np.ndarray) -> Column:
        """These pictures, with their annotations."""
        return Column.select(self, rows)

    def stored_size(self, row: int) -> tuple[int, int]:
        """Height and width of the picture, turned as its annotations are."""
        width, height = self.objects.rows[row].size
        return height, width


def object_columns(path: Path, how: Images) -> Columns:
    """The columns ``images`` and ``labels`` of COCO's annotations, or of a folder of YOLO's polygons.

    Raises BadInput as `read_coco` and `read_yolo`.
    """
    objects = read_yolo(path) if path.is_dir() else read_coco(path)
    columns = {"images": ObjectPictures(objects, how), "labels": ObjectMasks(objects, how)}
    return Columns(columns, objects.source, notes=objects.notes)


def has_polygons(path: Path) -> bool:
    """True for a folder with pictures in ``images`` and text files in ``labels`` (YOLO)."""
    return (path / "images").is_dir() and next((path / "labels").glob("*.txt"), None) is not None


def choose_classes(columns: Columns, names: Sequence[str], source: str) -> Columns:
    """`columns` with masks of the classes `names` alone. Raises BadInput if none are drawn from outlines."""
    drawn = {name: column for name, column in columns.items() if isinstance(column, ObjectMasks)}
    if not drawn:
        raise BadInput(f"classes are chosen of boxes, and of outlines of objects, which {source} has not")
    columns.update({name: column.renumbered(names, source) for name, column in drawn.items()})
    return columns


def mask_field(name: str, prediction: Sequence[Any], ignored: int | None, are_numbers: bool = False) -> Field:
    """The labels `name` for a `prediction` of this shape: class numbers, or 0 and 1 beside a single score.

    Classes lie along the axis 1, unless its size is open and that of the last axis is not. With `are_numbers`, labels
    of a single score are numbers, such as depths.
    """
    dims = [d if isinstance(d, int) else None for d in prediction[1:]] if len(prediction) == 4 else [2, None, None]
    axis = 2 if dims[0] is None and dims[2] is not None else 0
    if dims[axis] == 1:
        return Field(name, np.dtype(np.float32), tuple(dims), label=True, binary=not are_numbers)
    space = tuple(d for k, d in enumerate(dims) if k != axis)
    return Field(name, np.dtype(np.int64), space, label=True, ignored=ignored)


def shared_sizes(fields: Sequence[Field], columns: Mapping[str, Column]) -> list[tuple[str, int, str, int]]:
    """Axes of masks and of pictures with one name in the model: (masks, axis, pictures, axis)."""
    return [
        (mask.name, k, picture.name, 1 + picture.dims.index(name))
        for mask in fields
        if isinstance(columns.get(mask.name), Masks)
        for k, name in enumerate(mask.dims, 1)
        for picture in fields
        if name and not picture.label and name in picture.dims
    ]


def check_sizes(batch: Mapping[str, np.ndarray], shared: Sequence[tuple[str, int, str, int]], source: str) -> None:
    """Raise BadInput for masks of another size than their pictures, where the model takes both as they are."""
    for mask, k, picture, axis in shared:
        own, size = batch[mask].shape[k], batch[picture].shape[axis]
        if own != size:
            raise BadInput(
                f"masks {mask!r} of {source} have {own} pixels where the pictures {picture!r} have {size}\n"
                "  hint: scale them to one size, or export the model with the size of its pictures"
            )


def mask_folder(path: Path, how: Images) -> Mapping[str, Column]:
    """The columns ``images`` and ``labels`` of a folder with pictures and their masks; nothing for other folders.

    Raises:
        BadInput: a picture has no mask, or a mask no picture.
    """
    for first, second in _PAIRS:
        if not ((path / first).is_dir() and (path / second).is_dir()):
            continue
        masks = _by_stem(path / second)
        if not masks:
            continue
        pictures = _by_stem(path / first)
        if first == "JPEGImages":
            pictures = {name: pictures[name] for name in masks if name in pictures}
        alone = sorted(pictures.keys() ^ masks.keys())
        if alone or not pictures:
            name = alone[0] if alone else ""
            file, other = (pictures[name], second) if name in pictures else (masks.get(name, path), first)
            raise BadInput(f"{str(file)!r} has no file of that name in {str(path / other)!r}")
        names = sorted(pictures)
        files = [pictures[name] for name in names]
        drawn = [masks[name] for name in names]
        return {"images": Pictures(files, how, path / first, drawn), "labels": Masks(drawn, how)}
    return {}


def _by_stem(folder: Path) -> dict[str, Path]:
    """The pictures in a folder by their relative paths without endings; ``_mask`` is dropped, too."""
    files = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in SUFFIXES]
    return {p.relative_to(folder).with_suffix("").as_posix().removesuffix("_mask"): p for p in files}
