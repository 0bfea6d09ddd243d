"""Tables in text: ``.csv`` and ``.tsv``, whose first line names the columns, and ``.jsonl``, a JSON object per line.

pyarrow reads them and finds the type of each column: numbers, or text. Text that the loss compares with becomes class
numbers (see `onnxgrad.training.data.batches`). Spreadsheets of many languages write ``.csv`` with semicolons
between its columns and commas in its numbers, which is found out from its beginning.

A column of whole numbers, any of which begins with a zero (``01067``), holds codes: it is text, unless the model was
trained on its numbers.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from onnxgrad.errors import BadInput, printable

#: Bytes at the beginning of a table that show its format.
BEGINNING = 1 << 16
_QUOTED = re.compile(r'"[^"]*"')
_COMMA_NUMBER = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*")

#: Forms of dates beside that of ISO 8601; with slashes, the day and the month cannot be told apart.
_DATES = ("%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S")
SUFFIXES = (".csv", ".tsv", ".tab", ".jsonl", ".ndjson")

#: A cell that may be a whole number with a leading zero, and one that is.
_MAYBE_CODE, _CODE = re.compile(rb'[,;\t"\r\n] *[+-]?0\d'), r"^\s*[+-]?0\d+\s*$"

#: Lists and objects inside each other.
DEEPEST = 500
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{\]}]')


def read_text_table(file: BinaryIO, path: Path, kinds: Mapping[str, str]) -> tuple[Any, list[str]]:
    """The ``pyarrow.Table`` in `file`, which was opened at `path`, and lines about its form.

    Args:
        file: at its beginning.
        path: of the file.
        kinds: of columns that the model was trained on, see `RawColumn`: text stays text, and numbers are no codes.

    Raises:
        BadInput: a line of JSON holds something other than an object, or is nested too deeply.
        Exception: pyarrow's own, for rows that differ in their number of columns.
    """
    import pyarrow.csv

    suffix = path.suffix.lower()
    types = {name: "string" for name, kind in kinds.items() if kind == "text"}
    if suffix in (".jsonl", ".ndjson"):
        return read_lines(file, path, types), []
    searched = Searched(file)
    try:
        table = pyarrow.csv.read_csv(searched, **csv_options(file, suffix, types))
    except pyarrow.ArrowInvalid:  # a single thread names the row
        one = pyarrow.csv.ReadOptions(use_threads=False)
        table = pyarrow.csv.read_csv(file, read_options=one, **csv_options(file, suffix, types))
    codes = find_codes(file, suffix, whole_numbers(table.schema, kinds)) if searched.may_have_codes else []
    if codes:
        table = pyarrow.csv.read_csv(file, **csv_options(file, suffix, types | dict.fromkeys(codes, "string")))
    return table, notes(file, path, codes)


def read_lines(file: BinaryIO, path: Path, types: Mapping[str, str]) -> Any:
    """The table of the lines of JSON in `file`, with columns of these `types` where it has them."""
    import pyarrow.json

    check_lines(file, path)
    table = pyarrow.json.read_json(file)
    known = [(n, pyarrow.type_for_alias(t)) for n, t in types.items() if n in table.column_names]
    if any(table.schema.field(name).type != kind for name, kind in known):
        file.seek(0)
        schema = pyarrow.json.ParseOptions(explicit_schema=pyarrow.schema(known))
        table = pyarrow.json.read_json(file, parse_options=schema)
    for k, (name, column) in enumerate(zip(table.column_names, table.columns)):
        if name not in types and (dates := _as_dates(column)) is not None:
            table = table.set_column(k, name, dates)
    return table


def _as_dates(column: Any) -> Any:
    """The dates of an Arrow column of text in the forms that pyarrow finds in CSV, not in JSON; None: other text."""
    import pyarrow as pa
    import pyarrow.compute

    if column.type != pa.string():
        return None
    for unit, zone in (("us", None), ("us", "UTC"), ("ns", None), ("ns", "UTC")):  # fractions of seconds
        with contextlib.suppress(pa.ArrowInvalid):
            return column.cast(pa.timestamp(unit, zone))
    for form in _DATES:
        with contextlib.suppress(pa.ArrowInvalid):
            return pyarrow.compute.strptime(column, form, "s")
    return None


class Searched(io.RawIOBase):
    """A text table that notes, while it is read, if any of its cells may be a code.

    Attributes:
        may_have_codes: such a cell was read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.end, self.may_have_codes = file, b"", False

    def readable(self) -> bool:
        """True, as pyarrow asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with what comes next."""
        content = self.file.read(len(buffer))
        buffer[: len(content)] = content
        if not self.may_have_codes:
            self.may_have_codes = _MAYBE_CODE.search(self.end + content) is not None
            self.end = content[-16:]
        return len(content)


def whole_numbers(schema: Any, known: Collection[str]) -> list[str]:
    """The columns of whole numbers in `schema` that are not `known`."""
    counts = Counter(schema.names)
    return [f.name for f in schema if str(f.type) == "int64" and f.name not in known and counts[f.name] == 1]


def find_codes(file: BinaryIO, suffix: str, names: Sequence[str]) -> list[str]:
    """The columns of text table `file`, among `names`, with leading zeros; leaves `file` at its beginning."""
    import pyarrow.compute
    import pyarrow.csv

    found: set[str] = set()
    options = csv_options(file, suffix, dict.fromkeys(names, "string"))
    options["convert_options"].include_columns = list(names)
    if names:
        for block in pyarrow.csv.open_csv(file, **options):
            found |= {
                n
                for n in names
                if pyarrow.compute.any(pyarrow.compute.match_substring_regex(block.column(n), _CODE)).as_py()
            }
    file.seek(0)
    return [n for n in names if n in found]


def csv_options(file: BinaryIO, suffix: str, types: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Options of pyarrow for the format of the table in `file`, which is found out from its beginning.

    Args:
        file: it goes to its beginning.
        suffix: of its name.
        types: of columns, where they are known.
    """
    import pyarrow.csv

    delimiter, point = _written(file, suffix)
    return {
        "parse_options": pyarrow.csv.ParseOptions(delimiter=delimiter),
        "convert_options": pyarrow.csv.ConvertOptions(
            strings_can_be_null=False,
            decimal_point=point,
            timestamp_parsers=[pyarrow.csv.ISO8601, *_DATES],
            column_types=types,
        ),
    }


def notes(file: BinaryIO, path: Path, codes: Collection[str] = ()) -> list[str]:
    """Lines about the form of the table in `file`, where it is not that of the suffix; `codes`: names of columns."""
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return []
    delimiter, point = _written(file, path.suffix.lower())
    found = ["semicolons between columns"] if delimiter == ";" else []
    found += ["decimal commas"] if point == "," else []
    lines = [f"{path.name} is read with {' and '.join(found)}"] if found else []
    named = ", ".join(map(printable, codes))
    return [*lines, f"text, as numbers have leading zeros: {named} of {path.name}"] if named else lines


def check_lines(file: BinaryIO, path: Path) -> None:
    """Raise BadInput for lines on which pyarrow ends the process: null, and objects that are nested deeply."""
    for number, line in enumerate(file, 1):
        text = line.removeprefix(b"\xef\xbb\xbf").strip()
        if text and not (text.startswith(b"{") and text.endswith(b"}")):
            held = text[:40].decode(errors="replace")
            raise BadInput(f"line {number} of {str(path)!r} is {held!r}; each line must be a JSON object")
        if text.count(b"{") + text.count(b"[") > DEEPEST and _depth(text) > DEEPEST:
            raise BadInput(f"line {number} of {str(path)!r} nests lists and objects more than {DEEPEST} deep")
    file.seek(0)


def _depth(text: bytes) -> int:
    """The most lists and objects of JSON that are open at once."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(text):
        if (token := found[0]) in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token in b"]}":
            depth -= 1
    return deepest


def _written(file: BinaryIO, suffix: str) -> tuple[str, str]:
    """Detect the separator of columns and the decimal point of numbers in a table."""
    file.seek(0)
    lines = file.read(BEGINNING).decode(errors="replace").splitlines()
    file.seek(0)
    heading = _QUOTED.sub("", lines[0]) if lines else ""
    delimiter = "\t" if suffix != ".csv" else ";" if heading.count(";") > heading.count(",") else ","
    cells = [cell.strip('"') for line in lines[1:] for cell in line.split(delimiter)]
    commas = delimiter != "," and any(map(_COMMA_NUMBER.fullmatch, cells))
    return delimiter, "," if commas else "."
