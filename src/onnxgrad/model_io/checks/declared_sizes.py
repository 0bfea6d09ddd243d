"""Declared sizes of tensors are checked against their data before anything is allocated.

A file of a hundred bytes can declare a weight of a terabyte, a reference to a file elsewhere, or a thousand million
nested calls of functions. These checks refuse it by its declarations, before memory is allocated.
"""

from __future__ import annotations

import math
import os
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]

from onnxgrad.errors import BadInput
from onnxgrad.ir.infer.limits import MOST_AXES

#: Bytes of one message, and so of a file without external data. A protobuf ends at 2 GiB.
PROTOBUF_LIMIT = 2**31 - 2**20
#: Bytes of everything in a message that is no tensor and no structure: notes and documentation.
MOST_NOTES = 1 << 26


def check_message(proto: onnx.ModelProto, what: str) -> bool:
    """Check `proto`: its strings are text, and tensors have as many elements as declared.

    Where a string is no text, the package protobuf gives bytes, without a word.

    Returns:
        True if a graph has sparse initializers.

    Raises:
        BadInput: it is not so.
    """
    stack: list[Any] = [proto]
    notes, has_sparse = 0, False
    while stack:
        message = stack.pop()
        kind = type(message)
        if kind is onnx.NodeProto and _is_plain(message):
            if message.attribute:
                stack += message.attribute[::-1]
            continue
        if kind is onnx.ValueInfoProto and _is_plain_value(message):
            stack.append(message.type.tensor_type.shape)
            continue
        if kind is onnx.TensorShapeProto:
            if len(message.dim) > MOST_AXES:
                raise BadInput(
                    f"{what} is not a valid ONNX model: it declares a value of {len(message.dim)} axes; "
                    f"{MOST_AXES} are the most"
                )
            if all([type(d.dim_param) is type(d.denotation) is str for d in message.dim]):  # noqa: C419  (it is faster)
                continue  # most messages are dimensions
        if kind is onnx.TensorProto:
            why = _complaint(message)
            if why:
                raise BadInput(f"{what} is not a valid ONNX model: the tensor {_called(message)} {why}")
            if type(message.name) is str and not (
                message.doc_string or message.external_data or message.metadata_props
            ):
                continue
            stack += (*message.external_data, *message.metadata_props)
            fields = [(f, getattr(message, f.name)) for f in _NAMED if message.HasField(f.name)]  # not its data
        else:
            fields = message.ListFields()
        if kind is onnx.SparseTensorProto:
            why = _sparse_complaint(message)
            if why:
                raise BadInput(f"{what} is not a valid ONNX model: the sparse tensor {_called(message.values)} {why}")
        elif kind is onnx.AttributeProto:
            _check_attribute(message, what)
        elif kind is onnx.GraphProto:
            has_sparse |= bool(message.sparse_initializer)
        elif kind is onnx.StringStringEntryProto:
            notes += message.ByteSize()  # without making text of it
            check_size_of_notes(notes, what)
        for field, value in fields:
            field_kind = _FIELDS[field]
            if field_kind is None:
                continue
            is_message, is_repeated = field_kind
            values = value if is_repeated else (value,)
            if is_message:
                stack += values[::-1]
                continue
            if field.name == "doc_string":
                notes += len(value)
                check_size_of_notes(notes, what)
            if bytes in map(type, values):
                name = field.full_name.split(".", 1)[1]
                raise BadInput(f"{what} is not a valid ONNX model: its {name} is no text")
    return has_sparse


def _is_plain_value(value: onnx.ValueInfoProto) -> bool:
    """True if `value` is a tensor whose name is text, without notes and documentation."""
    kind = value.type
    named = type(value.name) is type(kind.denotation) is str and kind.HasField("tensor_type")
    return named and not (value.doc_string or value.metadata_props)


def _is_plain(node: onnx.NodeProto) -> bool:
    """True if the names in `node` are text, and it has neither notes nor documentation: most nodes."""
    try:
        "".join((node.name, node.op_type, node.domain, node.overload, *node.input, *node.output))
    except TypeError:
        return False
    return not (node.doc_string or node.metadata_props or node.device_configurations)


def check_size_of_notes(notes: int, what: str) -> None:
    """Raise BadInput if a model has metadata of more than `MOST_NOTES` bytes."""
    if notes > MOST_NOTES:
        raise BadInput(f"{what} carries more than {MOST_NOTES >> 20} MiB of metadata, which are not read")


class _Fields(dict[FieldDescriptor, tuple[bool, bool] | None]):
    """For each field of messages or strings: True for messages, and True if it is repeated."""

    def __missing__(self, field: FieldDescriptor) -> tuple[bool, bool] | None:
        is_message = field.type == FieldDescriptor.TYPE_MESSAGE
        is_held = is_message or field.type == FieldDescriptor.TYPE_STRING
        entry = self[field] = (is_message, field.is_repeated) if is_held else None
        return entry


_FIELDS = _Fields()
_NAMED = [onnx.TensorProto.DESCRIPTOR.fields_by_name[name] for name in ("name", "doc_string")]


def _check_attribute(a: onnx.AttributeProto, what: str) -> None:
    """Raise BadInput if `a` lacks the field of its type, or has invalid text."""
    member = {onnx.AttributeProto.GRAPH: "g", onnx.AttributeProto.TENSOR: "t"}.get(a.type)
    if a.ref_attr_name and a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        raise BadInput(f"{what} has a graph {a.name!r} that is an attribute of a function, which is not supported")
    if member and not a.ref_attr_name and not a.HasField(member):
        raise BadInput(f"{what} is not a valid ONNX model: the attribute {a.name!r} holds nothing")
    try:
        for s in (a.s, *a.strings):
            s.decode()
    except UnicodeDecodeError as e:
        raise BadInput(f"{what} is not a valid ONNX model: the attribute {a.name!r} holds text that is none") from e


def location_complaint(location: str) -> str:
    """The error in a location of external data; empty if the location is inside the model's folder."""
    if not location or "\0" in location:
        return "is in external data without a place"
    parts = location.replace("\\", "/").split("/")
    if os.path.isabs(location) or location.startswith(("/", "\\")) or ":" in parts[0]:
        return f"is in external data at {location!r}; only places in the folder of the model are read"
    if ".." in parts:
        return f"is in external data at {location!r}, outside the folder of the model"
    return ""


# --- tensors ----------------------------------------------------------------------------------------


def _complaint(tensor: onnx.TensorProto) -> str:
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        return f"has the unknown type {tensor.data_type}"
    if dtype == ir.DataType.UNDEFINED:
        return "has no type"
    if len(tensor.dims) > MOST_AXES:
        return f"has {len(tensor.dims)} axes; {MOST_AXES} are the most"
    if min(tensor.dims, default=0) < 0:
        return f"has the dimensions {list(tensor.dims)}"
    if tensor.HasField("segment"):
        return "is a segment of another tensor, which onnxgrad does not read"
    count = math.prod(tensor.dims)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        entries = {e.key: e.value for e in tensor.external_data}
        return _external_complaint(entries, dtype, count)
    if dtype == ir.DataType.STRING:
        stored, wanted, unit = len(tensor.string_data), count, "strings"
    elif tensor.HasField("raw_data"):
        stored, wanted, unit = len(tensor.raw_data), -(-count * dtype.bitwidth // 8), "bytes"
    else:
        field = onnx.helper.tensor_dtype_to_field(tensor.data_type)
        stored, wanted, unit = len(getattr(tensor, field)), count, "elements"
        if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
            wanted *= 2
        elif dtype.bitwidth < 8:
            wanted = -(-count * dtype.bitwidth // 8)
    return "" if stored == wanted else f"declares {list(tensor.dims)}, which are {wanted} {unit}, and holds {stored}"


def _external_complaint(entries: dict[str, str], dtype: ir.DataType, count: int) -> str:
    why = location_complaint(entries.get("location", ""))
    if why:
        return why
    if dtype == ir.DataType.STRING:
        return "holds strings in external data"
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or 0)
    except ValueError:
        return "says in no number where in its external data it is"
    size = -(-count * dtype.bitwidth // 8)
    if offset < 0 or length < 0 or (length and length != size):
        return f"takes {size} bytes, and its external data {length} from {offset} on"
    return ""


def _sparse_complaint(sparse: onnx.SparseTensorProto) -> str:
    for tensor in (sparse.values, sparse.indices):
        if why := _complaint(tensor):
            return why
    dims, held, at = list(sparse.dims), list(sparse.values.dims), list(sparse.indices.dims)
    if len(dims) > MOST_AXES:
        return f"has {len(dims)} axes; {MOST_AXES} are the most"
    if any(d < 0 for d in dims):
        return f"has the dimensions {dims}"
    for tensor in (sparse.values, sparse.indices):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return "is in external data"
    if sparse.indices.data_type != onnx.TensorProto.INT64 or sparse.values.data_type == onnx.TensorProto.STRING:
        return "has indices that are no int64, or values that are no numbers"
    if len(held) != 1 or at not in ([held[0]], [held[0], len(dims)]):
        return f"has values of shape {held} and indices of shape {at}"
    size = math.prod(dims) * ir.DataType(sparse.values.data_type).bitwidth // 8
    if size > PROTOBUF_LIMIT:
        return f"declares {dims}, which are {size / 1e9:.1f} GB written out"
    indices = onnx.numpy_helper.to_array(sparse.indices)
    bounds = dims if indices.ndim == 2 else [math.prod(dims)]
    columns = indices.T if indices.ndim == 2 else [indices]
    if any(((c < 0) | (c >= n)).any() for c, n in zip(columns, bounds)):
        return f"has an index outside of {dims}"
    return ""


def _called(tensor: onnx.TensorProto) -> str:
    return repr(tensor.name) if tensor.name else "without a name"
