"""Masked language modelling: the model predicts tokens that were hidden (Devlin et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: The share of tokens that are learned, and the shares of these that are hidden, and replaced by any token.
LEARNED, HIDDEN, REPLACED = 0.15, 0.8, 0.1
#: The draw where none is given: held-out data are the same in every epoch.
_HELD_OUT = (0x6D6C6D,)


@dataclass(frozen=True)
class Masking:
    """New masks for each epoch, as functions of the seed, the epoch and the row.

    Attributes:
        tokens: the input with the tokens.
        labels: the input with the tokens to find, at every place that may be learned.
        mask: the token that hides another.
        vocabulary: how many tokens there are.
        ignored: the label of places that are not learned.
    """

    tokens: str
    labels: str
    mask: int
    vocabulary: int
    ignored: int = -100

    def __call__(
        self, batch: Mapping[str, np.ndarray], rows: np.ndarray, draw: Sequence[int] | None
    ) -> dict[str, np.ndarray]:
        """Tokens and labels of `batch`, whose rows have these numbers."""
        tokens, labels = batch[self.tokens].copy(), np.full_like(batch[self.labels], self.ignored)
        for ids, learned, own, row in zip(tokens, labels, batch[self.labels], rows):
            random = np.random.default_rng([*(_HELD_OUT if draw is None else draw), int(row)])
            places = np.flatnonzero(own != self.ignored)
            chance = random.random(len(places))
            chosen = places[chance < LEARNED] if (chance < LEARNED).any() else places[[chance.argmin()]]
            learned[chosen] = own[chosen]
            fate = random.random(len(chosen))
            ids[chosen[fate < HIDDEN]] = self.mask
            other = chosen[(fate >= HIDDEN) & (fate < HIDDEN + REPLACED)]
            ids[other] = random.integers(0, self.vocabulary, len(other))
        return {self.tokens: tokens, self.labels: labels}
