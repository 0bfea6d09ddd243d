"""Pictures: a folder of folders of image files, decoded when a batch needs them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxgrad.errors import BadInput, as_bad_input, needs_package
from onnxgrad.files import open_ordinary
from onnxgrad.training.data.columns import Column, stacked
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.labels import ClassColumn
from onnxgrad.wording import name_list

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
#: Formats that are read, under any suffix: Pillow runs other programs for some formats.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
#: Pixels of a picture, packed or as the model takes it; a file of some kilobytes can claim any number.
MOST_PIXELS = 1 << 26
#: The EXIF tag of the orientation; from 5 on, width and height are swapped.
_ORIENTATION, _SWAPPED = 0x0112, 5

#: (width, height), read where it is needed.
Size = Callable[[], tuple[int, int]]
#: Names of folders that hold a part of the data: to train on, or to measure.
TRAINING, HELD_OUT = {"train", "training"}, {"val", "valid", "validation", "dev", "test", "testing", "eval"}


@dataclass(frozen=True)
class Images:
    """Conversion of images to arrays: (pixels / 255 - mean) / std, scaled to the size of the model's input.

    Attributes:
        mean: subtracted, one number or one per channel.
        std: divided by, likewise.
        size: (height, width), where the model leaves it open; default: that of the first picture.
    """

    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    size: tuple[int, int] | None = None

    def read(self, path: Path, field: Field, size: Size | None = None) -> np.ndarray:
        """The picture in the file at `path` as one row of `field`; `size`: see `upright`.

        Raises:
            BadInput: it cannot be read, or `field` is no picture.
        """
        with open_ordinary(path) as file:
            return self.decode(file, field, str(path), size)

    def decode(self, file: BinaryIO, field: Field, name: str, size: Size | None = None) -> np.ndarray:
        """The picture in an open `file`, which messages call `name`, as one row of `field`. Raises BadInput."""
        self._layout(field)
        image = load_pillow()
        failing = as_bad_input(f"cannot read the picture {name!r}", nested=True)
        with failing, image.open(file, formats=FORMATS) as picture:
            return self.convert(upright(picture, size), field)

    def convert(self, picture: Any, field: Field) -> np.ndarray:
        """A `picture` of Pillow as one row of `field`. Raises BadInput for too many pixels."""
        channels, (height, width), last = self._layout(field)
        check_pixels(width or 1, height or 1)
        picture = deep_pixels(picture) if picture.mode[0] in "IF" else picture.convert("L" if channels == 1 else "RGB")
        size = (width or picture.width, height or picture.height)
        if picture.size != size:
            picture = picture.resize(size, load_pillow().Resampling.BILINEAR)
        pixels = np.asarray(picture, np.float32).reshape(size[1], size[0], -1)
        pixels = np.broadcast_to(pixels, (*pixels.shape[:2], channels))
        scaled = ((pixels / 255 - np.array(self.mean)) / np.array(self.std)).astype(np.float32)
        return scaled if last else scaled.transpose(2, 0, 1)

    def fixed_size(self, field: Field) -> tuple[int | None, int | None]:
        """Height and width that pictures are scaled to; None where each keeps its own. Raises BadInput."""
        return self._layout(field)[1]

    def _layout(self, field: Field) -> tuple[int, tuple[int | None, int | None], bool]:
        """Channels, (height, width), and True for channels last."""
        shape = field.shape
        if len(shape) == 3 and shape[0] in (1, 3):
            return shape[0], self._sized(shape[1], shape[2]), False
        if len(shape) == 3 and shape[2] in (1, 3):
            return shape[2], self._sized(shape[0], shape[1]), True
        raise BadInput(f"pictures cannot feed the input {field.name!r}, which is {field.wanted}")

    def _sized(self, height: int | None, width: int | None) -> tuple[int | None, int | None]:
        own = self.size or (None, None)
        return height or own[0], width or own[1]


def upright(picture: Any, size: Size | None = None) -> Any:
    """A `picture` turned by its EXIF orientation, unless `size`, that of its annotations, is the one before it.

    Raises:
        BadInput: it has too many pixels.
    """
    check_pixels(*picture.size)
    from PIL import ImageOps

    if picture.getexif().get(_ORIENTATION, 1) == 1:
        return picture
    turned = ImageOps.exif_transpose(picture)
    return picture if size is not None and picture.size == size() != turned.size else turned


def upright_size(file: Path) -> tuple[int, int]:
    """(width, height) of the picture in `file` as it is looked at, from its header."""
    with open_ordinary(file) as opened, load_pillow().open(opened, formats=FORMATS) as picture:
        swapped = picture.getexif().get(_ORIENTATION, 1) >= _SWAPPED
        return (picture.height, picture.width) if swapped else picture.size


def check_pixels(width: int, height: int) -> None:
    """Raise BadInput for too many pixels."""
    if width * height > MOST_PIXELS:
        raise BadInput(f"{width} by {height} pixels; {MOST_PIXELS} are the most")


def deep_pixels(picture: Any) -> Any:
    """A `picture` of 16 bits as floats from 0 to 255; Pillow's conversion to 8 bits would cut off above 255.

    Raises:
        BadInput: it has numbers of another range, as those of 32 bits or floats.
    """
    values = np.asarray(picture, np.float32)
    if picture.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise BadInput("pixels of 32 bits have no known range; save 8 or 16 bits")
    return load_pillow().fromarray(values / 257)


class Pictures(Column):
    """A column of image files, turned by their EXIF orientations.

    Args:
        paths: of the files.
        how: see `Images`.
        folder: that of the data.
        masks: files of the sizes in which the pictures are annotated.

    Attributes:
        names: the paths as the data name them.
    """

    def __init__(self, paths: list[Path], how: Images, folder: Path, masks: list[Path] | None = None) -> None:
        self.paths, self.how, self.folder, self.masks = paths, how, folder, masks

    @property
    def names(self) -> np.ndarray:
        """The paths relative to the folder of the data."""
        return np.array([p.relative_to(self.folder).as_posix() for p in self.paths], object)

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These pictures, decoded now."""
        sizes = [None if self.masks is None else partial(upright_size, self.masks[i]) for i in rows]
        return stacked([self.how.read(self.paths[i], field, size) for i, size in zip(rows, sizes)])

    def select(self, rows: np.ndarray) -> Column:
        """These pictures."""
        masks = None if self.masks is None else [self.masks[i] for i in rows]
        return type(self)([self.paths[i] for i in rows], self.how, self.folder, masks)

    def sizes(self, field: Field) -> np.ndarray:
        """Height and width of each picture as a row of `field`, before padding: [rows, 2]."""
        fixed = self.how.fixed_size(field)
        return np.array([[size or n for size, n in zip(fixed, self.stored_size(row))] for row in range(len(self))])

    def stored_size(self, row: int) -> tuple[int, int]:
        """Height and width of the picture in its file, by its header."""
        return upright_size((self.masks or self.paths)[row])[::-1]


class NamedPictures(Pictures):
    """A column of image files that a table names: those in its folder or below it; no others are opened."""

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These pictures, decoded now. Raises BadInput for a path that leads elsewhere."""
        folder = Path(os.path.realpath(self.folder))
        for path in (self.paths[i] for i in rows):
            if not Path(os.path.realpath(path)).is_relative_to(folder):
                raise BadInput(f"{str(path)!r} leads out of the folder of the table that names it, so it is not read")
        return super().take(rows, field)


class EncodedPicture:
    """A picture as the bytes of its file, decoded when the size of the input is known."""

    def __init__(self, content: bytes, name: str) -> None:
        self.content, self.name = content, name


class EncodedPictures(Column):
    """A column of `EncodedPicture`."""

    def __init__(self, column: Column, how: Images) -> None:
        self.column, self.how = column, how

    def __len__(self) -> int:
        return len(self.column)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These pictures, decoded now."""
        found = [np.asarray(p).item() for p in self.column.take(rows, field)]
        return stacked([self.how.decode(io.BytesIO(p.content), field, p.name) for p in found])


def pictures_named_in(column: Column, folder: Path, how: Images) -> Column:
    """The pictures that a `column` of paths names, from `folder` on; other columns as they are."""
    texts = [] if column.array is None or column.array.dtype.kind not in "UO" else column.array.tolist()
    if not texts or Path(str(texts[0])).suffix.lower() not in SUFFIXES or not (folder / str(texts[0])).is_file():
        return column
    load_pillow()
    found = NamedPictures([folder / text for text in texts], how, folder)
    found.chunks = column.chunks
    return found


def picture_files(path: Path, how: Images) -> dict[str, Column]:
    """The column ``images`` of one picture, or of a folder of pictures without classes; nothing for other folders."""
    flat = path.is_dir()
    files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file()) if flat else [path]
    if not files:
        return {}
    load_pillow()
    return {"images": Pictures(files, how, path if flat else path.parent)}


def image_folder(path: Path, how: Images) -> dict[str, Column]:
    """Columns ``images`` and ``labels`` of a folder with a folder of images per class.

    Raises:
        BadInput: there are no such folders, or they hold only folders themselves.
    """
    load_pillow()
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    files = [sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES) for folder in folders]
    if not any(files):
        suffixes = sorted({p.suffix.lower() for p in path.rglob("*") if p.suffix and p.is_file()})
        others = f", but {name_list(suffixes)}" if suffixes else ""
        raise BadInput(
            f"{str(path)!r} holds neither .npy files nor folders of pictures, one per class{others}\n"
            "  hint: sounds and other files: save their numbers as arrays, numpy.savez('data.npz', x=…, labels=…)"
        )
    _check_levels(path, folders, files)
    for folder, found in zip(folders, files):
        if not found:
            raise BadInput(f"the folder {str(folder)!r} holds no pictures, so its class has no rows")
    labels = np.repeat(np.arange(len(folders)), [len(f) for f in files])
    return {
        "images": Pictures([p for f in files for p in f], how, path),
        "labels": ClassColumn(labels, [f.name for f in folders]),
    }


def _check_levels(path: Path, folders: list[Path], files: list[list[Path]]) -> None:
    """Raise BadInput if folders of `path` are parts of the data with folders of classes inside, not classes."""
    outer = []
    for folder, found in zip(folders, files):
        others = any(p.is_file() and not p.name.startswith(".") for p in folder.iterdir())
        if found and not any(p.parent == folder for p in found):
            outer += [folder] if folder.name.lower() in TRAINING | HELD_OUT or not others else []
    if not outer:
        return
    training = next((f for f in outer if f.name.lower() in TRAINING), outer[0])
    validation = next((f for f in outer if f.name.lower() in HELD_OUT and f != training), None)
    hint = f"--data {training}" + (f" --validation {validation}" if validation else "")
    inner = sorted({p.relative_to(f).parts[0] for f, found in zip(folders, files) if f in outer for p in found})
    raise BadInput(
        f"the folder {str(outer[0])!r} holds only folders, so {outer[0].name!r} is no class; "
        f"the classes seem to be {name_list(inner, 4)}\n"
        f"  hint: {hint}"
    )


def load_pillow() -> Any:
    """The module ``PIL.Image``. Raises BadInput if Pillow is not installed."""
    with needs_package("to read pictures, install pillow", "train"):
        from PIL import Image
    return Image
