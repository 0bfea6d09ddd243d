"""Fusions of ONNX Runtime that lose digits or transpositions are switched off where they would."""

import numpy as np
import onnx
import pytest

from onnxgrad import Function
from onnxgrad.runtime import Session
from onnxgrad.runtime.wrong_fusions import wrong_fusions

RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((5, 30)), RNG.standard_normal((30, 40))
SCALED = """<ir_version: 10, opset_import: ["": 21]>
g (KIND[N, 30] x, KIND[30, 40] w) => (KIND[N, 40] y) {
    c = Constant<value = KIND {0.1}>()
    s = Mul(x, c)
    y = MatMul(s, w)
}"""


def model(kind):
    return onnx.parser.parse_model(SCALED.replace("KIND", kind))


@pytest.mark.parametrize("form", [lambda m: m, onnx.ModelProto.SerializeToString], ids=["model", "bytes"])
def test_a_scaled_product_of_doubles_keeps_its_digits(form, tmp_path):
    given = form(model("double"))
    if isinstance(given, bytes):
        (tmp_path / "m.onnx").write_bytes(given)
        given = tmp_path / "m.onnx"
    np.testing.assert_allclose(Function(given)(X, W), (X * 0.1) @ W, rtol=1e-12, atol=1e-14)


def test_only_models_that_need_it_do_without():
    assert wrong_fusions(model("float").SerializeToString()) == []
    assert wrong_fusions(model("double").SerializeToString()) == ["MatMulScaleFusion"]
    inside = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (float[N, 30] x, float[30, 40] w) => (float[N, 40] y) {
            a = Cast<to=11>(x)
            b = Cast<to=11>(w)
            m = MatMul(a, b)
            y = Cast<to=1>(m)
        }"""
    )
    assert wrong_fusions(inside.SerializeToString()) == ["MatMulScaleFusion"]


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("opset", [20, 21])
def test_rounded_numbers_that_are_moved(kind, opset):
    rounded = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": {opset}]>
        g (float[2, 3, 4, 4] x, float[3, 2, 4, 4] w) => (float[3, 3, 1, 1] y) <float s = {{0.5}}, {kind} z = {{3}}> {{
            q = QuantizeLinear (x, s, z)  d = DequantizeLinear (q, s, z)
            t = Transpose <perm = [1, 0, 2, 3]> (d)  y = Conv (t, w)
        }}""")
    wrong = ["QDQPropagationTransformer"] if (kind, opset) == ("int8", 21) else []
    assert wrong_fusions(rounded.SerializeToString()) == wrong
    x, w = RNG.standard_normal((2, 3, 4, 4)).astype(np.float32), np.ones((3, 2, 4, 4), np.float32)
    y = Function(rounded)(x, w)
    low = -3 if kind == "uint8" else -131
    np.testing.assert_allclose(y[:, 0, 0, 0], np.maximum(np.rint(x / 0.5), low).sum((0, 2, 3)) * 0.5, rtol=1e-5)


def test_products_of_floats_beside_doubles_are_scaled():
    beside = """<ir_version: 10, opset_import: ["": 21]>
    g (float[N, 30] x, float[30, 40] w, double r) => (float[N, 40] y, double s) {
        c = Constant<value = float {0.1}>()
        m = MatMul(x, w)
        y = Mul(m, c)
        s = Sqrt(r)
    }"""
    given = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(beside))
    assert wrong_fusions(given.SerializeToString()) == []
    doubled = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(beside.replace("float", "double")))
    assert wrong_fusions(doubled.SerializeToString()) == ["MatMulScaleFusion"]


def test_operands_of_blocks_of_four_bits_stay_floats(tmp_path):
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 32] x) => (float[N, 3] y)
        <float[2, 3] scale = {0.1, 0.2, 0.3, -0.1, -0.2, 0.4}> {
        w = DequantizeLinear <axis = 0, block_size = 16> (q, scale)
        y = MatMul (x, w) }"""
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    whole = rng.integers(-8, 8, (32, 3))
    model.graph.initializer.append(onnx.helper.make_tensor("q", onnx.TensorProto.INT4, whole.shape, whole))
    onnx.save(model, tmp_path / "m.onnx")
    x = rng.standard_normal((5, 32), np.float32)
    scale = onnx.numpy_helper.to_array(model.graph.initializer[0]).astype(float)
    for given in (tmp_path / "m.onnx", model):
        y = Session(given).run({"x": x})["y"]
        np.testing.assert_allclose(y, x @ (whole * scale.repeat(16, 0)), rtol=1e-5, atol=1e-5)
