"""A faster ``onnx_ir.to_proto``.

``onnx_ir`` fills messages field by field. Most of a derived model are nodes without metadata, and values whose type
and shape occur many times. Their bytes are written here in the wire format (a tag, a length, the bytes), and one call
of protobuf parses all of them. That takes a quarter of the time.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

import onnx
import onnx_ir as ir

from onnxgrad.ir.match import not_none
from onnxgrad.ir.notes import notes, properties


def serialize(model: ir.Model, weights: bool = True) -> onnx.ModelProto:
    """Serialize `model`; the message equals that of ``onnx_ir.to_proto(model)``, without `weights` if asked for."""
    graph = model.graph
    shell = copy.copy(model)
    shell.graph = ir.Graph((), (), nodes=(), opset_imports=graph.opset_imports)
    proto = ir.serde.serialize_model(shell)
    _Writer(model.ir_version).graph(proto.graph, graph, weights)
    return proto


def serialize_nodes(nodes: Iterable[ir.Node], proto: onnx.GraphProto) -> None:
    """Append `nodes`, and the types of all their results, to `proto`."""
    parts: list[bytes] = []
    _Writer().nodes(proto, nodes, parts, lambda value: True)
    proto.MergeFromString(b"".join(parts))


def serialize_apart(model: ir.Model, file: BinaryIO, location: str) -> onnx.ModelProto:
    """Serialize `model` with larger weights in `file`, which the message calls `location`."""
    proto = serialize(model, weights=False)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            continue
        entry = proto.graph.initializer.add()
        if tensor.nbytes < _PAGE or tensor.dtype == ir.DataType.STRING:
            if isinstance(tensor, ir.ExternalTensor):  # its place is relative to another folder
                tensor = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
            ir.serde.serialize_tensor_into(entry, tensor)
        else:
            file.seek(-file.tell() % _PAGE, os.SEEK_CUR)
            about = {"location": location, "offset": str(file.tell()), "length": str(tensor.nbytes)}
            entry.external_data.extend(onnx.StringStringEntryProto(key=key, value=text) for key, text in about.items())
            entry.data_type, entry.data_location = tensor.dtype, onnx.TensorProto.EXTERNAL
            entry.dims.extend(tensor.shape.numpy())
            write_tensor(tensor, file)
        entry.name = name
    return proto


def write_tensor(tensor: ir.TensorProtocol, file: BinaryIO) -> None:
    """Write the bytes of a tensor, without a copy of them if the tensor can."""
    if isinstance(tensor, (ir.Tensor, ir.LazyTensor)):
        tensor.tofile(file)
    else:
        file.write(tensor.tobytes())


def _tag(message: type, field: str, wire: int = 2) -> bytes:
    """The wire tag of one of the first 15 fields of `message`; `wire` is 2 for strings and messages, 0 for numbers."""
    return bytes([message.DESCRIPTOR.fields_by_name[field].number << 3 | wire])  # type: ignore[attr-defined]


_NODE, _VALUE_INFO, _IN, _OUT = (_tag(onnx.GraphProto, field) for field in ("node", "value_info", "input", "output"))
_INPUT, _OUTPUT, _NAME, _OP_TYPE, _ATTRIBUTE, _DOMAIN = (
    _tag(onnx.NodeProto, field) for field in ("input", "output", "name", "op_type", "attribute", "domain")
)
_VALUE_NAME, _VALUE_TYPE = (_tag(onnx.ValueInfoProto, field) for field in ("name", "type"))
_TENSOR, _DIM = _tag(onnx.TypeProto, "tensor_type"), _tag(onnx.TensorShapeProto, "dim")
_ELEMENT, _SHAPE = _tag(onnx.TypeProto.Tensor, "elem_type", 0), _tag(onnx.TypeProto.Tensor, "shape")
_SIZE = _tag(onnx.TensorShapeProto.Dimension, "dim_value", 0)
_SYMBOL = _tag(onnx.TensorShapeProto.Dimension, "dim_param")
#: Fields of attributes that are numbers.
_FIELDS = {
    ir.AttributeType.INT: "i",
    ir.AttributeType.INTS: "ints",
    ir.AttributeType.FLOAT: "f",
    ir.AttributeType.FLOATS: "floats",
}
#: Bytes of weights from which on they are apart, and by which they are aligned, so that they can be mapped into memory.
_PAGE = 1 << 12
#: Bytes of a tensor in an attribute that may be there twice for a moment.
_COPIED = 1 << 16
#: Bytes of an attribute that other nodes may share.
_KEPT = 1 << 8


_SHORT = [bytes([length]) for length in range(128)]


def _prefix_length(data: bytes) -> bytes:
    """`data` behind its length."""
    length = len(data)
    return (_SHORT[length] if length < len(_SHORT) else varint(length)) + data


def varint(number: int) -> bytes:
    """`number` as messages have it, seven bits at a time."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


class _Texts(dict[str, bytes]):
    """Encoded strings, behind the tag of a field: a name is written where its value is made, described and read."""

    def __init__(self, tag: bytes = b"") -> None:
        self._tag = tag

    def __missing__(self, text: str) -> bytes:
        found = self[text] = self._tag + _prefix_length(text.encode())
        return found


class _Dims(dict["int | ir.SymbolicDim", bytes]):
    """Fields of shapes, each of which holds a size, a symbol or nothing."""

    def __missing__(self, dim: int | ir.SymbolicDim) -> bytes:
        if isinstance(dim, int):
            encoded = _SIZE + varint(dim)
        else:
            encoded = b"" if dim.value is None else _SYMBOL + _prefix_length(dim.value.encode())
        found = self[dim] = _DIM + _prefix_length(encoded)
        return found


class _Writer:
    """Fills messages of graphs."""

    def __init__(self, ir_version: int | None = None) -> None:
        self.ir_version = ir_version
        self._texts, self._operands, self._operators = _Texts(), _Texts(_INPUT), _Texts(_OP_TYPE)
        self._dims = _Dims()
        self._types: dict[tuple[int, int], bytes] = {}  # of values that share them
        self._alike: dict[tuple[ir.DataType, tuple[int | ir.SymbolicDim, ...]], bytes] = {}  # equal ones are shared
        self._attributes: dict[int, bytes] = {}  # nodes share their attributes

    def graph(self, proto: onnx.GraphProto, graph: ir.Graph, weights: bool = True) -> None:
        """Fill `proto`, which is empty; with initializers of `graph` itself only if `weights`."""
        if graph.name:
            proto.name = graph.name
        if graph.doc_string:
            proto.doc_string = graph.doc_string
        proto.metadata_props.extend(
            onnx.StringStringEntryProto(key=key, value=value) for key, value in graph.metadata_props.items()
        )
        parts: list[bytes] = []
        for value in graph.inputs:
            parts += _IN, self.value(value)
            if value.name not in graph.initializers:
                _annotate(proto, value)
        given = {value.name for value in graph.inputs}
        for value in graph.initializers.values():
            if value.name not in given:
                self.describe(value, parts)
            _annotate(proto, value)
            if weights and value.const_value is not None:
                _add_tensor(proto, value)
        self.nodes(proto, graph, parts, lambda value: not value.is_graph_output())
        for value in graph.outputs:
            parts += _OUT, self.value(value)
            _annotate(proto, value)
        proto.MergeFromString(b"".join(parts))

    def nodes(
        self,
        proto: onnx.GraphProto,
        nodes: Iterable[ir.Node],
        parts: list[bytes],
        described: Callable[[ir.Value], bool],
    ) -> None:
        """Append `nodes`, and their results that are `described`, to the `parts` of `proto`."""
        for node in nodes:
            encoded = self.node(node)
            if encoded is None:
                proto.MergeFromString(b"".join(parts))
                parts.clear()
                ir.serde.serialize_node_into(proto.node.add(), node, model_ir_version=self.ir_version)
            else:
                parts += _NODE, encoded
            for value in node.outputs:
                if value.name and described(value):
                    self.describe(value, parts)
                    if notes(value):
                        _annotate(proto, value)

    def node(self, node: ir.Node) -> bytes | None:
        """The message of `node`, behind its length; None if it has notes, or a tensor that is better not copied."""
        if node.doc_string or properties(node) or node.overload or node.device_configurations:
            return None
        texts = self._texts
        operands = self._operands
        parts = [operands["" if v is None else v.name or ""] for v in node.inputs]
        for name in _value_names(node.outputs):
            parts += _OUTPUT, texts[name]
        if own := node.name:
            parts += _NAME, texts[own]
        parts.append(self._operators[node.op_type])
        if attributes := node.attributes.data:
            for a in attributes.values():
                if a.type == ir.AttributeType.TENSOR and not a.is_ref() and a.value.nbytes > _COPIED:
                    return None
                parts += _ATTRIBUTE, self.attribute(a)
        if domain := node.domain:
            parts += _DOMAIN, texts[domain]
        return _prefix_length(b"".join(parts))

    def attribute(self, a: ir.Attr) -> bytes:
        """The message of `a`, behind its length."""
        known = self._attributes.get(id(a))
        if known is None:
            if a.type == ir.AttributeType.GRAPH and not a.is_ref() and not a.doc_string:
                proto = onnx.AttributeProto(name=a.name, type=onnx.AttributeProto.GRAPH)
                self.graph(proto.g, a.as_graph())
            elif (field := _FIELDS.get(a.type)) and not a.is_ref() and not a.doc_string:
                proto = onnx.AttributeProto(name=a.name, type=int(a.type), **{field: a.value})  # type: ignore[arg-type]
            else:
                proto = onnx.AttributeProto()
                write = ir.serde.serialize_reference_attribute_into if a.is_ref() else ir.serde.serialize_attribute_into
                write(proto, a)
            known = _prefix_length(proto.SerializeToString())
            if len(known) < _KEPT:
                self._attributes[id(a)] = known
        return known

    def describe(self, value: ir.Value, parts: list[bytes]) -> None:
        """Append type and shape of `value` to the `parts` of a graph, if they are known."""
        if value.type is not None or value.shape is not None or properties(value) or value.doc_string:
            parts += _VALUE_INFO, self.value(value)

    def value(self, value: ir.Value) -> bytes:
        """The message of `value`, behind its length."""
        held, shape = value.type, value.shape
        if held is None or shape is None or properties(value) or value.doc_string:
            return _prefix_length(ir.serde.serialize_value(value).SerializeToString())
        known = self._types.get((id(shape), id(held)))
        if known is None:
            known = self._types[id(shape), id(held)] = self.type(held, shape)
        return _prefix_length(_VALUE_NAME + self._texts[value.name or ""] + known)

    def type(self, held: ir.TypeProtocol, shape: ir.Shape) -> bytes:
        """The field of a value for type and shape."""
        dims = shape.dims
        denoted = held.denotation or any(map(shape.get_denotation, range(len(dims))))
        if denoted or type(held) is not ir.TensorType:
            return self._type_in_full(held, shape)
        known = self._alike.get((held.dtype, dims))
        if known is None:
            if min([d for d in dims if isinstance(d, int)], default=0) < 0:
                return self._type_in_full(held, shape)
            tensor = _ELEMENT + varint(held.dtype) + _SHAPE + _prefix_length(b"".join([self._dims[d] for d in dims]))
            known = self._alike[held.dtype, dims] = _VALUE_TYPE + _prefix_length(_TENSOR + _prefix_length(tensor))
        return known

    def _type_in_full(self, held: ir.TypeProtocol, shape: ir.Shape) -> bytes:
        """`type` by ``onnx_ir``: with denotations, of any kind, of a negative size."""
        message = ir.serde.serialize_type(held)
        ir.serde.serialize_shape_into(message, shape)
        return _VALUE_TYPE + _prefix_length(message.SerializeToString())


def _add_tensor(proto: onnx.GraphProto, value: ir.Value) -> None:
    """Add the initializer `value` to `proto`."""
    tensor = not_none(value.const_value)
    if type(tensor) is ir.Tensor and not tensor.doc_string and not tensor.metadata_props:
        dims, data = tensor.shape.dims, tensor.tobytes()
        proto.initializer.add(name=value.name, data_type=int(tensor.dtype), dims=dims, raw_data=data)
    else:
        tensor.name = value.name
        ir.serde.serialize_tensor_into(proto.initializer.add(), tensor)


def _annotate(proto: onnx.GraphProto, value: ir.Value) -> None:
    """Add the note on quantization that `value` was read with, if there is one."""
    if (noted := notes(value)) and (names := noted.get("quant_parameter_tensor_names")):
        annotation = proto.quantization_annotation.add(tensor_name=value.name)
        for key in sorted(names):
            annotation.quant_parameter_tensor_names.add(key=key, value=names[key])


def _value_names(values: Sequence[ir.Value]) -> list[str]:
    """The names of `values`, but for those at the end that have none."""
    names = [v.name or "" for v in values]
    while names and not names[-1]:
        names.pop()
    return names
