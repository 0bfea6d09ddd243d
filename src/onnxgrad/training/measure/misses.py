"""The worst rows of a model by loss, with images of them and of the confusion matrix."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput
from onnxgrad.figures import drawing, plain, png
from onnxgrad.training.metrics.registry import surprise

#: Classes that have a name each in the picture of the confusion matrix.
NAMED = 30


@dataclass(frozen=True, order=True)
class Miss:
    """A row that a prediction is far from.

    Attributes:
        loss: −log of the probability of the actual class; of numbers, the mean squared error.
        row: its number in the data.
        actual: the label.
        predicted: what the model says, a class or the numbers.
        image: what the model was fed, [channels, height, width] or [height, width], if that is a picture.
    """

    loss: float
    row: int
    actual: str = field(compare=False)
    predicted: str = field(compare=False)
    image: np.ndarray | None = field(compare=False, default=None, repr=False)


class Misses:
    """Collects the `most` rows with the largest losses, batch by batch."""

    def __init__(self, most: int, classes: Sequence[str] | None) -> None:
        self.most, self.classes, self.rows = most, classes, 0
        self._kept: list[Miss] = []

    def add(self, scores: Any, labels: Any, fed: Mapping[str, np.ndarray], rows: int) -> None:
        """Add `rows` rows: their scores and labels in the form of the metrics, and the feeds of the model.

        Raises:
            BadInput: they have not one label each.
        """
        if not isinstance(scores, np.ndarray) or len(scores) != rows:
            raise BadInput("the worst predictions are of rows with one label each; these have several or none")
        numbers = labels.ndim > 1
        losses = ((scores - labels) ** 2).mean(1) if numbers else surprise(scores, labels)
        image = next((a for a in fed.values() if _is_picture(a)), None)
        for i in np.argsort(-losses, kind="stable")[: self.most]:
            if numbers:
                actual, predicted = _numbers(labels[i]), _numbers(scores[i])
            else:
                found = scores[i].argmax() if scores.ndim > 1 else scores[i] > 0
                actual, predicted = self._named(int(labels[i])), self._named(int(found))
            miss = Miss(float(losses[i]), self.rows + int(i), actual, predicted, None if image is None else image[i])
            (heapq.heappush if len(self._kept) < self.most else heapq.heappushpop)(self._kept, miss)
        self.rows += rows

    def _named(self, number: int) -> str:
        return self.classes[number] if self.classes and number < len(self.classes) else str(number)

    def result(self) -> list[Miss]:
        """The worst first."""
        return sorted(self._kept, key=lambda m: (-m.loss, m.row))


def _is_picture(array: np.ndarray) -> bool:
    """[rows, 1, 3 or 4 channels, height, width], or [rows, height, width]: of floats, and not of a few pixels."""
    if array.dtype.kind not in "fu" or array.ndim not in (3, 4) or min(array.shape[-2:]) < 6:
        return False
    return array.ndim == 3 or array.shape[1] in (1, 3, 4)


def _numbers(row: np.ndarray) -> str:
    shown = ", ".join(f"{v:.4g}" for v in row[:4])
    return f"{shown}, …" if len(row) > 4 else shown


def misses_picture(misses: Sequence[Miss]) -> bytes | None:
    """A PNG file of the rows that are pictures; None if none is. Raises BadInput without matplotlib."""
    shown = [m for m in misses if m.image is not None]
    if not shown:
        return None
    columns = min(6, len(shown))
    rows = -(-len(shown) // columns)
    with drawing() as new_figure:
        figure = new_figure(figsize=(1.7 * columns, 2.1 * rows))
        for k, miss in enumerate(shown):
            axis = figure.add_subplot(rows, columns, k + 1)
            axis.imshow(_as_shown(miss.image), cmap="gray")
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(f"row {miss.row}: {plain(miss.actual)}\nread {plain(miss.predicted)}", fontsize=8)
        return png(figure)


def _as_shown(image: Any) -> np.ndarray:
    """The channels last, between 0 and 1 by the least and the largest number of each."""
    array = np.asarray(image, np.float64)
    if array.ndim == 3:
        array = array[0] if len(array) == 1 else array[:3].transpose(1, 2, 0)
    low, high = array.min(axis=(0, 1)), array.max(axis=(0, 1))
    return (array - low) / np.where(high > low, high - low, 1)


def confusion_picture(table: np.ndarray, classes: Sequence[str] | None = None) -> bytes:
    """A PNG file of a confusion matrix [actual, predicted], colored by shares of its rows.

    Raises:
        BadInput: matplotlib is missing.
    """
    size = len(table)
    side = float(np.clip(0.4 * size, 3, 9))
    rows = table.sum(1, keepdims=True)
    shares = table / np.where(rows, rows, 1)
    with drawing() as new_figure:
        figure = new_figure(figsize=(side + 1, side))
        axis = figure.add_subplot()
        figure.colorbar(axis.imshow(shares, cmap="Blues", vmin=0, vmax=1), label="share of the actual class")
        if size <= NAMED:
            names = [plain(str(classes[c]), 24) if classes and c < len(classes) else str(c) for c in range(size)]
            axis.set_xticks(range(size), names, rotation=90 if max(map(len, names)) > 2 else 0)
            axis.set_yticks(range(size), names)
            for i, j in zip(*np.nonzero(table)):
                color = "white" if shares[i, j] > 0.5 else "black"
                axis.text(j, i, str(int(table[i, j])), ha="center", va="center", fontsize=8, color=color)
        axis.set(xlabel="predicted", ylabel="actual")
        return png(figure)
