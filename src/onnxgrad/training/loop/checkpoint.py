"""Checkpoints: the state of a run and everything needed to continue exactly, in one versioned format.

A checkpoint is a safetensors file. Its tensors are the state of the step. Its header has one JSON document: the
position of the run (steps, epoch, rows already seen), how rows are drawn (seed, batch size, number of rows), the
metrics so far, and a fingerprint of the step. Digests, one per tensor and one of the document, show damage.

Ranks that share out the state of the optimizer write one more file each (see `checkpoint_parts`). The document then
names these parts, and `Checkpoint.load` joins them. The best states that ``fit(keep=3)`` leaves are files of the same
format.

A file is written beside its place, flushed to the disk, and renamed. A run killed at any moment leaves the last
checkpoint intact. The previous one is kept beside it; if the disk damages the newest, the message names the previous
one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput, TrainingError, warn_caller
from onnxgrad.files import open_ordinary, reading, replacing, scratch
from onnxgrad.training.step.digest import digest_of
from onnxgrad.training.tensor_files import decode, import_safetensors

FILE = "checkpoint.safetensors"
PREVIOUS = ".previous"
#: The key of `Checkpoint.run` for the parts of a checkpoint (see `checkpoint_parts`).
PARTS = "parts"
#: Names of the files of parts.
PART_NAME = r"part-\d+-of-\d+-[0-9a-f]{32}\.safetensors"
_KEY = "onnxgrad.checkpoint"
_DIGEST = "onnxgrad.digest"
_EXTRA = "onnxgrad.extra."
_VERSION = 2  # 1 had no digests

#: Types of the entries of `Checkpoint.run` that other modules rely on.
_RUN: dict[str, type] = {
    "step": int,
    "epoch": int,
    "row": int,
    "total": float,
    "seconds": float,
    "drawing": dict,
    "settings": dict,
    "finished": str,
    "callbacks": list,
    "history": dict,
}


@dataclass
class Checkpoint:
    """A run at one moment.

    Attributes:
        state: every tensor of state, by name.
        run: JSON: where the run stands and how it draws its rows.
        step_graph: fingerprint of the step that the state belongs to.
        extras: state of the exchange between ranks (see `Strategy.extras`), by name.
        digest: of what the file says beside its tensors, where it was read from one.
    """

    state: dict[str, np.ndarray]
    run: dict[str, Any] = field(default_factory=dict)
    step_graph: str = ""
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    digest: str = ""

    @property
    def _tensors(self) -> dict[str, np.ndarray]:
        return self.state | {_EXTRA + name: array for name, array in self.extras.items()}

    def described(self) -> str:
        """The JSON document of the file. Raises TrainingError if a tensor is not finite."""
        for name, array in self._tensors.items():
            if not _finite(array):
                step = self.run.get("step", "?")
                raise TrainingError(f"{name!r} is not finite after step {step}; no checkpoint was written")
        digests = {name: digest_of(array) for name, array in self._tensors.items()}
        return json.dumps({"version": _VERSION, "step_graph": self.step_graph, "run": self.run, "digests": digests})

    def save(self, path: Path, *, keep: bool = False, text: str | None = None) -> None:
        """Write the checkpoint to `path` atomically; `keep` the old one as the previous; `text` comes from `described`.

        Raises:
            TrainingError: the state is not finite. BadInput: the place cannot be written.
        """
        safetensors, tensors = import_safetensors(), self._tensors
        text = self.described() if text is None else text
        with replacing(path) as file:
            try:
                safetensors.numpy.save_file(tensors, file, {_KEY: text, _DIGEST: digest_of(text)})
            except safetensors.SafetensorError as error:  # a full disk, in words of its own
                number = re.search(r"os error (\d+)", str(error))
                why = os.strerror(int(number[1])) if number else str(error)
                raise BadInput(f"cannot write {str(path)!r}: {why}") from error
            if keep and path.exists():
                _keep(path, previous(path))

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read the checkpoint at `path`: its file, and those of its parts where ranks have shared out the state.

        Raises:
            BadInput: there is none, it is damaged, it is not one of onnxgrad's, or a part is missing or is that of
                another checkpoint.
        """
        index = cls.load_file(path)
        if PARTS in index.run:
            index.state |= _joined_parts(path, index, index.run.pop(PARTS))
        return index

    @classmethod
    def load_file(cls, path: Path) -> Checkpoint:
        """Read one file: a checkpoint without the state that its parts have, or a part.

        Raises:
            BadInput: there is none, it is damaged, or it is not one of onnxgrad's.
        """
        safetensors = import_safetensors()
        if not path.exists():
            raise BadInput(f"there is no checkpoint {str(path)!r}")
        try:
            with open_ordinary(path) as file, reading(path):
                data = file.read()
        except MemoryError as error:
            raise BadInput(f"cannot read {str(path)!r}: it does not fit into memory") from error
        try:
            tensors = safetensors.deserialize(data)
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
        except Exception as error:  # the library raises its own type, json and unicode theirs
            raise BadInput(f"the checkpoint {str(path)!r} is damaged: {error}{_offer(path)}") from error
        try:
            metadata = header["__metadata__"]
            about = json.loads(metadata[_KEY])
            version = about["version"]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"{str(path)!r} is not a checkpoint of onnxgrad{_offer(path)}") from error
        digested = metadata.get(_DIGEST)
        if digested is not None and digested != digest_of(metadata[_KEY]):
            raise BadInput(f"the checkpoint {str(path)!r} is damaged: its header is not what was written{_offer(path)}")
        if version not in (1, _VERSION) or isinstance(version, (bool, float)):
            raise BadInput(f"the checkpoint {str(path)!r} has version {version}; this onnxgrad reads {_VERSION}")
        if version == 1:
            warn_caller(f"the checkpoint {str(path)!r} has no digests: damage to it would not show")
        elif digested is None:
            raise BadInput(f"the checkpoint {str(path)!r} is damaged: its digest is missing{_offer(path)}")
        state = decode(tensors, path)
        found = cls(state, about.get("run"), about.get("step_graph"), digest=digested or "")
        found._check_types(path)
        if version > 1:
            _check_digests(state, about.get("digests"), path)
        for name in [name for name in state if name.startswith(_EXTRA)]:
            found.extras[name.removeprefix(_EXTRA)] = state.pop(name)
        return found

    def _check_types(self, path: Path) -> None:
        """Raise BadInput for JSON of other types than `save` writes."""

        def wrong(what: str, value: Any) -> BadInput:
            said = f"{what} is {json.dumps(value)[:40]}"
            return BadInput(f"{str(path)!r} is not a checkpoint of onnxgrad: its {said}{_offer(path)}")

        if not isinstance(self.run, dict):
            raise wrong("run", self.run)
        if not isinstance(self.step_graph, str):
            raise wrong("step_graph", self.step_graph)
        for key, kind in _RUN.items():
            value = self.run.get(key, kind())
            fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
            if (
                not fits
                or (kind in (int, float) and not 0 <= abs(value) < math.inf)
                or (kind is int and not 0 <= value < 2**53)
            ):
                raise wrong(key, value)


def _check_digests(state: Mapping[str, np.ndarray], digests: Any, path: Path) -> None:
    """Raise BadInput unless `state` has exactly the tensors that were written."""
    expected = digests if isinstance(digests, dict) else {}
    for name in sorted(expected.keys() | state.keys()):
        if name not in state or name not in expected or digest_of(state[name]) != expected[name]:
            raise BadInput(f"the checkpoint {str(path)!r} is damaged: {name!r} is not what was written{_offer(path)}")


def _joined_parts(path: Path, index: Checkpoint, parts: Any) -> dict[str, np.ndarray]:
    """The state that the parts of the checkpoint at `path` have, whole."""
    try:
        files = [(str(file), str(digest)) for file, digest in parts["files"]]
        shapes = {str(n): (np.dtype(t), tuple(map(int, s))) for n, (t, s) in parts["tensors"].items()}
        state = {name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        raise BadInput(f"the checkpoint {str(path)!r} does not say which parts it has") from error
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in state}
    for rank, (file, digest) in enumerate(files):
        _copy_part(_part(path, index, rank, len(files), file, digest), state, places, path.parent / file)
    for name, found in places.items():
        ends = [0, *(end for place in sorted(found) for end in place), state[name].size]
        if any(low != high for low, high in list(pairwise(ends))[::2]):
            raise BadInput(f"the checkpoint {str(path)!r} is damaged: its parts do not make all of {name!r}")
    return state


def _part(path: Path, index: Checkpoint, rank: int, ranks: int, file: str, digest: str) -> Checkpoint:
    """Read the part of a rank, and check that it belongs to `index`."""
    if not re.fullmatch(PART_NAME, file):
        raise BadInput(f"the checkpoint {str(path)!r} does not say which parts it has")
    place = path.parent / file
    if not place.exists():
        raise BadInput(
            f"the checkpoint {str(path)!r} is not whole: {file!r}, the part of rank {rank} of {ranks}, is missing"
        )
    found = Checkpoint.load_file(place)
    step, of, needed = found.run.get("step"), found.run.get("rank"), index.run.get("step")
    if (step, of) != (needed, rank):
        raise BadInput(
            f"the part {str(place)!r} is of step {step} and rank {of}; the checkpoint {str(path)!r}, of step {needed}, "
            f"needs that of rank {rank}"
        )
    if found.digest != digest:
        raise BadInput(f"the part {str(place)!r} is not the one that the checkpoint {str(path)!r} was written with")
    return found


def _copy_part(
    part: Checkpoint, state: Mapping[str, np.ndarray], places: Mapping[str, list[tuple[int, int]]], path: Path
) -> None:
    """Write the tensors of a part to their places in `state`."""
    places_of = part.run.get("places")
    for name, array in part.state.items():
        place = places_of.get(name) if isinstance(places_of, dict) else None
        if name not in state or array.dtype != state[name].dtype or not _is_place(place, array.size, state[name].size):
            raise BadInput(f"the part {str(path)!r} is damaged: it does not record the place of its {name!r}")
        low, high = place  # type: ignore[misc]
        state[name].reshape(-1)[low:high] = array.reshape(-1)
        places[name].append((low, high))


def _is_place(place: Any, size: int, whole: int) -> bool:
    if not isinstance(place, list) or len(place) != 2 or not all(type(end) is int for end in place):
        return False
    return 0 <= place[0] <= place[1] <= whole and place[1] - place[0] == size


def previous(path: Path) -> Path:
    """The path of the checkpoint before the one at `path`."""
    return path.with_name(path.stem + PREVIOUS + path.suffix)


def named_parts(path: Path, strict: bool = False) -> list[str]:
    """The names of the part files of the checkpoint at `path`; empty for a checkpoint in one file.

    Args:
        path: of the checkpoint; its tensors are not read.
        strict: raise BadInput if it is none.
    """
    try:
        with open_ordinary(path) as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return _parts_of(json.loads(header["__metadata__"][_KEY])["run"])
    except (BadInput, OSError, MemoryError, OverflowError, ValueError, KeyError, TypeError, RecursionError):
        if strict:
            Checkpoint.load_file(path)
        return []


def _parts_of(run: Mapping[str, Any]) -> list[str]:
    try:
        return [str(name) for name, _ in run[PARTS]["files"]]
    except (KeyError, TypeError, ValueError):
        return []


def _offer(path: Path) -> str:
    """A hint to the previous checkpoint, if it is complete; else empty."""
    other = previous(path)
    if path == other or path.stem.endswith(PREVIOUS) or not other.exists():
        return ""
    try:
        found = Checkpoint.load_file(other)
        step = found.run["step"]
    except (BadInput, KeyError):
        return ""
    if not all(_finite(array) for array in found.state.values()):
        return ""
    if not all((path.parent / name).is_file() for name in _parts_of(found.run)):
        return ""
    return f"\n  hint: the one before it, of step {step}, is whole: rename {str(other)!r} to {path.name!r} to use it"


def _keep(path: Path, other: Path) -> None:
    """Make `other` the same file as `path`; a copy where the file system has no links."""
    if other.exists() and path.samefile(other):
        return  # a run was killed right after it had done this
    try:
        with scratch(other) as folder:
            link = folder / other.name
            os.link(path, link)
            link.replace(other)
    except OSError:
        with replacing(other) as copy:
            shutil.copyfile(path, copy)


def _finite(array: np.ndarray) -> bool:
    return not ir.DataType.from_numpy(array.dtype).is_floating_point() or bool(np.isfinite(array).all())


def check_state_fits(checkpoint: Checkpoint, like: Mapping[str, np.ndarray], path: Path) -> None:
    """Raise BadInput unless the state of `checkpoint` can be that of a step with the state `like`, and is finite."""
    for name in sorted(checkpoint.state.keys() ^ like.keys()):
        whose = "has" if name in checkpoint.state else "lacks"
        raise BadInput(f"the checkpoint {str(path)!r} belongs to another model or optimizer: it {whose} {name!r}")
    for name, expected in like.items():
        found = checkpoint.state[name]
        if (found.dtype, found.shape) != (expected.dtype, expected.shape):
            raise BadInput(
                f"the checkpoint {str(path)!r} belongs to another model: its {name!r} is "
                f"{found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
            )
        if not _finite(found) and _finite(expected):
            raise BadInput(f"the checkpoint {str(path)!r} is no good: its {name!r} is not finite{_offer(path)}")
