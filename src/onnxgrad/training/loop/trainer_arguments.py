"""What the arguments of a trainer may be, and those of its `fit`, as far as they alone can tell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.keywords import check_kind
from onnxgrad.training.data import Augment, Images
from onnxgrad.training.loop.callbacks import Callback


def check_whole(**numbers: Any) -> None:
    """Raise BadInput for an argument that should be a whole number, and is none."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, np.integer))):
            raise BadInput(f"{name} is a whole number, not {number!r}")


def check_fit(
    *,
    numbers: tuple[int, int, int],
    evaluate_every: int | None,
    patience: int | None,
    keep: int | None,
    planned: int | None,
    validation: Any,
    validation_split: float | None,
    why_not: str,
    monitor: str,
    images: Images | None,
    augment: Augment | str | None,
    paths: dict[str, str | os.PathLike | None],
    callbacks: Sequence[Callback],
) -> bool:
    """Whether validation data are measured, if the arguments of `fit` go together.

    Args:
        numbers: epochs, batch size and seed.
        planned: the most rows of a batch that memory was planned for.
        why_not: why validation data cannot be measured, if they cannot be.
        paths: what is written where, by the names of the arguments.

    Raises:
        BadInput: one is of another type or too small, or two exclude each other.
    """
    epochs, batch_size, seed = numbers
    check_whole(epochs=epochs, batch_size=batch_size, seed=seed)
    check_whole(evaluate_every=evaluate_every, patience=patience, keep=keep)
    check_kind("validation_split", validation_split, (int, float), "a number between 0 and 1")
    check_kind("monitor", monitor, str, "a name, as 'validation_loss'")
    check_kind("images", images, Images, "an Images(…)")
    check_kind("augment", augment, (str, Augment), "a text, as 'flip,crop=4', or an Augment(…)")
    for name, path in paths.items():
        check_kind(name, path, (str, os.PathLike), "a path")
    if not isinstance(callbacks, Sequence) or not all(isinstance(c, Callback) for c in callbacks):
        raise BadInput(f"callbacks are a list of Callback, not {callbacks!r}")
    for what, n, least in (("epochs", epochs, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
        if n < least:
            raise BadInput(f"{what} must be at least {least}, not {n}")
    if planned is not None and batch_size > planned:
        raise BadInput(f"memory was planned for batches of at most {planned} rows, not {batch_size}")
    if validation is not None and validation_split is not None:
        raise BadInput("validation and validation_split exclude each other")
    measures = validation is not None or validation_split is not None
    if measures and why_not:
        raise BadInput(why_not)
    if evaluate_every is not None and evaluate_every < 1:
        raise BadInput(f"evaluate_every must be at least 1, not {evaluate_every}")
    if evaluate_every is not None and not measures:
        raise BadInput("evaluate_every measures validation data, and there are none")
    return measures
