"""Columns of a table as they are: numbers, booleans, dates and text, of which some may be missing."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.columns import Column
from onnxgrad.training.data.fields import Field

#: Microseconds.
_DAY = 86400e6


@dataclass(frozen=True)
class RawColumn:
    """The rows of one column.

    Attributes:
        kind: number, boolean, date or text.
        values: of the rows.
        is_typed: the source has dates of their own, so that numbers are none.
    """

    kind: str
    values: np.ndarray
    is_typed: bool = False

    @property
    def missing(self) -> np.ndarray:
        """True for rows without a value."""
        return self.values == "" if self.kind == "text" else np.isnan(self.values)

    def check_finite(self, what: str, begin: int = 0) -> None:
        """Raise BadInput for an infinite number of the column, which messages call `what`; `begin`: its first row."""
        bad = np.zeros(0, bool) if self.kind == "text" else np.isinf(self.values)
        if bad.any():
            row = int(np.argmax(bad))
            value = f"{self.values[row]:g} in row {begin + row}"
            raise BadInput(f"{what} is not finite: {value}\n  hint: leave the row out, or give it a number")


def checked_raw(raw: RawColumn, name: str, kind: str, may_miss: bool, source: str) -> RawColumn:
    """`raw` of this `kind` as in training; without any value, of that type. In arrays, numbers may be days.

    Raises:
        BadInput: it is of another kind, or a value is missing where none is allowed.
    """
    is_text = kind == "text"
    if raw.missing.all():
        raw = (
            RawColumn("text", np.full(len(raw.values), "", object))
            if is_text
            else RawColumn("number", np.full(len(raw.values), np.nan))
        )
    other_days = (raw.kind == "date") != (kind == "date") and (raw.kind == "date" or raw.is_typed)
    if (raw.kind == "text") != is_text or other_days:
        held = kind if is_text else f"{kind}s"
        raise BadInput(f"column {name!r} of {source} holds {raw.kind}s, and {held} when the model was trained")
    missing = raw.missing
    raw.check_finite(f"column {name!r} of {source}")
    if missing.any() and not may_miss:
        raise BadInput(
            f"column {name!r} of {source} has no value in row {np.argmax(missing)}, and the model was trained on rows "
            "without missing values\n"
            "  hint: train it with --missing mean; or leave the row out, as --missing drop of evaluate does"
        )
    return raw


def raw_column(column: Column, name: str) -> RawColumn:
    """The rows of `column`, with missing values. Raises BadInput for rows that are no single values."""
    if column.chunks is not None:
        return _of_arrow(column.chunks, name)
    found = column.array
    if found is None:
        found = column.take(np.arange(len(column)), Field(name, np.dtype(np.float64), ()))  # type: ignore[assignment]
    array = np.asarray(found)
    if array.ndim != 1:
        raise BadInput(f"column {name!r} has the shape {list(array.shape)}, not one value per row")
    if array.dtype.kind == "b":
        return RawColumn("boolean", array.astype(np.float64))
    if array.dtype.kind in "fiu":
        return RawColumn("number", array.astype(np.float64))
    if array.dtype.kind == "M":
        return _days(array)
    values = ["" if v is None or v != v else v for v in array.tolist()]
    if all(isinstance(v, (bool, np.bool_)) or v == "" for v in values) and any(v != "" for v in values):
        return RawColumn("boolean", np.array([np.nan if v == "" else float(v) for v in values]))
    if all(isinstance(v, (int, float, Decimal)) or v == "" for v in values) and any(v != "" for v in values):
        return RawColumn("number", np.array([np.nan if v == "" else float(v) for v in values]))
    if all(isinstance(v, datetime.date) or v == "" for v in values) and any(v != "" for v in values):
        return _days(np.array([_naive(v) for v in values], "datetime64[us]"))
    if not all(isinstance(v, str) for v in values):
        other = next(v for v in values if not isinstance(v, str))
        raise BadInput(f"column {name!r} mixes text and other values, such as {other!r:.40}")
    return RawColumn("text", np.array(values, object))


def _naive(value: Any) -> Any:
    """A date or time without a zone, in UTC; NaT for a missing one."""
    if value == "":
        return np.datetime64("NaT")
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC).replace(tzinfo=None)
    return value


def _days(array: np.ndarray) -> RawColumn:
    """Dates as days since 1970-01-01."""
    missing = np.isnat(array)
    days = array.astype("datetime64[us]").astype(np.int64) / _DAY
    return RawColumn("date", np.where(missing, np.nan, days))


def _of_arrow(chunks: Any, name: str) -> RawColumn:
    import pyarrow as pa

    kind = chunks.type
    if pa.types.is_dictionary(kind):
        chunks = chunks.cast(kind.value_type)
        kind = chunks.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        naive = chunks.cast(pa.timestamp("us"), safe=False)
        return _days(naive.to_numpy())
    if pa.types.is_boolean(kind):
        return RawColumn("boolean", chunks.cast(pa.int8()).cast(pa.float64()).to_numpy(zero_copy_only=False))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return RawColumn("number", np.asarray(chunks.cast(pa.float64(), safe=False).to_numpy()), is_typed=True)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view":
        texts = ["" if v is None else v for v in chunks.to_pylist()]
        return RawColumn("text", np.array(texts, object))
    raise BadInput(f"column {name!r} holds {kind}, which is neither a number, a date nor text")


def raw_columns(columns: Mapping[str, Column], names: Sequence[str]) -> dict[str, RawColumn]:
    """The raw columns of these `names`."""
    return {name: raw_column(columns[name], name) for name in names}
