"""Labels that are the model's own input: a language model that learns to repeat each token, not the next one."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from onnxgrad.errors import warn_caller
from onnxgrad.training.data import Data

#: Rows that are compared.
_ROWS = 16
_HINT = "\n  hint: --task causal-lm (in Python task='causal_lm') shifts labels to the next token"


def warn_of_unshifted(rows: Data) -> None:
    """Warn if class labels of tokens equal the tokens that the model reads, but for ignored ones."""
    labels = [f for f in rows.fields if f.label and f.indices and len(f.shape) == 1 and f.name in rows.columns]
    tokens = [f for f in rows.fields if not f.label and f.dtype.kind in "iu" and len(f.shape) == 1]
    if not labels or not tokens:
        return
    batch = next(iter(rows.batches(min(len(rows), rows.fixed or _ROWS))))
    for label in labels:
        own = batch[label.name]
        counted = own != (-100 if label.ignored is None else label.ignored)
        for field in tokens:
            given = batch[field.name]
            if given.shape == own.shape and counted.any() and np.array_equal(own[counted], given[counted]):
                warn_caller(
                    f"the labels {rows.called[label.name]!r} equal the input {field.name!r}: the model is trained to "
                    f"repeat each token, without a shift{_HINT}"
                )


def warn_of_own_input(labels: str | None, inputs: Collection[str]) -> None:
    """Warn if the loss compares with `labels` that are an input of tokens of the model."""
    if labels is not None and labels in inputs and "ids" in labels:
        warn_caller(
            f"the labels are the input {labels!r}: the model is trained to repeat each token, without a shift{_HINT}"
        )
