"""Columns: named rows, in memory, mapped from a file, or made on demand.

Rows can be read in any order. Rows of equal size are one array; rows of different sizes (sentences, strips of text) are
a list, which is padded in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.fields import Field

if TYPE_CHECKING:
    from onnxgrad.training.data.augment import Augment


@dataclass(frozen=True)
class Features:
    """Columns of a table that feed one input.

    Attributes:
        names: of the columns, in their order.
        written: how the caller wrote them, as ``f0..f63``.
        table: their fitted preparation (see `onnxgrad.training.data.table`), if they have one.
    """

    names: tuple[str, ...]
    written: str
    table: Any = None


class JointRows(Protocol):
    """Inputs whose rows are read at once."""

    def augmented(self, how: Augment) -> Callable[[np.ndarray, Sequence[int]], dict[str, np.ndarray]]:
        """A function of rows and a draw (a seed and an epoch) that reads variants of them."""


class Column:
    """Rows of one name.

    Attributes:
        features: the columns of a table that it was made of, if the caller named them.
        problem: why it cannot feed an input; empty if it can.
        array: all rows, if they are in memory: they are then checked and converted once.
        lengths: the length of every row along its first axis, where rows differ in it and it is known without
            reading them; batches of rows of like lengths are made by it.
        whole: it has no rows: every batch has all of it.
        chunks: its rows in a table of Arrow, with missing values.
        together: reads rows of several inputs in variants that fit each other, such as pictures and boxes in them.
        row_classes: a class number of each row, where samples are balanced by another one than a label.
    """

    features: Features | None = None
    problem: str = ""
    array: np.ndarray | None = None
    lengths: np.ndarray | None = None
    whole: bool = False
    chunks: Any = None
    together: JointRows | None = None
    row_classes: np.ndarray | None = None

    def __len__(self) -> int:
        """The number of rows."""
        raise NotImplementedError

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These rows for `field`: an array with the rows as first axis, or a list of arrays of several sizes."""
        raise NotImplementedError

    def select(self, rows: np.ndarray) -> Column:
        """A column of only these rows."""
        return Selected(self, rows)

    def select_in_memory(self, rows: np.ndarray) -> Column:
        """A column of only these rows, in memory where this one is."""
        if type(self) is not Dense or self.array is None:
            return self.select(rows)
        some = self.array[rows]
        return Dense(np.array(some.tolist()) if some.dtype == object else some)


class Unusable(Column):
    """A column of a table that no input can read: missing values, dates, mixed text.

    Args:
        size: the number of rows.
        problem: see `Column`.
        some: the column of some of the rows, which may be usable.
    """

    def __init__(self, size: int, problem: str, some: Callable[[np.ndarray], Column]) -> None:
        self.size, self.problem, self.some = size, problem, some

    def __len__(self) -> int:
        return self.size

    def select_in_memory(self, rows: np.ndarray) -> Column:
        """A column of only these rows."""
        return self.some(rows)


class Selected(Column):
    """A selection of the rows of another column, read on access."""

    def __init__(self, column: Column, rows: np.ndarray) -> None:
        self.column, self.rows, self.problem = column, rows, column.problem
        self.lengths = None if column.lengths is None else column.lengths[rows]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These of the selected rows."""
        return self.column.take(self.rows[rows], field)


class Dense(Column):
    """An array whose first axis counts the rows."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = self.rows = array

    def __len__(self) -> int:
        return len(self.rows) if self.rows.ndim else 1

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray:
        """A copy of these rows. Raises BadInput if the array is one number."""
        if not self.rows.ndim:
            raise BadInput(f"the array {field.name!r} is one number and has no rows")
        return np.asarray(self.rows[rows])


class Mapped(Dense):
    """A memory-mapped array, whose rows are read on access."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        self.array = None


def single_array(column: Column) -> np.ndarray | None:
    """All rows of `column`, if they are one array, in memory or in a file."""
    if isinstance(column, Selected):
        whole = single_array(column.column)
        return None if whole is None else np.asarray(whole[column.rows])
    return np.asarray(column.rows) if isinstance(column, Dense) else None


class Ragged(Column):
    """Ragged rows, one array each.

    Raises:
        BadInput: rows differ in rank.
    """

    def __init__(self, rows: Sequence[np.ndarray], name: str) -> None:
        self.items = rows
        ranks = {a.ndim for a in rows}
        if len(ranks) > 1:
            raise BadInput(f"the rows of {name!r} differ in rank: {sorted(ranks)}")
        self.lengths = np.array([len(a) for a in rows], np.int64)

    def __len__(self) -> int:
        return len(self.items)

    def take(self, rows: np.ndarray, field: Field) -> list[np.ndarray]:
        """These rows."""
        return [self.items[i] for i in rows]


class Items(Column):
    """One entry of the rows of a sequence of mappings (a ``datasets.Dataset``, a list of dicts).

    Args:
        fetch: reads rows; columns of the same sequence share it, so a row is read once for all of them.
        name: of the entry.
        size: number of rows.
    """

    def __init__(self, fetch: Callable[[np.ndarray], Sequence[Mapping[str, Any]]], name: str, size: int) -> None:
        self.fetch, self.name, self.size = fetch, name, size

    def __len__(self) -> int:
        return self.size

    def select_in_memory(self, rows: np.ndarray) -> Column:
        """A column of only these rows; numbers or texts of a list are one array."""
        is_list = isinstance(getattr(self.fetch, "items", None), list)
        some = self.take(rows, Field(self.name, np.dtype(np.float64), ())) if is_list else None
        return Dense(some) if isinstance(some, np.ndarray) and some.ndim == 1 else self.select(rows)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These rows, read now.

        Raises:
            BadInput: a row lacks the entry.
        """
        found = []
        for i, row in zip(rows, self.fetch(rows)):
            if self.name not in row:
                raise BadInput(f"row {i} has no {self.name!r}; it has {', '.join(map(repr, row)) or 'nothing'}")
            found.append(np.asarray(row[self.name]))
        return stacked(found)


class Remembered:
    """A cache of the rows last read from a sequence: one read serves all columns of a batch."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self._rows: np.ndarray | None = None
        self._found: list[Mapping[str, Any]] = []

    def __call__(self, rows: np.ndarray) -> list[Mapping[str, Any]]:
        """The rows at these positions."""
        if self._rows is None or not np.array_equal(rows, self._rows):
            self._found = [self.items[int(i)] for i in rows]
            self._rows = rows.copy()
        return self._found


def stacked(rows: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    """One array, where the sizes of `rows` agree."""
    return np.stack(rows) if len({a.shape for a in rows}) == 1 else rows


class Columns(dict[str, Column]):
    """Columns by name, as `open_data` returns them.

    Attributes:
        source: the name of their source in messages.
        is_joined: columns were joined to inputs.
        notes: lines about the form in which they were found.
    """

    def __init__(
        self, columns: Mapping[str, Column], source: str, is_joined: bool = False, notes: Sequence[str] = ()
    ) -> None:
        super().__init__(columns)
        self.source, self.is_joined, self.notes = source, is_joined, tuple(notes)


def column(values: Any, name: str) -> Column:
    """`values` as a column: an array, a sequence of arrays of several sizes, or a column.

    Raises:
        BadInput: it is neither.
    """
    if isinstance(values, Column):
        return values
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        is_number = values.dtype.kind in "fiu"
        wide = np.ma.asarray(values, np.result_type(values, np.float16)) if is_number else None
        values = values.tolist() if wide is None else wide.filled(np.nan)
    if isinstance(values, (np.ndarray, np.generic, int, float)):
        array = np.asarray(values)
        if array.dtype != object or array.ndim != 1:
            return Dense(array)
    try:
        rows = [np.asarray(v) for v in values]
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name!r} is neither an array nor a sequence of arrays: {error}") from error
    missing = next((i for i, a in enumerate(rows) if a.dtype == object and a.ndim == 0 and a.item() is None), None)
    if any(a.dtype == object for a in rows) and all(a.ndim == 0 for a in rows):
        found = Dense(np.array([a.item() for a in rows], object))
        if missing is not None:
            found.problem = f"it has no value in row {missing}\n  hint: fill it in, or leave the row out"
        return found
    if any(a.dtype == object for a in rows):
        raise BadInput(f"{name!r} holds rows that are not rectangular arrays of numbers")
    whole = stacked(rows) if rows else np.empty(0)
    return Dense(whole) if isinstance(whole, np.ndarray) else Ragged(whole, name)
