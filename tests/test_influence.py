"""Influence of training rows: closed form of a linear model, retraining, several checkpoints."""

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.influence import influence
from tests.training.models import blobs, classifier

RNG = np.random.default_rng(0)


def linear():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 3] x) => (float[N, 2] y) { y = MatMul (x, w) }""")
    array = RNG.standard_normal((3, 2)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    return model, array


def rows(count):
    return {"x": RNG.standard_normal((count, 3)).astype(np.float32),
            "labels": RNG.standard_normal((count, 2)).astype(np.float32)}  # fmt: skip


def test_of_a_linear_regression():
    (first, w1), (second, w2) = linear(), linear()
    train, test = rows(6), rows(4)
    found = influence([first, second], train, test, loss="mse", rates=[0.5, 2.0])
    wanted = 0.0
    for w, rate in ((w1, 0.5), (w2, 2.0)):
        of_train, of_test = (
            np.einsum("ni,nk->nik", d["x"], d["x"] @ w - d["labels"]).reshape(-1, 6) for d in (train, test)
        )  # the mean over both numbers of a row
        wanted = wanted + rate * of_test @ of_train.T
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_it_is_how_much_a_step_on_a_row_lowers_the_loss():
    model, train, test = classifier(), blobs(12), blobs(3, seed=1)
    found = influence(model, train, test, loss="cross_entropy")

    def loss(model, k):
        row = {n: a[k : k + 1] for n, a in test.items()}
        return onnxgrad.evaluate(model, row, metrics="log_loss").metrics["log_loss"]

    for i in (0, 5, 11):
        row = {n: a[i : i + 1] for n, a in train.items()}
        settings = {"loss": "cross_entropy", "optimizer": "sgd", "learning_rate": 1e-2, "epochs": 1}
        moved = onnxgrad.train(model, row, progress=False, **settings).inference_model()
        gains = [(loss(model, k) - loss(moved, k)) / 1e-2 for k in range(3)]
        np.testing.assert_allclose(found[:, i], gains, rtol=0.05, atol=0.02)


def test_a_wrong_label_harms():
    train, test = blobs(60), blobs(30, seed=1)
    settings = {"loss": "cross_entropy", "learning_rate": 0.03, "epochs": 10, "progress": False}
    model = onnxgrad.train(classifier(), train, **settings).inference_model()
    wrong = {"x": train["x"], "labels": train["labels"].copy()}
    wrong["labels"][7] = (wrong["labels"][7] + 1) % 3
    found = influence(model, wrong, test, loss="cross_entropy", trainable=["last:1"]).mean(0)
    assert found.argmin() == 7
    assert found[7] < 0


def test_what_does_not_fit():
    model, _ = linear()
    with pytest.raises(BadInput, match="1 models and 2 rates"):
        influence(model, rows(2), rows(2), loss="mse", rates=[1, 2])
    with pytest.raises(BadInput, match="cannot be accumulated"):
        influence(classifier(), blobs(4), blobs(4), loss="info_nce")
    with pytest.raises(BadInput, match="influence has no argument 'lost'"):
        influence(model, rows(2), rows(2), lost="mse")
