"""Tables in text: ``.csv`` and ``.tsv``, whose first line names the columns, and ``.jsonl``, a JSON object per line.

pyarrow reads them and finds the type of each column: numbers, or text. Text that the loss compares with becomes class
numbers (see `onnxgrad.training.data.batches`). Spreadsheets of many languages write ``.csv`` with semicolons
between its columns and commas in its numbers, which is found out from its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from onnxgrad.errors import BadInput

#: Bytes at the beginning of a table that show its format.
BEGINNING = 1 << 16
_QUOTED = re.compile(r'"[^"]*"')
_COMMA_NUMBER = re.compile(r"\s*[+-]?\d*,\d+([eE][+-]?\d+)?\s*")

#: Forms of dates beside that of ISO 8601; with slashes, the day and the month cannot be told apart.
_DATES = ("%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S")
SUFFIXES = (".csv", ".tsv", ".tab", ".jsonl", ".ndjson")

#: Lists and objects inside each other.
DEEPEST = 500
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{\]}]')


def read_text_table(file: BinaryIO, path: Path, texts: Collection[str] = ()) -> Any:
    """The ``pyarrow.Table`` in `file`, which was opened at `path`; the columns `texts` are text.

    Raises:
        BadInput: a line of JSON holds something other than an object, or is nested too deeply.
        Exception: pyarrow's own, for rows that differ in their number of columns, or text that is not UTF-8.
    """
    import pyarrow.csv
    import pyarrow.json

    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        check_lines(file, path)
        return pyarrow.json.read_json(file)
    return pyarrow.csv.read_csv(file, **csv_options(file, suffix, dict.fromkeys(texts, "string")))


def csv_options(file: BinaryIO, suffix: str, types: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Options of pyarrow for the format of the table in `file`, which is found out from its beginning.

    Args:
        file: at its beginning.
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


def notes(file: BinaryIO, path: Path) -> list[str]:
    """Lines about the form of the table in `file`, where it is not that of the suffix."""
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return []
    file.seek(0)
    delimiter, point = _written(file, path.suffix.lower())
    found = ["semicolons between columns"] if delimiter == ";" else []
    found += ["decimal commas"] if point == "," else []
    return [f"{path.name} is read with {' and '.join(found)}"] if found else []


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
    lines = file.read(BEGINNING).decode(errors="replace").splitlines()
    file.seek(0)
    heading = _QUOTED.sub("", lines[0]) if lines else ""
    delimiter = "\t" if suffix != ".csv" else ";" if heading.count(";") > heading.count(",") else ","
    cells = [cell.strip('"') for line in lines[1:] for cell in line.split(delimiter)]
    commas = delimiter != "," and any(map(_COMMA_NUMBER.fullmatch, cells))
    return delimiter, "," if commas else "."
