"""Pictures with masks: a folder of pictures beside a folder of their masks, files of the same names.

| pictures | masks |
|---|---|
| ``images`` | ``masks``, or ``labels`` or ``annotations`` with pictures in them |
| ``JPEGImages`` | ``SegmentationClass`` (Pascal VOC), of some of the pictures |

The values of a mask are class numbers, also where a palette colors them. For labels between 0 and 1, 255 is 1 as well;
for other numbers (depth), a mask of 16 bits has its values as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary
from onnxgrad.training.data.columns import Column, stacked
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.images import FORMATS, MOST_PIXELS, SUFFIXES, Images, Pictures, load_pillow

#: Folders of pictures, and of their masks.
_PAIRS = (
    ("images", "masks"),
    ("images", "labels"),
    ("images", "annotations"),
    ("JPEGImages", "SegmentationClass"),
)
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
        shape = field.shape or (None, None)  # of labels whose shape is asked for
        channels = [axis for axis, size in enumerate(shape) if size == 1] if len(shape) == 3 else []
        if len(shape) - len(channels[:1]) != 2:
            raise BadInput(f"masks cannot be the labels {field.name!r}, which are {field.wanted}")
        dims = [size for axis, size in enumerate(shape) if axis not in channels[:1]]
        image = load_pillow()
        try:
            with open_ordinary(path) as file, image.open(file, formats=FORMATS) as mask:
                if mask.width * mask.height > MOST_PIXELS:
                    raise BadInput(f"{mask.width} by {mask.height} pixels; {MOST_PIXELS} are the most")
                if mask.mode not in _MODES:
                    values = np.asarray(mask.convert("RGB"))
                    if np.ptp(values, axis=2).any():
                        raise BadInput("it has colors, where a mask has a class number at each pixel")
                    mask = image.fromarray(values[..., 0])
                own = self.how.size or (None, None)
                size = (dims[1] or own[1] or mask.width, dims[0] or own[0] or mask.height)
                values = np.asarray(mask if mask.size == size else mask.resize(size, image.Resampling.NEAREST))
        except Exception as error:  # each format fails in its own ways on a damaged file
            raise BadInput(f"cannot read the mask {str(path)!r}: {str(error) or type(error).__name__}") from error
        numbers = values.astype(field.dtype)
        if field.binary and numbers.max(initial=0) > 1:
            numbers = numbers / np.asarray(255, field.dtype)
        return np.expand_dims(numbers, channels[0]) if channels else numbers


def mask_field(name: str, prediction: Sequence[Any], ignored: int | None) -> Field:
    """The labels `name` for a `prediction` of this shape: class numbers, or 0 and 1 beside a single score.

    Classes lie along the axis 1, unless its size is open and that of the last axis is not.
    """
    dims = [d if isinstance(d, int) else None for d in prediction[1:]] if len(prediction) == 4 else [2, None, None]
    axis = 2 if dims[0] is None and dims[2] is not None else 0
    if dims[axis] == 1:
        return Field(name, np.dtype(np.float32), tuple(dims), label=True, binary=True)
    space = tuple(d for k, d in enumerate(dims) if k != axis)
    return Field(name, np.dtype(np.int64), space, label=True, ignored=ignored)


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
        return {"images": Pictures(files, how, path / first), "labels": Masks([masks[name] for name in names], how)}
    return {}


def _by_stem(folder: Path) -> dict[str, Path]:
    """The pictures in a folder by their relative paths without endings; ``_mask`` is dropped, too."""
    files = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in SUFFIXES]
    return {p.relative_to(folder).with_suffix("").as_posix().removesuffix("_mask"): p for p in files}
