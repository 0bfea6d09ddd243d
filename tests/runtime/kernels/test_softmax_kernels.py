"""The cotangent of Softmax and softmax cross-entropy in C, against the operators and float64."""

import numpy as np
import pytest
from onnx import helper

from onnxgrad.errors import OnnxGradError
from onnxgrad.runtime import Options, Session
from tests.runtime.kernels.pulled import Pulled
from tests.runtime.kernels.twins import needs_kernels

pytestmark = needs_kernels

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def normal(*shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


def probabilities(x, axis):
    wide = np.exp(x.astype(np.float64) - x.max(axis, keepdims=True))
    return wide / wide.sum(axis, keepdims=True)


# --- cross-entropy ---------------------------------------------------------------------------------


def loss(shape, reduction="mean", ignore=None, weighted=False, kind=np.int64, symbolic=False):
    rng = np.random.default_rng(5)
    arrays = {"x": normal(*shape) * 3, "l": rng.integers(0, shape[1], (shape[0], *shape[2:])).astype(kind)}
    if ignore is not None and arrays["l"].size > 2:
        arrays["l"].reshape(-1)[::3] = ignore
    if weighted:
        arrays["w"] = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    settings = {} if ignore is None else {"ignore_index": ignore}
    inputs = ["x", "l", *["w"] * weighted]
    return Pulled(
        [helper.make_node("SoftmaxCrossEntropyLoss", inputs, ["y"], reduction=reduction, **settings)],
        arrays, ["x"], symbolic,
    )  # fmt: skip


def compare(operators, seed=None):
    """Losses and cotangents of both targets, on one thread and on two."""
    reduced = operators.model.graph.outputs[0].shape.rank() == 0
    seed = np.float32(0.7) if reduced else normal(*operators.arrays["l"].shape, seed=3) if seed is None else seed
    assert operators.kernels == ["SoftmaxCrossEntropy"]
    found = [
        run(operators, seed, target, threads) for target, threads in (("portable", 1), ("native", 1), ("native", 2))
    ]
    for expected, one, two in zip(*found):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, expected, **CLOSE)
    return found[1]


def run(operators, seed, target, threads):
    session = Session(operators.model, Options(threads=threads, target=target))
    found = session.run({**operators.arrays, operators.seed: seed})
    return found["y"], found[operators.results[0]]


SCORES = [(5, 7), (1, 1), (300, 40), (2, 9000), (3, 4, 300), (2, 5, 6, 7), (2, 33, 16), (40, 3, 1)]


@pytest.mark.parametrize("shape", SCORES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(shape, reduction):
    compare(loss(shape, reduction))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("shape", [(30, 40), (3, 4, 30)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", [np.int64, np.int32])
@pytest.mark.parametrize("symbolic", [False, True])
def test_weights_and_labels_that_are_ignored(shape, reduction, kind, symbolic):
    value, dx = compare(loss(shape, reduction, ignore=-1, weighted=True, kind=kind, symbolic=symbolic))
    value, dx = compare(loss(shape, reduction, ignore=2, kind=kind, symbolic=symbolic))
    ignored = np.moveaxis(dx, 1, -1).reshape(-1, shape[1])[::3]
    assert not ignored.any()
    assert value.any()


def test_the_loss_of_a_row_is_that_of_float64():
    operators = loss((20, 300), "mean", weighted=True)
    x, labels, weights = (operators.arrays[k] for k in "xlw")
    value, dx = compare(operators)
    p, rows = probabilities(x, 1), np.arange(20)
    share = weights[labels] / weights[labels].sum(dtype=np.float64)
    np.testing.assert_allclose(value, -(share * np.log(p[rows, labels])).sum(), rtol=1e-6)
    p[rows, labels] -= 1
    np.testing.assert_allclose(dx, 0.7 * p * share[:, None], rtol=1e-5, atol=1e-7)


def test_all_labels_are_ignored():
    for reduction in ("sum", "none"):
        operators = loss((4, 5), reduction, ignore=3)
        operators.arrays["l"][:] = 3
        value, dx = compare(operators)
        assert not value.any()
        assert not dx.any()
    operators = loss((4, 5), "mean", ignore=3)
    operators.arrays["l"][:] = 3
    assert not run(operators, np.float32(1), "native", 1)[1].any()


@pytest.mark.parametrize("shape", [(6, 70), (6, 3, 20)], ids=str)
def test_cross_entropy_of_what_is_not_finite(shape):
    for ignore in (None, 1):
        operators = loss(shape, "none", ignore)
        x, labels = operators.arrays["x"], operators.arrays["l"]
        labels[:3], x[0], x[1, 2], x[2, 0], x[3, 1] = 1, -np.inf, np.inf, np.nan, -np.inf
        labels[4:], x[4] = 2, 1e30
        compare(operators)


def test_loss_alone():
    """Nobody asks for the cotangent: nothing as large as the scores is written."""
    operators = loss((30, 50))
    names = {v.name for v in operators.model.graph.outputs} - {"y"}
    operators.model.graph.outputs[:] = [v for v in operators.model.graph.outputs if v.name not in names]
    feeds = {**operators.arrays, operators.seed: np.float32(1)}
    expected, found = (
        Session(operators.model, Options(threads=1, target=t)).run(feeds)["y"] for t in ("portable", "native")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("label", [5, -1, 2**40, -(2**40)])
def test_a_label_out_of_range_is_refused(label):
    operators = loss((4, 5))
    operators.arrays["l"][2] = label
    with pytest.raises(OnnxGradError, match="out of range"):
        run(operators, np.float32(1), "native", 1)


def test_losses_that_need_more_stay_operators():
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["x", "l", "w"], ["y"])
    arrays = {"x": normal(3, 4), "l": np.zeros(3, np.int64), "w": np.ones(4, np.float32)}
    assert Pulled([node], arrays, ["x", "w"]).kernels == []
    arrays = {"x": normal(3, 4).astype(np.float64), "l": np.zeros(3, np.int64)}
    assert Pulled([helper.make_node("SoftmaxCrossEntropyLoss", ["x", "l"], ["y"])], arrays, ["x"]).kernels == []
    assert Pulled([helper.make_node("Softmax", ["x"], ["y"])], {"x": arrays["x"]}, ["x"]).kernels == []
