"""Checkpoints: one safetensors file that holds all state and everything needed to go on exactly.

The tensors are the state of the step; the header carries one JSON document with the position of the run
(steps, epoch, rows already seen), how rows are drawn (seed, batch size, number of rows), the metrics so
far, and a fingerprint of the step graph. It is one file, so it cannot be half old and half new: it is
written beside its place, flushed to the disk, and renamed. A run killed at any moment leaves the last
checkpoint whole. Digests, one per tensor and one of the document, tell whether what is read is what was written.
The one before is kept beside it: should the disk damage the newest, the message says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (it registers bfloat16 with numpy)
import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput, TrainingError, warn_caller
from onnxgrad.files import open_ordinary, replacing, scratch

__all__ = [
    "FILE",
    "Checkpoint",
    "check_state_fits",
    "digest_of",
    "fingerprint",
    "named_parts",
    "previous",
    "replacing",
    "structure",
]

FILE = "checkpoint.safetensors"
PREVIOUS = ".previous"
#: What `Checkpoint.run` says of the parts that a checkpoint is in (see `checkpoint_parts`).
PARTS = "parts"
_KEY = "onnxgrad.checkpoint"
_DIGEST = "onnxgrad.digest"
_EXTRA = "onnxgrad.extra."
_VERSION = 2  # 1 had no digests
_BODIES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)

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


#: What the entries of `Checkpoint.run` that others rely on are.
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
        step_graph: fingerprint of the step graph that the state belongs to.
        extras: what else ranks carry from step to step (see `training.parallel`), by name.
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
        """What the file says beside its tensors, as JSON. Raises TrainingError if one of them is not finite."""
        for name, array in self._tensors.items():
            if not _finite(array):
                step = self.run.get("step", "?")
                raise TrainingError(f"{name!r} is not finite after step {step}; no checkpoint was written")
        digests = {name: digest_of(array) for name, array in self._tensors.items()}
        return json.dumps({"version": _VERSION, "step_graph": self.step_graph, "run": self.run, "digests": digests})

    def save(self, path: Path, *, keep: bool = False, text: str | None = None) -> None:
        """Write it to `path`, all or nothing; `keep` what was there as the previous one; `text` is what it `described`.

        Raises:
            TrainingError: the state is not finite. BadInput: the place cannot be written.
        """
        safetensors, tensors = _library(), self._tensors
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
        state = {}
        for name, tensor in tensors:  # not by safetensors.numpy, which cannot read bfloat16
            if tensor["dtype"] not in _DTYPES:
                raise BadInput(f"{str(path)!r} is not a checkpoint of onnxgrad: {name!r} is {tensor['dtype']}")
            flat = np.frombuffer(bytes(tensor["data"]), np.dtype(_DTYPES[tensor["dtype"]]))
            state[name] = flat.reshape(tensor["shape"]).copy()
        found = cls(state, about.get("run"), about.get("step_graph"), digest=digested or "")
        found._check_types(path)
        if version > 1:
            _check_digests(state, about.get("digests"), path)
        for name in [name for name in state if name.startswith(_EXTRA)]:
            found.extras[name.removeprefix(_EXTRA)] = state.pop(name)
        return found

    def _check_types(self, path: Path) -> None:
        """Raise BadInput where JSON holds something else than `save` puts there."""

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
            if not fits or (kind in (int, float) and not 0 <= abs(value) < math.inf) or (kind is int and value < 0):
                raise wrong(key, value)


def digest_of(what: str | np.ndarray) -> str:
    """Of a text, or of the dtype, the shape and the contents of an array."""
    if isinstance(what, str):
        return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
    found = hashlib.blake2b(f"{what.dtype}{what.shape}".encode(), digest_size=16)
    found.update(np.ascontiguousarray(what).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _check_digests(state: Mapping[str, np.ndarray], digests: Any, path: Path) -> None:
    """Raise BadInput unless the tensors of `state`, and no others, are those that were written."""
    expected = digests if isinstance(digests, dict) else {}
    for name in sorted(expected.keys() | state.keys()):
        if name not in state or name not in expected or digest_of(state[name]) != expected[name]:
            raise BadInput(f"the checkpoint {str(path)!r} is damaged: {name!r} is not what was written{_offer(path)}")


def previous(path: Path) -> Path:
    """Where the checkpoint before the one at `path` is kept."""
    return path.with_name(path.stem + PREVIOUS + path.suffix)


def named_parts(path: Path, strict: bool = False) -> list[str]:
    """The names of the files that the checkpoint at `path` is in parts in, if it is one and is in parts.

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
            Checkpoint.load(path)
        return []


def _parts_of(run: Mapping[str, Any]) -> list[str]:
    try:
        return [str(name) for name, _ in run[PARTS]["files"]]
    except (KeyError, TypeError, ValueError):
        return []


def _offer(path: Path) -> str:
    """What else there is, if the checkpoint at `path` is no good."""
    other = previous(path)
    if path == other or path.stem.endswith(PREVIOUS) or not other.exists():
        return ""
    try:
        found = Checkpoint.load(other)
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


def fingerprint(model: ir.Model) -> str:
    """A digest of a step graph: equal for the same model, loss, optimizer and settings."""
    proto = ir.to_proto(model)
    del proto.metadata_props[:]
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


def structure(model: ir.Model) -> str:
    """The same, whatever the values inside are called: a loss that says what it weighs draws other names."""
    proto = ir.to_proto(model)
    del proto.metadata_props[:]
    names = {value.name: value.name for value in proto.graph.input}
    _rename(proto.graph, names)
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Call values by numbers, in the order in which nodes name them; `names` holds what is known so far."""

    def numbered(name: str) -> str:
        return names.setdefault(name, f"#{len(names)}") if name else ""

    del graph.value_info[:]
    for node in graph.node:
        node.name = ""
        node.input[:] = [numbered(name) for name in node.input]
        for attribute in node.attribute:
            for body in [attribute.g, *attribute.graphs] if attribute.type in _BODIES else ():
                for value in body.input:
                    value.name = numbered(value.name)
                _rename(body, names)
        node.output[:] = [numbered(name) for name in node.output]
    for held in [*graph.output, *graph.initializer]:
        held.name = numbered(held.name)
    initializers = sorted(graph.initializer, key=lambda tensor: tensor.name)
    del graph.initializer[:]
    graph.initializer.extend(initializers)


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise BadInput("checkpoints need the package safetensors: pip install 'onnxgrad[train]'") from error
    return safetensors


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
