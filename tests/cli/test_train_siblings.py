"""``onnxgrad train --also``: quantized forms beside the trained model, each measured."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.commands import command
from tests.training.models import blobs, classifier

TRAIN = ("train", "m.onnx", "--data", "d.npz", "-o", "t.onnx", "--loss", "cross_entropy", "--epochs", 5, "--lr", 0.05)


@pytest.fixture
def place(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs())
    return tmp_path


def test_measured(place):
    """The score of each file is printed and kept, and is that of the file."""
    found = command(*TRAIN, "--validation", "d.npz", "--also", "int8,int4", "--history", "h.json", cwd=place)
    assert found.returncode == 0, found.stderr
    lines = {line.split()[0]: line for line in found.stdout.splitlines()}
    assert lines["int8"].endswith("t.int8.onnx")
    assert lines["int4"].endswith("t.int4.onnx")
    kinds = {
        name: {t.data_type for t in onnx.load(place / f"t.{name}.onnx").graph.initializer} for name in ("int8", "int4")
    }
    assert onnx.TensorProto.INT8 in kinds["int8"]
    assert onnx.TensorProto.INT4 in kinds["int4"]
    scores = json.loads((place / "h.json").read_text())
    data = blobs()
    for name in ("int8", "int4"):
        session = onnxruntime.InferenceSession(place / f"t.{name}.onnx")
        (feed,) = session.get_inputs()
        (logits,) = session.run(None, {feed.name: data[feed.name]})[:1]
        accuracy = float((logits.argmax(-1) == data["labels"]).mean())
        assert scores[name]["accuracy"] == pytest.approx(accuracy)
        assert f"{100 * accuracy:.2f}%" in lines[name]
        assert accuracy > 0.8


def test_raw_columns_of_a_table(place):
    """The saved model takes raw columns, and so does its quantized form."""
    rng = np.random.default_rng(0)
    rows = [f"{a:.2f};{c};{2 * a:.2f}" for a, c in zip(rng.uniform(1, 5, 60), rng.choice(["red", "", "blue"], 60))]
    (place / "t.csv").write_text("\n".join(["age;colour;goal", ";red;4", *rows]).replace(".", ","))
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] x) => (float[N, 1] z) { z = MatMul (x, w) }'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([[1], [-2], [0.5]]), "w"))
    onnx.save(model, place / "raw.onnx")
    found = command(
        "train", "raw.onnx", "--data", "t.csv", "--input", "x=age,colour", "--labels", "goal", "--missing", "mean",
        "--standardize", "--loss", "mse", "-o", "t.onnx", "--also", "int8", cwd=place,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    feeds = {"age": np.array([1.5, np.nan, 4.0]), "colour": np.array(["red", "", "green"], object)}
    wide, narrow = (onnxruntime.InferenceSession(place / f"t{s}.onnx").run(None, feeds)[0] for s in ("", ".int8"))
    assert np.ptp(wide) > 1
    np.testing.assert_allclose(narrow, wide, atol=0.05)


@pytest.mark.parametrize(("also", "words"), [("int3", "int3"), ("int8,bits", "bits")])
def test_unknown(place, also, words):
    """An unknown form is refused before training."""
    found = command(*TRAIN, "--also", also, cwd=place)
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert words in found.stderr
    assert {p.name for p in place.iterdir()} == {"m.onnx", "d.npz"}
