"""Rows of tokens, as tasks of language models make them of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class TokenRow:
    """Tokens, and at each place the token that is learned there or the label that is ignored.

    Attributes:
        document: its number in the source.
        begins: the places where documents begin, if the row is packed.
        source: tokens of the encoder.
    """

    tokens: np.ndarray
    labels: np.ndarray
    document: int
    begins: tuple[int, ...] = (0,)
    source: np.ndarray | None = None

    @property
    def numbers(self) -> np.ndarray:
        """The number of the document of each token."""
        return np.searchsorted(np.array(self.begins), np.arange(len(self.tokens)), side="right")

    @property
    def positions(self) -> np.ndarray:
        """The place of each token in its document."""
        return np.arange(len(self.tokens)) - np.array(self.begins)[self.numbers - 1]


def number_tokens(rows: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Document numbers and positions of rows of one document each."""
    return [np.ones(len(row), np.int64) for row in rows], [np.arange(len(row)) for row in rows]


def join_rows(rows: Sequence[TokenRow]) -> TokenRow:
    """One packed row of the documents of `rows`."""
    begins = np.cumsum([0, *(len(row.tokens) for row in rows[:-1])])
    tokens, labels = (np.concatenate([getattr(row, name) for row in rows]) for name in ("tokens", "labels"))
    return TokenRow(tokens, labels, rows[0].document, tuple(int(b) for b in begins))
