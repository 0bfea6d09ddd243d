"""Rows of several sizes as one array: padded at the ends of their axes, and the inputs that say where rows end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.columns import Column
from onnxgrad.training.data.fields import Field


def padded(rows: Sequence[np.ndarray], field: Field, pad_to: int, where: str) -> np.ndarray:
    """One array of `rows`, each padded at the ends of its axes to the largest of them.

    Raises:
        BadInput: the rows differ in rank, or in a size that `field` fixes.
    """
    ranks = {a.ndim for a in rows}
    if ranks != {len(field.shape)}:
        raise BadInput(f"{where} has rows of rank {', '.join(map(str, sorted(ranks)))}; expected {field.wanted}")
    shape = []
    for axis, wanted in enumerate(field.shape):
        size = max(a.shape[axis] for a in rows)
        if wanted is not None and size > wanted:
            raise BadInput(f"{where} has a row of size {size} along axis {axis + 1}; expected {field.wanted}")
        shape.append(wanted if wanted is not None else -(-size // pad_to) * pad_to)
    if field.label and field.indices and any(a.shape != tuple(shape) for a in rows):
        check_padding(field, where)
    ignored = field.ignored if field.label and field.ignored is not None else 0
    result = np.full((len(rows), *shape), ignored, np.result_type(*{a.dtype for a in rows}))
    for i, row in enumerate(rows):
        result[i][tuple(slice(n) for n in row.shape)] = row
    return result


def check_padding(field: Field, where: str) -> None:
    """Raise BadInput if no label marks padding: 0 is a class, and would be learned."""
    if field.ignored is None:
        raise BadInput(
            f"{where} has rows of different lengths, and no label says what is padding\n"
            "  hint: cross_entropy:ignore_index=-100 pads with -100, and leaves it out"
        )


def find_ends(fields: Sequence[Field], columns: Mapping[str, Column]) -> dict[str, tuple[str, Field]]:
    """Inputs without a column that are lengths of a ragged field: its name, and their own field."""
    ragged = [f for f in fields if f.name in columns and columns[f.name].array is None]
    found = {}
    for field in fields:
        if field.name in columns or not ragged:
            continue
        if not field.name.endswith(("mask", "lengths", "length")):
            continue
        stems = [f for f in ragged if field.name.startswith(f.name.rstrip("s"))]
        of = stems or [f for f in ragged if f.label == field.label] or ragged
        found[field.name] = (of[0].name, field)
    return found
