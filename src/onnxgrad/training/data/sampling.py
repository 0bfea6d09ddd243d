"""Sampling of rows for an epoch: each row once, or each class equally often."""

from __future__ import annotations

import numpy as np

from onnxgrad.errors import BadInput

#: Ways to sample, by name.
SAMPLES = ("each", "balanced")


def check_sample(sample: str, labels: np.ndarray | None, shuffle: bool, source: str) -> None:
    """Raise BadInput unless rows can be sampled in this way; `labels` are the class indices of all rows, if any."""
    if sample not in SAMPLES:
        raise BadInput(f"sample is {' or '.join(map(repr, SAMPLES))}, not {sample!r}")
    if sample == "balanced" and not shuffle:
        raise BadInput("balanced samples are drawn at random: leave shuffle=False out")
    if sample == "balanced" and labels is None:
        raise BadInput(f"balanced samples need one array with a class number for each row of {source}")


def balanced(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw as many rows as `labels` has, in random order, with equal counts of each class (±1).

    All rows of a rare class occur before any of them repeats; of a frequent class, other epochs draw other rows.
    """
    known = np.unique(labels)
    shares = np.full(len(known), len(labels) // len(known))
    shares[random.permutation(len(known))[: len(labels) % len(known)]] += 1
    taken = []
    for label, share in zip(known, shares):
        own = np.flatnonzero(labels == label)
        rounds = [random.permutation(own) for _ in range(-(-share // len(own)))]
        taken.append(np.concatenate([*rounds, own[:0]])[:share])
    return random.permutation(np.concatenate(taken))
