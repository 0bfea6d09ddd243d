"""Files that are read as streams: tables by row groups, record batches or blocks, and tars of samples.

| suffix | a part |
|---|---|
| ``.parquet`` | rows of a row group; a resumed run skips whole groups unread |
| ``.arrow``, ``.feather``, ``.ipc`` | a record batch; likewise |
| ``.csv``, ``.tsv``, ``.jsonl`` | a block of lines |
| ``.txt``, ``.text``, ``.md`` | a paragraph, as the column ``text`` |
| ``.tar`` | a sample: the files that share a name up to its first dot, as WebDataset writes them |

A folder of such files is read in the sorted order of their names. In a sample, ``.jpg`` and other pictures feed
``images``, ``.cls`` (a number) ``labels``, and ``.json``, ``.npy`` and ``.txt`` what their name says; no file is
unpickled or unpacked to the disk.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, as_bad_input, needs_package
from onnxgrad.files import check_readable, open_ordinary, open_text
from onnxgrad.ir.match import not_none
from onnxgrad.training.data import text_tables
from onnxgrad.training.data.images import SUFFIXES as PICTURES
from onnxgrad.training.data.images import EncodedPicture

_PARQUET, _ARROW = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
_TEXT = (".txt", ".text", ".md")
SUFFIXES = (*_PARQUET, *_ARROW, *text_tables.SUFFIXES, *_TEXT, ".tar")
#: Rows of a part of a table, bytes of a block of text, and the largest file of a sample.
_ROWS, _BLOCK, _LARGEST = 8192, 1 << 20, 1 << 28

#: Types of a text table's columns in the order in which pyarrow tries them, and its error at a line of another type.
_TYPES = ("null", "int64", "bool", "date32[day]", "time32[s]", "timestamp[s]", "timestamp[ns]", "double", "string")
_WRONG_TYPE = re.compile(r"In CSV column #(\d+): .*conversion error", re.IGNORECASE)


class Shards:
    """Files that are read from their beginning, any number of times.

    Args:
        path: a file, or a folder of files of one kind.

    Attributes:
        types: of columns of text tables whose first lines show another one.
        codes: columns of text tables whose numbers have leading zeros, by file.

    Raises:
        BadInput: there is no such file, or it cannot be read as a stream.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.types, self.codes = path, dict[str, str](), dict[Path, list[str]]()
        self._known: set[str] = set()
        self.files = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
        kinds = {p.suffix.lower() for p in self.files}
        if not self.files or len(kinds) > 1 or not kinds <= set(SUFFIXES):
            held = f"holds files of {', '.join(sorted(kinds))}" if len(kinds) > 1 else "holds none of them"
            raise BadInput(f"{str(path)!r} {held}: a stream is a file, or a folder of files, of {', '.join(SUFFIXES)}")
        for file in self.files:
            check_readable(file)

    @property
    def notes(self) -> list[str]:
        """Lines about the form of text tables."""
        if self.files[0].suffix.lower() not in text_tables.SUFFIXES:
            return []
        with open_text(self.files[0]) as file:
            return text_tables.notes(
                file, self.files[0], dict.fromkeys(n for names in self.codes.values() for n in names)
            )

    def know(self, kinds: Mapping[str, str]) -> None:
        """Read columns as the `kinds` that the model was trained on: text stays text, and numbers are no codes."""
        self.types |= {name: "string" for name, kind in kinds.items() if kind == "text"}
        self._known |= kinds.keys()

    def __iter__(self) -> Iterator[Any]:
        return self.read(0)

    def read(self, skip: int) -> Iterator[Any]:
        """Parts without the first `skip` rows; parts that are skipped as a whole are not read where possible."""
        for file in self.files:
            with as_bad_input(f"cannot read {str(file)!r}"):
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

    def _parts(self, file: Path, skip: int) -> Iterator[Any]:
        """The parts of `file`; a number stands for that many rows at its beginning, which are skipped unread."""
        suffix = file.suffix.lower()
        if suffix == ".tar":
            yield from _samples(file)
            return
        if suffix in _TEXT:
            yield from _paragraphs(file)
            return
        with needs_package(f"to read {str(file)!r}, install pyarrow", "train"):
            import pyarrow.parquet
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
            with open_text(file) as opened:
                while lines := opened.readlines(_BLOCK):
                    block = io.BytesIO(b"".join(lines))
                    yield text_tables.read_lines(block, file, self.types)
        else:
            yield from self._blocks(file, suffix)

    def _blocks(self, file: Path, suffix: str) -> Iterator[Any]:
        """Blocks of lines of a text table; a column is read as the next type from a line on that is not of its type."""
        import pyarrow as pa
        import pyarrow.csv

        rows, schema = 0, None
        while True:
            behind = rows
            try:
                with open_text(file) as opened:
                    types = {n: pa.type_for_alias(t) for n, t in self.types.items()}
                    options = text_tables.csv_options(opened, suffix, types)
                    size = pyarrow.csv.ReadOptions(block_size=_BLOCK)
                    searched = text_tables.Searched(opened)
                    with pyarrow.csv.open_csv(searched, read_options=size, **options) as reader:
                        schema = reader.schema
                        for block in reader:
                            if searched.may_have_codes and file not in self.codes and self._find_codes(file, schema):
                                break
                            gone = min(behind, block.num_rows)
                            behind -= gone
                            if gone < block.num_rows:
                                rows += block.num_rows - gone
                                yield block.slice(gone)
                        else:
                            return
            except pa.ArrowInvalid as error:
                column = _WRONG_TYPE.search(str(error))
                if column is None or schema is None:
                    raise
                name = schema.field(int(column[1])).name
                now = self.types.get(name, str(schema.field(name).type))
                if now not in _TYPES[:-1]:
                    raise
                self.types[name] = _TYPES[_TYPES.index(now) + 1]

    def _find_codes(self, file: Path, schema: Any) -> bool:
        """Read columns of `file` whose numbers have leading zeros as text; True if there are any."""
        with open_text(file) as opened:
            names = text_tables.whole_numbers(schema, self._known)
            self.codes[file] = text_tables.find_codes(opened, file.suffix.lower(), names)
        self.types |= dict.fromkeys(self.codes[file], "string")
        return bool(self.codes[file])


def _paragraphs(path: Path) -> Iterator[dict[str, str]]:
    """The paragraphs of a text, which blank lines separate."""
    lines: list[str] = []
    indented = True
    with open_text(path) as raw, io.TextIOWrapper(raw, encoding="utf-8") as file:
        for line in itertools.chain(file, [""]):
            if line.strip():
                lines.append(line if lines or indented else line.lstrip())
                continue
            indented = False
            if lines:
                yield {"text": "".join(lines).rstrip("\n")}
                lines = []


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
            content = not_none(tar.extractfile(member))
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
