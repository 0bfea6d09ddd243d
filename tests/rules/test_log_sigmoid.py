"""log σ(x) of two nodes is differentiated as one function, without the 0 that ONNX Runtime's Sigmoid is far below 0."""

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import jvp, vjp

MODEL = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 18]>
    g (float[N] x) => (float[N] y) { s = Sigmoid (x) y = Log (s) }""")


@pytest.mark.parametrize(("derive", "result"), [(vjp, "x_grad"), (jvp, "y_tangent")])
def test_values_and_slopes_far_below_zero(derive, result):
    session = onnxruntime.InferenceSession(derive(MODEL, wrt="x", of="y").SerializeToString())
    x = np.float32([-200, -60, -20, -3, 0, 3])
    feeds = {i.name: x if i.name == "x" else np.ones_like(x) for i in session.get_inputs()}
    value, slope = session.run(["y", result], feeds)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(value, -np.log1p(np.exp(-exact)), rtol=1e-5)
    np.testing.assert_allclose(slope, 1 / (1 + np.exp(exact)), rtol=1e-5)


def test_the_sigmoid_itself_has_a_derivative():
    session = onnxruntime.InferenceSession(vjp(MODEL, wrt=["x", "s"], of="y").SerializeToString())
    x = np.float32([-2, 0, 2])
    of_x, of_s = session.run(["x_grad", "s_grad"], {"x": x, "y_cotangent": np.ones_like(x)})
    np.testing.assert_allclose(of_s, 1 + np.exp(-x), rtol=1e-5)
    np.testing.assert_allclose(of_x, 1 / (1 + np.exp(x)), rtol=1e-5)
