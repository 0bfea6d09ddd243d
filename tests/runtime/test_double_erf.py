"""Erf of float64 on ONNX Runtime, against that of the C library."""

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxgrad import vjp
from onnxgrad.runtime import Session
from onnxgrad.runtime.double_erf import DOUBLE_ERF
from onnxgrad.runtime.setting import Setting

X = np.concatenate(
    [np.linspace(-8, 8, 4001), np.logspace(-300, 1, 100), -np.logspace(-300, 1, 100), [0.0, -0.0, 1e300, -1e300]]
)
MODEL = '<ir_version: 10, opset_import: ["": 21]> g (double[N] x) => (double[N] y) { y = Erf (x) }'
BRANCH = """<ir_version: 10, opset_import: ["": 21]> g (double[N] x, bool c) => (double[N] y) {
    y = If (c) <
        then_branch = t () => (double[N] a) { a = Erf (x) },
        else_branch = e () => (double[N] b) { b = Neg (x) }>
}"""


@pytest.mark.parametrize("text", [MODEL, BRANCH], ids=["graph", "branch"])
def test_it_is_exact(text):
    feeds = {"x": X} | ({"c": np.array(True)} if text is BRANCH else {})
    found = Session(onnx.parser.parse_model(text)).run(feeds)["y"]
    np.testing.assert_allclose(found, [math.erf(x) for x in X], rtol=6e-16, atol=0)


def test_nan_and_infinities():
    found = Session(onnx.parser.parse_model(MODEL)).run({"x": np.array([np.nan, np.inf, -np.inf])})["y"]
    np.testing.assert_array_equal(found, [np.nan, 1, -1])


def test_its_derivative_runs():
    found = Session(vjp(onnx.parser.parse_model(MODEL), wrt=["x"])).run({"x": X, "y_cotangent": np.ones_like(X)})
    np.testing.assert_allclose(
        found["x_grad"], 2 / np.sqrt(np.pi) * np.exp(-(np.minimum(np.abs(X), 30.0) ** 2)), rtol=1e-14, atol=1e-300
    )


def test_equal_nodes_are_written_once_and_outputs_keep_their_names():
    text = """<ir_version: 10, opset_import: ["": 21]> g (double[N] x) => (double[N] y, double[N] z, double[N] w) {
        y = Erf (x)  z = Erf (x)  v = Erf (x)  w = Neg (v) }"""
    found = Session(onnx.parser.parse_model(text)).run({"x": X})
    assert list(found) == ["y", "z", "w"]
    for name, sign in [("y", 1), ("z", 1), ("w", -1)]:
        np.testing.assert_allclose(found[name], [sign * math.erf(x) for x in X], rtol=6e-16, atol=0)
    changed = ir.from_proto(onnx.parser.parse_model(text))
    assert DOUBLE_ERF.apply(changed, Setting(changed.graph)) == 3
    assert [n.op_type for n in changed.graph].count("Exp") == 1


@pytest.mark.parametrize("name", ["double_erf_Abs_1", "double_erf_Exp_1"])
def test_names_of_the_model_are_not_taken(name):
    text = f'<ir_version: 10, opset_import: ["": 21]> g (double[N] x) => (double[N] y, double[N] {name})'
    found = Session(onnx.parser.parse_model(text + f"{{ {name} = Neg (x)  y = Erf (x) }}")).run({"x": X})
    np.testing.assert_array_equal(found[name], -X)
    np.testing.assert_allclose(found["y"], [math.erf(x) for x in X], rtol=6e-16, atol=0)
