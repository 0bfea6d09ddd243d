"""Streaming writer of a model: memory has one weight at a time besides the model itself.

A protobuf message has a copy of all weights, and its serialized bytes another one. Here the message is built without
weights, which are written after its other fields (the encoding allows any order of fields).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import BinaryIO

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.ir.serialize import serialize, varint, write_tensor
from onnxgrad.model_io import zeros
from onnxgrad.model_io.checks.declared_sizes import PROTOBUF_LIMIT
from onnxgrad.model_io.read import training_info

#: Pieces of a message: bytes, and tensors whose bytes are generated on writing.
_Pieces = list[bytes | ir.TensorProtocol]


def write(model: ir.Model, file: BinaryIO, moments: Mapping[str, ir.TensorProtocol]) -> None:
    """Write `model` with its training information; the file is equal to the result of `to_proto`.

    Args:
        model: with all of its weights in it.
        file: where to write.
        moments: the values of those initializers of algorithms that the training information only declares.

    Raises:
        BadInput: it is more than one file can hold; nothing was written then.
    """
    pieces = list(_model(model, moments))
    size = _size(pieces)
    if size > PROTOBUF_LIMIT:
        raise BadInput(f"the model and its moments take {size / 1e9:.1f} GB, more than one file can hold")
    for piece in pieces:
        if isinstance(piece, bytes):
            file.write(piece)
        else:
            write_tensor(piece, file)


def _model(model: ir.Model, moments: Mapping[str, ir.TensorProtocol]) -> Iterator[bytes | ir.TensorProtocol]:
    weights = [(v.name, v.const_value) for v in model.graph.initializers.values() if v.const_value is not None]
    proto = serialize(model, weights=False)
    graph: _Pieces = [proto.graph.SerializeToString()]
    for name, tensor in weights:
        tensor.name = name
        graph += _tensor(tensor)
    proto.ClearField("graph")
    yield proto.SerializeToString()
    yield from _field(onnx.ModelProto, "graph", graph)
    for info in training_info(model):
        yield from _field(onnx.ModelProto, "training_info", _info(info, moments))


def _info(info: onnx.TrainingInfoProto, moments: Mapping[str, ir.TensorProtocol]) -> _Pieces:
    algorithm: _Pieces = [_without(info.algorithm, "initializer").SerializeToString()]
    for proto in info.algorithm.initializer:
        if not zeros.is_declared(proto):
            algorithm += _field(onnx.GraphProto, "initializer", [proto.SerializeToString()])
            continue
        tensor = moments.get(proto.name)
        if tensor is None:
            empty = zeros.sparse(proto).SerializeToString()
            algorithm += _field(onnx.GraphProto, "sparse_initializer", [empty])
            continue
        data = _field(onnx.TensorProto, "raw_data", [tensor])
        algorithm += _field(onnx.GraphProto, "initializer", [proto.SerializeToString(), *data])
    rest = _without(info, "algorithm").SerializeToString()
    return [rest, *_field(onnx.TrainingInfoProto, "algorithm", algorithm)]


def _tensor(tensor: ir.TensorProtocol) -> _Pieces:
    """The field of a graph for an initializer."""
    if tensor.dtype == ir.DataType.STRING or isinstance(tensor, ir.ExternalTensor):
        return _field(onnx.GraphProto, "initializer", [ir.to_proto(tensor).SerializeToString()])
    about = onnx.TensorProto(name=tensor.name, data_type=tensor.dtype, dims=list(tensor.shape.numpy()))
    if tensor.doc_string:
        about.doc_string = tensor.doc_string
    for key, value in tensor.metadata_props.items():
        about.metadata_props.add(key=key, value=value)
    data = _field(onnx.TensorProto, "raw_data", [tensor])
    return _field(onnx.GraphProto, "initializer", [about.SerializeToString(), *data])


def _field(message: type, name: str, pieces: _Pieces) -> _Pieces:
    """`pieces` as a field of `message`."""
    number = message.DESCRIPTOR.fields_by_name[name].number  # type: ignore[attr-defined]
    return [varint(number << 3 | 2) + varint(_size(pieces)), *pieces]


def _size(pieces: _Pieces) -> int:
    return sum(len(p) if isinstance(p, bytes) else p.nbytes for p in pieces)


def _without(message: onnx.GraphProto | onnx.TrainingInfoProto, name: str) -> onnx.GraphProto | onnx.TrainingInfoProto:
    """A copy of `message` without the field `name`, which is not copied on the way."""
    copy = type(message)()
    for field, held in message.ListFields():
        if field.name == name:
            continue
        if field.is_repeated:
            getattr(copy, field.name).extend(held)
        elif field.message_type is not None:
            getattr(copy, field.name).CopyFrom(held)
        else:
            setattr(copy, field.name, held)
    return copy
