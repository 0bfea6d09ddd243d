"""Metrics that are added up over batches are those of the whole; each against another implementation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrad.errors import BadInput
from onnxgrad.training.measure.comparisons import Binary, Classes, Comparison, Meter, Sequences
from onnxgrad.training.metrics.registry import METRICS
from onnxgrad.training.metrics.running import edit_distance


def added(comparison, prediction, label, names=None, parts=3):
    score = Meter(comparison, names)
    for p, t in zip(np.array_split(prediction, parts), np.array_split(label, parts)):
        if len(p):
            score.add(p, t)
    return score.result()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("classes", [3, 9])
@pytest.mark.parametrize("axis", [1, -1])
def test_classes(rng, classes, axis):
    metrics = pytest.importorskip("sklearn.metrics")
    y, t = rng.standard_normal((40, 7, classes)), rng.integers(0, classes, (40, 7))
    t[0, :3] = -100
    y[np.arange(20)[:, None], np.arange(7), t[:20] % classes] += 2
    found = added(Classes(axis, -100), np.moveaxis(y, -1, axis), t)
    flat, labels = y.reshape(-1, classes)[t.ravel() >= 0], t[t >= 0]
    best = flat.argmax(1)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, best))
    assert found["f1"] == pytest.approx(metrics.f1_score(labels, best, labels=np.unique(labels), average="macro"))
    if classes > 5:
        top = metrics.top_k_accuracy_score(labels, flat, k=5, labels=range(classes))
        assert found["top5"] == pytest.approx(top)
    assert ("top5" in found) == (classes > 5)


def test_binary(rng):
    metrics = pytest.importorskip("sklearn.metrics")
    y, t = rng.standard_normal((50, 2)), (rng.random((50, 2)) > 0.7).astype(np.float32)
    found = added(Binary(), y, t)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(t.ravel(), (y > 0).ravel()))
    assert found["f1"] == pytest.approx(metrics.f1_score(t.ravel(), (y > 0).ravel()))


MACRO = ["f1_macro", "precision_macro", "recall_macro", "auc_macro", "average_precision_macro"]


def test_means_over_labels(rng):
    """Those of scikit-learn, over batches. Areas leave out a label that does not occur."""
    metrics = pytest.importorskip("sklearn.metrics")
    t = (rng.random((60, 5)) > [0.9, 0.7, 0.5, 1, 0.2]).astype(np.float32)
    y = (rng.standard_normal((60, 5)) + t).round(1)
    seen = [0, 1, 2, 4]
    found, parts = (Meter(Binary(), MACRO) for _ in range(2))
    for meter, low in ((found, 0), (parts, 20), (found, 40)):
        meter.add(y[low : low + 20], t[low : low + 20])
    found.join(parts.sums())
    wanted = {
        f"{name}_macro": getattr(metrics, f"{name}_score")(t, y > 0, average="macro", zero_division=0)
        for name in ("f1", "precision", "recall")
    }
    wanted["auc_macro"] = metrics.roc_auc_score(t[:, seen], y[:, seen], average="macro")
    wanted["average_precision_macro"] = metrics.average_precision_score(t[:, seen], y[:, seen], average="macro")
    assert found.result() == pytest.approx(wanted)
    one = added(Binary(), y[:, :1], t[:, :1], MACRO)
    assert one["f1_macro"] == pytest.approx(metrics.f1_score(t[:, 0], y[:, 0] > 0, average="macro"))
    assert one["auc_macro"] == pytest.approx(metrics.roc_auc_score(t[:, 0], y[:, 0]))
    assert all(np.isnan(v) for v in added(Binary(), y, np.zeros_like(t), MACRO).values())
    classes = added(Classes(), y, t.argmax(1), ["f1", "f1_macro", "auc", "auc_macro"])
    assert (classes["f1"], classes["auc"]) == (classes["f1_macro"], classes["auc_macro"])


def test_numbers(rng):
    metrics = pytest.importorskip("sklearn.metrics")
    t = rng.standard_normal((50, 2)) * [1, 5] + [1000, 0]
    y = t + rng.standard_normal((50, 2))
    found = added(Comparison(), y.astype(np.float32), t.astype(np.float32))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(t, y), rel=1e-4)
    assert found["r2"] == pytest.approx(metrics.r2_score(t, y, multioutput="variance_weighted"), rel=1e-4)
    assert "r2" not in added(Comparison(), np.ones((4, 1)), np.zeros((4, 1)))


def test_sequences():
    path = np.array([[1, 1, 0, 2, 2, 0, 2], [0, 3, 3, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [1, 0, 2, 0, 3, 0, 4]])
    labels = np.array([[1, 2, 2, -1], [3, 3, 0, 0], [0, 0, 0, 0], [1, 3, 4, 0]])
    y = np.eye(5)[path]
    for score, prediction in ((Sequences(), y), (Sequences(time=0), y.transpose(1, 0, 2))):
        assert [d.tolist() for d in score.decoded(prediction)] == [[1, 2, 2], [3], [], [1, 2, 3, 4]]
    found = added(Sequences(), y, labels)
    assert found == {"exact": 0.5, "cer": 2 / 8}


def test_words_are_what_a_symbol_separates():
    read = np.eye(5)[[[1, 2, 3, 4, 4, 3], [3, 1, 3, 2, 0, 3]]]  # "12|4|" and "|1|2|" with 3 between words
    labels = np.array([[1, 2, 3, 4], [1, 3, 4, -1]])  # "12|4" and "1|4"
    assert added(Sequences(), read, labels, ["wer:space=3"]) == {"wer:space=3": 1 / 4}
    meter = Meter(Sequences(), ["wer", "cer"], classes=["_", "a", "b", " ", "c"])
    meter.add(read, labels)
    assert meter.result()["wer"] == 1 / 4
    with pytest.raises(BadInput, match="the symbol between words is not known"):
        Meter(Sequences(), ["wer"])


@pytest.mark.parametrize("name", [n for n, m in METRICS.items() if "classes" in m.tasks])
def test_parts_amount_to_the_whole(rng, name):
    y, t = rng.standard_normal((40, 7)).astype(np.float32), rng.integers(0, 7, 40)
    whole = added(Classes(), y, t, [name], parts=1)
    assert added(Classes(), y, t, [name], parts=5) == pytest.approx(whole, rel=1e-12)


def slow_distance(a, b):
    if not a or not b:
        return len(a) + len(b)
    return min(slow_distance(a[1:], b) + 1, slow_distance(a, b[1:]) + 1, slow_distance(a[1:], b[1:]) + (a[0] != b[0]))


@given(*[st.lists(st.integers(0, 2), max_size=5)] * 2)
def test_edit_distance(a, b):
    assert edit_distance(np.array(a, int), np.array(b, int)) == slow_distance(a, b)


def test_nothing_to_count():
    for comparison in (Classes(ignored=0), Binary(), Comparison(), Sequences()):
        assert Meter(comparison).result() == {}
    assert added(Classes(ignored=0), np.zeros((3, 2)), np.zeros(3, int)) == {}
    assert np.isnan(added(Classes(ignored=0), np.zeros((3, 2)), np.zeros(3, int), ["accuracy"])["accuracy"])
