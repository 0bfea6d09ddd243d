"""Checkpoints of ranks that share out the state of the optimizer: a file for each of them, and an index.

The index is where an ordinary checkpoint would be, and is one but for what is shared out; of that it names the files.
These are called by a digest of what is in them, so none is ever written over by another. The index takes its place once
all of them are on the disk; then those that neither it nor the index before it names are removed. A run killed at any
moment leaves the last checkpoint whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.files import alone, sweep
from onnxgrad.training.loop.checkpoint import FILE, PARTS, Checkpoint, digest_of, named_parts, previous
from onnxgrad.training.parallel.ranks import Ranks
from onnxgrad.training.parallel.sharded import Sharded

_NAME = r"part-\d+-of-\d+-[0-9a-f]{32}\.safetensors"


def save_parts(found: Checkpoint, machine: Sharded, ranks: Ranks, folder: Path) -> None:
    """Write a checkpoint into `folder`, which all ranks see; they all call this.

    Args:
        found: the checkpoint, with the state that this rank has; that of the first rank counts, but for its part.
        machine: tells which part it has.
        ranks: all of them.
        folder: where to write.

    Raises:
        OnAll: it cannot be written on one of them; the one before is as it was.
    """
    kept = [name for name in machine.shares.kept if name in found.state]
    about = {
        "step": found.run["step"],
        "rank": ranks.rank,
        "ranks": ranks.size,
        "places": {name: machine.shares.part(name, ranks.rank) for name in kept},
    }
    part = Checkpoint({name: found.state[name] for name in kept}, about, found.step_graph)

    def write_own() -> list[str]:
        text = part.described()
        file = f"part-{ranks.rank}-of-{ranks.size}-{digest_of(text)}.safetensors"
        part.save(folder / file, text=text)
        return [file, digest_of(text)]

    files = ranks.every(write_own)
    tensors = {n: [t.dtype.numpy().name, list(t.shape)] for n, t in machine.first.items() if n in machine.shares.kept}
    whole = {name: array for name, array in found.state.items() if name not in tensors}
    run = {**found.run, PARTS: {"files": files, "tensors": tensors}}
    index = Checkpoint(whole, run, found.step_graph)

    def write() -> None:
        for name, _ in files:
            if not (folder / name).is_file():
                raise BadInput(f"{str(folder / name)!r}, which another rank has written, is not there: all ranks write "
                               "into one folder, on a disk that all of them see")  # fmt: skip
        index.save(folder / FILE, keep=True)
        tidy(folder)

    ranks.first(write)


def load_whole(path: Path) -> Checkpoint:
    """The checkpoint at `path`, put together where it is in parts.

    Raises:
        BadInput: there is none, it is damaged, or a part of it is missing or is that of another one.
    """
    index = Checkpoint.load(path)
    parts = index.run.pop(PARTS, None)
    if parts is None:
        return index
    try:
        files = [(str(file), str(digest)) for file, digest in parts["files"]]
        shapes = {str(n): (np.dtype(t), tuple(map(int, s))) for n, (t, s) in parts["tensors"].items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise BadInput(f"the checkpoint {str(path)!r} does not say which parts it has") from error
    state = {name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in state}
    for rank, (file, digest) in enumerate(files):
        _put(_part(path, index, rank, len(files), file, digest), state, places, path.parent / file)
    for name, found in places.items():
        ends = [0, *(end for place in sorted(found) for end in place), state[name].size]
        if any(low != high for low, high in list(pairwise(ends))[::2]):
            raise BadInput(f"the checkpoint {str(path)!r} is damaged: its parts do not make all of {name!r}")
    index.state |= state
    return index


def _part(path: Path, index: Checkpoint, rank: int, ranks: int, file: str, digest: str) -> Checkpoint:
    """The part of a rank, if it is that of `index`."""
    if not re.fullmatch(_NAME, file):
        raise BadInput(f"the checkpoint {str(path)!r} does not say which parts it has")
    place = path.parent / file
    if not place.exists():
        raise BadInput(
            f"the checkpoint {str(path)!r} is not whole: {file!r}, the part of rank {rank} of {ranks}, is missing"
        )
    found = Checkpoint.load(place)
    step, of, needed = found.run.get("step"), found.run.get("rank"), index.run.get("step")
    if (step, of) != (needed, rank):
        raise BadInput(
            f"the part {str(place)!r} is of step {step} and rank {of}; the checkpoint {str(path)!r}, of step {needed}, "
            f"needs that of rank {rank}"
        )
    if found.digest != digest:
        raise BadInput(f"the part {str(place)!r} is not the one that the checkpoint {str(path)!r} was written with")
    return found


def _put(
    part: Checkpoint, state: Mapping[str, np.ndarray], places: Mapping[str, list[tuple[int, int]]], path: Path
) -> None:
    """Put the tensors of a part where they belong."""
    told = part.run.get("places")
    for name, array in part.state.items():
        place = told.get(name) if isinstance(told, dict) else None
        if name not in state or array.dtype != state[name].dtype or not _is_place(place, array.size, state[name].size):
            raise BadInput(f"the part {str(path)!r} is damaged: it does not say what its {name!r} is a part of")
        low, high = place  # type: ignore[misc]
        state[name].reshape(-1)[low:high] = array.reshape(-1)
        places[name].append((low, high))


def _is_place(place: Any, size: int, whole: int) -> bool:
    if not isinstance(place, list) or len(place) != 2 or not all(type(end) is int for end in place):
        return False
    return 0 <= place[0] <= place[1] <= whole and place[1] - place[0] == size


def tidy(folder: Path) -> None:
    """Remove the parts in `folder` that no checkpoint there names, and what killed processes have left of some."""
    named = {name for path in (folder / FILE, previous(folder / FILE)) for name in named_parts(path)}
    for file in folder.glob("part-*.safetensors"):
        if re.fullmatch(_NAME, file.name) and file.name not in named:
            file.unlink(missing_ok=True)
    sweep(folder, _NAME)


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
        output: where to write the ordinary one. Default: in its place; its parts are removed then.

    Returns:
        The file.

    Raises:
        BadInput: there is none in parts, a part is missing or is that of another checkpoint, or the place cannot be
            written. Nothing is changed then.
    """
    path = _file(checkpoint)
    if not named_parts(path, strict=True):
        raise BadInput(f"the checkpoint {str(path)!r} is an ordinary one: nothing of it is in parts")
    target = path if output is None else Path(output)
    if target != path:
        load_whole(path).save(target)
        return target
    with alone(path.parent):
        load_whole(path).save(path)
        tidy(path.parent)
    return path
