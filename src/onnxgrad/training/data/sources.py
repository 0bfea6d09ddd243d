"""Sources of data: files by their suffix, folders by their contents, Python objects by their methods.

| source | columns |
|---|---|
| ``.npz`` | its arrays, read and checked at once |
| ``.npy`` | one array, called like the file; memory-mapped |
| a folder of ``.npy`` files | one array each, memory-mapped |
| ``.parquet``, ``.arrow``, ``.feather`` | its columns; lists of several lengths are ragged rows (package pyarrow) |
| ``.csv``, ``.tsv``, ``.jsonl`` | its columns, by the names in the first line or of the fields (package pyarrow) |
| a folder of folders of images | ``images``, and ``labels`` by the sorted names of the folders (package pillow) |
| a folder with ``images`` and ``masks`` | ``images``, and the masks of the same names as ``labels`` (package pillow) |
| a ``.json`` file of COCO | ``images``, and the outlines of objects, drawn, as ``labels`` (package pillow) |
| an image, a folder of images | ``images`` (package pillow) |
| a table of pyarrow, pandas or polars | its columns (package pyarrow) |
| a mapping of names to arrays, or to lists of arrays | those |
| a sequence of mappings (dicts, a ``datasets.Dataset``) | the entries of its rows, read when a batch needs them |
| any other iterable of mappings | the same, after reading it to its end once |

No code in a file is ever executed.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxgrad.errors import BadInput, as_bad_input, needs_package, reason_of
from onnxgrad.files import check_readable, open_ordinary, open_text
from onnxgrad.training.data import text_tables
from onnxgrad.training.data.arrow_size import unpacked_size
from onnxgrad.training.data.columns import Column, Columns, Dense, Features, Items, Mapped, Remembered, Unusable, column
from onnxgrad.training.data.images import SUFFIXES as PICTURES
from onnxgrad.training.data.images import (
    EncodedPicture,
    EncodedPictures,
    Images,
    image_folder,
    picture_files,
    pictures_named_in,
)
from onnxgrad.training.data.masks import has_polygons, mask_folder, object_columns
from onnxgrad.training.data.wide import Joining, join_columns
from onnxgrad.wording import tensor_text

#: Bytes that any file may unpack to; a larger one is limited to a multiple of its packed size.
FREE, MOST_FOLD = 1 << 30, 100

_TABLES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")


def open_data(
    source: Any,
    images: Images | None = None,
    inputs: Mapping[str, str] | None = None,
    trained: Mapping[str, Features] | None = None,
    tables: Joining | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Columns:
    """The columns of `source` (see the table above).

    Args:
        source: a path, a mapping of arrays, a sequence or an iterable of mappings; opened columns are copied.
        images: how pictures become arrays, where there are any.
        inputs: which columns feed which input of the model (see `onnxgrad.training.data.wide`).
        trained: the columns that fed them when the model was trained.
        tables: how columns with missing values, text or dates are prepared.
        kinds: of columns of a text table that the model was trained on (see `RawColumn`).

    Raises:
        BadInput: it is missing, unreadable, empty, or nothing of the above; or has no such column.
    """
    columns = source if isinstance(source, Columns) else _opened(source, images, kinds or {})
    name, notes = source_name(source), getattr(columns, "notes", ())
    is_joined = getattr(columns, "is_joined", False)
    if (inputs or trained) and not is_joined:
        columns = join_columns(columns, inputs or {}, trained or {}, tables, name)
        notes, is_joined = (*notes, *columns.notes), True
    return Columns(columns, name, is_joined, notes)


def source_name(data: Any, otherwise: str = "the data") -> str:
    """The name of `data` in messages: of opened columns that of their source, or a path; else `otherwise`."""
    if isinstance(data, Columns):
        return data.source
    return repr(os.fspath(data)) if isinstance(data, (str, os.PathLike)) else otherwise


def _opened(source: Any, images: Images | None, kinds: Mapping[str, str]) -> dict[str, Column]:
    if isinstance(source, (str, os.PathLike)):
        return _open_path(Path(source), images or Images(), kinds)
    if hasattr(source, "__arrow_c_stream__"):  # tables of pyarrow, pandas, polars, …
        return _in_memory(source)
    if isinstance(source, Mapping):
        return {str(name): column(values, str(name)) for name, values in source.items()}
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return _items(source, images)
    if isinstance(source, Iterable):
        return _items(list(source), images)
    raise BadInput(f"{type(source).__name__} is no data: give a path, arrays by name, or rows that are dicts")


def _in_memory(source: Any) -> dict[str, Column]:
    """The columns of a table that can be had by the interface that Arrow's libraries share."""
    with needs_package("to read a table, install pyarrow", "train"):
        import pyarrow
    with as_bad_input(f"cannot read the {type(source).__name__} as a table"):
        table = pyarrow.table(source)
    return _columns_of(table, f"the {type(source).__name__}")


def _columns_of(table: Any, where: str) -> dict[str, Column]:
    """The columns of a table of Arrow. Raises BadInput for two of one name."""
    table = _without_structs(table)
    counts = Counter(table.column_names)
    twice = next((n for n, count in counts.items() if count > 1), None)
    if twice is not None:
        raise BadInput(f"{where} has {counts[twice]} columns called {twice!r}\n  hint: give them different names")
    return {name: _column_of(table.column(name), name) for name in table.column_names}


def _without_structs(table: Any) -> Any:
    """`table` with columns for the fields of objects: by their own names, or with dots where two have the same name."""
    import pyarrow as pa

    own = list(table.column_names)
    while any(pa.types.is_struct(t) for t in table.schema.types):
        table = table.flatten()
    leaves = [name if name in own else name.rpartition(".")[2] for name in table.column_names]
    counts = Counter(leaves)
    return table.rename_columns([n if counts[n] == 1 else name for n, name in zip(leaves, table.column_names)])


def _items(rows: Any, images: Images | None) -> dict[str, Column]:
    if not len(rows):
        raise BadInput("the data have no rows")
    first = rows[0]
    if not isinstance(first, Mapping):
        raise BadInput(
            f"a row of the data is {type(first).__name__}, not a dict of arrays by name\n"
            "  hint: rows are dicts, {'x': …, 'labels': …}; arrays without names are a pair, (x, y)"
        )
    fetch = Remembered(rows)
    found: dict[str, Column] = {str(name): Items(fetch, name, len(rows)) for name in first}
    for name, value in first.items():
        if isinstance(value, EncodedPicture):
            found[str(name)] = EncodedPictures(found[str(name)], images or Images())
    return found


def _open_path(path: Path, images: Images, kinds: Mapping[str, str]) -> dict[str, Column]:
    if path.is_dir():
        return _folder(path, images)
    suffix = path.suffix.lower()
    if suffix in _TABLES or suffix in text_tables.SUFFIXES:
        columns = _table(path, kinds)
        columns.update({n: pictures_named_in(c, path.parent, images) for n, c in columns.items()})
        return columns
    if suffix == ".json":
        return object_columns(path, images)
    if suffix == ".npy":
        return {path.stem: Mapped(_map_array(path))}
    if suffix in PICTURES and path.exists():
        return picture_files(path, images)
    try:
        return {name: Dense(array) for name, array in load_npz(path).items()}
    except BadInput as error:
        if suffix in (".npz", "") or not path.exists():
            raise
        known = ", ".join([".npz", ".npy", *_TABLES, *text_tables.SUFFIXES])
        raise BadInput(f"{error}\n  hint: data are files of {known}, or folders of arrays or pictures") from None


def _folder(path: Path, images: Images) -> dict[str, Column]:
    arrays = sorted(path.glob("*.npy"))
    if arrays:
        return {p.stem: Mapped(_map_array(p)) for p in arrays}
    if masked := mask_folder(path, images):
        return dict(masked)
    if has_polygons(path):
        return object_columns(path, images)
    has_classes = any(p.is_dir() and not p.name.startswith(".") for p in path.iterdir())
    return ({} if has_classes else picture_files(path, images)) or image_folder(path, images)


def _map_array(path: Path) -> np.ndarray:
    try:
        check_readable(path)
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except BadInput:
        raise
    except Exception as error:  # numpy fails in several ways on a damaged file
        reason = reason_of(error)
        if "Object arrays" in reason or "Python objects" in reason:
            raise BadInput(f"{str(path)!r} holds Python objects; save numbers only") from error
        reason = "not a NumPy file" if "pickle" in reason else reason
        raise BadInput(f"cannot read {str(path)!r} as an .npy file: {reason}") from error


def column_kinds(columns: Mapping[str, Column]) -> dict[str, str]:
    """The kinds of columns of a table, text or number, by their names."""
    tables = {name: str(c.chunks.type) for name, c in columns.items() if c.chunks is not None}
    return {name: "text" if kind in ("string", "large_string") else "number" for name, kind in tables.items()}


def _table(path: Path, kinds: Mapping[str, str]) -> Columns:
    with needs_package(f"to read {str(path)!r}, install pyarrow", "train"):
        import pyarrow.feather
        import pyarrow.parquet
    check_readable(path)
    notes: list[str] = []
    with as_bad_input(f"cannot read {str(path)!r} as a table"):
        if path.suffix.lower() in (".parquet", ".pq"):
            table = _parquet(path)
        elif path.suffix.lower() in text_tables.SUFFIXES:
            with open_text(path) as file:
                table, notes = text_tables.read_text_table(file, path, kinds)
        else:
            with open_ordinary(path) as file:
                _check_unpacked_size(unpacked_size(file), path)
            table = pyarrow.feather.read_table(path)
        table.validate(full=True)  # else offsets may point anywhere
        return Columns(_columns_of(table, repr(str(path))), repr(str(path)), notes=notes)


def _parquet(path: Path) -> Any:
    """The table in `path`; text stays dictionary-encoded until it is used."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        held = file.metadata
        parts = [held.row_group(i).column(k) for i in range(held.num_row_groups) for k in range(held.num_columns)]
        widths = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12}
        sizes = (max(p.total_uncompressed_size, p.num_values * widths.get(p.physical_type, 8)) for p in parts)
        _check_unpacked_size(sum(sizes), path)
        text = [
            c.path for c in (held.schema.column(k) for k in range(held.num_columns)) if c.physical_type == "BYTE_ARRAY"
        ]
    return pyarrow.parquet.read_table(path, read_dictionary=text)


def _column_of(chunks: Any, name: str) -> Column:
    try:
        found = column(_of_arrow(chunks), name)
    except BadInput as error:
        found = Unusable(len(chunks), str(error), lambda rows: _column_of(chunks.take(rows), name))
    found.chunks = chunks
    return found


def _of_arrow(chunks: Any) -> Any:
    """The content of an Arrow column as an array, or a list of arrays; numbers are not copied one by one."""
    import pyarrow as pa

    kind = chunks.type
    if chunks.null_count:
        row = int(np.argmax(chunks.is_null().to_numpy()))
        raise BadInput(
            f"missing values: {chunks.null_count}, the first in row {row}\n"
            "  hint: fill the cells in; --missing drop of train and evaluate leaves the rows out, and in training with "
            "--inputs, --missing mean fills in the columns that it joins"
        )
    if pa.types.is_fixed_size_list(kind):
        flat = chunks.combine_chunks()
        inner = np.asarray(_of_arrow(pa.chunked_array([flat.flatten()])))
        return inner.reshape(len(chunks), kind.list_size, *inner.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return list(_lists(chunks))
    return chunks.to_numpy()


def _lists(chunks: Any) -> Iterator[np.ndarray]:
    import pyarrow as pa

    for chunk in chunks.chunks:
        values = _of_arrow(pa.chunked_array([chunk.flatten()]))
        ends = np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))
        for low, high in zip([0, *ends[:-1]], ends):
            yield np.asarray(values[low:high])


def _check_unpacked_size(size: int, path: Path) -> None:
    """Raise BadInput if `path` unpacks to more than the machine's memory, or an implausible multiple of the file."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        memory = 2**48
    most = max(FREE, MOST_FOLD * path.stat().st_size)
    if most < size <= memory:
        raise BadInput(
            f"{str(path)!r} unpacks to {size / 1e9:.1f} GB, more than {MOST_FOLD} times its size\n"
            "  hint: .npy files in a folder are read as they are needed"
        )
    if size > memory:
        raise BadInput(
            f"{str(path)!r} unpacks to {size / 1e9:.0f} GB, and the machine has {memory / 1e9:.0f} GB of memory\n"
            "  hint: .npy files in a folder are read as they are needed"
        )


def _check_header(file: zipfile.ZipFile, member: zipfile.ZipInfo, where: str) -> None:
    """Raise BadInput if an array is smaller than its header claims, before memory is allocated."""
    with file.open(member) as content:
        version = np.lib.format.read_magic(content)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read:
            raise BadInput(f"{where} has fields with names; save numbers only")
        shape, _, dtype = read[version](content)
        if dtype.hasobject:
            raise BadInput(f"{where} holds Python objects; save numbers only")
        size = content.tell() + math.prod(shape) * dtype.itemsize
        if any(d < 0 for d in shape) or size != member.file_size:
            raise BadInput(f"{where} is not as large as it says: {tensor_text(dtype, shape)}")


def _unnamed(file: BinaryIO, path: Path) -> BinaryIO:
    """`file` at its start. Raises BadInput for an array without a name."""
    if file.read(6) == np.lib.format.MAGIC_PREFIX:
        raise BadInput(f"{str(path)!r} holds one array without a name; use numpy.savez(path, name=array)")
    file.seek(0)
    return file


def load_npz(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file; no code in it is executed.

    Raises:
        BadInput: the file is missing, unreadable, truncated, no ``.npz``, or holds Python objects.
    """
    path = Path(path)
    arrays = {}
    try:
        with open_ordinary(path) as raw, zipfile.ZipFile(_unnamed(raw, path)) as file:
            members = [m for m in file.infolist() if not m.is_dir()]
            _check_unpacked_size(sum(m.file_size for m in members), path)
            for member in members:
                name = member.filename.removesuffix(".npy")
                _check_header(file, member, f"array {name!r} in {str(path)!r}")
                with file.open(member) as content:
                    arrays[name] = np.lib.format.read_array(content, allow_pickle=False)
    except BadInput:
        raise
    except Exception as error:  # zipfile, zlib and numpy fail in a dozen ways on a damaged file
        reason = reason_of(error)
        reason = "not a NumPy file" if "not a zip file" in reason else reason
        raise BadInput(f"cannot read {str(path)!r} as an .npz file: {reason}") from error
    if not arrays:
        raise BadInput(f"{str(path)!r} holds no arrays")
    return arrays
