"""Linear models as skl2onnx writes them train: their weights are attributes of LinearClassifier and LinearRegressor."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser

from onnxgrad import BadInput
from onnxgrad.model_io import open_model
from onnxgrad.training import Trainer, attach
from onnxgrad.training.graph.linear_models import with_own_weights

pytestmark = pytest.mark.filterwarnings("ignore:the output 'output_probability' is the tensor")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 4)).astype(np.float32)
CLASS = (X @ np.array([[3, 0, 1], [-2, 1, 0], [0, 2, -1], [1, 0, 2]])).argmax(1)
W = RNG.normal(size=(3, 4)).astype(np.float32)
B = RNG.normal(size=3).astype(np.float32)
ML = "ai.onnx.ml"


def classifier(labels, transform="SOFTMAX", weights=W, biases=B, opset=21, zipmap=True, normalizer=True):
    """LinearClassifier, Normalizer, ZipMap, as skl2onnx writes a LogisticRegression."""
    texts = isinstance(labels[0], str)
    kind = "strings" if texts else "ints"
    nodes = [
        helper.make_node(
            "LinearClassifier", ["X"], ["label", "raw"], "LinearClassifier", domain=ML, post_transform=transform,
            coefficients=weights.ravel(), intercepts=biases, multi_class=int(len(labels) > 2),
            **{f"classlabels_{kind}": labels},
        ),
        helper.make_node("Identity" if texts else "Cast", ["label"], ["output_label"], **({} if texts else {"to": 7})),
    ]  # fmt: skip
    last = "raw"
    if normalizer:
        nodes.append(helper.make_node("Normalizer", ["raw"], ["probabilities"], "Normalizer", domain=ML, norm="L1"))
        last = "probabilities"
    key = TensorProto.STRING if texts else TensorProto.INT64
    if zipmap:
        names = {f"classlabels_{'strings' if texts else 'int64s'}": labels}
        nodes.append(helper.make_node("ZipMap", [last], ["output_probability"], "ZipMap", domain=ML, **names))
        value = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
        held = helper.make_sequence_type_proto(helper.make_map_type_proto(key, value))
        output = helper.make_value_info("output_probability", held)
    else:
        output = helper.make_tensor_value_info(last, TensorProto.FLOAT, [None, len(labels)])
    inputs = [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 4])]
    outputs = [helper.make_tensor_value_info("output_label", key, [None]), output]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(ML, 1)], ir_version=8
    )


def session(model) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


OPPOSITE = {
    "labels": [0, 1],
    "transform": "LOGISTIC",
    "weights": np.stack([-W[0], W[0]]),
    "biases": np.array([-0.3, 0.3], np.float32),
    "normalizer": False,
}
CLASSIFIERS = {
    "softmax": {"labels": [0, 1, 2]},
    "labels in another order": {"labels": [7, -2, 40]},
    "labels are texts": {"labels": ["ant", "bee", "cat"]},
    "opset 9": {"labels": [0, 1, 2], "opset": 9},
    "a sigmoid each, normalized": {"labels": [0, 1, 2], "transform": "LOGISTIC"},
    "two classes with opposite scores": OPPOSITE,
    "two texts with opposite scores": {**OPPOSITE, "labels": ["no", "yes"]},
    "scores": {"labels": [0, 1, 2], "transform": "NONE", "normalizer": False, "zipmap": False},
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_what_is_written_is_what_the_operator_gives(name):
    source = classifier(**CLASSIFIERS[name])
    want = session(source).run(None, {"X": X})
    opened = open_model(source)
    with_own_weights(opened.model.graph)
    written = opened.close()
    assert "LinearClassifier" not in {n.op_type for n in written.graph.node}
    label, scores = session(written).run(None, {"X": X})
    assert label.tolist() == want[0].tolist()
    held = [[row[k] for k in CLASSIFIERS[name]["labels"]] for row in want[1]] if isinstance(want[1], list) else want[1]
    np.testing.assert_allclose(scores, held, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_trains_and_its_labels_follow(name):
    source = classifier(**CLASSIFIERS[name])
    names = CLASSIFIERS[name]["labels"]
    targets = np.minimum(CLASS, len(names) - 1)
    trainer = Trainer(source, loss="cross_entropy", optimizer="adam", learning_rate=0.05)
    labels = np.array(names)[targets]  # those of the model, as data have them
    trainer.fit({"X": X, "labels": labels}, epochs=60, batch_size=len(X), shuffle=False)
    trained = trainer.inference_model()
    assert [o.name for o in trained.graph.output] == [o.name for o in source.graph.output]
    label, scores = session(trained).run(None, {"X": X})
    assert label.tolist() == [names[k] for k in scores.argmax(1)]
    before = session(source).run(["output_label"], {"X": X})[0].tolist()
    right = [names[k] for k in targets]
    assert np.mean([a == b for a, b in zip(label, right)]) > 0.85 > np.mean([a == b for a, b in zip(before, right)])


def test_the_loss_of_a_classifier_is_that_of_its_scores():
    """The gradient of the coefficients, by the closed form: (softmax - one hot)·xᵀ / N."""
    trainer = Trainer(classifier([0, 1, 2]), loss="cross_entropy", optimizer="sgd", learning_rate=1.0)
    trainer.fit({"X": X, "labels": CLASS}, epochs=1, batch_size=len(X), shuffle=False)
    held = {t.name: onnx.numpy_helper.to_array(t) for t in trainer.inference_model().graph.initializer}
    s = (X @ W.T + B).astype(np.float64)
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    slope = X.T.astype(np.float64) @ (p - np.eye(3)[CLASS]) / len(X)
    np.testing.assert_allclose(held["LinearClassifier_coefficients"], W.T - slope, atol=1e-6)
    np.testing.assert_allclose(held["LinearClassifier_intercepts"], B - (p - np.eye(3)[CLASS]).mean(0), atol=1e-6)


def regressor(attributes: str) -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 1]> g (float[N,4] X) => (float[N,M] variable) '
        f"{{ variable = ai.onnx.ml.LinearRegressor<{attributes}>(X) }}"
    )


REGRESSORS = {
    "one target": ("coefficients=[0.1,0.2,0.3,0.4], intercepts=[0.5]", 1),
    "without intercepts": ("coefficients=[0.1,0.2,0.3,0.4]", 1),
    "two targets": ("coefficients=[0.1,0.2,0.3,0.4,1.0,2.0,3.0,4.0], intercepts=[0.5,-0.5], targets=2", 2),
}


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_regression_trains(name):
    text, targets = REGRESSORS[name]
    x = np.round(3 * X)
    y = (x @ np.array([[1.0, -1], [2, 0], [0, 1], [-1, 3]])[:, :targets]).astype(np.float32)
    source = regressor(text)
    opened = open_model(source)
    with_own_weights(opened.model.graph)
    want = session(source).run(None, {"X": x})[0]
    np.testing.assert_allclose(session(opened.close()).run(None, {"X": x})[0], want, rtol=1e-5, atol=1e-6)
    trainer = Trainer(source, loss="mse", optimizer="adam", learning_rate=0.1)
    trainer.fit({"X": x, "labels": y}, epochs=150, batch_size=len(X), shuffle=False)
    after = session(trainer.inference_model()).run(["variable"], {"X": x})[0]
    assert np.mean((after - y) ** 2) < 0.02 * np.mean((want - y) ** 2)


def test_a_transform_that_has_no_derivative_stays():
    source = regressor('coefficients=[0.1,0.2,0.3,0.4], post_transform="PROBIT"')
    opened = open_model(source)
    with_own_weights(opened.model.graph)
    assert [n.op_type for n in opened.close().graph.node] == ["LinearRegressor"]
    with pytest.raises(BadInput, match="nothing to train"):
        attach(source, loss="mse")


def test_a_vector_of_labels_by_index_has_the_shape_that_it_has():
    """ArrayFeatureExtractor of a vector gives one row with a column for each index."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 1]>
        g (int64[N,1] at, float[3] of) => (float[1,N] y) { y = ai.onnx.ml.ArrayFeatureExtractor(of, at) }""")
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    (y,) = open_model(model).model.graph.outputs
    assert [str(d) for d in y.shape] == ["1", "N"]


def test_models_of_skl2onnx():
    skl2onnx = pytest.importorskip("skl2onnx", reason="needs skl2onnx and scikit-learn")
    from sklearn.linear_model import LogisticRegression, RidgeClassifier, SGDClassifier
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    texts = np.array(["ant", "bee", "cat"])[CLASS]
    wrong = (CLASS + 1) % 3  # what they are fitted to
    fitted = {
        "logistic": LogisticRegression().fit(X, wrong),
        "two classes": LogisticRegression().fit(X, wrong > 0),
        "texts": LogisticRegression().fit(X, texts),
        "scaled": make_pipeline(StandardScaler(), LogisticRegression()).fit(X, wrong),
        "hinge": SGDClassifier(alpha=0.1, random_state=0).fit(X, wrong),
        "one versus rest": OneVsRestClassifier(LogisticRegression()).fit(X, wrong),
        "ridge": RidgeClassifier().fit(X, wrong),
    }
    for name, model in fitted.items():
        source = skl2onnx.to_onnx(model, X[:1])
        classes = len(model.classes_)
        targets = np.minimum(CLASS, classes - 1)
        trainer = Trainer(source, loss="cross_entropy", optimizer="adam", learning_rate=0.1)
        trainer.fit({"X": X, "labels": targets}, epochs=150, batch_size=len(X), shuffle=False)
        label = session(trainer.inference_model()).run(None, {"X": X})[0]
        right = [model.classes_[k] for k in targets]
        assert np.mean([a == b for a, b in zip(label.ravel().tolist(), right)]) > 0.8, name
