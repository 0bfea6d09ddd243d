"""Checkpoints of ranks that share out the state of the optimizer: a file for each of them, and an index.

The index is at the place of an ordinary checkpoint, and is one except for sharded tensors, for which it names the part
files. Their names are digests of their contents, so none is ever overwritten. The index is replaced after all of them
are on the disk; then those that neither it nor the previous index names are removed. A run killed at any moment leaves
the last checkpoint intact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from onnxgrad.errors import BadInput
from onnxgrad.files import lock_folder, sweep
from onnxgrad.training.loop.checkpoint import FILE, PART_NAME, PARTS, Checkpoint, named_parts, previous
from onnxgrad.training.parallel.strategy import Strategy
from onnxgrad.training.step.digest import digest_of
from onnxgrad.training.step.step import StateTensor


def save_checkpoint(found: Checkpoint, tensors: Mapping[str, StateTensor], strategy: Strategy, folder: Path) -> None:
    """Write a checkpoint into `folder`; where ranks share out the state, all of them call this and see the folder.

    Args:
        found: the checkpoint, with the state that this rank has; that of the first rank counts, but for its part.
        tensors: the state of the step, whole.
        strategy: the ranks, and the part of this one.
        folder: the folder of the checkpoint.

    Raises:
        BadInput: it cannot be written on one of them; the one before is as it was.
    """
    if not strategy.shares_state:
        found.save(folder / FILE, keep=True)
        tidy(folder)
        return
    ranks, places = strategy.ranks, strategy.places()
    own = {name: place for name, place in places.items() if name in found.state}
    about = {
        "step": found.run["step"],
        "rank": ranks.rank,
        "ranks": ranks.size,
        "places": own,
    }
    part = Checkpoint({name: found.state[name] for name in own}, about, found.step_graph)

    def write_own() -> list[str]:
        text = part.described()
        file = f"part-{ranks.rank}-of-{ranks.size}-{digest_of(text)}.safetensors"
        part.save(folder / file, text=text)
        return [file, digest_of(text)]

    files = ranks.every(write_own)
    first = {name: tensors[name].initial for name in places}
    shapes = {name: [t.dtype.numpy().name, list(t.shape)] for name, t in first.items()}
    whole = {name: array for name, array in found.state.items() if name not in places}
    run = {**found.run, PARTS: {"files": files, "tensors": shapes}}
    index = Checkpoint(whole, run, found.step_graph)

    def write() -> None:
        for name, _ in files:
            if not (folder / name).is_file():
                raise BadInput(f"{str(folder / name)!r}, which another rank has written, is not there: all ranks write "
                               "into one folder, on a disk that all of them see")  # fmt: skip
        index.save(folder / FILE, keep=True)
        tidy(folder)

    ranks.first(write)


def tidy(folder: Path) -> None:
    """Remove parts in `folder` that no checkpoint there names, and temporary files of killed processes."""
    named = {name for path in (folder / FILE, previous(folder / FILE)) for name in named_parts(path)}
    for file in folder.glob("part-*.safetensors"):
        if re.fullmatch(PART_NAME, file.name) and file.name not in named:
            file.unlink(missing_ok=True)
    sweep(folder, PART_NAME)


def files_of(checkpoint: str | Path) -> list[Path]:
    """The file of a checkpoint, which is given as that or as its folder, and those of its parts."""
    path = _file(checkpoint)
    return [path, *(path.parent / name for name in named_parts(path))]


def _file(checkpoint: str | Path) -> Path:
    path = Path(checkpoint)
    return path / FILE if path.is_dir() else path


def consolidate(checkpoint: str | Path, output: str | Path | None = None) -> Path:
    """Turn a checkpoint in parts into an ordinary one.

    Args:
        checkpoint: its folder, or its file in there.
        output: the file to write. Default: in place of the checkpoint, whose parts are then removed.

    Returns:
        The file.

    Raises:
        BadInput: there is none in parts, a part is missing or is that of another checkpoint, or the place cannot be
            written. Nothing is changed then.
    """
    path = _file(checkpoint)
    if not named_parts(path, strict=True):
        raise BadInput(f"the checkpoint {str(path)!r} is an ordinary one: it has no parts")
    target = path if output is None else Path(output)
    if target != path:
        Checkpoint.load(path).save(target)
        return target
    with lock_folder(path.parent):
        Checkpoint.load(path).save(path)
        tidy(path.parent)
    return path
