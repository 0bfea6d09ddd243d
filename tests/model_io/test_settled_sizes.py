"""Sizes that a Reshape leaves open and a product settles: known in derivatives, and any other is an error still."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from onnxgrad import vjp
from onnxgrad.errors import OnnxGradError
from onnxgrad.model_io.open import open_model
from onnxgrad.runtime import Session

#: Five nodes with six numbers each, in two heads, through a Reshape that names the nodes.
HEAD = """<ir_version: 10, opset_import: ["": 20]> g (float[N, 6] x, float[2, 3] s, float[6, 4] w) => (float[a, b] y)
    <int64[3] heads = {5, 2, -1}, int64[2] rows = {5, -1}>"""
TEXTS = {
    name: HEAD + "{ h = Reshape (x, heads) m = Mul (h, s) q = ReduceSum <keepdims = 0> (m) r = Reshape (h, rows)" + rest
    for name, rest in {
        "MatMul": "p = MatMul (r, w) y = Add (p, q) }",
        "Gemm": "t = Transpose (w) p = Gemm <transB = 1> (r, t) y = Add (p, q) }",
        "on the right": "c = Transpose (r) t = Transpose (w) p = MatMul (t, c) y = Add (p, q) }",
    }.items()
}


def _shape(model, name):
    graph = open_model(model).model.graph
    return next(list(v.shape) for node in graph for v in node.outputs if v.name == name)


@pytest.mark.parametrize("name", TEXTS)
def test_a_product_settles_the_size(name):
    model = onnx.parser.parse_model(TEXTS[name])
    assert _shape(model, "h") == [5, 2, 3]
    gradient = vjp(model, wrt=["x", "s"])
    assert "NonZero" not in {node.op_type for node in gradient.graph.node}  # axes that are found at run time
    x, s, w = (np.random.default_rng(0).standard_normal(n).astype(np.float32) for n in ((5, 6), (2, 3), (6, 4)))
    ct = np.ones((4, 5) if name == "on the right" else (5, 4), np.float32)
    found = Session(gradient).run({"x": x, "s": s, "w": w, "y_cotangent": ct})
    np.testing.assert_allclose(found["s_grad"], 20 * x.reshape(5, 2, 3).sum(0), rtol=1e-5)
    np.testing.assert_allclose(found["x_grad"], np.ones((5, 4)) @ w.T + 20 * s.reshape(6), rtol=1e-5)
    with pytest.raises(OnnxGradError):
        Session(gradient).run({"x": np.ones((10, 6), np.float32), "s": s, "w": w, "y_cotangent": ct})


def test_what_is_broadcast_settles_a_size_that_is_not_1():
    """3·N/5 is no 1; N/2 is that of two rows."""
    text = HEAD.replace("(float[a, b] y)", "(float[a, b, c] y)") + "{ h = Reshape (x, heads) y = Mul (s, h) }"
    assert _shape(onnx.parser.parse_model(text), "h") == [5, 2, 3]
    either = onnx.parser.parse_model(text.replace("float[N, 6] x", "float[N, 5] x"))
    assert not isinstance(_shape(either, "h")[2], int)
    for rows, size in ((2, 1), (6, 3)):
        feeds = {
            "x": np.ones((rows, 5), np.float32),
            "s": np.ones((2, 3), np.float32),
            "w": np.ones((6, 4), np.float32),
        }
        gradient = vjp(either, wrt="x")
        found = Session(gradient).run({**feeds, "y_cotangent": np.ones((5, 2, 3), np.float32)})
        np.testing.assert_array_equal(found["x_grad"], np.full((rows, 5), 3 / size))


@pytest.mark.parametrize("rows", ["float[k, 4]", "float[7, 4]"])
def test_what_no_product_settles_stays_open(rows):
    """A matrix of any rows, or of a number that no size of heads fits."""
    model = onnx.parser.parse_model(TEXTS["MatMul"].replace("float[6, 4]", rows).replace("float[2, 3] s", "float s"))
    assert not isinstance(_shape(model, "h")[2], int)


def test_a_target_that_others_share_is_theirs():
    shared = "u = Reshape (v, heads) k = ReduceSum <keepdims = 0> (u) z = Add (p, k) y = Add (z, q) }"
    text = TEXTS["MatMul"].replace("y = Add (p, q) }", shared).replace("[2, 3] s,", "[2, 3] s, float[M, 20] v,")
    model = onnx.parser.parse_model(text)
    assert _shape(model, "h") == [5, 2, 3]
    assert not isinstance(_shape(model, "u")[2], int)
