"""A model over data: predictions row by row, and which task its labels make."""

import json

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training import evaluate, predict
from onnxgrad.training.measure.comparisons import Binary
from onnxgrad.training.measure.result import as_json
from onnxgrad.uncertainty import conformal, laplace

RNG = np.random.default_rng(0)
X = RNG.standard_normal((25, 3)).astype(np.float32)


def model(body="y = Identity(x)", types="float[N, 3] y", inputs="float[N, 3] x", classes=None):
    weights = "<int64[1] i = {0}>" if "(x, i)" in body else ""
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g ({inputs}) => ({types}) {weights} {{ {body} }}'
    )
    if classes:
        proto.metadata_props.add(key="onnxgrad.classes", value=json.dumps(classes))
    return proto


def test_predictions_come_in_the_order_of_the_rows():
    sums = model("y = Add(x, x)\n s = ReduceSum<keepdims=0, noop_with_empty_axes=0>(y)", "float[N, 3] y, float s")
    found = predict(sums, {"x": X, "other": np.arange(25)}, outputs=["y"], batch_size=10)
    np.testing.assert_array_equal(found["y"], X + X)
    assert list(predict(sums, {"x": X})) == ["y"], "a single number is no prediction, unless it is asked for"
    with pytest.raises(BadInput, match=r"'s' is .*not one entry per row"):
        predict(sums, {"x": X}, outputs=["s"])


def test_predictions_that_are_not_numbers_are_counted():
    data = {"x": np.where(np.arange(75).reshape(25, 3) == 4, -1, X**2).astype(np.float32), "labels": np.arange(25) % 3}
    with pytest.warns(UserWarning, match=r"predictions 'y' are not numbers \(NaN\) in 1 of 25 rows"):
        assert np.isnan(evaluate(model("y = Log(x)"), data, batch_size=7).metrics["log_loss"])


def test_a_fixed_batch_is_filled_up():
    found = predict(model(types="float[10, 3] y", inputs="float[10, 3] x"), {"x": X})
    np.testing.assert_array_equal(found["y"], X)


def test_an_output_that_is_not_one_entry_per_row_is_refused():
    with pytest.raises(BadInput, match=r"'y' is .*not one entry per row"):
        predict(model("y = ReduceMax<keepdims=0>(x)", "float y"), {"x": X})
    with pytest.raises(UnknownName, match="no output named 'z'"):
        predict(model(), {"x": X}, outputs=["z"])


def test_classes_by_logits_and_by_probabilities():
    labels = RNG.integers(0, 3, 25)
    by_logits = evaluate(model(), {"x": X, "labels": labels}, metrics=["accuracy", "log_loss"], batch_size=7)
    by_chances = evaluate(model("y = Softmax(x)"), {"x": X, "labels": labels}, metrics=["accuracy", "log_loss"])
    assert by_logits.task == by_chances.task == "classes"
    assert by_logits.metrics == pytest.approx(by_chances.metrics, rel=1e-5)
    assert by_logits.metrics["accuracy"] == np.mean(X.argmax(1) == labels)
    assert by_logits.confusion.sum() == 25
    assert json.loads(as_json(by_logits))["rows"] == 25


def test_symbols_over_time_are_read_by_ctc():
    path = np.array([[1, 1, 0, 2, 2, 0, 2], [0, 3, 3, 3, 0, 0, 0]])
    data = {"x": np.eye(4, dtype=np.float32)[path], "labels": np.array([[1, 2, 2], [3, 3, -1]])}
    ctc = model(types="float[N, T, 4] y", inputs="float[N, T, 4] x")
    found = evaluate(ctc, data, metrics=["exact", "cer", "wer:space=2"])
    assert (found.task, found.metrics) == ("sequences", {"exact": 0.5, "cer": 1 / 5, "wer:space=2": 1 / 2})
    other = {"x": np.roll(data["x"], -1, 2), "labels": data["labels"] - 1}
    assert evaluate(ctc, other, metrics="cer", blank=3).metrics["cer"] == found.metrics["cer"]
    with pytest.raises(BadInput, match=r"the labels 'labels' are .*\n  hint: sequences .*--metrics cer"):
        evaluate(ctc, data, metrics=["accuracy", "cer"])


def test_classes_by_name_have_the_numbers_of_the_model():
    names = np.array(["b", "c", "a"])[X.argmax(1)]
    found = evaluate(model(classes=["b", "c", "a"]), {"x": X, "labels": names})
    assert found.metrics["accuracy"] == 1
    assert set(found.classes) == {"a", "b", "c"}


def test_words_over_time_on_either_axis_and_the_ignored_label():
    logits = RNG.standard_normal((6, 4, 9)).astype(np.float32)
    labels = logits.argmax(-1)
    labels[:, 3] = -100
    last = evaluate(
        model(types="float[N, T, 9] y", inputs="float[N, T, 9] x"), {"x": logits, "labels": labels}, ignore_index=-100
    )
    second = evaluate(
        model(types="float[N, 9, T] y", inputs="float[N, 9, T] x"),
        {"x": logits.transpose(0, 2, 1), "labels": labels}, ignore_index=-100,
    )  # fmt: skip
    assert last.metrics == pytest.approx(second.metrics)
    assert (last.metrics["accuracy"], last.rows) == (1, 18)
    with pytest.raises(BadInput, match=r"label -100 in row 0; the model tells 9 .*\n.*ignore_index=-100"):
        evaluate(model(types="float[N, T, 9] y", inputs="float[N, T, 9] x"), {"x": logits, "labels": labels})


@pytest.mark.parametrize("body", ["y = Gather<axis=1>(x, i)", "z = Gather<axis=1>(x, i)\n y = Sigmoid(z)"])
def test_ones_by_log_odds_and_by_probabilities(body):
    ones = (X[:, 0] + 0.1 > 0).astype(np.int64)
    binary = model(body, "float[N, 1] y")
    found = evaluate(binary, {"x": X, "labels": ones}, metrics=["accuracy", "auc"])
    assert found.task == "binary"
    assert found.metrics == pytest.approx({"accuracy": np.mean((X[:, 0] > 0) == ones), "auc": 1.0})


def test_numbers_with_and_without_an_axis():
    single = model("y = Gather<axis=1>(x, i)", "float[N, 1] y")
    for target in (X[:, 0] + 2, X[:, :1] + 2):
        found = evaluate(single, {"x": X, "target": target})
        assert found.task == "numbers"
        assert found.metrics["mae"] == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"metrics": ["acuracy"]}, "did you mean 'accuracy'"),
        ({"metrics": ["mae"]}, "mae is no metric for a task of classes"),
        ({"labels": "lables"}, "did you mean 'labels'"),
        ({"prediction": "z"}, "no output named 'z'"),
    ],
)
def test_what_is_not_there_is_refused(arguments, words):
    with pytest.raises(BadInput, match=words):
        evaluate(model(), {"x": X, "labels": RNG.integers(0, 3, 25)}, **arguments)


def test_without_labels_it_says_which_arrays_there_are():
    kinds = {"x": X, "kind": np.zeros(25, int)}
    assert evaluate(model(), kinds).labels == "kind"
    with pytest.raises(BadInput, match=r"--labels: 'kind', 'row'$"):
        evaluate(model(), {**kinds, "row": np.arange(25)})
    with pytest.raises(BadInput, match="the data has no labels, only what feeds the model: 'x'"):
        evaluate(model(), {"x": X})


def test_rows_of_different_lengths_count_no_padding():
    kinds = {"tokens": [[1, 2, 0], [2], [1, 1]], "tags": [[1, 2, 0], [2], [1, 0]]}
    onehot = model("y = OneHot(tokens, depth, values)", "float[N, T, 3] y", "int64[N, T] tokens")
    for name, array in {"depth": np.int64(3), "values": np.float32([0, 1])}.items():
        onehot.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    rows = [{k: v[i] for k, v in kinds.items()} for i in range(3)]
    for data in (kinds, rows):
        found = evaluate(onehot, data, labels="tags")
        assert (found.rows, found.metrics["accuracy"]) == (6, 5 / 6)


def test_arrays_without_names():
    labels = RNG.integers(0, 3, 25)
    assert evaluate(model(), (X, labels)).metrics == evaluate(model(), {"x": X, "labels": labels}).metrics
    np.testing.assert_array_equal(predict(model(), X.tolist())["y"], X)
    with pytest.raises(BadInput, match=r"row 0 of the data: 2 arrays without names.*1 inputs to feed: x"):
        predict(model(), [(X[0], 1)])


def test_several_ones_of_a_row_are_binary_behind_a_sigmoid():
    ones = (RNG.random((25, 3)) > 0.5).astype(np.float32)
    assert evaluate(model("y = Sigmoid(x)"), {"x": X, "labels": ones}).task == "binary"
    assert evaluate(model(), {"x": X, "labels": ones}).task == "numbers"


def linear():
    proto = model("y = MatMul(x, w)")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((3, 3), np.float32), "w"))
    return proto


def test_a_model_is_trained_in_one_call(tmp_path):
    data = {"x": X, "labels": X.argmax(1)}
    trainer = onnxgrad.train(
        linear(), data, loss="cross_entropy", optimizer="sgd", learning_rate=1.0, epochs=20, validation_split=0.2,
        output=tmp_path / "trained.onnx",
    )  # fmt: skip
    assert len(trainer.history.epochs) == 20
    found = onnxgrad.evaluate(tmp_path / "trained.onnx", data)
    assert found.metrics["accuracy"] > 0.9
    np.testing.assert_allclose(trainer.predict(data)["y"], onnxgrad.predict(tmp_path / "trained.onnx", data)["y"])
    assert "at step 20 " in repr(trainer)
    assert "trains 1 tensors of 9 numbers" in repr(trainer)
    with pytest.raises(BadInput, match="epoch"):
        onnxgrad.train(linear(), data, loss="cross_entropy", epoch=3)


def test_a_probability_that_rounding_makes_a_little_negative():
    """Ensembles of trees give the other class 1 - p, which can be -1e-7."""
    p = np.float32([0.9, 1 + 1.2e-7, 0.3, 1.0])
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> m (float[N, 2] x) => (float[N, 2] y) { y = Identity (x) }'
    )
    found = evaluate(
        proto, {"x": np.stack([1 - p, p], 1), "labels": np.array([1, 1, 0, 1])}, metrics="accuracy,log_loss"
    )
    assert found.metrics["accuracy"] == 1
    assert found.metrics["log_loss"] == pytest.approx(-np.log([0.9, 0.7]).sum() / 4, rel=1e-6)
    odds, _ = Binary(probabilities=True)(p[:, None], np.ones((4, 1)))
    assert (odds[[1, 3]] == np.inf).all()


def test_labels_that_are_one_number_have_no_rows():
    with pytest.raises(BadInput, match="the array 'labels' is one number and has no rows"):
        evaluate(model(), {"x": X, "labels": np.int64(1)})


def _several_outputs():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 5, 8] x) => (float[N, 5, 8] hidden, float[N, 8] pooled, float[N, 3] scores) {
            hidden = Tanh (x)
            axis = Constant <value = int64[1] {1}> ()
            pooled = ReduceMean <keepdims = 0> (hidden, axis)
            scores = MatMul (pooled, w)
        }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(8, 3, dtype=np.float32), "w"))
    return model


@pytest.mark.parametrize("metrics", [None, "accuracy", "recall_at_1,mrr"])
def test_another_output_is_suggested(metrics):
    rows = {"x": np.zeros((12, 5, 8), np.float32), "labels": np.arange(12) % 3}
    with pytest.raises(BadInput, match=r"\n  hint: --prediction chooses another output: 'pooled', 'scores'"):
        evaluate(_several_outputs(), rows, metrics=metrics)
    with pytest.raises(BadInput, match=r"\n  hint: --prediction chooses another output: 'pooled', 'scores'"):
        laplace(_several_outputs(), rows)
    with pytest.raises(BadInput, match=r"\n  hint: --prediction chooses another output: 'pooled', 'scores'"):
        conformal(_several_outputs(), rows)


@pytest.mark.parametrize("form", ["arrays", "names", "rows", "stream"])
def test_labels_that_are_missing_are_left_out(form):
    """Of arrays, and of rows that come one by one; without any, nothing changes."""
    labels = X.argmax(1)
    gone = np.isin(np.arange(25), [3, 7])
    kinds = np.array([None if out else "abc"[k] for k, out in zip(labels, gone)], object)
    rows = [{"x": x, "labels": None if out else int(k)} for x, k, out in zip(X, labels, gone)]
    source = {
        "arrays": {"x": X, "labels": np.where(gone, np.nan, labels)}, "names": {"x": X, "labels": kinds}, "rows": rows,
        "stream": lambda: iter(rows),
    }[form]  # fmt: skip
    names = list("abc") if form == "names" else None
    found = evaluate(model(classes=names), source, missing="drop", metrics="accuracy")
    assert (found.rows, found.task, found.metrics["accuracy"]) == (23, "classes", 1)
    assert found.notes == ["2 of 25 rows of the data lack a value and are left out, 2 of them without a label"]
    with pytest.raises(BadInput, match=r"no value in row 3|no label in row 3|not finite"):
        evaluate(model(classes=names), source)
    whole = {"x": X, "labels": labels}
    assert as_json(evaluate(model(), whole, missing="drop")) == as_json(evaluate(model(), whole))
    with pytest.raises(BadInput, match="every row of the data has a missing value"):
        evaluate(model(), {"x": X, "labels": np.full(25, np.nan)}, missing="drop")
