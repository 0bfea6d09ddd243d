"""Files of predictions: a table with a line for each row, or arrays as they are."""

from __future__ import annotations

import csv
import itertools
import math
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.files import replacing
from onnxgrad.wording import is_number

#: Separators of tables, by the suffix of the file.
SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".npz")

#: First characters of text that spreadsheets take for a formula.
_FORMULA = tuple("=+-@＝＋－＠\t\r\n")


def write_predictions(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    classes: Sequence[str] | None = None,
    scores: Mapping[str, float] | None = None,
) -> None:
    """Write `arrays`, whose first axis is that of the rows, to `path` by its suffix.

    Args:
        path: one of `SUFFIXES`.
        arrays: by the names of the outputs.
        classes: names of the classes: in a table, an output with a number for each also gets the name of the largest.
        scores: outputs of one number a row that tell two classes apart, and the number above which it is the second.

    Raises:
        BadInput: the place cannot be written, or two columns of a table would have one name.
    """
    with replacing(path) as temporary:
        if path.suffix.lower() == ".npz":
            with zipfile.ZipFile(temporary, "w", allowZip64=True) as archive:
                for name, array in arrays.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, _storable(array), allow_pickle=False)
        else:
            with temporary.open("w", encoding="utf-8", errors="replace", newline="") as file:
                writer = csv.writer(file, delimiter=SEPARATORS[path.suffix.lower()], lineterminator="\n")
                writer.writerows(_lines(arrays, classes, scores or {}))


def _storable(array: np.ndarray) -> np.ndarray:
    """`array` in a type that numpy reads without further packages."""
    if array.dtype == object:
        return array.astype(str)
    if array.dtype.isbuiltin == 2:  # a type of ml_dtypes
        return array.astype(np.float32 if ir.DataType.from_numpy(array.dtype).is_floating_point() else np.int8)
    return array


def _lines(
    arrays: Mapping[str, np.ndarray], classes: Sequence[str] | None, scores: Mapping[str, float]
) -> Iterator[list[object]]:
    """A heading, then a line for each row; arrays are spread over columns ``y_0``, ``y_1_2``, …"""
    heading: list[str] = []
    columns = []
    for name, array in arrays.items():
        shape = array.shape[1:]
        places = itertools.product(*map(range, shape)) if shape else ()
        heading += ["_".join([name, *map(str, at)]) for at in places] if shape else [name]
        columns.append(array.reshape(len(array), math.prod(shape)))
        best = array.argmax(1) if classes and shape == (len(classes),) and array.dtype != object else None
        best = (array.ravel() > scores[name]).astype(int) if name in scores else best
        if best is not None:
            heading.append(f"{name}_class")
            columns.append(np.array(classes, object)[best][:, None])
    for name, count in Counter(heading).items():
        if count > 1:
            raise BadInput(
                f"two columns would be called {name!r}\n  hint: --output names the outputs; -o FILE.npz keeps arrays"
            )
    yield [_cell(name) for name in heading]
    for row in zip(*columns):
        yield [_cell(entry) for part in row for entry in part]


def _cell(entry: object) -> object:
    """Escape `entry` for spreadsheets: text that looks like a formula gets a leading apostrophe."""
    if isinstance(entry, str):
        return f"'{entry}" if entry.startswith(_FORMULA) and not is_number(entry) else entry
    return entry.item() if isinstance(entry, np.generic) else entry
