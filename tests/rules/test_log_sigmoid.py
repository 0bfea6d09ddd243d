"""log σ(x) and log(1 - σ(x)) are differentiated as one function, where ONNX Runtime's Sigmoid is 0 or 1, too."""

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import jvp, vjp


def model(share):
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[N] x) => (float[N] y) <float one = {{1}}> {{ s = Sigmoid (x) {share} }}""")


SHARES = {"y = Log (s)": 1, "r = Sub (one, s) y = Log (r)": -1}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("derive", "result"), [(vjp, "x_grad"), (jvp, "y_tangent")])
def test_values_and_slopes_far_from_zero(share, derive, result):
    session = onnxruntime.InferenceSession(derive(model(share), wrt="x", of="y").SerializeToString())
    x, sign = np.float32([-200, -60, -20, -3, 0, 3]) * SHARES[share], SHARES[share]
    feeds = {i.name: x if i.name == "x" else np.ones_like(x) for i in session.get_inputs()}
    value, slope = session.run(["y", result], feeds)
    exact = sign * x.astype(np.float64)
    np.testing.assert_allclose(value, -np.log1p(np.exp(-exact)), rtol=1e-5)
    np.testing.assert_allclose(slope, sign / (1 + np.exp(exact)), rtol=1e-5)


@pytest.mark.parametrize(
    ("share", "name", "of_it"), [("y = Log (s)", "s", 1), ("r = Sub (one, s) y = Log (r)", "r", -1)]
)
def test_what_the_logarithm_is_taken_of_has_a_derivative(share, name, of_it):
    session = onnxruntime.InferenceSession(vjp(model(share), wrt=["x", name], of="y").SerializeToString())
    x = np.float32([-2, 0, 2]) * of_it
    of_x, of_share = session.run(["x_grad", f"{name}_grad"], {"x": x, "y_cotangent": np.ones_like(x)})
    np.testing.assert_allclose(of_share, 1 + np.exp(-x * of_it), rtol=1e-5)
    np.testing.assert_allclose(of_x, of_it / (1 + np.exp(x * of_it)), rtol=1e-5)


def test_one_of_more_axes_broadcasts():
    given = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[3] x) => (float[1, 3] y) <float[1, 1] one = {1}> { s = Sigmoid (x) r = Sub (one, s) y = Log (r) }""")
    session = onnxruntime.InferenceSession(vjp(given, wrt="x", of="y").SerializeToString())
    x = np.float32([-1, 0, 2])
    feeds = {i.name: x if i.name == "x" else np.ones((1, 3), np.float32) for i in session.get_inputs()}
    value, slope = session.run(["y", "x_grad"], feeds)
    assert value.shape == (1, 3)
    np.testing.assert_allclose(slope, -1 / (1 + np.exp(-x)), rtol=1e-5)
