"""Preferences: pairs of a chosen and a rejected answer, which are two rows of a batch, one after the other.

DPO compares the log-likelihoods of both with those by a reference, the model before training. They are computed once,
when the data are opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Session
from onnxgrad.training.data.columns import Column
from onnxgrad.training.data.fields import Field
from onnxgrad.training.data.text import Tokens
from onnxgrad.training.language.limits import scores_of

#: The ends of the names of label inputs with a number for each row: its log-likelihood by the reference, its advantage.
REFERENCE, ADVANTAGE = "_reference", "_advantage"


class Pairs(Column):
    """Pairs of rows of another column: each row of the data is two rows of a batch.

    Args:
        column: the first and the second row of each pair, one after the other.
    """

    def __init__(self, column: Column) -> None:
        self.column = column
        if column.lengths is not None:
            self.lengths = column.lengths.reshape(-1, 2).max(1)

    def __len__(self) -> int:
        return len(self.column) // 2

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray | list[np.ndarray]:
        """Both rows of each of these pairs."""
        return self.column.take((2 * rows[:, None] + np.arange(2)).ravel(), field)


class Numbers(Column):
    """A number for each row, which are not rows of the data."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray:
        """The numbers of these rows."""
        return self.values[rows].astype(field.dtype)


def sides_of(documents: Sequence[Mapping[str, Any]], source: str) -> list[list[Mapping[str, Any]]]:
    """The chosen and the rejected documents. Raises BadInput for a row that is no pair."""
    for number, document in enumerate(documents):
        if "pair" not in document:
            raise BadInput(f"row {number} of {source} is no preference: it needs the fields chosen and rejected")
    return [[document["pair"][side] for document in documents] for side in (0, 1)]


def check_answers(labels: Sequence[np.ndarray], ignored: int, source: str) -> None:
    """Raise BadInput unless each of the rows, two for each pair, has a label that counts behind its first token."""
    for number, row in enumerate(labels):
        if (row[1:] == ignored).all():
            side = ("chosen", "rejected")[number % 2]
            raise BadInput(
                f"row {number // 2} of {source} has no token of the {side} answer that counts\n"
                "  hint: --max-length (in Python max_length=) must leave room for the answers"
            )


def paired(
    made: Mapping[str, Column], fields: Sequence[Field], labels: Tokens, reference: ir.Model | None, rows: int
) -> dict[str, Column]:
    """Columns of pairs, with log-likelihoods by the `reference` where the loss reads them.

    Args:
        made: columns with two rows for each pair.
        fields: the inputs of the step.
        labels: see `log_likelihoods`, as `rows`.
        reference: the model before training.
        rows: how many run at once.

    Raises:
        BadInput: there is no reference, and the loss needs one.
    """
    found: dict[str, Column] = {name: c if c.whole else Pairs(c) for name, c in made.items()}
    for field in [f for f in fields if f.label and f.name.endswith(REFERENCE)]:
        if reference is None:
            raise BadInput("a step without the model that it was compiled from has no reference for dpo")
        found[field.name] = Pairs(Numbers(log_likelihoods(reference, made, fields, labels, rows)))
    return found


def log_likelihoods(
    model: ir.Model, columns: Mapping[str, Column], fields: Sequence[Field], labels: Tokens, rows: int
) -> np.ndarray:
    """Σ log p of the labels that count, for each row of `columns`, by `model`.

    Args:
        model: with scores of tokens as an output.
        columns: for the inputs of the model.
        fields: the inputs.
        labels: the next token at each place, or a negative number.
        rows: how many run at once.
    """
    session, scores = Session(model), scores_of(model)
    assert scores is not None  # or it raises
    name = scores.name or ""
    order = np.argsort([len(row) for row in labels.items], kind="stable")
    found = np.zeros(len(order), np.float32)
    label = Field("labels", np.dtype(np.int64), (None,))
    for part in (order[i : i + rows] for i in range(0, len(order), rows)):
        feeds = {}
        for field in [f for f in fields if not f.label and f.name in session.inputs]:
            column = columns[field.name]
            taken = column.take(np.arange(len(column)) if column.whole else part, field)
            feeds[field.name] = np.asarray(taken).astype(field.dtype)
        logits = session.run(feeds, [name])[name].astype(np.float64)
        target = labels.take(part, label)
        logits -= logits.max(-1, keepdims=True)
        own = np.take_along_axis(logits, np.maximum(target, 0)[..., None], -1)[..., 0]
        own -= np.log(np.exp(logits).sum(-1))
        found[part] = np.where(target >= 0, own, 0).sum(1)
    return found
