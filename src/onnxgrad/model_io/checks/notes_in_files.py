"""Limit the metadata of a model file before it is parsed, which takes several times its size in memory.

The fields of a message are passed over in the file (https://protobuf.dev/programming-guides/encoding). Those of the
model, of its graph and functions, and of large nodes that are text or metadata are counted. Metadata of small nodes and
of tensors is counted once the message is there (`declared_sizes`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

import onnx

from onnxgrad.model_io.checks.declared_sizes import MOST_NOTES, check_size_of_notes

#: Nodes of fewer bytes are not looked into.
_LARGE_NODE = 1 << 10


class _Message(NamedTuple):
    """A kind of message.

    Attributes:
        notes: numbers of the fields that are text or metadata.
        inner: the kinds of messages in other fields, by the number of the field.
        least: messages of fewer bytes are passed over.
    """

    notes: frozenset[int]
    inner: Mapping[int, _Message] = {}
    least: int = 0


_NODE = _Message(
    frozenset({onnx.NodeProto.METADATA_PROPS_FIELD_NUMBER, onnx.NodeProto.DOC_STRING_FIELD_NUMBER}), least=_LARGE_NODE
)
_GRAPH = _Message(
    frozenset(
        {
            onnx.GraphProto.METADATA_PROPS_FIELD_NUMBER,
            onnx.GraphProto.DOC_STRING_FIELD_NUMBER,
            onnx.GraphProto.NAME_FIELD_NUMBER,
        }
    ),
    {onnx.GraphProto.NODE_FIELD_NUMBER: _NODE},
)
_FUNCTION = _Message(
    frozenset({onnx.FunctionProto.METADATA_PROPS_FIELD_NUMBER, onnx.FunctionProto.DOC_STRING_FIELD_NUMBER}),
    {onnx.FunctionProto.NODE_FIELD_NUMBER: _NODE},
)
_MODEL = _Message(
    frozenset(
        {
            onnx.ModelProto.METADATA_PROPS_FIELD_NUMBER,
            onnx.ModelProto.DOC_STRING_FIELD_NUMBER,
            onnx.ModelProto.PRODUCER_NAME_FIELD_NUMBER,
            onnx.ModelProto.PRODUCER_VERSION_FIELD_NUMBER,
            onnx.ModelProto.DOMAIN_FIELD_NUMBER,
        }
    ),
    {onnx.ModelProto.GRAPH_FIELD_NUMBER: _GRAPH, onnx.ModelProto.FUNCTIONS_FIELD_NUMBER: _FUNCTION},
)


def check_notes(file: BinaryIO, size: int, what: str) -> None:
    """Raise BadInput if a model file of `size` bytes has more metadata than the limit."""
    if size <= MOST_NOTES:
        return
    notes = 0
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        todo = [(0, size, _MODEL)]
        while todo:
            begin, end, kind = todo.pop()
            for number, low, high in _fields(data, begin, end):
                if number in kind.notes:
                    notes += high - low
                    check_size_of_notes(notes, what)
                elif (inner := kind.inner.get(number)) is not None and high - low >= inner.least:
                    todo.append((low, high, inner))


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number, start and end of each length-delimited field of a message, up to the first malformed one."""
    while at < end:
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at, end)
        elif kind == 2:
            size, at = _varint(data, at, end)
            if size > end - at:
                return
            yield tag >> 3, at, at + size
            at += size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            return


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """A varint and the position after it; the end of the message for an unterminated one."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    return 0, end
