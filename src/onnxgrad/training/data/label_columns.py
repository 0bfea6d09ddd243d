"""Columns of labels as a model takes them: indices of classes, or numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.columns import Column, Dense, Items, Mapped
from onnxgrad.training.data.fields import Field, is_float
from onnxgrad.training.data.labels import ClassColumn, NamedClasses, check_count, class_column, numbered
from onnxgrad.training.data.masks import ObjectMasks
from onnxgrad.wording import name_list


def label_column(column: Column, field: Field, classes: Sequence[str] | None, source: str, called: str) -> Column:
    """`column` for the labels `field` as class indices; text is mapped by `classes` if given.

    Raises:
        BadInput: a label is no class of the model, or there are more classes than the model tells apart.
    """
    where = f"array {called!r} of {source}"
    if isinstance(column, Items) and isinstance(getattr(column.fetch, "items", None), list):
        found = column.take(np.arange(1), field)
        if isinstance(found, np.ndarray) and found.dtype.kind == "U":  # text is numbered when all of it is known
            column = Dense(np.array(column.take(np.arange(len(column)), field)))
    if isinstance(column, Mapped) and column.rows.ndim == 1:  # small, and checked before the first step
        column = Dense(np.asarray(column.rows))
    is_number = is_float(field.dtype)  # of a single score: one of two classes
    if is_number and isinstance(column, ObjectMasks):
        column = column.merged()
    if is_number and (not field.binary or len(classes or ("", "")) != 2):
        return column
    column = class_column(column, where)
    if is_number and isinstance(column, ClassColumn) and len(column.names) != 2 and classes is None:
        raise BadInput(
            f"{where} has {len(column.names)} names of classes, {name_list(column.names)}; one score tells 2 apart"
        )
    is_named = isinstance(column, NamedClasses) or (column.array is not None and column.array.dtype.kind in "iub")
    if classes and (is_named or not is_number):
        column = numbered(column, classes, source, where, field.ignored)
    if isinstance(column, NamedClasses) and field.classes is not None and len(column.names) > field.classes:
        check_count(column.names, field.classes, source, own=classes is not None)
    return column
