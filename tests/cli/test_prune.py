"""``onnxgrad prune``: shares, budgets, the table of sensitivity, and refusals."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

import onnxgrad
from onnxgrad.cli.app import build
from onnxgrad.training.pruning.costs import milliseconds
from tests.training.models import blobs, classifier


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(hidden=32), "m.onnx")
    np.savez("d.npz", **blobs())
    return tmp_path


def run(*words: str):
    return CliRunner().invoke(build(), ["prune", "m.onnx", *words, "-o", "small.onnx"])


def shapes(path) -> dict[str, list[int]]:
    return {t.name: list(t.dims) for t in onnx.load(path).graph.initializer}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("words", "width"),
    [
        (("--channels", "0.5"), 16),
        (("--channels", "0.25", "--score", "wanda", "--data", "d.npz"), 24),
        (("--channels", "0.5", "--score", "movement", "--data", "d.npz", "--loss", "cross_entropy"), 16),
        (("--flops", "0.5", "--data", "d.npz"), 16),
        (("--bytes", "700B"), 17),
        (("--bytes", "0.8", "--multiple", "8"), 24),
    ],
)
def test_widths(place, words, width):
    found = run(*words)
    assert found.exit_code == 0, found.output
    assert shapes("small.onnx") == {"w1": [6, width], "b1": [width], "w2": [width, 3]}
    assert f"w1: 32 → {width} channels" in found.output
    assert "differs from the masked model by" in found.output


def test_every_batch_counts(place):
    """The norms of what layers read are sums over all rows, whichever batch comes last."""
    rows = {name: array[:96].copy() for name, array in blobs().items()}
    rows["x"][64:] *= 0.01 * np.arange(1, rows["x"].shape[1] + 1)  # the last batch alone would turn the order round
    turned = {name: array[::-1] for name, array in rows.items()}
    one, other = (onnxgrad.prune("m.onnx", {"x": data["x"]}, weights=0.5, score="wanda") for data in (rows, turned))
    for a, b in zip(one.graph.initializer, other.graph.initializer):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(a), onnx.numpy_helper.to_array(b))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_no_channel_more_fits_the_budget(share):
    sizes, rng = (9, 33, 17, 4), np.random.default_rng(0)
    nodes = "h = MatMul (x, w0)  r = Relu (h)  g = MatMul (r, w1)  t = Tanh (g)  y = MatMul (t, w2)"
    head = '<ir_version: 10, opset_import: ["": 21]> net (float[N, 9] x) => (float[N, 4] y)'
    model = onnx.parser.parse_model(f"{head} {{ {nodes} }}")
    for k, shape in enumerate(pairwise(sizes)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype("f"), f"w{k}"))
    small = onnxgrad.prune(model, {"x": rng.standard_normal((40, 9)).astype(np.float32)}, flops=share)
    a, b = (t.dims[1] for t in small.graph.initializer if t.name != "w2")
    budget = share * (9 * 33 + 33 * 17 + 17 * 4)
    assert 9 * a + a * b + 4 * b <= budget
    assert a == 33 or 9 * (a + 1) + (a + 1) * b + 4 * b > budget
    assert b == 17 or 9 * a + a * (b + 1) + 4 * (b + 1) > budget


def test_zeros_by_a_pattern(place):
    found = run("--weights", "2:4")
    assert found.exit_code == 0, found.output
    held = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("small.onnx").graph.initializer}
    assert ((held["w2"].reshape(8, 4, 3) != 0).sum(1) == 2).all()
    assert "zeros" in found.output


def test_a_budget_of_time(place):
    model, feeds = classifier(hidden=2048), {"x": np.zeros((512, 6), np.float32)}
    onnx.save(model, "m.onnx")
    before = milliseconds(model, feeds)
    found = run("--milliseconds", f"{0.6 * before:.4f}", "--latency-rows", "512")
    assert found.exit_code == 0, found.output
    assert shapes("small.onnx")["b1"][0] <= 1536
    assert milliseconds(onnx.load("small.onnx"), feeds) < 0.9 * before


@pytest.mark.parametrize("name", ["table.json", "picture.png"])
def test_sensitivity(place, name):
    if name.endswith("png"):
        pytest.importorskip("matplotlib")
    found = run("--channels", "0.5", "--data", "d.npz", "--sensitivity", name)
    assert found.exit_code == 0, found.output
    if name.endswith("json"):
        (layer,) = json.loads((place / name).read_text())["layers"]
        assert (layer["name"], layer["before"], layer["after"]) == ("w1", 32, 16)
        damage = [layer["damage"][share] for share in ("0.25", "0.5", "0.75")]
        assert 0 < damage[0] < damage[2]
    else:
        assert (place / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what to remove"),
        (("--channels", "1.5"), "between 0 and 1"),
        (("--channels", "0.5", "--flops", "0.5"), "leave channels and heads out"),
        (("--flops", "0.5", "--bytes", "1KB"), "several budgets"),
        (("--flops", "0.001"), "the budget cannot be met"),
        (("--heads", "0.5"), "no heads can be removed"),
        (("--channels", "0.5", "--exclude", "w1"), "no channels can be removed"),
        (("--channels", "0.5", "--score", "wanda"), "needs data"),
        (("--channels", "0.5", "--score", "gradient", "--data", "d.npz"), "needs a loss"),
        (("--channels", "0.5", "--score", "size"), "no score 'size'"),
        (("--weights", "4:2"), "N of M"),
        (("--channels", "0.5", "--sensitivity", "table.JSN"), "none of .json, .png, .svg"),
    ],
)
def test_refusals(place, words, message):
    found = run(*words)
    assert found.exit_code == 2, found.output
    assert message in " ".join(found.output.split()) or message in " ".join(found.stderr.split())
    assert not (place / "small.onnx").exists()
