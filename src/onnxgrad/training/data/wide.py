"""Wide tables: columns with one number per row are joined to one array for an input.

``X=f0..f63`` joins f0, f1, … f63; ``X=age,height`` joins these two in this order; ``X=pixel*`` joins the matching
columns in the order of the table; ``X=images`` lets one array feed an input of another name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training.data.column_fit import SAMPLE, ColumnFit, TableSettings
from onnxgrad.training.data.columns import Column, Columns, Dense, Features
from onnxgrad.training.data.dropped_rows import DroppedRows
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.images import Pictures
from onnxgrad.training.data.raw_columns import raw_columns
from onnxgrad.training.data.table import Table
from onnxgrad.wording import is_number, name_list, no_number, type_text

_HINT = "\n  hint: --categories onehot (in Python categories='onehot') makes numbers of text, codes and dates"
_NUMBERED = re.compile(r"(.*?)(\d+)")


class Joined(Column):
    """Adjacent columns: rows of one number each become rows with one number per column."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = list(columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray:
        """These rows, [rows, columns]."""
        return np.stack([np.asarray(c.take(rows, field)) for c in self.columns], axis=1)


@dataclass(frozen=True)
class Joining:
    """The preparation of the columns that are joined.

    Attributes:
        settings: of the run; None: only inputs that the model was trained on are prepared.
        whole: inputs that take whole numbers.
        fit_rows: the rows that means and categories are taken of. Default: all.
        labels: inputs of the loss, whose columns are not prepared.
    """

    settings: TableSettings | None = None
    whole: frozenset[str] = frozenset()
    fit_rows: np.ndarray | None = None
    labels: frozenset[str] = frozenset()

    @classmethod
    def of(cls, settings: TableSettings | None, fields: Sequence[Field], fit_rows: np.ndarray | None = None) -> Joining:
        """The preparation by these settings for the inputs of a step."""
        whole = frozenset(f.name for f in fields if f.dtype.kind in "iu")
        return cls(settings, whole, fit_rows, frozenset(f.name for f in fields if f.label))


def join_columns(
    columns: Mapping[str, Column],
    inputs: Mapping[str, str],
    trained: Mapping[str, Features] | None = None,
    tables: Joining | None = None,
    source: str = "the data",
) -> Columns:
    """`columns` with those joined that `inputs` lists, under the name of the input.

    Args:
        columns: by name.
        inputs: from the name of an input to the columns that feed it, written as above.
        trained: the columns that fed an input when the model was trained; they keep that order, not the order in
            the data.
        tables: how columns with missing values, text or dates are prepared.
        source: the data in messages.

    Raises:
        BadInput: a column is missing, holds no numbers, or columns differ in their number of rows.
    """
    if not isinstance(inputs, Mapping):
        raise BadInput(f'inputs are written as {{"X": "f0..f63"}}, from an input to its columns, not {inputs!r}')
    trained = trained or {}
    wanted = {name: order_columns(name, text, trained.get(name), columns) for name, text in inputs.items()}
    wanted |= {n: f for n, f in trained.items() if n not in inputs and n not in columns and _apply(n, f, columns)}
    left, made, tables = dict(columns), {}, tables or Joining()
    kept: np.ndarray | None = None
    notes: list[str] = []
    if tables.settings is not None and tables.settings.missing:
        drop = DroppedRows(tables.settings.missing)
        kept = drop.find_kept(columns, wanted, tables.labels)
        if kept is not None and not len(kept):
            raise drop.none_left(source)
        notes = [] if tables.settings.is_counted else drop.notes(source)
    for name, features in wanted.items():
        for called in features.names:
            left.pop(called, None)
        is_prepared = name not in tables.labels and not isinstance(columns[features.names[0]], Pictures)
        if features.table is not None or (tables.settings is not None and is_prepared):
            made[name] = _prepared(name, features, columns, tables, kept, source)
            continue
        own = {n: columns[n] if kept is None else columns[n].select_in_memory(kept) for n in features.names}
        is_one = len(own) == 1 and not any(c in features.written for c in "*?[")
        made[name] = copy.copy(own[features.names[0]]) if is_one else _side_by_side(name, own)
        made[name].features = features
    if kept is not None:
        left = {n: c.select_in_memory(kept) for n, c in left.items()}
    return Columns({**left, **made}, source, True, notes)


def fit_parts(
    parts: Iterable[Mapping[str, Column]],
    inputs: Mapping[str, str],
    trained: Mapping[str, Features],
    tables: Joining,
    source: str = "the data",
) -> tuple[dict[str, Features], list[str]]:
    """The fitted preparation of the inputs that columns feed, by all parts of a stream, and notes about it.

    Raises:
        BadInput: as `join_columns`.
    """
    assert tables.settings is not None
    features = dict(trained)
    fits: dict[str, list[ColumnFit]] = {}
    drop, kept = DroppedRows(tables.settings.missing or ""), None
    for columns in parts:
        features |= {n: order_columns(n, text, features.get(n), columns) for n, text in inputs.items()}
        raws = {n: raw_columns(columns, features[n].names) for n in inputs if n not in tables.labels}
        if tables.settings.missing:
            kept = drop.find_kept(columns, {n: features[n] for n in inputs}, tables.labels)
        if kept is not None:
            raws = {n: {c: replace(r, values=r.values[kept]) for c, r in of.items()} for n, of in raws.items()}
        for name in [n for n in raws if features[n].table is None]:
            if name not in fits:
                fits[name] = [ColumnFit(called, tables.settings, SAMPLE) for called in features[name].names]
            for fit in fits[name]:
                fit.add(raws[name][fit.name])
    if drop.rows and drop.gone == drop.rows:
        raise drop.none_left(source)
    for name, own in fits.items():
        table = Table.fit(own, tables.settings, name in tables.whole, name)
        features[name] = replace(features[name], table=table)
    notes = [fit.note for own in fits.values() for fit in own if fit.note]
    return {n: f for n, f in features.items() if n in inputs and n not in tables.labels}, [*drop.notes(source), *notes]


def complete_rows(
    columns: Mapping[str, Column],
    inputs: Mapping[str, str | Features] | None,
    labels: Collection[str] = (),
    drop: DroppedRows | None = None,
) -> dict[str, Column]:
    """The rows of `columns` without a missing value in those for `inputs` or `labels`; all of them without either.

    Args:
        columns, labels: by name, and those of the loss.
        inputs: which columns feed which input.
        drop: counts the other rows.
    """
    wanted = {
        n: f if isinstance(f, Features) else Features(tuple(_select_columns(f, [*columns])), f)
        for n, f in (inputs or {}).items()
    }
    drop = drop or DroppedRows()
    if (kept := drop.find_kept(columns, wanted, labels)) is None or not drop.gone:
        return dict(columns)
    if not len(kept):
        raise drop.none_left("the data")
    fed = [called for n, f in wanted.items() if n not in labels for called in f.names]
    raws = raw_columns(columns, [n for n in fed if not isinstance(columns[n], Pictures)])
    some = {n: c.select_in_memory(kept) for n, c in columns.items() if n not in raws}
    return some | {n: Dense(raw.values[kept]) for n, raw in raws.items()}


def _prepared(
    name: str,
    features: Features,
    columns: Mapping[str, Column],
    tables: Joining,
    kept: np.ndarray | None,
    source: str,
) -> Column:
    """The rows of an input, by the preparation of the training, or one that is fitted now."""
    raws = raw_columns(columns, features.names)
    if len({len(raw.values) for raw in raws.values()}) > 1:
        raise BadInput(f"the columns for {name!r} differ in their number of rows")
    if kept is not None:
        raws = {n: replace(raw, values=raw.values[kept]) for n, raw in raws.items()}
    table = features.table
    if table is None:
        assert tables.settings is not None
        rows = slice(None) if tables.fit_rows is None else tables.fit_rows
        shown = {n: replace(raw, values=raw.values[rows]) for n, raw in raws.items()}
        fits = [ColumnFit(called, tables.settings) for called in shown]
        for fit in fits:
            fit.add(shown[fit.name])
        table = Table.fit(fits, tables.settings, name in tables.whole, name)
    made = Dense(table(raws, source))
    made.features = replace(features, table=table)
    return made


def order_columns(name: str, text: str, trained: Features | None, columns: Mapping[str, Column]) -> Features:
    """The columns that `text` names; those of the model's training come in their order there."""
    if trained is not None and text == trained.written:
        check_present(name, trained, columns)
        return trained
    chosen = tuple(_select_columns(text, list(columns)))
    if trained is not None and set(chosen) == set(trained.names):
        chosen = trained.names
    return Features(chosen, text)


def _apply(name: str, features: Features, columns: Mapping[str, Column]) -> bool:
    """True if `columns` have all columns that fed the input `name`. Raises BadInput if some are missing."""
    present = [called for called in features.names if called in columns]
    if present:
        check_present(name, features, columns)
    return bool(present)


def check_present(name: str, features: Features, columns: Mapping[str, Column]) -> None:
    """Raise BadInput if a column is missing that fed the input `name` in training."""
    missing = [called for called in features.names if called not in columns]
    if missing:
        others = "" if len(missing) == 1 else f" and {len(missing) - 1} more"
        raise BadInput(
            f"the data have no column {missing[0]!r}{others}, which the model was trained on\n"
            f"  hint: {name_list(features.names)} fed {name!r}; --inputs {name}=… names other columns"
        )


def check_fed(inputs: Mapping[str, str], fields: Sequence[Field]) -> None:
    """Raise UnknownName for one of the `inputs` that columns are to feed, and that is none of the `fields`."""
    for name in inputs:
        if name not in {f.name for f in fields}:
            raise UnknownName(name, [f.name for f in fields], "input")


def check_numbers(field: Field, array: np.ndarray, features: Features | None) -> None:
    """Raise BadInput if a table gives another number of numbers than `field` takes; the message lists them."""
    size = field.shape[0] if len(field.shape) == 1 else None
    if features is None or features.table is None or size is None or array.shape[1:] == (size,):
        return
    numbers = features.table.numbers
    shown = name_list(numbers, 12)
    words = {c.name: [v for v in c.categories if not is_number(v)] for c in features.table.columns}
    mixed = [c for c in features.table.columns if 0 < 2 * len(words[c.name]) < len(c.categories)]
    if mixed:
        raise BadInput(
            f"the input {field.name!r} takes {size} numbers for each row, and {features.written} gives {len(numbers)}, "
            f"as {mixed[0].name!r} is text: {words[mixed[0].name][0]!r} is no number\n"
            "  hint: leave the cells of missing numbers empty"
        )
    raise BadInput(
        f"the input {field.name!r} takes {size} numbers for each row, and {features.written} gives {len(numbers)}: "
        f"{shown}\n  hint: a model with {len(numbers)} inputs fits, or other columns, or --categories index"
    )


def _side_by_side(name: str, parts: Mapping[str, Column]) -> Column:
    rows = {len(c) for c in parts.values()}
    if len(rows) > 1:
        raise BadInput(f"the columns for {name!r} differ in their number of rows: {', '.join(map(str, sorted(rows)))}")
    for called, part in parts.items():
        if part.problem:
            raise BadInput(f"column {called!r}, which is to feed {name!r}: {part.problem}")
        if part.array is not None and (part.array.dtype.kind not in "fiub" or part.array.ndim != 1):
            raise BadInput(
                f"column {called!r}, which is to feed {name!r}, {_describe_rows(part.array)}, not one number per row"
                f"{_HINT if part.array.dtype.kind in 'UOM' and part.array.ndim == 1 else ''}"
            )
    if all(c.array is not None for c in parts.values()):
        return Dense(np.stack([c.array for c in parts.values()], axis=1))  # type: ignore[misc]
    return Joined(list(parts.values()))


def _describe_rows(array: np.ndarray) -> str:
    """The rows of a column that cannot be joined, in words."""
    if array.dtype.kind in "fiub":
        return f"has the shape {list(array.shape)}"
    texts = [value for value in array.flat if isinstance(value, str)]
    if not texts:
        return f"holds {type_text(array.dtype)}"
    return f"is text ({(shown := no_number(texts))[:40]!r} in row {array.ravel().tolist().index(shown)})"


def _select_columns(text: str, names: list[str]) -> list[str]:
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
