"""Items of a stream: rows or batches, in the forms that generators, data loaders and libraries of tables give them.

An item is a mapping of names to values (nested mappings are flattened to the names of inputs), a tuple or list of
arrays by position, one array for the only input, or a table of Arrow. Tensors of PyTorch are read as arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.by_position import named_by_position
from onnxgrad.training.data.fields import Field, match
from onnxgrad.training.data.shards import Shards

#: Rows that come one by one are converted so many at a time.
ROWS_AT_A_TIME = 64


class NamedRows(Sequence[Mapping[str, Any]]):
    """The rows of a sequence, such as a ``Dataset`` of PyTorch, whose rows are tuples, with names.

    Args:
        rows: the sequence.
        fields: the inputs that data feed.
        name: of the data in messages.
    """

    def __init__(self, rows: Any, fields: Sequence[Field], name: str) -> None:
        self._rows, self._fields, self._name = rows, fields, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        named = named_item(self._rows[row], self._fields, f"row {row} of {self._name}")
        return {name: as_array(value) for name, value in named.items()}


def named_source(source: Any, fields: Sequence[Field], name: str = "the data") -> Any:
    """`source` as arrays, rows or a table by name: arrays by position get names, a stream is read to its end.

    Args:
        source: see `named_by_position`; or a stream, or a sequence of tuples, such as a ``Dataset`` of PyTorch.
        fields: the inputs that data feed.
        name: of the data in messages.

    Raises:
        BadInput: there are more or fewer arrays than inputs.
    """
    if is_stream(source):
        return gathered_rows(source, fields, name)
    if isinstance(source, Mapping) and any(isinstance(v, Mapping) for v in source.values()):
        return flattened(source, [f.name for f in fields])
    has_rows = hasattr(source, "__getitem__") and hasattr(source, "__len__") and not hasattr(source, "__array__")
    if has_rows and not is_table(source) and not isinstance(source, (str, tuple, Mapping)) and len(source):
        first = source[0]
        nested = isinstance(first, Mapping) and any(isinstance(v, Mapping) for v in first.values())
        if nested or isinstance(first, tuple):
            return NamedRows(source, fields, name)
    return named_by_position(source, fields, name)


def is_stream(data: Any) -> bool:
    """True for a source that is read as a run needs it: an iterable without rows by number, a function, a tar."""
    if isinstance(data, (str, os.PathLike)):
        return Path(data).suffix.lower() == ".tar"
    if hasattr(data, "collect_batches"):
        return True
    if isinstance(data, (Mapping, tuple)) or hasattr(data, "__array__"):
        return False
    if is_table(data):
        return not hasattr(data, "__len__") and isinstance(data, Iterable)  # a reader of record batches
    if hasattr(data, "to_batches") and not hasattr(data, "__len__"):
        return True
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return False
    return callable(data) or isinstance(data, Iterable)


def open_items(source: Any, name: str) -> Iterator[Any]:
    """The items of a stream, from its beginning. Raises BadInput for a function that returns no iterable."""
    if isinstance(source, (str, os.PathLike)):
        source = Shards(Path(source))
    for method in ("collect_batches", "to_batches"):
        if hasattr(source, method) and not hasattr(source, "__len__"):
            return iter(getattr(source, method)())
    try:
        return iter(source() if callable(source) and not isinstance(source, Iterable) else source)
    except TypeError as error:
        raise BadInput(f"{name}: a function of data returns an iterable: {error}") from error


def gathered_rows(source: Any, fields: Sequence[Field], name: str) -> Any:
    """All rows of a stream: a table, or a list of rows by name."""
    rows: list[Any] = []
    tables: list[Any] = []
    for part, as_batch in chunks(open_items(source, name), fields, name):
        if is_table(part):
            tables.append(part)
        elif as_batch:
            count = max(len(v) for v in part.values())
            rows += [{n: v[i] for n, v in part.items()} for i in range(count)]
        else:
            rows += part
    if not tables:
        return rows
    import pyarrow

    return pyarrow.concat_tables([as_table(t) for t in tables])


def first_rows(source: Any, count: int) -> Any:
    """The first `count` rows of a stream or a few more: a table, or a list of its items."""
    items: list[Any] = []
    rows = 0
    for item in open_items(source, "the data"):
        items.append(item)
        rows += getattr(item, "num_rows", 1)
        if rows >= count:
            break
    if not items or not is_table(items[0]):
        return items
    import pyarrow

    return pyarrow.concat_tables([as_table(t) for t in items], promote_options="permissive")


def example_rows(source: Any) -> Any:
    """Some rows of a stream that can be opened again, as columns that show their types; None if they are not known."""
    if isinstance(source, Iterator) or type(source).__name__ == "RecordBatchReader":
        return None
    found = first_rows(source, 4)
    if is_table(found):
        return found
    has_scalars = [isinstance(row, Mapping) and any(np.ndim(as_array(v)) == 0 for v in row.values()) for row in found]
    return [{n: as_array(v) for n, v in row.items()} for row in found] if all(has_scalars) and found else None


def as_table(part: Any) -> Any:
    """A batch of rows of Arrow, pandas or polars as a table of pyarrow."""
    import pyarrow

    if hasattr(part, "__arrow_c_stream__"):
        return pyarrow.table(part)
    return pyarrow.Table.from_batches([pyarrow.record_batch(part)])


def is_table(item: Any) -> bool:
    """True for a table of Arrow, pandas or polars, or a batch of its rows."""
    return hasattr(item, "__arrow_c_stream__") or hasattr(item, "__arrow_c_array__")


def named_item(item: Any, fields: Sequence[Field], name: str) -> Mapping[str, Any]:
    """`item`, which is no table, as values by name.

    Raises:
        BadInput: it is neither, or has more or fewer parts than there are inputs.
    """
    if isinstance(item, Mapping):
        return flattened(item, {f.name for f in fields})
    if isinstance(item, list) and not all(isinstance(v, (int, float)) for v in item):
        item = tuple(item)
    if isinstance(item, (list, int, float)):
        item = np.asarray(item)
    if isinstance(item, tuple) or hasattr(item, "__array__") or hasattr(item, "detach"):
        parts = item if isinstance(item, tuple) else (item,)
        if parts and isinstance(parts[0], Mapping):
            parts = (flattened(parts[0], {f.name for f in fields}), *parts[1:])
        named = named_by_position(tuple(_part(p) for p in parts), fields, name)
        if isinstance(named, Mapping):
            return named
    raise BadInput(
        f"{name}: {type(item).__name__} is neither a dict of arrays, a tuple of arrays nor a table\n"
        "  hint: give {'x': …, 'labels': …}, or (x, labels)"
    )


def _part(part: Any) -> Any:
    if isinstance(part, (tuple, list)) and any(hasattr(p, "__array__") or hasattr(p, "detach") for p in part):
        return tuple(part)
    return part


def flattened(item: Mapping[Any, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """`item` without mappings inside: an entry has the name of an input, its own, or its path with dots."""
    leaves = list(_leaves(item, ()))
    own = [path[-1] for path, _ in leaves]
    wanted = set(wanted)
    found: dict[str, Any] = {}
    for path, value in leaves:
        spellings = (".".join(path), "_".join(path))
        name = next((s for s in spellings if s in wanted), path[-1] if own.count(path[-1]) == 1 else spellings[0])
        found[name] = value
    return found


def _leaves(item: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in item.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def as_array(value: Any) -> Any:
    """A tensor of PyTorch, also one with a gradient or on a device, as an array; other values unchanged."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return np.asarray(value.float() if str(value.dtype) == "torch.bfloat16" else value)


def are_rows(item: Mapping[str, Any], fields: Sequence[Field]) -> bool:
    """True if `item` is one row, by the number of axes of what the inputs take; false for a batch of rows."""
    votes = []
    try:
        named = match(item, [f for f in fields if not f.scalar], "")
    except BadInput:  # of columns that are joined, or of inputs that follow from others
        named = {f.name: f.name for f in fields}
    for field in sorted(fields, key=lambda f: f.label):
        value = item.get(named.get(field.name, field.name))
        if value is None or field.scalar:
            continue
        if isinstance(value, str):
            return True
        axes = np.ndim(as_array(value)) if not _is_ragged(value) else len(field.shape) + 1
        if axes in (len(field.shape), len(field.shape) + 1):
            votes.append(axes == len(field.shape))
    if votes:
        return votes[0]
    return all(isinstance(v, str) or np.ndim(as_array(v)) == 0 for v in item.values())


def _is_ragged(value: Any) -> bool:
    """True for a list of arrays of several sizes, or of texts."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return len({np.shape(as_array(v)) for v in value}) > 1


def chunks(items: Iterable[Any], fields: Sequence[Field], name: str) -> Iterator[tuple[Any, bool]]:
    """Yield sources for `Data`, a few rows or a batch at a time, with True for a batch that came as one.

    Raises:
        BadInput: an item has another form than the inputs need.
    """
    rows: list[Mapping[str, Any]] = []
    single: bool | None = None
    for number, item in enumerate(items):
        if is_table(item):
            yield as_table(item), False
            continue
        named = named_item(item, fields, f"item {number} of {name}")
        if single is None:
            single = are_rows(named, fields)
        if not single:
            yield {n: as_array(v) for n, v in named.items()}, True
            continue
        rows.append({n: as_array(v) for n, v in named.items()})
        if len(rows) == ROWS_AT_A_TIME:
            yield rows, False
            rows = []
    if rows:
        yield rows, False
