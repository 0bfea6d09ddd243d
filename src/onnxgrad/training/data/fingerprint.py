"""A digest of the data, by which a resumed run recognizes its rows.

The digest covers everything that a step reads, bit by bit: arrays in memory as fed, arrays in files as stored, images
as the bytes of their files. The fingerprint of a sequence that has one (a ``datasets.Dataset``) is trusted; for any
other, all rows are read once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxgrad.files import open_ordinary
from onnxgrad.training.data.columns import Column, Dense, Items, Remembered
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.images import Pictures
from onnxgrad.training.data.labels import NumberedColumn

#: The approximate number of bytes read at a time from array files; the number of generated rows.
CHUNK, ROWS = 1 << 24, 64


def fingerprint(arrays: Mapping[str, np.ndarray], columns: Mapping[str, tuple[Column, Field]]) -> str:
    """The digest of `arrays` and of all rows of `columns`, by name.

    Raises:
        BadInput: they cannot be read.
    """
    found = _Digest()
    for name, array in sorted(arrays.items()):
        found.add_words(name)
        found.array(array)
    made: dict[str, tuple[Column, Field]] = {}
    for name, (column, field) in sorted(columns.items()):
        own = _own(column)
        found.add_words(name, len(column), own)
        if isinstance(column, Pictures):
            found.pictures(column)
        elif isinstance(column, Dense):
            size = max(1, CHUNK * len(column) // max(1, column.rows.nbytes))
            for low in range(0, len(column), size):
                found.array(column.rows[low : low + size])
        elif own is None:
            made[name] = column, field
    for low in range(0, max((len(c) for c, _ in made.values()), default=0), ROWS):
        for column, field in made.values():  # columns of one sequence share the read rows
            for row in column.take(np.arange(low, min(low + ROWS, len(column))), field):
                found.array(np.asarray(row))
    return str(found)


def _own(column: Column) -> str | None:
    """The fingerprint that a sequence of rows brings along, if it has one."""
    if isinstance(column, NumberedColumn):
        own = _own(column.column)
        return None if own is None else f"{own} {column.names}"
    if isinstance(column, Items) and isinstance(column.fetch, Remembered):
        own = getattr(column.fetch.items, "_fingerprint", None)
        return own if isinstance(own, str) else None
    return None


class _Digest:
    """A digest in which the boundaries between its parts count."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add_words(self, *words: Any) -> None:
        self._hash.update(repr(words).encode())

    def array(self, array: np.ndarray) -> None:
        self.add_words(str(array.dtype), array.shape)
        if array.dtype.hasobject:
            self.add_words(array.tolist())
        elif array.size:
            self._hash.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def pictures(self, column: Pictures) -> None:
        self.add_words(column.how)
        for path in column.paths:
            with open_ordinary(path) as file:
                self.add_words(hashlib.blake2b(file.read(), digest_size=16).hexdigest())

    def __str__(self) -> str:
        return self._hash.hexdigest()
