"""The rows that a model is most wrong about, and pictures of them and of what it confuses."""

import base64
import io
import json
import re

import numpy as np
import onnx
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training import Trainer, evaluate
from onnxgrad.training.measure.misses import Miss, confusion_picture, misses_picture
from tests.cli.said import said

HEAD = '<ir_version: 10, opset_import: ["": 21]> g '
SCORES = onnx.parser.parse_model(HEAD + "(float[N, 3] x) => (float[N, 3] y) { y = Identity(x) }")


def test_the_largest_losses_of_classes_in_any_batches():
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((40, 3)).astype(np.float32), rng.integers(0, 3, 40)
    losses = np.log(np.exp(x.astype(np.float64)).sum(1)) - x[np.arange(40), labels]
    order = np.argsort(-losses)[:5]
    for size in (7, 256):
        found = evaluate(SCORES, {"x": x, "labels": labels}, worst=5, batch_size=size).worst
        assert [m.row for m in found] == order.tolist()
        np.testing.assert_allclose([m.loss for m in found], losses[order], rtol=1e-6)
        assert [m.actual for m in found] == [str(labels[i]) for i in order]
        assert [m.predicted for m in found] == [str(x[i].argmax()) for i in order]
    assert evaluate(SCORES, {"x": x, "labels": labels}).worst is None


def test_the_largest_losses_of_numbers_and_of_log_odds():
    line = onnx.parser.parse_model(HEAD + "(float[N, 2] x) => (float[N, 2] y) { y = Identity(x) }")
    x, t = np.array([[0, 0], [1, 1], [5, 5]], np.float32), np.array([[0, 0], [1.5, 1], [2, 5]], np.float32)
    found = evaluate(line, {"x": x, "t": t}, labels="t", worst=2).worst
    assert [(m.row, m.loss, m.actual, m.predicted) for m in found] == [
        (2, 4.5, "2, 5", "5, 5"),
        (1, 0.125, "1.5, 1", "1, 1"),
    ]
    odds = onnx.parser.parse_model(HEAD + "(float[N] x) => (float[N] y) { y = Identity(x) }")
    found = evaluate(
        odds, {"x": np.float32([3, -3, 0.5]), "t": np.array([1, 1, 0])}, labels="t", metrics="auc", worst=1
    )
    assert (found.worst[0].row, found.worst[0].actual, found.worst[0].predicted) == (1, "1", "0")
    assert found.worst[0].loss == pytest.approx(np.log1p(np.exp(3)))


def test_rows_with_several_labels_are_refused():
    tokens = onnx.parser.parse_model(HEAD + "(float[N, T, 3] x) => (float[N, T, 3] y) { y = Identity(x) }")
    with pytest.raises(BadInput, match="one label each"):
        evaluate(tokens, {"x": np.zeros((4, 5, 3), np.float32), "labels": np.zeros((4, 5), np.int64)}, worst=1)


def picture(png):
    image = pytest.importorskip("PIL.Image")
    found = image.open(io.BytesIO(png))
    return np.asarray(found.convert("RGB"))


@pytest.fixture
def digits(tmp_path):
    """A model of pictures, of which it gets some wrong, and the data as a file."""
    rng = np.random.default_rng(1)
    proto = onnx.parser.parse_model(
        HEAD + "(float[N, 1, 8, 8] x) => (float[N, 3] y) { f = Flatten(x)\n y = MatMul(f, w) }"
    )
    weights = rng.standard_normal((64, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    data = {"x": rng.random((30, 1, 8, 8)).astype(np.float32), "labels": rng.integers(0, 3, 30)}
    np.savez(tmp_path / "d.npz", **data)
    return tmp_path, proto, data


def test_pictures_of_the_command(digits):
    pytest.importorskip("matplotlib")
    folder, proto, data = digits
    text = said(folder, "evaluate PLACE/m.onnx --data PLACE/d.npz --worst 3 --picture PLACE/worst.png")
    found = evaluate(proto, data, worst=3)
    for miss in found.worst:
        assert re.search(rf"{miss.row} +{miss.loss:.4g} +{miss.actual} +{miss.predicted}", text)
    assert (folder / "worst.png").read_bytes() == misses_picture(found.worst)
    assert picture((folder / "worst.png").read_bytes()).std() > 20
    said(folder, "evaluate PLACE/m.onnx --data PLACE/d.npz --picture PLACE/table.png")
    assert (folder / "table.png").read_bytes() == confusion_picture(found.confusion)
    told = json.loads(said(folder, "evaluate PLACE/m.onnx --data PLACE/d.npz --worst 1 --json"))
    assert told["worst"][0]["row"] == found.worst[0].row


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    same = onnx.parser.parse_model(HEAD + "(float[N, 2] x) => (float[N, 2] y) { y = Identity(x) }")
    onnx.save(same, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((3, 2), np.float32), y=np.full((3, 2), 0.5, np.float32))
    assert "nothing to draw" in said(tmp_path, "evaluate PLACE/m.onnx --data PLACE/d.npz --picture PLACE/p.png", 2)
    assert not (tmp_path / "p.png").exists()


def test_the_confusion_matrix_shows_where_it_is_dark():
    pytest.importorskip("matplotlib")
    right, wrong = (picture(confusion_picture(t, ["a", "b"])) for t in (np.diag([9, 9]), np.diag([9, 9])[::-1]))
    assert (right != wrong).any(axis=2).mean() > 0.1


def test_reports_show_what_is_confused(digits):
    pytest.importorskip("matplotlib")
    folder, proto, data = digits
    Trainer(proto, loss="cross_entropy", learning_rate=1e-4).fit(
        data, epochs=1, batch_size=10, validation=data, report=folder / "r.html", progress=False
    )
    page = (folder / "r.html").read_text()
    assert "most wrong about (validation data)" in page
    assert "Confusion matrix (validation data)" in page
    assert len(re.findall("data:image/png;base64,", page)) == 2
    first = base64.b64decode(re.search(r"data:image/png;base64,([^\"]+)", page)[1])
    assert picture(first).std() > 20


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["$\\frac{$", "$_$", "a$b", "\\$", "\udcff\x00\n", "x" * 100_000, "{\\bf"])
def test_names_of_classes_are_drawn_as_they_are(name):
    """Between $ matplotlib reads a formula, of which most are not well formed."""
    pytest.importorskip("matplotlib")
    image = np.arange(64.0).reshape(8, 8)
    assert picture(confusion_picture(np.diag([9, 9]), [name, name])).std() > 1
    assert picture(misses_picture([Miss(1.0, 0, name, name, image)])).std() > 1
