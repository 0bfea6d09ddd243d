"""Estimators of scikit-learn: they keep its contract, and fine-tune models inside of its tools."""

import numpy as np
import onnx
import pytest
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import onnxgrad
from onnxgrad.errors import BadInput
from onnxgrad.sklearn import Classifier, Regressor, perceptron
from tests.training.models import blobs, classifier


@pytest.mark.sweep(6)
@parametrize_with_checks([Classifier(), Regressor()])
def test_the_contract_of_estimators(estimator, check):
    check(estimator)


def test_a_pipeline_in_a_search():
    x, y = load_digits(return_X_y=True)
    x, y = x[:600], np.array([f"digit {n}" for n in y[:600]])
    pipeline = make_pipeline(StandardScaler(), Classifier(epochs=16))
    search = GridSearchCV(pipeline, {"classifier__learning_rate": [1e-6, 0.01]}, cv=3).fit(x, y)
    assert search.best_params_ == {"classifier__learning_rate": 0.01}
    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    assert search.best_score_ > cross_val_score(linear, x, y, cv=3).mean() - 0.05
    assert set(search.predict(x[:50])) <= set(y)


def test_a_regression_is_as_good_as_a_linear_one():
    x, y = load_diabetes(return_X_y=True)
    y = (y - y.mean()) / y.std()
    model = make_pipeline(StandardScaler(), Regressor(epochs=30, learning_rate=3e-3, optimizer="adamw"))
    linear = make_pipeline(StandardScaler(), Ridge())
    found, known = (cross_val_score(m, x, y, cv=3).mean() for m in (model, linear))
    assert found > known - 0.1


def test_a_file_is_trained_and_saved(tmp_path):
    onnx.save(classifier(softmax=True), tmp_path / "m.onnx")
    rows = blobs()
    estimator = Classifier(tmp_path / "m.onnx", epochs=10).fit(rows["x"], np.array(list("abc"))[rows["labels"]])
    estimator.save(tmp_path / "trained.onnx")
    odds = onnxgrad.predict(tmp_path / "trained.onnx", {"x": rows["x"]})["y"]
    np.testing.assert_allclose(estimator.predict_proba(rows["x"]), odds, rtol=1e-6)  # once a Softmax, not twice
    assert estimator.score(rows["x"], np.array(list("abc"))[rows["labels"]]) > 0.95
    assert len(estimator.history_) == estimator.n_iter_ == 10


def test_one_score_is_of_the_second_class():
    rows = blobs()
    y = np.where(rows["labels"] == 2, "yes", "no")
    estimator = Classifier(lambda features, outputs: perceptron(features, 1)).fit(rows["x"], y)
    assert estimator.predict_proba(rows["x"]).shape == (90, 2)
    assert estimator.score(rows["x"], y) > 0.95


def test_rows_take_the_shape_of_the_input():
    x, y = load_digits(return_X_y=True)
    net = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[N, 1, 8, 8] image) => (float[N, 10] scores) {
            c = Conv (image, kernel)
            r = Relu (c)
            f = Flatten (r)
            scores = MatMul (f, w)
        }""")
    draw = np.random.default_rng(0)
    for name, shape in {"kernel": (4, 1, 3, 3), "w": (144, 10)}.items():
        array = (0.1 * draw.standard_normal(shape)).astype(np.float32)
        net.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    assert Classifier(net, epochs=5).fit(x[:500] / 16, y[:500]).score(x[500:900] / 16, y[500:900]) > 0.8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rows: Classifier(classifier()).fit(rows["x"], rows["labels"] % 2), "2 classes, and the model has 3"),
        (lambda rows: Classifier(classifier()).fit(rows["x"][:, :4], rows["labels"]), r"X has 4 features, .* \[6\]"),
        (lambda rows: Classifier().fit(rows["x"], np.zeros(90, int)), "y has one class"),
        (lambda rows: Classifier(settings={"epoch": 3}).fit(rows["x"], rows["labels"]), "did you mean 'epochs'"),
    ],
)
def test_what_does_not_fit(make, message):
    with pytest.raises(BadInput, match=message):
        make(blobs())
