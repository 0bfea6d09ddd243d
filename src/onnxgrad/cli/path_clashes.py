"""The files of a command, held against each other before anything is written: nothing is destroyed by a slip.

The outputs of a command must differ from its inputs and from each other, for any spelling of a path: through links, by
another name, or from outside of a data folder into it. Only the given model may be replaced by the new one, and only on
request.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from onnxgrad.errors import BadInput
from onnxgrad.files import check_ordinary, is_left_of
from onnxgrad.training.data.images import SUFFIXES
from onnxgrad.training.loop.checkpoint import FILE, previous

MODEL, OUTPUT, GOING = "MODEL", "--output", "--save-training"

Force = Annotated[bool, typer.Option("--force", help="--output may be MODEL itself, which is lost then.")]


def model_files(path: Path) -> list[Path]:
    """The files that saving a model at `path` may write: the model and its weights."""
    return [path, path.with_name(f"{path.name}.data")]


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that a run writes to its checkpoint folder."""
    return [folder / FILE, previous(folder / FILE)]


def check_paths(
    reads: Mapping[str, Path | Iterable[Path] | None],
    writes: Mapping[str, Path | None],
    folders: Mapping[str, tuple[Path, Iterable[Path]]] | None = None,
    *,
    force: bool | None = None,
) -> None:
    """Refuse paths that cannot be written in the end, or that would overwrite an input or another result.

    Args:
        reads: files and folders by flag; `MODEL` is the model.
        writes: files by flag; `OUTPUT` and `GOING` are models.
        folders: those that are made if they are not there, and the files that go there.
        force: True if `OUTPUT` may take the place of `MODEL`; None: the command has no such flag.

    Raises:
        BadInput: two of them are the same, or a place cannot be written to.
    """
    read = [
        _Place(flag, p) for flag, paths in reads.items() for p in ([paths] if isinstance(paths, Path) else paths or ())
    ]
    written, made = [], []
    for flag, path in writes.items():
        if path is not None:
            _check_target(path)
            written += [_Place(flag, p) for p in (model_files(path) if flag in (OUTPUT, GOING) else [path])]
    for flag, (folder, files) in (folders or {}).items():
        _check_folder(flag, folder)
        made.append(_Place(flag, folder))
        written += [_Place(flag, p) for p in files]
    for i, place in enumerate(written):
        check_ordinary(place.path)
        for other in written[:i]:
            # a checkpoint may be a hard link to the one before
            if place.real == other.real or (place.flag != other.flag and place.is_same(other)):
                raise BadInput(f"{other.flag} and {place.flag} would both write {str(place.path)!r}")
        for source in read:
            of_model = (place.flag, source.flag) == (OUTPUT, MODEL)
            if of_model and force:
                continue
            if place.is_same(source) or source.holds(place) or is_left_of(source.path, place.path):
                hint = ", or give up the model as it is with --force" if of_model and force is not None else ""
                raise BadInput(
                    f"{place.flag} {place.path} would write over {source.flag} {source.path}\n"
                    f"  hint: choose another place{hint}"
                )
    for target in made:
        for file in (*written, *(r for r in read if not r.path.is_dir())):
            if file.is_same(target) or target.real.startswith(file.real + os.sep):
                raise BadInput(
                    f"{target.flag} makes a folder of {target.path}, where {file.flag} has its file {file.path}"
                )


def _check_target(path: Path) -> None:
    """Refuse a place that cannot be written to."""
    folder = path.parent
    if path.is_dir():
        raise BadInput(f"{path} is a directory, not a file to write to")
    if not folder.is_dir():
        raise BadInput(f"cannot write {path}: there is no directory {folder}")
    if not os.access(folder, os.W_OK):
        raise BadInput(f"cannot write {path}: the directory {folder} cannot be written to")


def _check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder that cannot be made, or written to."""
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        why = "cannot be written to" if parent.is_dir() else "is not a directory"
        raise BadInput(f"cannot write to {folder} ({flag}): {parent} {why}")


@dataclass
class _Place:
    """A path of a command, and where it leads."""

    flag: str
    path: Path

    def __post_init__(self) -> None:
        self.real = os.path.normcase(os.path.realpath(self.path))
        self.file: tuple[int, int] | None = None
        with suppress(OSError):
            found = os.stat(self.path)
            self.file = (found.st_dev, found.st_ino)

    def is_same(self, other: _Place) -> bool:
        """True if both paths refer to the same file."""
        return self.real == other.real or (self.file is not None and self.file == other.file)

    def holds(self, other: _Place) -> bool:
        """True if `other` is, or would become, a data file in this folder."""
        if not self.path.is_dir():
            return False
        if other.real.startswith(self.real + os.sep) and _is_data(other.real[len(self.real) + 1 :].split(os.sep)):
            return True
        return other.file is not None and any(
            _Place("", p).is_same(other) for p in _linked_files(self.path, other.file)
        )


def _is_data(inside: list[str]) -> bool:
    """True if the entries of a folder are data: arrays, or images in folders below."""
    suffix = os.path.splitext(inside[-1])[1].lower()
    return suffix == ".npy" if len(inside) == 1 else suffix in SUFFIXES


def _linked_files(folder: Path, file: tuple[int, int]) -> Iterator[Path]:
    """Data in `folder` that are links, or that may be another name of `file`."""
    stack = [(folder, 1)]
    while stack:
        here, depth = stack.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                if _is_data([""] * (depth - 1) + [entry.name]) and (entry.is_symlink() or entry.inode() == file[1]):
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=depth == 1):
                    stack.append((Path(entry.path), depth + 1))
