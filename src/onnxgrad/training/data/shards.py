"""Files that are read as streams: tables by row groups, record batches or blocks, and tars of samples.

| suffix | a part |
|---|---|
| ``.parquet`` | rows of a row group; a resumed run skips whole groups unread |
| ``.arrow``, ``.feather``, ``.ipc`` | a record batch; likewise |
| ``.csv``, ``.tsv``, ``.jsonl`` | a block of lines |
| ``.tar`` | a sample: the files that share a name up to its first dot, as WebDataset writes them |

A folder of such files is read in the sorted order of their names. In a sample, ``.jpg`` and other pictures feed
``images``, ``.cls`` (a number) ``labels``, and ``.json``, ``.npy`` and ``.txt`` what their name says; no file is
unpickled or unpacked to the disk.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.files import check_readable, open_ordinary
from onnxgrad.training.data import text_tables
from onnxgrad.training.data.images import SUFFIXES as PICTURES
from onnxgrad.training.data.images import EncodedPicture

_PARQUET, _ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
SUFFIXES = (*_PARQUET, *_ARROW, *text_tables.SUFFIXES, ".tar")
#: Rows of a part of a table, bytes of a block of text, and the largest file of a sample.
_ROWS, _BLOCK, _LARGEST = 8192, 1 << 20, 1 << 28


class Shards:
    """Files that are read from their beginning, any number of times.

    Args:
        path: a file, or a folder of files of one kind.

    Raises:
        BadInput: there is no such file, or it cannot be read as a stream.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
        kinds = {p.suffix.lower() for p in self.files}
        if not self.files or len(kinds) > 1 or not kinds <= set(SUFFIXES):
            held = f"holds files of {', '.join(sorted(kinds))}" if len(kinds) > 1 else "holds none of them"
            raise BadInput(f"{str(path)!r} {held}: a stream is a file, or a folder of files, of {', '.join(SUFFIXES)}")
        for file in self.files:
            if not file.exists():
                raise BadInput(f"there is no file {str(file)!r}")
            check_readable(file)

    def __iter__(self) -> Iterator[Any]:
        return self.read(0)

    def read(self, skip: int) -> Iterator[Any]:
        """Parts without the first `skip` rows; parts that are skipped as a whole are not read where possible."""
        for file in self.files:
            try:
                for part in self._parts(file, skip):
                    if isinstance(part, int):
                        skip -= part
                        continue
                    if skip and hasattr(part, "num_rows"):
                        gone = min(skip, part.num_rows)
                        skip, part = skip - gone, part.slice(gone)
                    elif skip:
                        skip -= 1
                        continue
                    if not hasattr(part, "num_rows") or part.num_rows:
                        yield part
            except BadInput:
                raise
            except Exception as error:  # the libraries raise their own types and a dozen of Python's
                raise BadInput(f"cannot read {str(file)!r}: {' '.join(str(error).split())}") from error

    def _parts(self, file: Path, skip: int) -> Iterator[Any]:
        """The parts of `file`; a number stands for that many rows at its beginning, which are skipped unread."""
        suffix = file.suffix.lower()
        if suffix == ".tar":
            yield from _samples(file)
            return
        try:
            import pyarrow.csv
            import pyarrow.json
            import pyarrow.parquet
        except ImportError as error:
            raise BadInput(f"to read {str(file)!r}, install pyarrow: pip install 'onnxgrad[train]'") from error
        if suffix in _PARQUET:
            with pyarrow.parquet.ParquetFile(file) as opened:
                for group in range(opened.num_row_groups):
                    rows = opened.metadata.row_group(group).num_rows
                    if rows <= skip:
                        skip -= rows
                        yield rows
                        continue
                    skip = 0
                    yield from opened.iter_batches(_ROWS, row_groups=[group])
        elif suffix in _ARROW:
            with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_file(mapped) as opened:
                for k in range(opened.num_record_batches):
                    yield opened.get_batch(k)
        elif suffix in (".jsonl", ".ndjson"):
            with open_ordinary(file) as opened:
                while lines := opened.readlines(_BLOCK):
                    block = io.BytesIO(b"".join(lines))
                    text_tables.check_lines(block, file)
                    yield pyarrow.json.read_json(block)
        else:
            with open_ordinary(file) as opened:
                options = text_tables.csv_options(opened, suffix)
                yield from pyarrow.csv.open_csv(
                    opened, read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK), **options
                )


def _samples(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a tar, in its order."""
    sample: dict[str, Any] = {}
    key = None
    with open_ordinary(path) as raw, tarfile.open(fileobj=raw, mode="r|*") as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            if not member.isfile() or not stem or not suffix:
                continue
            if (folder, stem) != key:
                if sample:
                    yield sample
                sample, key = {}, (folder, stem)
            if member.size > _LARGEST:
                raise BadInput(f"{member.name!r} in {str(path)!r} has {member.size / 1e9:.1f} GB")
            content = tar.extractfile(member)
            assert content is not None
            sample |= _decoded(suffix.lower(), content.read(), f"{member.name} in {path}")
    if sample:
        yield sample


def _decoded(suffix: str, content: bytes, name: str) -> Mapping[str, Any]:
    """The entries of one file of a sample. Raises BadInput for a file of an unknown kind."""
    column, _, kind = suffix.rpartition(".")
    if f".{kind}" in PICTURES:
        return {column or "images": EncodedPicture(content, name)}
    try:
        if kind in ("cls", "cls2", "id", "index"):
            return {column or ("labels" if kind == "cls" else kind): int(content)}
        if kind == "json":
            found = json.loads(content)
            return found if isinstance(found, dict) and not column else {column or kind: found}
        if kind in ("txt", "text", "transcript"):
            return {column or kind: content.decode()}
        if kind == "npy":
            return {column or kind: np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)}
    except ValueError as error:
        raise BadInput(f"cannot read {name!r}: {error}") from error
    raise BadInput(
        f"{name!r} is of no kind that a sample may have: pictures, .cls, .json, .txt, .npy; nothing is unpickled"
    )
