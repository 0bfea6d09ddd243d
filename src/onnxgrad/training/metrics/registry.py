"""Metrics by name: one number for the predictions and the labels of a whole data set, added up over its batches.

Each metric compares scores with labels, whose form depends on the task:

| task | scores | labels |
|---|---|---|
| ``classes`` | logits, of which log-probabilities are some, [rows, classes] | class numbers [rows] |
| ``ranked`` | the best class, how many are better than the label, −log of its probability, [rows, 3] | class numbers |
| ``binary`` | log-odds [rows] | 0 or 1 [rows] |
| ``numbers`` | numbers [rows, size] | numbers [rows, size] |
| ``sequences`` | the symbols read, an array for each row | the symbols wanted, likewise |
| ``maps`` | scores of pixels [rows, H, W], the larger the stranger | 0 and 1, likewise |
| ``points`` | key points [rows, K, 2], or with their scores [rows, K, 3] | x, y and visibility [rows, K, 3] |
| ``boxes`` | `Detections` of pictures | samples of `onnxgrad.training.data.annotations` |
| ``masks`` | the same with masks | the same with masks |
| ``texts`` | texts that a model wrote | reference texts |
| ``gaussian`` | means and spreads, [rows, size, 2] | numbers [rows, size] |
| ``intervals`` | lower and upper ends, [rows, size, 2] | numbers [rows, size] |
| ``sets`` | classes in the set of a row, [rows, classes] of booleans | class numbers |
| ``embeddings`` | embeddings [rows, size] | numbers of groups that belong together [rows] |

A mean over classes (macro) is over the classes that occur in the labels or the predictions, as scikit-learn's: a class
that is predicted and never right counts as zero, and one that occurs in neither does not count. Means of ``auc``,
``average_precision`` and ``balanced_accuracy`` are over the classes of the labels. An undefined metric (the AUC of a
single class) is NaN. Several labels of 0 and 1 in a row are pooled, except for the metrics whose names end in
``_macro``, which get scores and labels [rows, labels].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training.metrics import boxes, calibration, dense, in_step, similarity
from onnxgrad.training.metrics.calibration import Calibration
from onnxgrad.training.metrics.in_step import InStep
from onnxgrad.training.metrics.running import NAN, Edits, Explained, Mean, Running, Tally, Whole
from onnxgrad.training.metrics.texts import of_corpus, rouge, same_texts
from onnxgrad.training.option_strings import spelled

Function = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Metric:
    """A metric with the tasks that it is defined for.

    Attributes:
        formula: its definition, in a line.
        tasks: makes the running metric for each task.
        larger: True if more is better.
        in_step: the same as nodes of a step graph, for the tasks for which a step can compute it.
        by_label: of several labels in a row, each is measured by itself.
    """

    formula: str
    tasks: dict[str, Callable[[], Running]]
    larger: bool = True
    in_step: Mapping[str, InStep] = field(default_factory=dict)
    by_label: bool = False

    def of(self, task: str, scores: Any, labels: Any) -> float:
        """The value of the metric for all scores and labels at once."""
        running = self.tasks[task]()
        running.add(scores, labels)
        return running.result()


def counts(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The confusion matrix [actual, predicted], of numbers of rows."""
    size = scores.shape[1]
    return np.bincount(labels * size + scores.argmax(1), minlength=size * size).reshape(size, size)


def per_class(table: np.ndarray) -> dict[str, np.ndarray]:
    """precision, recall, f1 and rows of each class.

    Precision is NaN for a class that is never predicted, recall for one that occurs in no label.

    Args:
        table: the confusion matrix, as `counts` gives it.
    """
    right, actual, predicted = np.diag(table), table.sum(1), table.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "precision": right / predicted,
            "recall": right / actual,
            "f1": 2 * right / (actual + predicted),
            "rows": actual,
        }


def ranking_auc(scores: np.ndarray, ones: np.ndarray) -> float:
    """The area under the ROC curve: the share of pairs in which a one scores more than a zero; ties count half."""
    ones = ones.astype(bool)
    m, n = int(ones.sum()), int((~ones).sum())
    if not m or not n:
        return NAN
    _, inverse, repeats = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(repeats) - (repeats - 1) / 2)[inverse.ravel()]
    return float((ranks[ones].sum() - m * (m + 1) / 2) / (m * n))


def average_precision(scores: np.ndarray, ones: np.ndarray) -> float:
    """Σ (recall_k − recall_{k−1}) · precision_k over the thresholds k, from the largest score down."""
    ones = ones.astype(bool)
    if not ones.any():
        return NAN
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.diff(scores[order], append=np.nan) != 0)  # the last row of each threshold
    found = np.cumsum(ones[order])[last]
    return float((np.diff(found, prepend=0) / found[-1] * found / (last + 1)).sum())


def _each_class(of: Function) -> Function:
    """`of` for each class against all others, averaged over the classes that occur in the labels."""

    def mean(scores: np.ndarray, labels: np.ndarray) -> float:
        chances = np.exp(scores - _normalizer(scores)[:, None])
        return float(np.mean([of(chances[:, c], labels == c) for c in np.unique(labels)]))

    return mean


def _each_label(of: Function) -> Function:
    """`of`; where rows have several labels, its mean over those for which it is defined."""

    def mean(scores: np.ndarray, labels: np.ndarray) -> float:
        if labels.ndim == 1:
            return of(scores, labels)
        found = np.array([of(scores[:, k], labels[:, k]) for k in range(labels.shape[1])])
        return float(found[~np.isnan(found)].mean()) if not np.isnan(found).all() else NAN

    return mean


def _normalizer(scores: np.ndarray) -> np.ndarray:
    """log Σ exp of each row."""
    top = scores.max(1)
    return top + np.log(np.exp(scores - top[:, None]).sum(1, dtype=np.float64))


def _own(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.take_along_axis(scores, labels[:, None], 1)


def surprise(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """−log of the probability of the true class, of each row; of log-odds likewise."""
    if scores.ndim == 1:
        return np.logaddexp(0, np.where(labels > 0, -scores, scores))
    return _normalizer(scores) - _own(scores, labels)[:, 0]


def _right(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return (scores.argmax(1) if scores.ndim > 1 else scores > 0) == labels


def _top(k: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda scores, labels: (scores > _own(scores, labels)).sum(1) < k


def _ratio(name: str, right: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    union = predicted + actual - right
    whole = {"precision": predicted, "recall": actual, "f1": (predicted + actual) / 2, "iou": union}[name]
    with np.errstate(invalid="ignore", divide="ignore"):
        return right / whole


def _macro(name: str, labels_only: bool = False) -> Callable[[], Running]:
    """The mean of a metric over the classes that occur in the labels, or unless `labels_only` in the predictions."""

    def mean(right: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> float:
        occurs = actual if labels_only else actual + predicted
        return float(np.nan_to_num(_ratio(name, right, predicted, actual)[occurs > 0]).mean())

    return lambda: Tally(mean)


def _of_ones(name: str) -> Callable[[], Running]:
    """The metric of class 1 alone."""
    return lambda: Tally(lambda *table: float(_ratio(name, *table)[1]))


def _errors(of: Callable[[np.ndarray], np.ndarray], then: Callable[[float], Any] = float) -> Callable[[], Running]:
    return lambda: Mean(lambda y, t: of(np.asarray(y, np.float64) - t), then)


def _from_summary(column: int, of: Callable[[np.ndarray, np.ndarray], np.ndarray], then: Any = float) -> dict[str, Any]:
    """A metric from a column of the summary scores of ranked classes, and the labels."""
    return {"ranked": lambda: Mean(lambda told, labels: of(told[:, column], labels), then)}


def _rows(of: Callable[..., np.ndarray], *tasks: str, then: Callable[[float], Any] = float) -> dict[str, Any]:
    return dict.fromkeys(tasks, lambda: Mean(of, then))


def _words(space: int) -> Callable[[], Running]:
    """Edits of words, which the symbol `space` separates."""

    def cut(symbols: np.ndarray) -> list[tuple[int, ...]]:
        pieces = np.split(symbols, np.flatnonzero(np.asarray(symbols) == space))
        return [word for p in pieces if (word := tuple(int(s) for s in p if s != space))]

    return lambda: Edits(cut)


METRICS: dict[str, Metric] = {
    "accuracy": Metric("rows whose largest score is that of their class ÷ rows",
        _rows(_right, "classes", "binary") | _from_summary(0, np.equal),
        in_step={"classes": in_step.ACCURACY, "binary": in_step.BINARY_ACCURACY}),
    "balanced_accuracy": Metric("the mean of the recall over the classes of the labels", {
        "classes": _macro("recall", labels_only=True), "binary": _macro("recall", labels_only=True)}),
    "top5": Metric("rows whose class is among the five largest scores ÷ rows",
        _rows(_top(5), "classes") | _from_summary(1, lambda better, _: better < 5),
        in_step={"classes": in_step.TOP5}),
    "precision": Metric("tp ÷ (tp + fp): of the ones, or the mean over classes (macro)", {
        "classes": _macro("precision"), "binary": _of_ones("precision")}),
    "recall": Metric("tp ÷ (tp + fn): of the ones, or the mean over classes (macro)", {
        "classes": _macro("recall"), "binary": _of_ones("recall")}),
    "f1": Metric("2·tp ÷ (2·tp + fp + fn): of the ones, or the mean over classes (macro)", {
        "classes": _macro("f1"), "binary": _of_ones("f1")}),
    "f1_micro": Metric("2·Σtp ÷ (2·Σtp + Σfp + Σfn) over all classes, which is the accuracy",
        _rows(_right, "classes")),
    **{f"{name}_macro": Metric(f"the mean of {name} over the labels of a row; of one score, over 0 and 1", {
        "classes": _macro(name), "binary": _macro(name)}, by_label=True) for name in ("precision", "recall", "f1")},
    "auc": Metric("area under the ROC curve; of several classes the mean of each against all others (macro)", {
        "classes": lambda: Whole(_each_class(ranking_auc)), "binary": lambda: Whole(ranking_auc),
        "maps": lambda: Whole(dense.of_pixels(ranking_auc))}),
    "average_precision": Metric("Σ (recall step) · precision; of several classes the mean (macro)", {
        "classes": lambda: Whole(_each_class(average_precision)), "binary": lambda: Whole(average_precision),
        "maps": lambda: Whole(dense.of_pixels(average_precision))}),
    **{f"{name}_macro": Metric(f"the mean of {name} over the labels of a row", {
        "classes": partial(Whole, _each_class(of)), "binary": partial(Whole, _each_label(of))}, by_label=True)
       for name, of in {"auc": ranking_auc, "average_precision": average_precision}.items()},
    "image_auc": Metric("area under the ROC curve of pictures, by their largest score (anomaly maps)", {
        "maps": lambda: Whole(dense.of_pictures(ranking_auc))}),
    "au_pro": Metric("area under the overlap of regions up to 30 % of false positives, ÷ 0.3 (anomaly maps)", {
        "maps": lambda: Whole(dense.region_overlap)}),
    "log_loss": Metric("the mean of −log of the probability of the true class",
        _rows(surprise, "classes", "binary") | _from_summary(2, lambda surprise, _: surprise), larger=False),
    "perplexity": Metric("exp(log_loss)",
        _rows(surprise, "classes", then=np.exp) | _from_summary(2, lambda surprise, _: surprise, np.exp), larger=False),
    "brier": Metric("the mean of Σ over classes of (p − 1 of the true class)²",
        _rows(calibration.brier, "classes", "binary"), larger=False),
    "ece": Metric("Σ over 15 bins of the largest probability: share of rows · |accuracy − mean probability|", {
        "classes": Calibration, "binary": Calibration}, larger=False),
    "temperature": Metric("the T that minimizes the log loss of scores ÷ T; 1: calibrated", {
        "classes": lambda: Whole(calibration.temperature), "binary": lambda: Whole(calibration.temperature)},
        larger=False),
    "nll": Metric("the mean of −log of the normal density of mean and spread at the label",
        _rows(calibration.gaussian_nll, "gaussian"), larger=False),
    "coverage": Metric("labels in their interval or set ÷ labels; of mean and spread, in the central 90 %",
        _rows(lambda y, t: calibration.is_inside(calibration.central(y), t), "gaussian")
        | _rows(calibration.is_inside, "intervals") | _rows(calibration.is_member, "sets")),
    "width": Metric("the mean length of the intervals; of mean and spread, of the central 90 %",
        _rows(lambda y, t: np.ptp(calibration.central(y), -1), "gaussian")
        | _rows(lambda y, t: np.ptp(y, -1), "intervals"), larger=False),
    "set_size": Metric("the mean number of classes in a set", _rows(lambda y, t: y.sum(1), "sets"), larger=False),
    "mrr": Metric("the mean of 1 ÷ the rank of the nearest row of the same group, by the cosine", {
        "embeddings": lambda: Whole(similarity.of_ranks(lambda r: 1 / r))}),
    **{f"recall_at_{k}": Metric(f"rows with one of the same group among the {k} nearest ÷ rows", {
        "embeddings": partial(Whole, similarity.of_ranks(partial(np.greater_equal, k)))}) for k in (1, 5, 10)},
    "spearman": Metric("the correlation of the ranks of y and t", {
        "numbers": lambda: Whole(similarity.spearman)}),
    "mae": Metric("mean |y − t|", {"numbers": _errors(np.abs)}, larger=False, in_step={"numbers": in_step.MAE}),
    "mse": Metric("mean (y − t)²", {"numbers": _errors(np.square)}, larger=False, in_step={"numbers": in_step.MSE}),
    "rmse": Metric("√mse", {"numbers": _errors(np.square, np.sqrt)}, larger=False),
    "r2": Metric("1 − Σ(y − t)² ÷ Σ(t − mean of its column)²", {"numbers": Explained}),
    "miou": Metric("tp ÷ (tp + fp + fn): of the ones, or the mean over classes (macro)", {
        "classes": _macro("iou"), "binary": _of_ones("iou")}),
    "abs_rel": Metric("mean |y − t| ÷ t where t > 0 (depth)", _rows(dense.relative_errors, "numbers"), larger=False),
    "delta1": Metric("the share of t > 0 with max(y ÷ t, t ÷ y) < 1.25 (depth)", _rows(dense.are_near, "numbers")),
    "oks": Metric("the mean of exp(−d² ÷ (8·σ²·area)) over the key points, area: 0.53 of the box around them", {
        "points": lambda: Mean(dense.point_similarity)}),
    **{f"oks_{name}": Metric(f"{boxes.DEFINED[name].replace('IoU', 'OKS')} of key points, as COCO defines it", {
        "points": partial(dense.PointPrecision, name)}) for name in ("map50_95", "map50", "map75")},
    **{name: Metric(text, {"boxes": partial(boxes.MeanPrecision, name)}) for name, text in boxes.DEFINED.items()},
    **{name: Metric(text, {"masks": partial(boxes.MeanPrecision, name.removeprefix("mask_"), masks=True)})
       for name, text in boxes.OF_MASKS.items()},
    "exact": Metric("rows that are read without an error ÷ rows",
        _rows(lambda y, t: np.array([np.array_equal(a, b) for a, b in zip(y, t)]), "sequences")
        | _rows(same_texts, "texts")),
    "cer": Metric("Σ edit distance ÷ Σ length of the labels, in symbols", {"sequences": Edits}, larger=False),
    "wer": Metric("Σ edit distance ÷ Σ length of the labels, in words", {"sequences": _words(-1)}, larger=False),
    "bleu": Metric("BLEU of all texts, 0 to 100 (sacrebleu)", {"texts": of_corpus("corpus_bleu")}),
    "chrf": Metric("chrF of all texts, 0 to 100 (sacrebleu)", {"texts": of_corpus("corpus_chrf")}),
    "rouge1": Metric("the mean F-measure of common words (rouge-score)", {"texts": rouge("rouge1")}),
    "rouge2": Metric("the mean F-measure of common pairs of words (rouge-score)", {"texts": rouge("rouge2")}),
    "rougeL": Metric("the mean F-measure of the longest common subsequence (rouge-score)", {"texts": rouge("rougeL")}),
}  # fmt: skip

#: Metrics of the predictions of a model; the others compare texts that it generates.
OF_PREDICTIONS = tuple(name for name, metric in METRICS.items() if metric.tasks.keys() != {"texts"})

#: Metrics that are measured by default: of a file, and during training. There, `top5` needs more than five classes,
#: and a metric that is not defined is left out.
DEFAULTS = {
    "classes": ("accuracy", "f1", "log_loss"),
    "ranked": ("accuracy", "log_loss"),
    "binary": ("accuracy", "f1", "auc"),
    "numbers": ("mae", "rmse", "r2"),
    "sequences": ("exact", "cer"),
    "points": ("oks", "oks_map50_95"),
    "maps": ("au_pro", "auc", "image_auc"),
    "boxes": ("map50_95", "map50", "map75", "mar_100"),
    "gaussian": ("nll", "coverage", "width"),
    "intervals": ("coverage", "width"),
    "sets": ("coverage", "set_size"),
    "embeddings": ("recall_at_1", "recall_at_10", "mrr"),
}
WHILE_TRAINING = {
    "classes": ("accuracy", "f1", "top5"),
    "ranked": ("accuracy", "top5"),
    "binary": ("accuracy", "f1"),
    "numbers": ("mae", "r2"),
    "sequences": ("exact", "cer"),
    "points": ("oks", "oks_map50_95"),
    "boxes": ("map50_95", "map50"),
}
#: Names of the symbol between words, where the classes of a model have names.
_SPACES = (" ", "<space>", "|", "▁")


def names_of(metrics: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """The names that ``"accuracy,auc"``, or a list of names, asks for.

    Raises:
        UnknownName: there is no such metric. BadInput: there is no name, or one with options that it does not have.
    """
    if metrics is None:
        return None
    if not isinstance(metrics, Iterable):
        raise BadInput(f"metrics are names, 'accuracy,auc' or a list of them, not {metrics!r}")
    found = tuple(str(n).strip() for n in (metrics.split(",") if isinstance(metrics, str) else metrics))
    if not any(found):
        raise BadInput(f"no metric is named; there are {', '.join(METRICS)}")
    for text in found:
        if text.endswith(".json") or "/" in text:
            raise BadInput(
                f"{text!r} is no metric: metrics are names, such as accuracy\n"
                "  hint: --history (in Python history=) is the file for losses and scores"
            )
        name, options = spelled(text)
        if name not in METRICS:
            raise UnknownName(name, METRICS, "metric")
        if options and (name != "wer" or options.keys() - {"space"}):
            raise BadInput(f"the metric {name!r} has no option {next(iter(options))!r}")
    return tuple(dict.fromkeys(found))


def is_metric_of(text: str, task: str) -> bool:
    """True if the metric spelled `text` is defined for `task`."""
    return task in METRICS[text.partition(":")[0]].tasks


def larger_is_better(entry: str) -> bool:
    """True if the entry of a record, such as ``validation_auc``, is a metric that should be maximized."""
    metric = METRICS.get(entry.removeprefix("validation_").partition(":")[0])
    return metric is not None and metric.larger


def running(text: str, task: str, classes: Sequence[str] | None = None) -> Running:
    """The metric spelled `text` for `task`, at its beginning.

    Raises:
        BadInput: it is not defined for that task, or the symbol between words is not known.
    """
    name, options = spelled(text)
    if task not in METRICS[name].tasks:
        fitting = ", ".join(n for n, m in METRICS.items() if task in m.tasks)
        raise BadInput(f"{name} is no metric for a task of {task}; those are {fitting}")
    if name != "wer":
        return METRICS[name].tasks[task]()
    space = options.get("space", next((i for i, c in enumerate(classes or ()) if c in _SPACES), None))
    if not isinstance(space, int):
        raise BadInput(
            "wer counts words, and the symbol between words is not known\n  hint: write wer:space=5, its number"
        )
    return _words(space)()


__all__ = [
    "DEFAULTS", "METRICS", "WHILE_TRAINING", "Metric", "average_precision", "counts", "larger_is_better", "names_of",
    "per_class", "ranking_auc", "running",
]  # fmt: skip
