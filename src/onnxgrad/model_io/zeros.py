"""Large zeros in training information (initial moments), which have no data: neither in memory nor in files.

Internally, a tensor message with declared elements but without data means zeros. In a message from outside it is
refused (`declared_sizes`); before a message is returned or saved, such a tensor becomes a sparse initializer without
values (`write_declared`), and it is declared again when it is read (`declare_sparse`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir

#: Bytes of zeros that are worth it.
_LARGE = 1 << 16


def declare_tensor(tensor: ir.TensorProtocol) -> onnx.TensorProto:
    """The message of `tensor`; for large zeros only the declaration."""
    if tensor.dtype.bitwidth < 8 or tensor.nbytes < _LARGE or tensor.numpy().reshape(-1).view(np.uint8).any():
        return ir.serde.serialize_tensor(tensor)
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
    """Write the declared tensors of `infos`, in place: with these `values`, or as sparse initializers."""
    for info in infos:
        held, empty = info.algorithm.initializer, list[int]()
        for i, tensor in enumerate(held):
            if is_declared(tensor) and (known := (values or {}).get(tensor.name)) is not None:
                tensor.raw_data = known.tobytes()
            elif is_declared(tensor):
                info.algorithm.sparse_initializer.append(sparse(tensor))
                empty.append(i)
        for i in reversed(empty):
            del held[i]


def sparse(declared: onnx.TensorProto) -> onnx.SparseTensorProto:
    """The sparse initializer for a `declared` tensor: it has no values."""
    zeros = onnx.SparseTensorProto(dims=declared.dims)
    zeros.values.CopyFrom(declared)
    zeros.values.dims[:] = [0]
    zeros.values.raw_data = b""
    zeros.indices.CopyFrom(onnx.TensorProto(data_type=onnx.TensorProto.INT64, dims=[0], raw_data=b""))
    return zeros


def declare_sparse(sparse: onnx.SparseTensorProto) -> onnx.TensorProto | None:
    """The declared tensor for a sparse initializer without values; None for small ones, and those with values."""
    size = math.prod(sparse.dims) * ir.DataType(sparse.values.data_type).bitwidth // 8
    if sparse.values.dims[:] != [0] or size < _LARGE:
        return None
    declared = onnx.TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)
    declared.metadata_props.extend(sparse.values.metadata_props)
    return declared


def is_declared(proto: onnx.TensorProto) -> bool:
    """True if `proto` has a dtype and dims, but no data."""
    if proto.HasField("raw_data") or proto.data_location == onnx.TensorProto.EXTERNAL or 0 in proto.dims:
        return False
    return {field.name for field, _ in proto.ListFields()} <= {"name", "data_type", "dims", "metadata_props"}
