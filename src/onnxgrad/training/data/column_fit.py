"""The preparation of a column of a table, fitted on training rows that come at once, or part by part from a stream.

Means and deviations of parts are combined exactly (Chan, Golub, LeVeque 1979). Of more rows than `SAMPLE`, the median
is that of so many, drawn at random.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.raw_columns import RawColumn
from onnxgrad.wording import is_number

#: Numbers with separators of thousands, and with a decimal comma.
_GROUPED, _COMMA = re.compile(r"[+-]?\d{1,3}([.,'\xa0\u202f]\d{3})+([.,]\d+)?"), re.compile(r"[+-]?\d*,\d+")
#: Rows of a stream of which a median is taken, and the most texts of a stream that are categories.
SAMPLE, MOST_CATEGORIES = 1 << 16, 100_000


@dataclass(frozen=True)
class TableSettings:
    """The settings of a run for tables.

    Attributes:
        missing: "mean", "median", "drop" or "indicator"; None: missing values are refused. Each of them
            leaves out rows without a label.
        categories: "onehot" or "index"; None: by the type of the input.
        standardize: numbers less their mean, divided by their deviation.
        is_counted: rows that are left out were counted before, and are not mentioned again.
    """

    missing: str | None = None
    categories: str | None = None
    standardize: bool = False
    is_counted: bool = False


@dataclass(frozen=True)
class TableColumn:
    """The fitted preparation of one column.

    Attributes:
        name: of the column.
        kind: see `RawColumn`.
        fill: the number, or the category, in place of a missing value; None: there is none.
        mean, scale: numbers are less `mean`, divided by `scale`.
        categories: the texts that have a number, in its order.
        indicator: 1 for a missing value is a number of its own.
    """

    name: str
    kind: str
    fill: float | str | None = None
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()
    indicator: bool = False


class MixedColumn(BadInput):
    """A column whose parts are of several kinds."""

    def __init__(self, name: str, kinds: str) -> None:
        super().__init__(f"column {name!r} holds {kinds}")
        self.name = name


class ColumnFit:
    """The statistics of the training rows of one column.

    Args:
        name: of the column.
        settings: of the run.
        sample: rows of which the median is taken. Default: all.

    Attributes:
        kind: of the column; empty before a row has a value.
        rows: the number of rows.
        known: the number of rows with a value.
        first_missing: the number of the first row without a value.
    """

    def __init__(self, name: str, settings: TableSettings, sample: int | None = None) -> None:
        self.name, self.settings, self.sample = name, settings, sample
        self.kind = ""
        self.rows = self.known = 0
        self.first_missing: int | None = None
        self._mean = self._squares = 0.0
        self._texts: dict[str, int] = {}
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._held, self._limit = 0, 1.0
        self._random = np.random.default_rng(0)

    def add(self, raw: RawColumn) -> None:
        """Count the rows of `raw`. Raises BadInput for another kind of column than before."""
        missing, begin = raw.missing, self.rows
        raw.check_finite(f"column {self.name!r}", begin)
        self.rows += len(missing)
        if missing.any() and self.first_missing is None:
            self.first_missing = begin + int(np.argmax(missing))
        values = raw.values[~missing]
        if not len(values):  # which have no kind
            return
        if self.kind and self.kind != raw.kind:
            raise MixedColumn(self.name, f"{self.kind}s, and {raw.kind}s from row {begin} on")
        self.kind = raw.kind
        before, self.known = self.known, self.known + len(values)
        if raw.kind == "text":
            for text, count in zip(*np.unique(values.astype(str), return_counts=True)):
                self._texts[str(text)] = self._texts.get(str(text), 0) + int(count)
            if self.sample is not None and len(self._texts) > MOST_CATEGORIES:
                raise BadInput(f"column {self.name!r} has more than {MOST_CATEGORIES:,} texts, too many for categories")
            return
        mean = float(values.mean())
        change = mean - self._mean
        self._squares += float(np.square(values - mean).sum()) + change**2 * before * len(values) / self.known
        self._mean += change * len(values) / self.known
        if self.settings.missing == "median":
            self._keep(values)

    def _keep(self, values: np.ndarray) -> None:
        """Keep values for the median: those with the smallest of random keys, if there are too many."""
        keys = np.zeros(len(values)) if self.sample is None else self._random.random(len(values))
        kept = keys < self._limit
        self._parts.append((values[kept], keys[kept]))
        self._held += int(kept.sum())
        if self.sample is not None and self._held > 2 * self.sample:
            self._median_values()

    def _median_values(self) -> np.ndarray:
        """The values of which the median is taken."""
        values, keys = (np.concatenate(each) for each in zip(*self._parts))
        if self.sample is not None and len(keys) > self.sample:
            kept = np.argpartition(keys, self.sample)[: self.sample]
            values, keys = values[kept], keys[kept]
            self._limit = float(keys.max())
        self._parts, self._held = [(values, keys)], len(keys)
        return values

    @property
    def note(self) -> str:
        """A line about a median that is not of all rows; empty otherwise."""
        if self.settings.missing != "median" or self.kind == "text" or self.known <= (self.sample or self.known):
            return ""
        return f"the median of {self.name!r} is that of {self.sample:,} rows of {self.known:,}, drawn at random"

    def column(self) -> TableColumn:
        """The fitted preparation."""
        way = self.settings.missing
        indicator = way == "indicator" and self.known < self.rows
        if self.kind == "text":
            texts = sorted(self._texts)
            _check_no_numbers(self.name, texts)
            fill = None if way in (None, "drop", "indicator") else max(texts, key=self._texts.__getitem__)
            return TableColumn(self.name, self.kind, fill, categories=tuple(texts), indicator=indicator)
        number: float | None = None
        if way in ("mean", "median", "indicator"):
            number = float(np.median(self._median_values())) if way == "median" else self._mean
        mean, scale = 0.0, 1.0
        if self.settings.standardize and self.kind != "boolean":
            mean, scale = self._moments(number)
        return TableColumn(self.name, self.kind, number, mean, scale, indicator=indicator)

    def _moments(self, fill: float | None) -> tuple[float, float]:
        """The mean and the deviation of all rows, with `fill` in place of missing values."""
        filled, total = (0, self.known) if fill is None else (self.rows - self.known, self.rows)
        change = 0.0 if fill is None else fill - self._mean
        mean = self._mean + change * filled / total
        scale = float(np.sqrt((self._squares + change**2 * self.known * filled / total) / total))
        return mean, scale if scale > 1e-14 * abs(mean) else 1.0  # that of equal numbers is rounding


def _check_no_numbers(name: str, texts: Sequence[str]) -> None:
    """Raise BadInput for texts that are numbers, some of them with separators of thousands: they are no categories."""
    grouped = [t for t in texts if _GROUPED.fullmatch(t) and not is_number(t)]
    if grouped and all(is_number(t) or _GROUPED.fullmatch(t) or _COMMA.fullmatch(t) for t in texts):
        raise BadInput(
            f"column {name!r} holds numbers with separators of thousands, as {grouped[0]!r}, which are not read\n"
            "  hint: write 1234.5"
        )
