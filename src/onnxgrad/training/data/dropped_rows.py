"""Rows of tables that are left out for want of a value: a label under each way of `missing`, a feature under drop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.columns import Column, Dense, Features, Items, Ragged, Unusable
from onnxgrad.training.data.fields import LABELS, Field
from onnxgrad.training.data.labels import missing_labels
from onnxgrad.training.data.raw_columns import raw_column, raw_columns


class NoRowsLeft(BadInput):
    """Every row lacks a value."""


class DroppedRows:
    """Rows that are left out, as the labels or a column that feeds an input lack a value; and their number.

    Args:
        missing: see `TableSettings`; other ways than "drop" fill the columns in, and only labels are needed.
    """

    def __init__(self, missing: str = "drop") -> None:
        self.missing = missing
        self.rows = self.gone = self.unlabelled = 0

    def find_kept(
        self, columns: Mapping[str, Column], wanted: Mapping[str, Features], labels: Collection[str]
    ) -> np.ndarray | None:
        """The other rows of `columns`; None where no column feeds an input, or holds labels.

        Args:
            columns: by name.
            wanted: those that feed an input.
            labels: the inputs of the loss.
        """
        fed = [f.names for n, f in wanted.items() if n not in labels and self.missing == "drop"]
        raws = [raw_columns(columns, names) for names in fed]
        gone = [raw.missing for own in raws for raw in own.values()]
        unlabelled = [_unlabelled(columns[n], n) for n in _label_columns(columns, wanted, labels)]
        if len({len(each) for each in [*gone, *unlabelled]}) != 1:  # none, or sizes that are refused later
            return None
        left_out = np.any([*gone, *unlabelled], axis=0)
        self.rows += len(left_out)
        self.gone += int(left_out.sum())
        self.unlabelled += int(np.any(unlabelled, axis=0).sum()) if unlabelled else 0
        return np.flatnonzero(~left_out)

    def none_left(self, source: str) -> NoRowsLeft:
        """The refusal of a `source` all of whose rows are left out."""
        if self.missing != "drop":
            return NoRowsLeft(f"no row of {source} has a label")
        return NoRowsLeft(f"every row of {source} has a missing value, so --missing drop leaves none")

    def notes(self, source: str) -> list[str]:
        """A line with the number of these rows, if there are any."""
        if not self.gone:
            return []
        labels = f", {self.unlabelled:,} of them without a label" if self.unlabelled else ""
        return [f"{self.gone:,} of {self.rows:,} rows of {source} lack a value and are left out{labels}"]


def _label_columns(columns: Mapping[str, Column], wanted: Mapping[str, Features], labels: Collection[str]) -> list[str]:
    """The columns of labels: those that feed an input of the loss, or will be matched to it (see `fields.match`)."""
    used = {called for features in wanted.values() for called in features.names}
    left = [n for n in columns if n not in used]
    found = [n for n in left if n in labels]
    others = [n for n in left if n not in found]
    if len([n for n in labels if n not in found and n not in wanted]) == 1:
        named = [n for n in others if n.lower() in LABELS]
        found += named if len(named) == 1 else others if len(others) == 1 else []
    return [*found, *(called for n, f in wanted.items() if n in labels for called in f.names)]


def _unlabelled(column: Column, name: str) -> np.ndarray:
    """True for rows of labels without a value; false for those that are not in memory, as pictures."""
    found: Any = column.array
    if isinstance(column, Unusable):
        found = raw_column(column, name).values
    elif isinstance(column, (Dense, Items, Ragged)) and found is None:
        found = column.take(np.arange(len(column)), Field(name, np.dtype(np.float64), ()))
    if found is None:
        return np.zeros(len(column), bool)
    if isinstance(found, list):
        return np.array([missing_labels(np.asarray(row)).any() for row in found])
    return np.any(missing_labels(np.asarray(found)).reshape(len(column), -1), axis=1)
