"""Large weights of a message on disk, in a file without a name, so that memory holds none until one is asked for.

A message of the package protobuf frees nothing before all of it is freed, and keeps weights that are then trained
elsewhere. The file of the model itself cannot stand in: whoever writes it anew in place would change them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
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
    """`proto` without the data of large initializers of its graph, and these by name; itself if there is no room.

    Args:
        proto: the message, whose tensors are what they declare; it is used up.
    """
    tensors = [t for t in proto.graph.initializer if _is_large(t)]
    if sum(_bytes(t) for t in tensors) < FROM:
        return proto, {}
    found: dict[str, ir.TensorProtocol] = {}
    file: IO[bytes] | None = None
    lock = Lock()  # of the place in the file
    try:
        file = tempfile.TemporaryFile(prefix="onnxgrad-", buffering=0)  # noqa: SIM115 (the tensors hold it)
        for tensor in tensors:
            start = file.tell()
            left = memoryview(tensor.raw_data)
            while left:
                left = left[file.write(left) or 0 :]
            found[tensor.name] = _lazy(file, lock, start, tensor)
    except OSError:  # no room on the disk, or no folder to write to
        if file is not None:
            file.close()
        return proto, {}
    for tensor in tensors:
        tensor.ClearField("raw_data")
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    return bare, found


def put_back(model: ir.Model, held: Mapping[str, ir.TensorProtocol]) -> None:
    """Give the initializers of `model`, made of such a message, the values that were set aside."""
    for name, tensor in held.items():
        model.graph.initializers[name].const_value = tensor


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


def _lazy(file: IO[bytes], lock: Lock, start: int, proto: onnx.TensorProto) -> ir.TensorProtocol:
    """What lies from `start` in `file`, read anew each time it is asked for."""
    dtype, shape, name = ir.DataType(proto.data_type), tuple(proto.dims), proto.name
    doc, props = proto.doc_string, {p.key: p.value for p in proto.metadata_props}
    little = np.dtype(dtype.numpy()).newbyteorder("<")

    def read() -> ir.TensorProtocol:
        array = np.empty(shape, little)
        left = memoryview(array.reshape(-1).view(np.uint8).data)
        with lock:
            file.seek(start)
            while left:
                left = left[file.readinto(left) :]  # type: ignore[attr-defined]
        return ir.tensor(array, dtype=dtype, name=name)

    return ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(shape), name=name, doc_string=doc, metadata_props=props)
