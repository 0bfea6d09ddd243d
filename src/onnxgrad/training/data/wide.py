"""Wide tables: columns that hold one number per row each, joined to the one array that an input of a model wants.

``X=f0..f63`` joins f0, f1, … f63; ``X=age,height`` joins these two in this order; ``X=pixel*`` joins what matches, in
the order of the table; ``X=images`` lets one array feed an input of another name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training.data.columns import Column, Dense
from onnxgrad.training.data.fields import Field

_NUMBERED = re.compile(r"(.*?)(\d+)")


class Joined(Column):
    """Columns side by side: rows of one number each become rows of as many numbers as there are columns."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = list(columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray:
        """These rows, [rows, columns]."""
        return np.stack([np.asarray(c.take(rows, field)) for c in self.columns], axis=1)


def joined(columns: Mapping[str, Column], inputs: Mapping[str, str]) -> dict[str, Column]:
    """`columns` with those that `inputs` says joined, under the name of the input, in their place.

    Args:
        columns: by name.
        inputs: from the name of an input to the columns that feed it, written as above.

    Raises:
        BadInput: a column is missing, holds no numbers, or columns differ in their number of rows.
    """
    if not isinstance(inputs, Mapping):
        raise BadInput(f'inputs are written as {{"X": "f0..f63"}}, from an input to its columns, not {inputs!r}')
    left, made = dict(columns), {}
    for name, text in inputs.items():
        chosen = _chosen(text, list(columns))
        for called in chosen:
            left.pop(called, None)
        if len(chosen) == 1 and not any(c in text for c in "*?["):
            made[name] = columns[chosen[0]]
            continue
        made[name] = _side_by_side(name, {called: columns[called] for called in chosen})
    return {**left, **made}


def check_fed(inputs: Mapping[str, str], fields: Sequence[Field]) -> None:
    """Raise UnknownName for one of the `inputs` that columns are to feed, and that is none of the `fields`."""
    for name in inputs:
        if name not in {f.name for f in fields}:
            raise UnknownName(name, [f.name for f in fields], "input")


def _side_by_side(name: str, parts: Mapping[str, Column]) -> Column:
    rows = {len(c) for c in parts.values()}
    if len(rows) > 1:
        raise BadInput(f"the columns for {name!r} differ in their number of rows: {', '.join(map(str, sorted(rows)))}")
    for called, part in parts.items():
        if part.problem:
            raise BadInput(f"column {called!r}, which is to feed {name!r}: {part.problem}")
        if part.array is not None and (part.array.dtype.kind not in "fiub" or part.array.ndim != 1):
            raise BadInput(
                f"column {called!r}, which is to feed {name!r}, is {part.array.dtype}{list(part.array.shape)}, "
                "not one number per row"
            )
    if all(c.array is not None for c in parts.values()):
        return Dense(np.stack([c.array for c in parts.values()], axis=1))  # type: ignore[misc]
    return Joined(list(parts.values()))


def _chosen(text: str, names: list[str]) -> list[str]:
    """The columns that `text` names, in its order."""
    found: list[str] = []
    for part in text.split(",") if text not in names else [text]:
        part = part.strip()
        if part in names:
            found.append(part)
        elif ".." in part:
            first, _, last = part.partition("..")
            found += _range(first, last, names)
        elif any(c in part for c in "*?["):
            matching = [n for n in names if fnmatchcase(n, part)]
            if not matching:
                raise UnknownName(part, names, "column")
            found += matching
        else:
            raise UnknownName(part, names, "column")
    twice = {n for n in found if found.count(n) > 1}
    if twice:
        raise BadInput(f"column {sorted(twice)[0]!r} is named twice in {text!r}")
    return found


def _range(first: str, last: str, names: list[str]) -> list[str]:
    """``f0..f63`` counts; names that do not end in a number are the ends of a stretch of the table."""
    a, b = _NUMBERED.fullmatch(first), _NUMBERED.fullmatch(last)
    if a and b and a[1] == b[1]:
        width = len(a[2]) if a[2].startswith("0") and len(a[2]) == len(b[2]) else 0
        wanted = [f"{a[1]}{i:0{width}d}" for i in range(int(a[2]), int(b[2]) + 1)] if int(b[2]) < 10**7 else []
    else:
        for end in (first, last):
            if end not in names:
                raise UnknownName(end, names, "column")
        wanted = names[names.index(first) : names.index(last) + 1]
    for name in wanted:
        if name not in names:
            raise UnknownName(name, names, "column")
    if not wanted:
        raise BadInput(f"{first}..{last} names no columns: it ends before it begins")
    return wanted
