"""``onnxgrad explain``: a picture in, a picture out."""

import numpy as np
import onnx
import pytest

from tests.cli.said import said

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[N, 1, 8, 8] x) => (float[N, 2] y) <float[2, 1, 3, 3] w, int64[2] axes = {2, 3}> {
    c = Conv(x, w)
    h = Relu(c)
    y = ReduceMean<keepdims=0>(h, axes)
}"""


@pytest.fixture
def place(tmp_path):
    proto = onnx.parser.parse_model(MODEL.replace("float[2, 1, 3, 3] w, ", ""))
    kernel = np.zeros((2, 1, 3, 3), np.float32)
    kernel[0, 0, 1, 1], kernel[1, 0, 0, 0] = 1, 0.1
    proto.graph.initializer.append(onnx.numpy_helper.from_array(kernel, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    x = np.zeros((1, 1, 8, 8), np.float32)
    x[0, 0, 2, 5] = 1
    np.savez(tmp_path / "d.npz", x=x)
    return tmp_path


def test_integrated_gradients_find_the_bright_pixel(place):
    text = said(place, "explain PLACE/m.onnx PLACE/d.npz -o PLACE/e.npz --save-model PLACE/e.onnx")
    assert "integrated_gradients of y[:, 0] class 0" in text
    found = np.load(place / "e.npz")["attribution"]
    assert np.unravel_index(found.argmax(), found.shape) == (0, 2, 5)
    assert found.sum() == pytest.approx(1 / 36, rel=1e-4)
    onnx.checker.check_model(onnx.load(place / "e.onnx"))


def test_names_that_are_formulas(place):
    """The name of the baseline is made of letters that every tool reads; matplotlib draws what is between $ as math."""
    pytest.importorskip("matplotlib")
    proto = onnx.load(place / "m.onnx")
    proto.graph.input[0].name = proto.graph.node[0].input[0] = "$x^$"
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "$\\frac$"
    onnx.save(proto, place / "m.onnx")
    np.savez(place / "d.npz", **{"$x^$": np.load(place / "d.npz")["x"]})
    said(place, "explain PLACE/m.onnx PLACE/d.npz -o PLACE/e.png")
    np.savez(place / "d.npz", **{"$x^$": np.ones((2, 1, 8, 8), np.float32)})
    said(place, "explain PLACE/m.onnx PLACE/d.npz -o PLACE/e.npz --method expected_gradients")
    assert (place / "e.png").exists()


@pytest.mark.parametrize("method", ["saliency", "smooth_grad", "grad_cam"])
def test_a_picture_explained_by_a_picture(place, method):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    pixels = np.zeros((8, 8), np.uint8)
    pixels[2, 5] = 255
    image.fromarray(pixels).save(place / "p.png")
    said(place, f"explain PLACE/m.onnx PLACE/p.png -o PLACE/e.png --method {method} --class 0")
    assert image.open(place / "e.png").size[0] > 100


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("explain PLACE/m.onnx PLACE/d.npz -o PLACE/e.txt", "neither .png nor .npz"),
        ("explain PLACE/m.onnx PLACE/d.npz -o PLACE/d.npz", "DATA"),
        ("explain PLACE/m.onnx PLACE/d.npz -o PLACE/e.npz --row 3", "has 1 rows"),
        ("explain PLACE/m.onnx PLACE/d.npz -o PLACE/e.npz --of z", "no output named 'z'"),
        ("explain PLACE/m.onnx PLACE/d.npz -o PLACE/e.npz --method grad_cam --layer z", "no value named 'z'"),
    ],
)
def test_what_does_not_fit_is_refused(place, line, words):
    before = {p: p.read_bytes() for p in place.iterdir()}
    assert words in said(place, line, code=2)
    assert {p: p.read_bytes() for p in place.iterdir()} == before


def test_other_methods(place):
    rows = np.random.default_rng(0).random((9, 1, 8, 8)).astype(np.float32)
    rows[3] = 0
    rows[3, 0, 2, 5] = 1
    np.savez(place / "d.npz", x=rows)
    for method, flags in (("expected_gradients", "--background 8"), ("deep_lift", ""), ("occlusion", "--window 2")):
        said(place, f"explain PLACE/m.onnx PLACE/d.npz --row 3 --class 0 -o PLACE/e.npz --method {method} {flags}")
        found = np.load(place / "e.npz")["attribution"]
        assert found.shape == (1, 8, 8)
        assert found[0, 2, 5] == found.max() > 0
    np.savez(place / "one.npz", x=rows[:1])
    said(place, "explain PLACE/m.onnx PLACE/one.npz -o PLACE/e.npz --method expected_gradients", code=2)
    said(place, "explain PLACE/m.onnx PLACE/d.npz -o PLACE/e.npz --method attention_rollout", code=2)


def test_detectors_are_refused(place):
    proto = onnx.load(place / "m.onnx")
    proto.metadata_props.add(key="onnxgrad.detector", value="{}")
    onnx.save(proto, place / "m.onnx")
    text = said(place, "explain PLACE/m.onnx PLACE/d.npz -o PLACE/e.npz", code=2)
    assert "is a detector" in text
