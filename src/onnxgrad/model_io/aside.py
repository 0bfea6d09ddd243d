"""Move large weights of a message to an unnamed file on disk; each is read when it is used.

A protobuf message frees no memory before all of it is freed, so it would keep weights of which training has a copy.
The model's own file does not serve as storage: another program may overwrite it in place.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import IO

import numpy as np
import onnx
import onnx_ir as ir

#: Messages whose weights have fewer bytes are left as they are.
FROM = 1 << 25
#: Bytes of a tensor that is worth a place in the file.
_LARGE = 1 << 16


def set_aside(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Mapping[str, ir.TensorProtocol]]:
    """A copy of `proto` without the data of large initializers, and these tensors by name; `proto` itself without room.

    Args:
        proto: the message, whose tensors are what they declare; it is used up.
    """
    tensors = [t for t in proto.graph.initializer if _is_large(t)]
    if sum(_bytes(t) for t in tensors) < FROM:
        return proto, {}
    scratch = Scratch()
    found: dict[str, ir.TensorProtocol] = {}
    try:
        for t in tensors:
            props = {p.key: p.value for p in t.metadata_props}
            found[t.name] = scratch.keep(t.raw_data, ir.DataType(t.data_type), t.dims, t.name, t.doc_string, props)
    except OSError:  # no room on the disk, or no folder to write to
        return proto, {}
    for tensor in tensors:
        tensor.ClearField("raw_data")
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    return bare, found


def copy_aside(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Mapping[str, ir.TensorProtocol]]:
    """The same as `set_aside` for a message that stays as it is; itself if its weights are small."""
    if sum(_bytes(t) for t in proto.graph.initializer if _is_large(t)) < FROM:
        return proto, {}
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return set_aside(copy)


def put_back(model: ir.Model, held: Mapping[str, ir.TensorProtocol]) -> None:
    """Restore the tensors that were moved aside to the initializers of `model`."""
    for name, tensor in held.items():
        model.graph.initializers[name].const_value = tensor


def external_aside(model: ir.Model) -> None:
    """Copy the weights of `model` from external data to the unnamed file, in place: other programs may rewrite theirs.

    They are stored in a file without a name, or in memory if they are small or there is no room.
    """
    values = [v for g in model.graphs() for v in g.initializers.values()]
    external = [(v, t) for v in values if isinstance(t := v.const_value, ir.ExternalTensor)]
    large = [(v, t) for v, t in external if t.dtype.bitwidth >= 8 and t.nbytes >= _LARGE]
    if sum(t.nbytes for _, t in large) >= FROM:
        scratch = Scratch()
        try:
            copies = [scratch.keep_external(t) for _, t in large]
        except OSError:
            copies = []
        for (value, _), copy in zip(large, copies):
            value.const_value = copy
    ir.external_data.load_to_model(model)


class Scratch:
    """Tensors in an unnamed file; each access reads the data again."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._lock = Lock()  # of the place in the file

    def keep(
        self, data: bytes | memoryview, dtype: ir.DataType, shape: Sequence[int], name: str | None,
        doc: str | None = None, props: dict[str, str] | None = None,
    ) -> ir.TensorProtocol:  # fmt: skip
        """Write the little-endian bytes of a tensor. Raises OSError if there is no room."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="onnxgrad-", buffering=0)  # noqa: SIM115 (the tensors hold it)
        file, lock = self._file, self._lock
        start = file.seek(0, os.SEEK_END)
        left = memoryview(data)
        while left:
            left = left[file.write(left) or 0 :]
        return _lazy(file, lock, start, dtype, tuple(shape), name, doc, props or {})

    def keep_external(self, tensor: ir.ExternalTensor) -> ir.TensorProtocol:
        """Copy a tensor from its file."""
        was_read = tensor.raw is not None
        kept = self.keep_array(
            tensor.numpy(), tensor.dtype, tensor.name, tensor.doc_string, dict(tensor.metadata_props)
        )
        if not was_read:
            tensor.release()
        return kept

    def keep_array(
        self, array: np.ndarray, dtype: ir.DataType, name: str | None, doc: str | None = None,
        props: dict[str, str] | None = None,
    ) -> ir.TensorProtocol:  # fmt: skip
        """Write an array."""
        little = np.ascontiguousarray(array).astype(np.dtype(dtype.numpy()).newbyteorder("<"), copy=False)
        return self.keep(little.reshape(-1).view(np.uint8).data, dtype, array.shape, name, doc, props)


class KeptTensor(ir.LazyTensor):
    """A tensor in the unnamed file. Each `numpy` reads an array of its own, which the caller may change."""


def _is_large(tensor: onnx.TensorProto) -> bool:
    return bool(
        tensor.name
        and tensor.HasField("raw_data")
        and tensor.data_location != onnx.TensorProto.EXTERNAL
        and ir.DataType(tensor.data_type).bitwidth >= 8
        and _bytes(tensor) >= _LARGE
    )


def _bytes(tensor: onnx.TensorProto) -> int:
    return math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth // 8


def _lazy(
    file: IO[bytes], lock: Lock, start: int, dtype: ir.DataType, shape: tuple[int, ...], name: str | None,
    doc: str | None, props: dict[str, str],
) -> ir.TensorProtocol:  # fmt: skip
    little = np.dtype(dtype.numpy()).newbyteorder("<")

    def read() -> ir.TensorProtocol:
        array = np.empty(shape, little)
        left = memoryview(array.reshape(-1).view(np.uint8).data)
        with lock:
            file.seek(start)
            while left:
                left = left[file.readinto(left) :]  # type: ignore[attr-defined]
        return ir.tensor(array, dtype=dtype, name=name)

    return KeptTensor(read, dtype=dtype, shape=ir.Shape(shape), name=name, doc_string=doc, metadata_props=props)
