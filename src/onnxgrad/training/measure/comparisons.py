"""Comparisons of a batch's predictions with its labels, and the metrics accumulated from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import BadInput
from onnxgrad.training.metrics.dense import peaks
from onnxgrad.training.metrics.registry import METRICS, WHILE_TRAINING, running
from onnxgrad.training.metrics.running import Running


@dataclass(frozen=True)
class Comparison:
    """Predictions of numbers against numbers, [N, …] both; other tasks derive from it.

    Attributes:
        task: which metrics fit (see `onnxgrad.training.metrics.registry`).
        further: metrics that are usual besides those of the task.
        maps: the task of metrics that need the shape of masks, where predictions may be such; or nothing.
    """

    maps: ClassVar[tuple[str, ...]] = ()
    task: str = field(default="numbers", init=False)

    @property
    def further(self) -> tuple[str, ...]:
        """Metrics that are usual besides those of the task."""
        return ()

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[Any, Any]:
        """Scores and labels."""
        return _flat(prediction), _flat(label)

    def first_rows(self, prediction: np.ndarray, share: float) -> np.ndarray:
        """The entries of the first rows, a `share` of the batch."""
        return prediction[: round(share * len(prediction))]


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1).astype(np.float64)


@dataclass(frozen=True)
class Known(Comparison):
    """Predicted numbers against labels in which one number marks unknown places, as 0 does in maps of depth."""

    unknown: float = 0.0

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The known labels with their predictions, [labels, 1] both."""
        kept = label.ravel() != self.unknown
        return tuple(x.reshape(-1, 1)[kept].astype(np.float64) for x in (prediction, label))


@dataclass(frozen=True)
class Classes(Comparison):
    """Scores of classes against class numbers.

    Attributes:
        axis: of the classes: [N, C, …] or [N, …, C] against [N, …].
        ignored: the label that does not count.
        probabilities: True if the scores are probabilities, whose logarithms count.
        words: True if labels are tokens in a row.
        pixels: True if labels are masks.
        called: what the labels are called in messages.
    """

    axis: int = 1
    ignored: int | None = None
    probabilities: bool = False
    words: bool = False
    called: str = "labels"
    pixels: bool = False
    task: str = field(default="classes", init=False)

    @property
    def further(self) -> tuple[str, ...]:
        """Metrics that are usual besides those of the task."""
        return ("perplexity",) if self.words else ("miou",) if self.pixels else ()

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores [rows, classes], labels [rows] that count."""
        scores = np.moveaxis(prediction, self.axis, -1)
        scores, labels = _wide(scores.reshape(-1, scores.shape[-1])), label.reshape(-1).astype(np.int64)
        if self.ignored is not None:
            kept = labels != self.ignored
            scores, labels = scores[kept], labels[kept]
        bad = (labels < 0) | (labels >= scores.shape[1])
        if bad.any():
            raise BadInput(
                f"the label {labels[bad][0]} of {self.called!r} is none of the {scores.shape[1]} classes of the model"
            )
        if self.probabilities:
            with np.errstate(divide="ignore"):
                scores = np.log(np.maximum(scores, 0))
        return scores, labels


@dataclass(frozen=True)
class Ranked(Classes):
    """Compare labels with per-row summary scores (loss, rank of the target, top-1).

    Losses computed in blocks never materialize all logits: see the task ``ranked`` of the metrics.

    Attributes:
        size: how many classes there are.
    """

    size: int = 0
    task: str = field(default="ranked", init=False)

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Three numbers [rows, 3] for each label that counts; rows behind the last label are there to fill a block."""
        labels = label.reshape(-1).astype(np.int64)
        scores_of_rows = prediction.reshape(-1, 3)[: labels.size]
        kept = np.ones(labels.shape, bool) if self.ignored is None else labels != self.ignored
        return scores_of_rows[kept], labels[kept]

    def first_rows(self, prediction: np.ndarray, share: float) -> np.ndarray:
        """All blocks: those behind the last label are left out."""
        return prediction


def _wide(x: np.ndarray) -> np.ndarray:
    """At least float32."""
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)


def are_shares(y: np.ndarray, axis: int) -> bool:
    """True if all scores lie in [0, 1] and sum to 1 along `axis`, which logits never do by chance.

    Ensembles of trees compute 1 - p, which rounding may leave a little below 0.
    """
    return y.shape[axis] > 1 and bool((y >= -1e-5).all() and (np.abs(y.sum(axis, dtype=np.float64) - 1) < 1e-3).all())


@dataclass(frozen=True)
class Binary(Comparison):
    """Log-odds, or probabilities, against 0 and 1 of the same shape."""

    maps: ClassVar[tuple[str, ...]] = ("maps",)
    probabilities: bool = False
    task: str = field(default="binary", init=False)

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-odds [elements], labels [elements]."""
        scores, labels = prediction.ravel().astype(np.float64), (label.ravel() > 0.5).astype(np.int64)
        if self.probabilities:
            scores = np.clip(scores, 0, 1)
            with np.errstate(divide="ignore"):
                scores = np.log(scores) - np.log1p(-scores)
        return scores, labels


@dataclass(frozen=True)
class Maps(Comparison):
    """Scores of pixels against masks of 0 and 1 (anomaly maps), whose metrics are of regions and pictures."""

    task: str = field(default="maps", init=False)

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores and labels [rows, H, W]."""
        if prediction.size != label.size or label.ndim not in (3, 4) or (label.ndim == 4 and 1 not in label.shape[1:]):
            raise BadInput(f"maps are compared with masks of their size, not {_sizes(prediction)} with {_sizes(label)}")
        mask = label if label.ndim == 3 else label.squeeze(1 + label.shape[1:].index(1))
        return _wide(prediction).reshape(mask.shape), mask

    @staticmethod
    def fits(metrics: Sequence[str] | None) -> bool:
        """True if all `metrics` are defined for maps, and some only for these."""
        tasks = [METRICS[m.partition(":")[0]].tasks.keys() for m in metrics or ()]
        return bool(tasks) and all("maps" in t for t in tasks) and any("binary" not in t for t in tasks)


def _sizes(x: np.ndarray) -> str:
    return " × ".join(map(str, x.shape))


@dataclass(frozen=True)
class Sequences(Comparison):
    """Scores of symbols over time against label sequences (CTC), decoded greedily.

    The best symbol of every time step, repetitions merged and blanks dropped (Graves et al. 2006, best path).

    Attributes:
        blank: the symbol that stands for nothing; it and negative numbers are padding in labels.
        time: the axis of time, 1 of [N, T, C] or 0 of [T, N, C].
    """

    blank: int = 0
    time: int = 1
    task: str = field(default="sequences", init=False)

    def first_rows(self, prediction: np.ndarray, share: float) -> np.ndarray:
        """The first rows, along the axis that is not time."""
        rows = round(share * prediction.shape[1 - self.time])
        return prediction[:rows] if self.time == 1 else prediction[:, :rows]

    def decoded(self, prediction: np.ndarray) -> list[np.ndarray]:
        """The symbols of every row."""
        best = np.moveaxis(prediction.argmax(-1), self.time, 1)
        changed = np.ones(best.shape, bool)
        changed[:, 1:] = best[:, 1:] != best[:, :-1]
        return [row[keep] for row, keep in zip(best, changed & (best != self.blank))]

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The symbols read and wanted, of every row."""
        return self.decoded(prediction), [row[(row >= 0) & (row != self.blank)] for row in label]


@dataclass(frozen=True)
class Points(Comparison):
    """Key points [N, K, 2], or heat maps [N, K, H, W], against x, y and visibility [N, K, 3]."""

    task: str = field(default="points", init=False)

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Points and labels; of a heat map, the point is its largest cell."""
        return peaks(prediction) if prediction.ndim == 4 else prediction, label


@dataclass(frozen=True)
class Embeddings(Comparison):
    """Embeddings [N, size] against numbers of groups [N], whose rows belong together; `hint` ends a refusal."""

    hint: str = ""
    task: str = field(default="embeddings", init=False)

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Embeddings and groups."""
        if prediction.ndim != 2 or label.ndim != 1:
            raise BadInput(
                f"embeddings are [rows, size] and their labels [rows], not {list(prediction.shape)} and "
                f"{list(label.shape)}{self.hint}"
            )
        return prediction, label


@dataclass(frozen=True)
class Companion(Comparison):
    """Outputs beside a prediction that say how sure it is, as `onnxgrad.uncertainty` writes them.

    Attributes:
        outputs: their names, ends of an interval or a mean and its spread; of a set, one.
    """

    task: str = "gaussian"
    outputs: tuple[str, ...] = ()

    def fits(self, other: Comparison) -> bool:
        """True if the outputs are measured beside `other`."""
        return other.task == ("classes" if self.task == "sets" else "numbers")

    def __call__(self, prediction: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Parts [rows, size, 2] and numbers [rows, size]; or sets [rows, classes] and class numbers."""
        if self.task == "sets":
            return prediction[..., 0], label.reshape(-1)
        return prediction.reshape(len(prediction), -1, 2).astype(np.float64), _flat(label)


def companion(model: ir.Model, output: ir.Value) -> Companion | None:
    """The outputs of `model` that say how sure `output` is; None if there are none."""
    names, y = {v.name for v in model.graph.outputs}, output.name
    forms = {"sets": [f"{y}_set"], "intervals": [f"{y}_lower", f"{y}_upper"], "gaussian": [f"{y}", f"{y}_spread"]}
    return next((Companion(task, tuple(parts)) for task, parts in forms.items() if names.issuperset(parts)), None)


class Meter:
    """Metrics of one prediction, added up over batches.

    Args:
        comparison: lays predictions beside labels.
        names: of metrics. Default: those usual while training, without what is not defined.
        classes: the names of the classes, where they are known.

    Raises:
        BadInput: a metric that is not defined for the task.
    """

    def __init__(
        self, comparison: Comparison, names: Sequence[str] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self.comparison, self._asked, self.size, self.count = comparison, names is not None, 0, 0
        usual = (*WHILE_TRAINING.get(comparison.task, ()), *comparison.further)
        self.running: dict[str, Running] = {
            name: running(name, comparison.task, classes) for name in (usual if names is None else names)
        }

    def add(self, prediction: np.ndarray, label: np.ndarray) -> tuple[Any, Any]:
        """Add a batch: its scores and labels."""
        scores, labels = self.comparison(prediction, label)
        self.count += len(labels)
        ranked = self.comparison.size if isinstance(self.comparison, Ranked) else 0
        self.size = scores.shape[1] if self.comparison.task == "classes" else ranked
        if len(labels):
            for name, metric in self.running.items():
                by_label = label.ndim == 2 and METRICS[name.partition(":")[0]].by_label
                shape = label.shape if by_label and self.comparison.task == "binary" and label.shape[1] > 1 else None
                metric.add(*((scores, labels) if shape is None else (scores.reshape(shape), labels.reshape(shape))))
        return scores, labels

    def sums(self) -> dict[str, Any]:
        """The sums so far, as JSON and arrays."""
        return {"size": self.size, "count": self.count, "of": {n: m.sums() for n, m in self.running.items()}}

    def join(self, sums: Mapping[str, Any]) -> None:
        """Add the `sums` of another comparison of this kind."""
        self.size, self.count = self.size or sums["size"], self.count + sums["count"]
        for name, metric in self.running.items():
            metric.join(sums["of"][name])

    def result(self) -> dict[str, float]:
        """The metrics by name."""
        found = {name: metric.result() for name, metric in self.running.items()}
        if self._asked:
            return found
        return {k: v for k, v in found.items() if not math.isnan(v) and (k != "top5" or self.size > 5)}
