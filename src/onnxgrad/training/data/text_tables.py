"""Tables in text: ``.csv`` and ``.tsv``, whose first line names the columns, and ``.jsonl``, a JSON object per line.

pyarrow reads them and finds the type of each column: numbers, or text. Text that the loss compares with becomes class
numbers (see `onnxgrad.training.data.batches`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

SUFFIXES = (".csv", ".tsv", ".tab", ".jsonl", ".ndjson")


def read_text_table(file: BinaryIO, path: Path) -> Any:
    """The ``pyarrow.Table`` in `file`, which was opened at `path`.

    Raises:
        Exception: pyarrow's own, for rows that differ in their number of columns, or text that is not UTF-8.
    """
    import pyarrow.csv
    import pyarrow.json

    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return pyarrow.json.read_json(file)
    delimiter = "," if suffix == ".csv" else "\t"
    return pyarrow.csv.read_csv(
        file,
        parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter),
        convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=False),
    )
