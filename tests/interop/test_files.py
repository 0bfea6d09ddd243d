"""A model's derivatives as files with a manifest; the command that writes them."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.cli.said import said

MODEL = (
    '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] x, int64[N] k) => (float[N, 3] y, int64[1] n) '
    "{ s = Mul(x, x)\n y = Sin(s)\n n = Shape<end=1>(k) }"
)


@pytest.fixture
def place(tmp_path):
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "m.onnx")
    return tmp_path


def test_the_manifest_tells_a_program_how_to_feed_the_files(place):
    said(place, "family PLACE/m.onnx --for runtime -o PLACE/gen")
    manifest = json.loads((place / "gen" / "manifest.json").read_text())
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    given = {
        ("input", "x"): x,
        ("input", "k"): np.zeros(2, np.int64),
        ("cotangent", "y"): x + 1,
        ("tangent", "x"): x - 1,
    }
    found = {}
    for about in manifest["models"].values():
        session = onnxruntime.InferenceSession(place / "gen" / about["file"])
        feeds = {v["name"]: given[v["role"], v.get("of", v["name"])] for v in about["inputs"]}
        values = session.run([v["name"] for v in about["outputs"]], feeds)
        found |= {(v["role"], v.get("of", v["name"])): a for v, a in zip(about["outputs"], values)}
    slope = 2 * x * np.cos(x * x)
    np.testing.assert_allclose(found["gradient", "x"], (x + 1) * slope, rtol=1e-5)
    np.testing.assert_allclose(found["tangent", "y"], (x - 1) * slope, rtol=1e-5)
    np.testing.assert_allclose(found["output", "y"], np.sin(x * x), rtol=1e-6)


def test_with_a_loss_the_step_is_written_too(place):
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] x) => (float[N, 3] y) { y = MatMul(x, w) }'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "w"))
    onnx.save(proto, place / "t.onnx")
    said(place, "family PLACE/t.onnx -o PLACE/gen --loss mse --optimizer sgd --name net")
    assert (place / "gen" / "vjp_net.onnx").exists()
    assert {"train", "infer"} <= set(json.loads((place / "gen" / "step" / "contract.json").read_text())["models"])


def test_for_casadi(place):
    assert "fwd_adj_m.onnx" in said(place, "family PLACE/m.onnx --for casadi -o PLACE/gen --dim N=2")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("family PLACE/m.onnx --for casadi -o PLACE/gen", "a size that is not fixed (N)"),
        ("family PLACE/m.onnx --for casadi -o PLACE/gen --loss mse", "writes no training step"),
        ("family PLACE/m.onnx -o PLACE", "MODEL"),
        ("family PLACE/m.onnx -o PLACE/gen --name a/b", "--name a/b is not the name of a file"),
    ],
)
def test_what_does_not_fit_is_refused(place, line, words):
    assert words in said(place, line, code=2)
    assert [p.name for p in place.iterdir()] == ["m.onnx"]
