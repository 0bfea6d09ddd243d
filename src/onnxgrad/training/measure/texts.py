"""Generated texts beside reference texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.training.metrics.registry import names_of, running

#: Metrics that need no further package.
USUAL = ("exact",)


def compare_texts(
    texts: Sequence[str], references: Sequence[str], metrics: Sequence[str] | str | None = None
) -> dict[str, float]:
    """Metrics of `texts` beside `references`.

    Args:
        texts: as a model wrote them (see `onnxgrad.generate`).
        references: one for each text.
        metrics: names, in a list or with commas between them: exact, bleu, chrf, rouge1, rouge2, rougeL.
            Default: exact.

    Raises:
        BadInput: there are not as many references, a metric is not of texts, or the package for it is missing.
        UnknownName: there is no such metric.
    """
    if len(texts) != len(references):
        raise BadInput(f"there are {len(texts)} texts and {len(references)} references; each text needs one")
    found = {}
    for name in names_of(metrics) or USUAL:
        metric = running(name, "texts")
        metric.add(np.array(texts, object), np.array(references, object))
        found[name] = metric.result()
    return found
