"""Inputs of language models beside tokens: masks, positions, segments, and caches, which are empty in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.columns import Column, Dense
from onnxgrad.training.data.fields import Field, is_float
from onnxgrad.training.data.text import Tokens
from onnxgrad.training.graph.decoder_inputs import is_of_decoder, mask_of_pairs, role_of


class Empty(Column):
    """A cache without entries: the axis of tokens has length 0.

    Args:
        size: number of rows.

    Raises:
        BadInput: the sizes of the other axes are not known.
    """

    def __init__(self, size: int, field: Field) -> None:
        self.size = size
        unknown = [axis for axis, dim in enumerate(field.shape) if dim is None]
        if len(unknown) != 1:
            what = "fixes the number of tokens" if not unknown else "declares the number of tokens alone of no axis"
            raise BadInput(
                f"the cache {field.name!r} ({field.wanted}) cannot be empty: the model {what}\n"
                "  hint: export it with one dynamic axis beside that of the batch"
            )
        self.shape = tuple(dim or 0 for dim in field.shape)

    def __len__(self) -> int:
        return self.size

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray:
        """The caches of these rows."""
        return np.zeros((len(rows), *self.shape), field.dtype)


class Together(Column):
    """Masks [T, T] of rows: a token attends to those of its own document, and not to later ones if `causal`.

    Args:
        documents: for each row, the number of the document of each token.
    """

    def __init__(self, documents: Sequence[np.ndarray], causal: bool) -> None:
        self.items, self.causal = documents, causal
        self.lengths = np.array([len(row) for row in documents], np.int64)

    def __len__(self) -> int:
        return len(self.items)

    def take(self, rows: np.ndarray, field: Field) -> np.ndarray:
        """The masks of these rows (see `mask_of_pairs`)."""
        width = field.shape[-1] or max(len(self.items[i]) for i in rows)
        found = np.zeros((len(rows), width, width), bool)
        for target, i in zip(found, rows):
            one = self.items[i]
            target[: len(one), : len(one)] = one[:, None] == one
        return mask_of_pairs(found, self.causal, len(field.shape) + 1, field.dtype)


def tokens_of(fields: Sequence[Field], decoder: bool = False) -> Field | None:
    """The input for the tokens (of the decoder); None if the model has none."""
    found = [f for f in fields if _role(f) == "ids" and is_of_decoder(f.name) == decoder]
    named = [f for f in found if "ids" in f.name.lower()]
    return next(iter(named or found), None)


def _role(field: Field) -> str:
    """The role of an input (see `role_of`); labels have none."""
    rank, is_whole = 0 if field.scalar else len(field.shape) + 1, field.dtype.kind in "iu"
    return "" if field.label else role_of(field.name, rank, is_whole, is_float(field.dtype))


def masks_apart(fields: Sequence[Field]) -> bool:
    """True if the model takes a mask for each pair of tokens, which keeps the documents of a row apart."""
    return any(_role(f) == "masks" and len(f.shape) > 1 for f in fields)


def inputs_beside(
    fields: Sequence[Field], documents: Sequence[np.ndarray], positions: Sequence[np.ndarray], causal: bool
) -> dict[str, Column]:
    """Columns for masks, positions, segments and caches among `fields`.

    Args:
        fields: inputs of one part of the model, the encoder or the decoder.
        documents: for each row, the number of the document of each token.
        positions: for each row, the place of each token in its document.
        causal: tokens do not attend to later ones.
    """
    found: dict[str, Column] = {}
    for field in fields:
        role, is_flat = _role(field), len(field.shape) == 1
        if role in ("branch", "keep"):  # the branch without a cache, and the scores of all tokens
            found[field.name] = Dense(np.zeros(() if field.scalar else 1, field.dtype))
            found[field.name].whole = True
        elif role == "pasts":
            found[field.name] = Empty(len(documents), field)
        elif role == "masks" and len(field.shape) > 1:
            found[field.name] = Together(documents, causal)
        elif role == "masks" and is_flat:
            found[field.name] = Tokens([np.ones(len(row), np.int64) for row in documents], 0)
        elif role == "positions" and is_flat:
            found[field.name] = Tokens(positions, 0)
        elif role == "types":
            found[field.name] = Tokens([np.zeros(len(row), np.int64) for row in documents], 0)
    return found


def parts_of(fields: Sequence[Field]) -> Mapping[bool, list[Field]]:
    """The inputs of the decoder (True), whose names say so, and the others (False)."""
    return {part: [f for f in fields if is_of_decoder(f.name) == part] for part in (False, True)}
