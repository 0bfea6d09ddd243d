"""``onnxgrad predict``, ``evaluate`` and ``info``: files in, files and lines out."""

import csv
import json

import numpy as np
import onnx
import pytest

from tests.cli.said import said

X = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
NAMES = ["ant", "bee", "cat"]


@pytest.fixture
def files(tmp_path):
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[N, 3] x) => (float[N, 3] y) { y = Identity(x) }'
    )
    proto.metadata_props.add(key="onnxgrad.classes", value=json.dumps(NAMES))
    onnx.save(proto, tmp_path / "m.onnx")
    lines = [",".join([*map(str, row.tolist()), NAMES[row.argmax()]]) for row in X]
    (tmp_path / "d.csv").write_text("a,b,c,kind\n" + "\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_predictions_as_a_table(files, suffix):
    pytest.importorskip("pyarrow")
    said(files, f"predict PLACE/m.onnx --data PLACE/d.csv --input x=a..c -o PLACE/p.{suffix}")
    with (files / f"p.{suffix}").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="," if suffix == "csv" else "\t"))
    np.testing.assert_array_equal([[float(r[f"y_{k}"]) for k in range(3)] for r in rows], X)
    assert [r["y_class"] for r in rows] == [NAMES[k] for k in X.argmax(1)]


def test_predictions_as_arrays(files):
    np.savez(files / "d.npz", x=X)
    said(files, "predict PLACE/m.onnx --data PLACE/d.npz -o PLACE/p.npz")
    np.testing.assert_array_equal(np.load(files / "p.npz")["y"], X)


def test_metrics_and_a_table_of_classes(files):
    pytest.importorskip("pyarrow")
    line = "evaluate PLACE/m.onnx --data PLACE/d.csv --input x=a..c --labels kind --metrics accuracy,auc"
    text = said(files, line)
    assert "accuracy             1" in text
    assert "9 labels 'kind' against the output 'y' (classes)" in text
    found = json.loads(said(files, line + " --json"))
    assert found["metrics"] == {"accuracy": 1, "auc": 1}
    assert set(found["classes"]) <= set(NAMES)


def test_what_a_model_is(files):
    text = said(files, "info PLACE/m.onnx")
    assert "float[N, 3]" in text
    assert "classes    ant, bee, cat" in text
    found = json.loads(said(files, "info PLACE/m.onnx --json"))
    assert found["inputs"] == [{"name": "x", "type": "float[N, 3]", "dtype": "float", "shape": ["N", 3]}]
    assert found["operators"] == {"Identity": 1}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("predict PLACE/m.onnx --data PLACE/d.csv -o PLACE/p.npz", "--input x=a..c joins columns"),
        ("predict PLACE/m.onnx --data PLACE/d.csv --input x=a..c -o PLACE/p.txt", "none of .csv, .tsv, .npz"),
        ("predict PLACE/m.onnx --data PLACE/d.csv --input x=a..c -o PLACE/d.csv", "--data"),
        ("predict PLACE/m.onnx --data PLACE/d.csv --input x -o PLACE/p.npz", "not written as X=f0..f63"),
        ("predict PLACE/m.onnx --data PLACE/d.csv --input x=a..d -o PLACE/p.npz", "no column named 'd'"),
        (
            "evaluate PLACE/m.onnx --data PLACE/d.csv --input x=a..c --metrics ,",
            "no metric is named; there are",
        ),
        ("info PLACE/none.onnx", "none.onnx"),
    ],
)
def test_what_does_not_fit_is_refused(files, line, words):
    pytest.importorskip("pyarrow")
    before = {p: p.read_bytes() for p in files.iterdir()}
    assert words in said(files, line, code=2)
    assert {p: p.read_bytes() for p in files.iterdir()} == before
