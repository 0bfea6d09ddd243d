"""The unpacked size of the record batches in an Arrow file, found without unpacking any of them.

The end of the file lists its batches; a batch lists its buffers; a compressed buffer begins with its size. The layout
is that of the Arrow columnar format, section "IPC File Format", and its schemas ``File.fbs`` and ``Message.fbs``.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

_MAGIC = b"ARROW1"
#: The fields of the tables, by their places in the schemas; a batch of a dictionary holds a batch.
_DICTIONARIES, _BATCHES = 2, 3
_HEADER_TYPE, _HEADER = 1, 2
_LENGTH, _BUFFERS, _COMPRESSION = 0, 2, 3
_DICTIONARY_BATCH, _DATA = 2, 1


def unpacked_size(file: BinaryIO) -> int:
    """The bytes of all batches of `file` in memory; 0 if it is no Arrow file (or Feather version 1).

    Raises:
        ValueError: it is damaged.
    """
    if file.read(len(_MAGIC)) != _MAGIC:
        return 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        try:
            return sum(_sizes(held))
        except (struct.error, IndexError) as error:
            raise ValueError("its batches lie outside the file") from error


def _sizes(held: mmap.mmap) -> Iterator[int]:
    end = len(held) - len(_MAGIC) - 4
    footer = end - _number(held, "i", end)
    footer += _number(held, "i", footer)
    left = len(held) // 16  # as many descriptions of buffers as the file has room for
    for field in (_DICTIONARIES, _BATCHES):
        for at in _structs(held, _field(held, footer, field), 24):
            message, length = _number(held, "q", at), _number(held, "i", at + 8)
            body = message + length
            message += 8 if _number(held, "i", message) == -1 else 4
            message += _number(held, "i", message)
            batch = _table(held, message, _HEADER)
            kind = _field(held, message, _HEADER_TYPE)
            if kind and held[kind] == _DICTIONARY_BATCH:
                batch = _table(held, batch, _DATA)
            rows = _field(held, batch, _LENGTH)
            packed = bool(_field(held, batch, _COMPRESSION))
            buffers = _structs(held, _field(held, batch, _BUFFERS), 16)
            left -= len(buffers) + 1
            if left < 0:
                raise ValueError("its batches overlap")
            yield max(sum(_buffer(held, b, body, packed) for b in buffers), _number(held, "q", rows) if rows else 0)


def _buffer(held: Any, at: int, body: int, packed: bool) -> int:
    """The bytes of the buffer described at `at`; a size of -1 means that it is not compressed."""
    offset, length = _number(held, "q", at), _number(held, "q", at + 8)
    if packed and length >= 8:
        size = _number(held, "q", body + offset)
        return size if size >= 0 else length
    return max(length, 0)


# --- flatbuffers ------------------------------------------------------------------------------------


def _number(held: Any, kind: str, at: int) -> int:
    if at < 0:
        raise IndexError(at)
    return struct.unpack_from("<" + kind, held, at)[0]


def _field(held: Any, table: int, index: int) -> int:
    """The offset of a field of `table`; 0 if it is left out."""
    slots = table - _number(held, "i", table)
    if 4 + 2 * index >= _number(held, "H", slots):
        return 0
    offset = _number(held, "H", slots + 4 + 2 * index)
    return table + offset if offset else 0


def _table(held: Any, table: int, index: int) -> int:
    at = _field(held, table, index)
    if not at:
        raise ValueError("a batch of it is empty")
    return at + _number(held, "I", at)


def _structs(held: Any, at: int, size: int) -> range:
    """The offsets of the entries, of `size` bytes each, of the vector that the field `at` refers to."""
    if not at:
        return range(0)
    first = at + _number(held, "I", at)
    return range(first + 4, first + 4 + size * _number(held, "I", first), size)
