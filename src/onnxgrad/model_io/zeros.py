"""Large zeros in training information (initial moments), declared in memory and written only to files.

Internally, a tensor message with declared elements but without data means zeros. In a message from outside it is
refused (`declared_sizes`); before a message is returned or saved, the zeros are written (`write_declared`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir

#: Bytes of zeros that are worth it.
_LARGE = 1 << 16


def declare_tensor(tensor: ir.TensorProtocol) -> onnx.TensorProto:
    """The message of `tensor`; for large zeros only the declaration."""
    if tensor.dtype.bitwidth < 8 or tensor.nbytes < _LARGE or tensor.numpy().reshape(-1).view(np.uint8).any():
        return ir.to_proto(tensor)
    return onnx.TensorProto(name=tensor.name, data_type=tensor.dtype, dims=list(tensor.shape.numpy()))


def read_tensor(proto: onnx.TensorProto) -> ir.TensorProtocol:
    """The tensor in `proto`; large zeros that are only declared become a lazy tensor."""
    if not is_declared(proto):
        return ir.serde.deserialize_tensor(proto)
    dtype, shape, name = ir.DataType(proto.data_type), tuple(proto.dims), proto.name
    props = {p.key: p.value for p in proto.metadata_props}

    def zeros() -> ir.TensorProtocol:
        return ir.tensor(np.zeros(shape, dtype.numpy()), dtype=dtype, name=name)

    return ir.LazyTensor(zeros, dtype=dtype, shape=ir.Shape(shape), name=name, metadata_props=props)


def write_declared(
    infos: Iterable[onnx.TrainingInfoProto], values: Mapping[str, ir.TensorProtocol] | None = None
) -> None:
    """Fill in the declared tensors of `infos`, in place, by these `values` or zeros."""
    for info in infos:
        for tensor in info.algorithm.initializer:
            if is_declared(tensor):
                known = (values or {}).get(tensor.name)
                tensor.raw_data = bytes(read_tensor(tensor).nbytes) if known is None else known.tobytes()


def is_declared(proto: onnx.TensorProto) -> bool:
    """True if `proto` has a dtype and dims, but no data."""
    if proto.HasField("raw_data") or proto.data_location == onnx.TensorProto.EXTERNAL or 0 in proto.dims:
        return False
    return {field.name for field, _ in proto.ListFields()} <= {"name", "data_type", "dims", "metadata_props"}
