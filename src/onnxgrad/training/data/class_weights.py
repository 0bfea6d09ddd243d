"""Class weights against imbalance: n ÷ (C · n_c), like scikit-learn's "balanced"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.columns import Column, single_array
from onnxgrad.training.data.fields import LABELS
from onnxgrad.training.data.labels import class_column, numbered


def balanced_weights(labels: np.ndarray, classes: int, ignore_index: int | None = None) -> list[float]:
    """The weight of each of `classes` for these labels; classes that do not occur have weight 0.

    Raises:
        BadInput: labels that are no class numbers below `classes`.
    """
    labels = np.asarray(labels).ravel()
    if ignore_index is not None:
        labels = labels[labels != ignore_index]
    if labels.dtype.kind == "f" and (labels == np.trunc(labels)).all():
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "iub" or not labels.size or labels.min() < 0 or labels.max() >= classes:
        raise BadInput(f"balanced weights want class numbers from 0 to {classes - 1} as labels")
    found = np.bincount(labels.astype(np.int64), minlength=classes)
    seen = found > 0
    weights = np.zeros(classes)
    weights[seen] = labels.size / (seen.sum() * found[seen])
    return [round(float(w), 6) for w in weights]


def labels_in(columns: Mapping[str, Column], name: str | None, classes: Sequence[str] | None = None) -> np.ndarray:
    """The class numbers in one of `columns`.

    Args:
        columns: by name.
        name: of the labels. Default: the one that is called like labels are.
        classes: the names of the model's classes in the order of their numbers, if it has them.
    """
    found = [name] if name is not None else [n for n in columns if n.lower() in LABELS]
    if len(found) != 1 or found[0] not in columns:
        raise BadInput("balanced weights need the labels; say which array they are with --labels")
    column = class_column(columns[found[0]], f"array {found[0]!r}")
    if classes is not None:
        column = numbered(column, classes, "the data", f"array {found[0]!r}")
    array = single_array(column)
    if array is None:
        raise BadInput(f"balanced weights need labels in one array; {found[0]!r} is read row by row")
    return array
