"""The result of measuring a model on labelled data, one type for all tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrad.errors import json_text
from onnxgrad.training.measure.misses import Miss
from onnxgrad.training.metrics.registry import per_class


@dataclass
class Evaluated:
    """The result of `evaluate`, for every task.

    Attributes:
        task: "classes", "binary", "numbers", … (see `onnxgrad.training.metrics.registry`).
        metrics: by name.
        rows: how many labels were compared.
        labels: the array that they came from.
        prediction: the output that they were compared with.
        confusion: the confusion matrix [actual, predicted], of classes; of boxes, the background is the last of both.
        classes: precision, recall, f1 and rows of each class, by its name or number.
        worst: the rows with the largest losses, the worst first, where they were asked for.
        names: the names of the classes in the order of their numbers, where they are known; of boxes, the background
            is the last.
        curves: of each class of boxes, the precision at the IoU 0.5 at the recalls 0, 0.01, …, 1.
        pictures: the first pictures, where they were asked for, with boxes drawn on them, and their titles.
        notes: lines about how the rows were made.
    """

    task: str
    metrics: dict[str, float]
    rows: int
    labels: str
    prediction: str
    confusion: np.ndarray | None = None
    classes: dict[str, dict[str, float]] | None = None
    worst: list[Miss] | None = None
    names: Sequence[str] | None = None
    curves: Mapping[str, np.ndarray] | None = None
    pictures: Sequence[tuple[str, np.ndarray]] = ()
    notes: Sequence[str] = ()


def metrics_by_class(table: np.ndarray, names: Sequence[str] | None) -> dict[str, dict[str, float]]:
    """The metrics of each class that occurs in the confusion matrix `table`, by its name or else its number."""
    columns, known = per_class(table), names or ()
    return {
        str(known[c] if c < len(known) else c): {k: float(v[c]) for k, v in columns.items()}
        for c in np.flatnonzero(table.sum(0) + table.sum(1)).tolist()
    }


def as_json(found: Evaluated) -> str:
    """`found` as a line of JSON; numbers that are not defined are null."""

    def plain(x: float) -> float | None:
        return float(x) if np.isfinite(x) else None

    table = (found.classes or {}).items()
    classes = {name: {k: plain(v) for k, v in row.items()} for name, row in table} or None
    worst = None
    if found.worst is not None:
        columns = ("row", "actual", "predicted")
        worst = [{k: getattr(m, k) for k in columns} | {"loss": plain(m.loss)} for m in found.worst]
    curves = None if found.curves is None else {name: row.tolist() for name, row in found.curves.items()}
    return json_text(
        {
            "task": found.task,
            "metrics": {k: plain(v) for k, v in found.metrics.items()},
            "rows": found.rows,
            "labels": found.labels,
            "prediction": found.prediction,
            "classes": classes,
            "confusion": None if found.confusion is None else found.confusion.tolist(),
            "worst": worst,
            **({} if curves is None else {"names": list(found.names or ()), "curves": curves}),
        }
    )
