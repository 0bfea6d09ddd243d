"""Checkpoints: one safetensors file that holds all state and everything needed to go on exactly.

The tensors are the state of the step; the header carries one JSON document with the position of the run
(steps, epoch, rows already seen), how rows are drawn (seed, batch size, number of rows), the metrics so
far, and a fingerprint of the step graph. It is one file, so it cannot be half old and half new: it is
written beside its place, flushed to the disk, and renamed. A run killed at any moment leaves the last
checkpoint whole. The one before is kept beside it: should the disk damage the newest, the message says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (it registers bfloat16 with numpy)
import numpy as np
import onnx_ir as ir

from onnxgrad.door.places import open_ordinary, replacing, scratch
from onnxgrad.errors import BadInput, TrainingError

__all__ = ["FILE", "Checkpoint", "check_state_fits", "fingerprint", "previous", "replacing"]

FILE = "checkpoint.safetensors"
PREVIOUS = ".previous"
_KEY = "onnxgrad.checkpoint"
_VERSION = 1

#: What numpy (with ml_dtypes) calls the types of safetensors.
_DTYPES = {
    "F32": "float32",
    "F64": "float64",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass
class Checkpoint:
    """A run at one moment.

    Attributes:
        state: every tensor of state, by name.
        run: JSON: where the run stands and how it draws its rows.
        step_graph: fingerprint of the step graph that the state belongs to.
    """

    state: dict[str, np.ndarray]
    run: dict[str, Any] = field(default_factory=dict)
    step_graph: str = ""

    def save(self, path: Path, *, keep: bool = False) -> None:
        """Write it to `path`, all or nothing; `keep` what was there as the previous one.

        Raises:
            TrainingError: the state is not finite. BadInput: the place cannot be written.
        """
        safetensors = _library()
        for name, array in self.state.items():
            if ir.DataType.from_numpy(array.dtype).is_floating_point() and not np.isfinite(array).all():
                step = self.run.get("step", "?")
                raise TrainingError(f"{name!r} is not finite after step {step}; no checkpoint was written")
        about = {"version": _VERSION, "step_graph": self.step_graph, "run": self.run}
        with replacing(path) as file:
            try:
                safetensors.numpy.save_file(self.state, file, {_KEY: json.dumps(about)})
            except safetensors.SafetensorError as error:  # a full disk, in words of its own
                number = re.search(r"os error (\d+)", str(error))
                why = os.strerror(int(number[1])) if number else str(error)
                raise BadInput(f"cannot write {str(path)!r}: {why}") from error
            if keep and path.exists():
                _keep(path, previous(path))

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read the file at `path`.

        Raises:
            BadInput: there is none, it is damaged, or it is not one of onnxgrad's.
        """
        safetensors = _library()
        try:
            with open_ordinary(path) as file:
                data = file.read()
        except FileNotFoundError as error:
            raise BadInput(f"there is no checkpoint {str(path)!r}") from error
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or "it does not fit into memory"
            raise BadInput(f"cannot read the checkpoint {str(path)!r}: {why}") from error
        try:
            tensors = safetensors.deserialize(data)
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
        except Exception as error:  # the library raises its own type, json and unicode theirs
            raise BadInput(f"the checkpoint {str(path)!r} is damaged: {error}{_offer(path)}") from error
        try:
            about = json.loads(header["__metadata__"][_KEY])
            version = about["version"]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"{str(path)!r} is not a checkpoint of onnxgrad") from error
        if version != _VERSION:
            raise BadInput(f"the checkpoint {str(path)!r} has version {version}; this onnxgrad reads {_VERSION}")
        state = {}
        for name, tensor in tensors:  # not by safetensors.numpy, which cannot read bfloat16
            if tensor["dtype"] not in _DTYPES:
                raise BadInput(f"{str(path)!r} is not a checkpoint of onnxgrad: {name!r} is {tensor['dtype']}")
            flat = np.frombuffer(bytes(tensor["data"]), np.dtype(_DTYPES[tensor["dtype"]]))
            state[name] = flat.reshape(tensor["shape"]).copy()
        run = about.get("run")
        if not isinstance(run, dict):
            raise BadInput(f"{str(path)!r} is not a checkpoint of onnxgrad")
        return cls(state, run, about.get("step_graph", ""))


def previous(path: Path) -> Path:
    """Where the checkpoint before the one at `path` is kept."""
    return path.with_name(path.stem + PREVIOUS + path.suffix)


def _offer(path: Path) -> str:
    """What else there is, if the checkpoint at `path` is no good."""
    other = previous(path)
    if path == other or path.stem.endswith(PREVIOUS) or not other.exists():
        return ""
    try:
        step = Checkpoint.load(other).run["step"]
    except (BadInput, KeyError):
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


def fingerprint(model: ir.Model) -> str:
    """A digest of a step graph: equal for the same model, loss, optimizer and settings."""
    proto = ir.to_proto(model)
    del proto.metadata_props[:]
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise BadInput("checkpoints need the package safetensors: pip install 'onnxgrad[train]'") from error
    return safetensors


def check_state_fits(checkpoint: Checkpoint, like: Mapping[str, np.ndarray], graph: str, path: Path) -> None:
    """Raise BadInput unless `checkpoint` belongs to the step with this state and this graph."""
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
    if checkpoint.step_graph != graph:
        raise BadInput(
            f"the checkpoint {str(path)!r} belongs to another training step: the model, the loss, the "
            "optimizer or its settings are not those that it was written with"
        )
