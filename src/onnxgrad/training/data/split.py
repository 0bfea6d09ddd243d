"""Holding out a share of the rows, stratified by class where the labels are classes."""

from __future__ import annotations

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.data.batches import Data


def split(data: Data, share: float, seed: int) -> tuple[Data, Data]:
    """`data` without a random `share` of its rows, and that share (see `split_rows`)."""
    rest, set_aside = split_rows(data, share, seed)
    return data.select(rest, data.name), data.select(set_aside, f"the rows held out of {data.name}")


def split_rows(data: Data, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of `data` without a random `share` of them, and that share (see `divided`)."""
    return divided(len(data), data.labels, share, seed, data.name)


def divided(
    rows: int, labels: np.ndarray | None, share: float, seed: int, name: str = "the training data"
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of `rows` without a random `share` of them, and that share.

    The same seed sets the same rows aside. If one array of labels has class indices, one per row, each class is split
    separately (stratified): of a class with n rows, share·n are set aside, rounded so that the total is right.

    Raises:
        BadInput: the share is not between 0 and 1, or leaves one side empty.
    """
    if not 0 < share < 1:
        raise BadInput(f"the share of the rows to hold out is between 0 and 1, not {share}")
    count = round(share * rows)
    if not 0 < count < rows:
        raise BadInput(f"{name} has {rows} rows: a share of {share} leaves nothing on one side")
    random = np.random.default_rng([seed, 0x5EED])
    order = random.permutation(rows)
    if labels is not None:
        order = _interleave_classes(labels, order)
    held = np.zeros(rows, bool)
    held[order[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _interleave_classes(labels: np.ndarray, order: np.ndarray) -> np.ndarray:
    """`order` such that every beginning of it has each class in its share: by the place within the class."""
    place = np.empty(len(order))
    for label in np.unique(labels):
        mine = order[labels[order] == label]
        place[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return order[np.argsort(place[order], kind="stable")]
