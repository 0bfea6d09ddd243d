"""External data: the files in which a model may keep its tensors, and their safe reading.

A location in an untrusted model may be a link to a file elsewhere or a pipe without a writer, or become one later. So
the resolved path counts: it must be in the folder of the model or below, or among the blobs of the same Hugging Face
cache, whose snapshots are links. A hard link cannot be told from the file, so all names of a file must be in one
folder. A file that is opened later is checked again after it was opened.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary

_FILES = "onnxgrad.files"
#: The file in the cache of a model that was fetched.
FETCHED = "onnxgrad.fetched"
_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")


def settle_external(proto: onnx.ModelProto, path: Path) -> Folder:
    """Check all external data of `proto`, which was read from `path`, and return its files.

    Weights of the graph stay on disk. External data in attributes, functions and training information are read now,
    since no later code looks for them.

    Raises:
        BadInput: a file is not there, no ordinary one, elsewhere, or too short.
    """
    folder = Folder(path)
    for tensor, is_weight in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            size = math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth
            about = onnx.external_data_helper.ExternalDataInfo(tensor)
            start, size = about.offset or 0, -(-size // 8)
            held = folder.file(about.location, tensor.name, start + size)
            if not is_weight:
                with held.open() as file:
                    file.seek(start)
                    tensor.raw_data = file.read(size)
                tensor.ClearField("external_data")
                tensor.data_location = onnx.TensorProto.DEFAULT
    return folder


def external_locations(proto: onnx.ModelProto) -> list[str]:
    """The files that `proto` keeps tensors in, as it names them."""
    held = (t for t, _ in _tensors(proto) if t.data_location == onnx.TensorProto.EXTERNAL)
    return list(dict.fromkeys(onnx.external_data_helper.ExternalDataInfo(t).location for t in held))


def check_external(path: Path) -> None:
    """Check the external data of the model in the file at `path`; files that are no models are skipped.

    Raises:
        BadInput: a file is not there, no ordinary one, elsewhere, or too short.
    """
    try:
        with open_ordinary(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
                if data.find(b"location") < 0:  # the key that every reference to a file has
                    return
            proto = onnx.load(file, load_external_data=False)
    except (BadInput, DecodeError):  # the runtime reports the error
        return
    settle_external(proto, path)


def files_of(model: ir.Model, path: str | os.PathLike) -> list[Path]:
    """The file that `model` was loaded from, and those of its external data."""
    return [model.meta.get(FETCHED, Path(path)), *model.meta.get(_FILES, ())]


@dataclass(frozen=True)
class _File:
    """A file of external data, identified as it was when the model was read."""

    path: Path
    real: str
    found: os.stat_result

    def open(self) -> BinaryIO:
        """Open the file, if it is still the same one.

        Raises:
            BadInput: it is not, or cannot be opened.
        """
        file = open_ordinary(self.real)
        now = os.fstat(file.fileno())
        if not os.path.samestat(now, self.found) or now.st_size < self.found.st_size:
            file.close()
            raise BadInput(f"{self.path} is not the file any more that it was when the model was read")
        return file


class Folder:
    """The folder of the model at `path`, to which its external data are confined."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.real = os.path.realpath(path.parent)
        self.files: dict[str, _File] = {}

    def file(self, location: str, name: str, end: int) -> _File:
        """The file at `location`, which stores the tensor `name` up to the byte `end`."""
        if location not in self.files:
            self.files[location] = self._looked_at(location, name)
        held = self.files[location]
        if held.found.st_size < end:
            raise BadInput(f"{held.path} is cut off: it ends before the weight {name!r} of {self.path}")
        return held

    def hold(self, model: ir.Model) -> None:
        """Make the weights of `model` read the files that were checked."""
        for graph in model.graphs():
            for value in graph.initializers.values():
                held = value.const_value
                if isinstance(held, ir.ExternalTensor):
                    value.const_value = _Weight(held, self.files[os.fspath(held.location)], self.path.parent)
        model.meta[_FILES] = [f.path for f in self.files.values()]

    def _looked_at(self, location: str, name: str) -> _File:
        path = self.path.parent / location
        where = f"{self.path} keeps the weight {name!r} in {path}, which"
        real = os.path.realpath(path)
        try:
            found = os.stat(real)
        except OSError as e:
            raise BadInput(f"{where} does not exist") from e
        hint = "\n  hint: if that is meant, put a copy of the file there"
        if not stat.S_ISREG(found.st_mode):
            raise BadInput(f"{where} is no ordinary file")
        if os.path.commonpath([self.real, real]) != self.real and os.path.dirname(real) != self._blobs():
            raise BadInput(f"{where} leads out of the folder of the model, to {real}{hint}")
        if found.st_nlink > _names_beside(real, found):
            raise BadInput(f"{where} has other names outside of its folder (it is a hard link){hint}")
        return _File(path, real, found)

    def _blobs(self) -> str | None:
        """The blobs that the snapshot of a cache consists of, if the model is in one."""
        for revision in (Path(self.real), *Path(self.real).parents):
            snapshots = revision.parent
            if snapshots.name == "snapshots" and _REPOSITORY.fullmatch(snapshots.parent.name):
                return os.fspath(snapshots.parent / "blobs")
        return None


class _Weight(ir.ExternalTensor):
    """A weight in external data; reading it fails if the file has changed since the model was read."""

    def __init__(self, like: ir.ExternalTensor, file: _File, folder: Path) -> None:
        super().__init__(
            like.location,
            like.offset,
            like.length,
            like.dtype,
            shape=like.shape,
            name=like.name or "",
            doc_string=like.doc_string,
            metadata_props=dict(like.metadata_props),
            base_dir=folder,
        )
        self.file = file

    def _load(self) -> None:
        """Map the file on the first access of the array; the base class would open the path without a check."""
        with self.file.open() as file:
            self.raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self.dtype.bitwidth < 8:
            held = onnx.TensorProto(dims=self.shape.numpy(), data_type=self.dtype, raw_data=self.tobytes())
            self._array = ir.serde.deserialize_tensor(held).numpy()
            return
        dtype = np.dtype(self.dtype.numpy()).newbyteorder("<")
        flat = np.frombuffer(self.raw, dtype, offset=self.offset or 0, count=self.size)
        self._array = flat.reshape(self.shape.numpy())

    def tofile(self, file: Any) -> None:
        """Write the bytes to `file`."""
        left = self.nbytes
        with self.file.open() as source:
            source.seek(self.offset or 0)
            while left:
                left -= file.write(source.read(min(left, 1 << 24)))


def _names_beside(real: str, found: os.stat_result) -> int:
    """The number of hard links to the file at `real` in its own folder."""
    if found.st_nlink == 1:
        return 1
    with os.scandir(os.path.dirname(real)) as entries:
        return sum(e.inode() == found.st_ino and not e.is_symlink() for e in entries)


def _tensors(proto: onnx.ModelProto) -> Iterator[tuple[onnx.TensorProto, bool]]:
    """Every tensor of `proto`, with True for weights of its graph or of a nested graph."""
    trained = [g for i in proto.training_info for g in (i.algorithm, i.initialization)]
    stack: list[tuple[Any, bool]] = [(proto.graph, True), *((g, False) for g in (*trained, *proto.functions))]
    while stack:
        top, of_model = stack.pop()
        if isinstance(top, onnx.GraphProto):
            yield from ((t, of_model) for t in top.initializer)
        held = list(top.attribute_proto) if isinstance(top, onnx.FunctionProto) else []
        for a in (*held, *(a for node in top.node for a in node.attribute)):
            yield from ((t, False) for t in (*((a.t,) if a.HasField("t") else ()), *a.tensors))
            stack.extend((g, of_model) for g in (*((a.g,) if a.HasField("g") else ()), *a.graphs))
