"""Metrics by name: one number for the predictions and the labels of a whole data set.

Each is a function of (scores, labels). What the scores are depends on the task:

| task | scores | labels |
|---|---|---|
| ``classes`` | log-probabilities [rows, classes] | class numbers [rows] |
| ``binary`` | log-odds [rows] | 0 or 1 [rows] |
| ``numbers`` | numbers [rows, size] | numbers [rows, size] |

A mean over classes (macro) is over the classes that occur in the labels: a class that is absent from them is no class
with a score of zero. Where a metric is not defined (the AUC of a single class), it is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Function = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Metric:
    """A metric, for the tasks that it is defined for.

    Attributes:
        formula: its definition, in a line.
        tasks: the function for each task.
        larger: whether more is better.
    """

    formula: str
    tasks: dict[str, Function]
    larger: bool = True


def counts(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The confusion matrix [actual, predicted], of numbers of rows."""
    size = scores.shape[1]
    return np.bincount(labels * size + scores.argmax(1), minlength=size * size).reshape(size, size)


def per_class(scores: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """precision, recall, f1 and rows of each class; precision is NaN for a class that is never predicted."""
    table = counts(scores, labels)
    right, actual, predicted = np.diag(table), table.sum(1), table.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "precision": right / predicted,
            "recall": right / actual,
            "f1": 2 * right / (actual + predicted),
            "rows": actual,
        }


def _macro(name: str) -> Function:
    def mean(scores: np.ndarray, labels: np.ndarray) -> float:
        table = per_class(scores, labels)
        return float(np.nan_to_num(table[name][table["rows"] > 0]).mean())

    return mean


def ranking_auc(scores: np.ndarray, ones: np.ndarray) -> float:
    """The area under the ROC curve: how often a one scores more than a zero, ties by half (Mann, Whitney 1947)."""
    ones = ones.astype(bool)
    m, n = int(ones.sum()), int((~ones).sum())
    if not m or not n:
        return float("nan")
    _, inverse, repeats = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(repeats) - (repeats - 1) / 2)[inverse.ravel()]
    return float((ranks[ones].sum() - m * (m + 1) / 2) / (m * n))


def average_precision(scores: np.ndarray, ones: np.ndarray) -> float:
    """Σ (recall_k − recall_{k−1}) · precision_k over the thresholds k, from the largest score down."""
    ones = ones.astype(bool)
    if not ones.any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.diff(scores[order], append=np.nan) != 0)  # the last row of each threshold
    found = np.cumsum(ones[order])[last]
    return float((np.diff(found, prepend=0) / found[-1] * found / (last + 1)).sum())


def _each_class(of: Function) -> Function:
    """`of` for each class against all others, averaged over the classes that occur."""

    def mean(scores: np.ndarray, labels: np.ndarray) -> float:
        chances = np.exp(scores)
        found = [of(chances[:, c], labels == c) for c in np.unique(labels)]
        return float(np.mean(found)) if found else float("nan")

    return mean


def _top(k: int) -> Function:
    def share(scores: np.ndarray, labels: np.ndarray) -> float:
        own = np.take_along_axis(scores, labels[:, None], 1)
        return float(((scores > own).sum(1) < k).mean())

    return share


def _accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    return float((scores.argmax(1) == labels).mean())


def _log_loss(scores: np.ndarray, labels: np.ndarray) -> float:
    return float(-np.take_along_axis(scores, labels[:, None], 1).mean())


def _two(function: Function) -> Function:
    """A metric of classes for log-odds: of the classes 0 and 1."""

    def of(scores: np.ndarray, labels: np.ndarray) -> float:
        return function(np.stack([-np.logaddexp(0, scores), -np.logaddexp(0, -scores)], 1), labels)

    return of


def _of_ones(name: str) -> Function:
    def of(scores: np.ndarray, labels: np.ndarray) -> float:
        right, said, actual = ((scores > 0) & (labels == 1)).sum(), (scores > 0).sum(), labels.sum()
        whole = {"precision": said, "recall": actual, "f1": (said + actual) / 2}[name]
        return float(right / whole) if whole else float("nan")

    return of


def _errors(of: Callable[[np.ndarray], np.ndarray]) -> Function:
    return lambda y, t: float(of(y - t).mean())


def _r2(y: np.ndarray, t: np.ndarray) -> float:
    spread = ((t - t.mean(0)) ** 2).sum()
    return float(1 - ((y - t) ** 2).sum() / spread) if spread else float("nan")


METRICS: dict[str, Metric] = {
    "accuracy": Metric("rows whose largest score is that of their class ÷ rows", {
        "classes": _accuracy, "binary": _two(_accuracy)}),
    "balanced_accuracy": Metric("the mean of the recall over classes (macro)", {
        "classes": _macro("recall"), "binary": _two(_macro("recall"))}),
    "top5": Metric("rows whose class is among the five largest scores ÷ rows", {"classes": _top(5)}),
    "precision": Metric("tp ÷ (tp + fp): of the ones, or the mean over classes (macro)", {
        "classes": _macro("precision"), "binary": _of_ones("precision")}),
    "recall": Metric("tp ÷ (tp + fn): of the ones, or the mean over classes (macro)", {
        "classes": _macro("recall"), "binary": _of_ones("recall")}),
    "f1": Metric("2·tp ÷ (2·tp + fp + fn): of the ones, or the mean over classes (macro)", {
        "classes": _macro("f1"), "binary": _of_ones("f1")}),
    "f1_micro": Metric("2·Σtp ÷ (2·Σtp + Σfp + Σfn) over all classes, which is the accuracy", {
        "classes": _accuracy, "binary": _two(_accuracy)}),
    "auc": Metric("area under the ROC curve; of several classes the mean of each against all others (macro)", {
        "classes": _each_class(ranking_auc), "binary": ranking_auc}),
    "average_precision": Metric("Σ (recall step) · precision; of several classes the mean (macro)", {
        "classes": _each_class(average_precision), "binary": average_precision}),
    "log_loss": Metric("the mean of −log of the probability of the true class", {
        "classes": _log_loss, "binary": _two(_log_loss)}, larger=False),
    "perplexity": Metric("exp(log_loss)", {
        "classes": lambda s, t: float(np.exp(_log_loss(s, t)))}, larger=False),
    "mae": Metric("mean |y − t|", {"numbers": _errors(np.abs)}, larger=False),
    "mse": Metric("mean (y − t)²", {"numbers": _errors(np.square)}, larger=False),
    "rmse": Metric("√mse", {"numbers": lambda y, t: float(np.sqrt(np.square(y - t).mean()))}, larger=False),
    "r2": Metric("1 − Σ(y − t)² ÷ Σ(t − mean of its column)²", {"numbers": _r2}),
}  # fmt: skip

#: What is measured where nobody says what.
DEFAULTS = {
    "classes": ("accuracy", "f1", "log_loss"),
    "binary": ("accuracy", "f1", "auc"),
    "numbers": ("mae", "rmse", "r2"),
}
