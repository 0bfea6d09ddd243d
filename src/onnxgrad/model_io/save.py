"""Write a model so that at every moment the file is the old one or the new one, never a half.

Everything is written into a temporary directory beside the target and then renamed. Weights go to
external data when they came from there, or when one protobuf would grow too large; they are copied
from file to file, never gathered in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.files import check_ordinary, flush, scratch, writing
from onnxgrad.ir.graph import scopes
from onnxgrad.ir.serialize import serialize
from onnxgrad.model_io import stream
from onnxgrad.model_io.checks.declared_sizes import PROTOBUF_LIMIT
from onnxgrad.model_io.read import external_tensors, in_memory, training_info
from onnxgrad.model_io.zeros import write_declared

#: Weights of more bytes than this are written to external data.
EXTERNAL_FROM = 1_500_000_000


def weight_bytes(model: ir.Model) -> int:
    """The size of all initializers and tensor attributes."""
    total = sum(
        v.const_value.nbytes for g in scopes(model.graph) for v in g.initializers.values() if v.const_value is not None
    )
    for graph in scopes(model.graph):
        for node in graph:
            total += sum(
                a.value.nbytes for a in node.attributes.values() if a.type == ir.AttributeType.TENSOR and not a.is_ref()
            )
    return total


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """`model` as one message, its training information included; what that only declares are sparse zeros."""
    proto = serialize(model)
    proto.training_info.extend(training_info(model))
    write_declared(proto.training_info)
    return proto


def gathered(
    model: ir.Model, hint: str = "pass onnx_ir.load(path) instead; the result is then an onnx_ir.Model"
) -> onnx.ModelProto:
    """`model` as one message with all of its weights; `hint` is for a model that is too large.

    Raises:
        BadInput: they are more than one message can hold.
    """
    size = weight_bytes(model)
    if size > PROTOBUF_LIMIT:
        raise BadInput(f"the model holds {size / 1e9:.1f} GB of weights, more than one ModelProto can\n  hint: {hint}")
    with _same_weights(model) as values:
        for value in values:
            if isinstance(tensor := value.const_value, ir.ExternalTensor):
                value.const_value = in_memory(tensor)
        return to_proto(model)


@contextmanager
def _same_weights(model: ir.Model) -> Iterator[list[ir.Value]]:
    """The initializers of `model`, which after the block have the tensors that they had before."""
    held = [(v, v.const_value) for g in scopes(model.graph) for v in g.initializers.values()]
    try:
        yield [value for value, _ in held]
    finally:
        for value, tensor in held:
            value.const_value = tensor


def in_kind_of(given: Any, model: ir.Model) -> onnx.ModelProto | ir.Model:
    """`model` in the kind of the caller's argument `given`; for a path, an ``onnx.ModelProto`` with all weights."""
    if isinstance(given, ir.Model):
        return model
    return to_proto(model) if isinstance(given, onnx.ModelProto) else gathered(model)


def save_model(
    model: onnx.ModelProto | ir.Model,
    path: str | os.PathLike,
    moments: Mapping[str, ir.TensorProtocol] | None = None,
) -> list[Path]:
    """Write `model` to `path`; large or already external weights to ``{path}.data``. Returns the files.

    `moments` are the values of initializers of algorithms that its training information only declares.

    Raises:
        BadInput: it cannot be written there; nothing was changed then.
    """
    path = Path(path)
    if path.is_dir():
        raise BadInput(f"{path} is a directory, not a file to write to")
    check_ordinary(path)
    with writing(path), scratch(path) as folder:
        names = _write(model, folder, path.name, moments or {})
        for name in names:  # the data first, so that a new model never meets old data
            flush(folder / name)
            os.replace(folder / name, path.parent / name)
    return [path.parent / name for name in reversed(names)]


def _write(
    model: onnx.ModelProto | ir.Model, folder: Path, name: str, moments: Mapping[str, ir.TensorProtocol]
) -> list[str]:
    if isinstance(model, onnx.ModelProto):
        onnx.save(model, folder / name)
        return [name]
    data = f"{name}.data"
    with _same_weights(model):
        if external_tensors(model) or weight_bytes(model) > EXTERNAL_FROM:
            ir.external_data.unload_from_model(model, folder, data, size_threshold_bytes=1024)
        with open(folder / name, "wb") as file:
            stream.write(model, file, moments)
    return [data, name] if (folder / data).exists() else [name]
