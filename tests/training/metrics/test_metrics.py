"""Metrics against scikit-learn, and against what they are by definition."""

from pathlib import Path

import numpy as np
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training.metrics.dense import peaks
from onnxgrad.training.metrics.registry import (
    METRICS,
    average_precision,
    counts,
    larger_is_better,
    per_class,
    ranking_auc,
    running,
)

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 200)
LABELS[LABELS == 2] = 1  # a class that does not occur
SCORES = RNG.standard_normal((200, 4)).round(1) + 2 * np.eye(4)[LABELS]  # with ties
SCORES = SCORES - np.log(np.exp(SCORES).sum(1, keepdims=True))
ODDS, ONES = RNG.standard_normal(200).round(1), RNG.integers(0, 2, 200)


def metric(name, task, *data):
    return METRICS[name].of(task, *data)


def test_of_several_labels_in_a_row():
    """All labels are pooled: f1 is scikit-learn's micro average, and f1_micro would be the accuracy of each label."""
    found = metric("f1", "binary", ODDS, ONES)
    right = int(((ODDS > 0) & (ONES == 1)).sum())
    assert found == pytest.approx(2 * right / ((ODDS > 0).sum() + ONES.sum()))
    with pytest.raises(BadInput, match="f1_micro is no metric for a task of binary; those are accuracy"):
        running("f1_micro", "binary")


def test_of_classes_as_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    best, seen = SCORES.argmax(1), [0, 1, 3]
    for name, wanted in {
        "accuracy": sk.accuracy_score(LABELS, best),
        "balanced_accuracy": sk.balanced_accuracy_score(LABELS, best),
        "precision": sk.precision_score(LABELS, best, average="macro"),
        "recall": sk.recall_score(LABELS, best, average="macro", zero_division=0),
        "f1": sk.f1_score(LABELS, best, average="macro"),
        "f1_micro": sk.f1_score(LABELS, best, average="micro"),
        "auc": np.mean([sk.roc_auc_score(c == LABELS, np.exp(SCORES)[:, c]) for c in seen]),
        "average_precision": np.mean([sk.average_precision_score(c == LABELS, np.exp(SCORES)[:, c]) for c in seen]),
        "log_loss": sk.log_loss(LABELS, np.exp(SCORES), labels=range(4)),
    }.items():
        assert metric(name, "classes", SCORES, LABELS) == pytest.approx(wanted), name


def test_of_zeros_and_ones_as_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    said = ODDS > 0
    for name, wanted in {
        "accuracy": sk.accuracy_score(ONES, said),
        "balanced_accuracy": sk.balanced_accuracy_score(ONES, said),
        "precision": sk.precision_score(ONES, said),
        "recall": sk.recall_score(ONES, said),
        "f1": sk.f1_score(ONES, said),
        "auc": sk.roc_auc_score(ONES, ODDS),
        "average_precision": sk.average_precision_score(ONES, ODDS),
        "log_loss": sk.log_loss(ONES, 1 / (1 + np.exp(-ODDS))),
    }.items():
        assert metric(name, "binary", ODDS, ONES) == pytest.approx(wanted), name


def test_intersections_as_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    wanted = sk.jaccard_score(LABELS, SCORES.argmax(1), average="macro")
    assert metric("miou", "classes", SCORES, LABELS) == pytest.approx(wanted)
    assert metric("miou", "binary", ODDS, ONES) == pytest.approx(sk.jaccard_score(ONES, ODDS > 0))


def test_depth_by_hand():
    y, t = np.array([[1.0, 2, 6], [4, 9, 5]]), np.array([[1.0, 4, 5], [0, 10, 0]])
    assert metric("abs_rel", "numbers", y, t) == pytest.approx(np.mean([0, 0.5, 0.2, 0.1]))
    assert metric("delta1", "numbers", y, t) == 3 / 4


def test_similarity_of_key_points_by_hand():
    t = np.array([[[0.0, 0, 2], [4, 0, 1], [4, 3, 2], [9, 9, 0]]])
    y = t[..., :2] + [0.3, 0.4]
    area = 0.53 * 4 * 3
    assert metric("oks", "points", y, t) == pytest.approx(np.exp(-0.25 / (8 * area * (1 / 4) ** 2)))
    maps = np.zeros((1, 4, 5, 6))
    maps[0, :, 3, 2] = 1
    np.testing.assert_array_equal(peaks(maps)[..., :2], [[[2, 3]] * 4])


def test_of_numbers_as_scikit_learn():
    sk = pytest.importorskip("sklearn.metrics")
    t = RNG.standard_normal((50, 3))
    y = t + 0.3 * RNG.standard_normal((50, 3))
    assert metric("mae", "numbers", y, t) == pytest.approx(sk.mean_absolute_error(t, y))
    assert metric("mse", "numbers", y, t) == pytest.approx(sk.mean_squared_error(t, y))
    assert metric("rmse", "numbers", y, t) == pytest.approx(sk.mean_squared_error(t, y) ** 0.5)
    assert metric("r2", "numbers", y, t) == pytest.approx(sk.r2_score(t, y, multioutput="variance_weighted"))


def test_auc_is_the_share_of_pairs_in_order():
    pairs = [(a > b) + 0.5 * (a == b) for a in ODDS[ONES == 1] for b in ODDS[ONES == 0]]
    assert ranking_auc(ODDS, ONES) == pytest.approx(np.mean(pairs))
    assert np.isnan(ranking_auc(ODDS, np.ones(200)))


def test_average_precision_by_hand():
    assert average_precision(np.array([4.0, 3.0, 2.0, 1.0]), np.array([1, 0, 1, 0])) == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert average_precision(np.array([1.0, 1.0]), np.array([1, 0])) == pytest.approx(0.5)


def test_a_class_without_labels_is_zero_where_it_is_predicted_and_else_does_not_count():
    chances = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1]]
    scores, labels = np.log(chances), np.array([0, 1, 1])
    assert metric("f1", "classes", scores, labels) == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert metric("recall", "classes", scores, labels) == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert metric("balanced_accuracy", "classes", scores, labels) == pytest.approx((1 + 1 / 2) / 2)
    assert per_class(counts(scores, labels))["rows"].tolist() == [1, 2, 0, 0]


def test_perplexity_of_a_guess_is_the_number_of_classes():
    uniform = np.full((5, 7), -np.log(7.0))
    assert metric("perplexity", "classes", uniform, np.arange(5)) == pytest.approx(7)


def test_the_page_defines_each_metric():
    page = (Path(__file__).parents[3] / "docs" / "evaluate.md").read_text()
    for name, about in METRICS.items():
        better = "more" if about.larger else "less"
        assert f"| `{name}` | {about.formula} | {', '.join(about.tasks)} | {better} |" in page
        assert larger_is_better(f"validation_{name}") == about.larger
