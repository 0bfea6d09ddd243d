"""Labels of classes: text and whole numbers as the numbers of their classes, by the names that the model has."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.columns import Column, Dense
from onnxgrad.training.data.fields import Field
from onnxgrad.wording import name_list

#: A name of a class that is a number.
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?", re.ASCII)


class NamedClasses(Column):
    """Labels whose classes have names.

    Attributes:
        names: of the classes, in the order of their numbers.
    """

    names: tuple[str, ...]

    def renumbered(self, names: Sequence[str], where: str) -> NamedClasses:
        """The same classes by their numbers in `names`. Raises BadInput for a name that is not among them."""
        raise NotImplementedError


class ClassColumn(Dense, NamedClasses):
    """Class indices, and their names.

    Args:
        indices: into `names`, one per row; others are labels that the loss ignores.
        names: of the classes, in the order of their numbers.
    """

    def __init__(self, indices: np.ndarray, names: Sequence[str]) -> None:
        super().__init__(indices)
        self.names = tuple(names)

    def select(self, rows: np.ndarray) -> ClassColumn:
        """Only these rows, of the same classes."""
        return ClassColumn(self.rows[rows], self.names)

    def _first_row(self, name: str) -> str:
        """The first row of the class `name`, in words; empty if no row is of it."""
        rows = np.argwhere(self.rows == self.names.index(name))
        return f" in row {rows[0][0]}" if len(rows) else ""

    def renumbered(self, names: Sequence[str], where: str) -> ClassColumn:
        """The same classes by their numbers in `names`. Raises BadInput for a name that is not among them."""
        places = places_in(names, self.names, where, self._first_row)
        known = (self.rows >= 0) & (self.rows < len(places))
        return ClassColumn(np.where(known, places[np.where(known, self.rows, 0)], self.rows), names)


def places_in(
    names: Sequence[str], own: Sequence[str], where: str, row: Callable[[str], str] = lambda name: ""
) -> np.ndarray:
    """The places of the classes `own` in `names`. Raises BadInput for a class without one; `row`: where it occurs."""
    unknown = [n for n in own if n not in names]
    if unknown:
        raise BadInput(
            f"{where} has the class {unknown[0]!r}{row(unknown[0])}, which is none of those that the model was trained "
            f"to tell apart: {name_list(names)}\n"
            "  hint: leave its rows out, or train a new head (--head) for other classes"
        )
    return np.array([names.index(n) for n in own], np.int64)


class NumberedColumn(Column):
    """Labels that are read later, as the numbers of their classes.

    Args:
        column: of names of classes, or of the whole numbers that are their names.
        names: of the classes, in the order of their numbers.
        ignored: the label that stays as it is.
        where: the labels in messages.
    """

    def __init__(self, column: Column, names: Sequence[str], ignored: int | None, where: str) -> None:
        self.column, self.names, self.ignored, self.where = column, names, ignored, where
        self.lengths = column.lengths

    def __len__(self) -> int:
        return len(self.column)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """These rows."""
        found = self.column.take(rows, field)
        if isinstance(found, np.ndarray):
            return _places(found, self.names, self.ignored, self.where, rows)
        return [_places(a[None], self.names, self.ignored, self.where, rows[i : i + 1])[0] for i, a in enumerate(found)]


def missing_labels(array: np.ndarray) -> np.ndarray:
    """True where `array` holds NaN, None or empty text."""
    if array.dtype.kind == "f":
        return np.isnan(array)
    missing = np.zeros(array.shape, bool)
    if array.dtype.kind in "UO":
        missing |= np.char.strip(array.astype(str)) == ""
    if array.dtype.kind == "O":
        missing |= np.array([v is None or v != v for v in array.ravel()], bool).reshape(array.shape)
    return missing


def class_column(column: Column, where: str = "the labels") -> Column:
    """`column`, with text replaced by the indices of the sorted names that occur in it.

    Raises:
        BadInput: a row has no name.
    """
    if isinstance(column, NamedClasses) or column.array is None or column.array.dtype.kind not in "UO":
        return column
    texts = column.array.astype(str)
    missing = missing_labels(column.array)
    if missing.any():
        raise BadInput(
            f"{where} has no label in row {np.argwhere(missing)[0][0]}: the cell is empty\n"
            "  hint: fill it in; --missing drop of train and evaluate leaves the row out"
        )
    names, numbers = np.unique(texts, return_inverse=True)
    return ClassColumn(numbers.reshape(column.array.shape), names.tolist())


def numbered(column: Column, names: Sequence[str], source: str, where: str, ignored: int | None = None) -> Column:
    """`column` of labels as class indices by `names`.

    Numbers are class indices, unless they are names: a classifier of the digits 3, 5 and 7 has the classes 0, 1 and 2.
    If "1" names class 0, only numbers that are names are labels.

    Args:
        column: of text or numbers.
        names: of the classes of the model.
        source: the data in messages.
        where: the labels in messages.
        ignored: the label that the loss ignores.

    Raises:
        BadInput: a label is none of `names`.
    """
    if isinstance(column, NumberedColumn):
        return column
    if isinstance(column, NamedClasses):
        return column if column.names == tuple(names) else column.renumbered(tuple(names), source)
    if column.array is None:
        return NumberedColumn(column, names, ignored, where)
    if column.array.dtype.kind not in "fiub" or not _renumbers(names, column.array.dtype):
        return column
    return ClassColumn(_places(column.array, names, ignored, where), names)


def are_numbers(names: Sequence[str]) -> bool:
    """True if numbers are `names` of classes with other numbers, so that a number is a name first."""
    return bool(_renumbers(names))


def _renumbers(names: Sequence[str], dtype: np.dtype | None = None) -> dict[float, int]:
    """The classes by the numbers that are their names; empty if each of them names the class with this number."""
    found = _by_number(names, dtype)
    return found if any(value != place for value, place in found.items()) else {}


def _by_number(names: Sequence[str], dtype: np.dtype | None = None) -> dict[float, int]:
    """The classes whose `names` are numbers, by these, written as ``3``, ``03`` or ``3.0``; empty if two are equal.

    Labels that are true or false, of a `dtype` of these, have such names.
    """
    if dtype is not None and dtype.kind == "b":
        return {float(n.lower() == "true"): k for k, n in enumerate(names) if n.lower() in ("true", "false")}
    found = {float(n): k for k, n in enumerate(names) if _NUMBER.fullmatch(n)}
    return found if len(found) == sum(_NUMBER.fullmatch(n) is not None for n in names) else {}


def _places(
    labels: np.ndarray, names: Sequence[str], ignored: int | None, where: str, rows: np.ndarray | None = None
) -> np.ndarray:
    """The places in `names` of whole numbers, or of text; `rows`: their numbers in the data."""
    if labels.dtype.kind == "U":
        return _places_of_text(labels, names, where, rows)
    numbers = _renumbers(names, labels.dtype) if labels.dtype.kind in "fiub" else {}
    if not numbers:
        return labels
    values, places = (np.array(list(part)) for part in (numbers, numbers.values()))
    order = np.argsort(values)
    at = np.minimum(np.searchsorted(values, labels, sorter=order), len(values) - 1)
    known = values[order[at]] == labels
    stay = (
        ~known if len(values) < len(names) and not _are_shifted(numbers, len(names)) else np.zeros(labels.shape, bool)
    )
    if ignored is not None:
        stay |= labels == ignored
    if not (known | stay).all():
        place = tuple(np.argwhere(~(known | stay))[0])
        raise BadInput(
            f"{where} has the label {labels[place]} in row {place[0] if rows is None else rows[place[0]]}, which is "
            f"none of those of the model: {name_list(names)}"
        )
    found = np.where(stay, labels, places[order[at]])
    return found.astype(np.int64) if (found == np.trunc(found)).all() else found


def _are_shifted(numbers: Mapping[float, int], count: int) -> bool:
    """True if a number of 0, …, `count` - 1 names another class than the one with this number."""
    return any(value in range(count) and value != place for value, place in numbers.items())


def _places_of_text(labels: np.ndarray, names: Sequence[str], where: str, rows: np.ndarray | None) -> np.ndarray:
    number = {name: k for k, name in enumerate(names)}
    found = np.array([number.get(text, -1) for text in labels.ravel().tolist()], np.int64).reshape(labels.shape)
    if (found < 0).any():
        place = tuple(np.argwhere(found < 0)[0])
        row = place[0] if rows is None else rows[place[0]]
        raise BadInput(
            f"{where} has the class {str(labels[place])!r} in row {row}, which is none of those of the model: "
            f"{name_list(names)}"
        )
    return found


def check_count(names: Sequence[str], scores: int | None, source: str, own: bool) -> None:
    """Raise BadInput if the number of `scores` of the model does not match the classes `names`.

    Args:
        names: of the classes.
        scores: of a row; None if unknown.
        source: the data in messages.
        own: the names are those of the model.
    """
    if scores is None or scores == len(names):
        return
    count = f"{len(names)} classes: {name_list(names)}" if len(names) != 1 else f"only the class {names[0]!r}"
    if own:
        raise BadInput(f"the model names {count}; but it has {scores} scores for each row")
    hint = f"--head {len(names)} (with_head) trains a new head for these classes" if len(names) > 1 else ""
    if len(names) < scores:
        hint += (
            f"{'; ' if hint else ''}a list of all {scores} names in the model's metadata 'onnxgrad.classes' says which"
        )
    raise BadInput(f"{source} has {count}; the model has {scores} scores for each row\n  hint: {hint}")
