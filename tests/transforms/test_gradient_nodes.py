"""Models with Gradient nodes (ai.onnx.preview.training) are differentiated: the nodes are written out on the way."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxgrad import BadInput, Function, grad, jacobian, jvp, split_vjp, vjp, vmap
from onnxgrad.check import check

pytestmark = pytest.mark.usefixtures("form")  # everything here holds of both forms of many directions

HEAD = '<ir_version: 10, opset_import: ["": 21, "ai.onnx.preview.training": 1, "local": 1]>'
#: s(x, w) as text, and in numpy.
MODELS = {
    "slope of a cubic": (
        """g (double[3] x, double[3] w) => (double s) {
            q = Mul(x, x)  c = Mul(q, x)  p = Mul(c, w)  y = ReduceSum<keepdims=0>(p)
            dx = ai.onnx.preview.training.Gradient<xs=["x"], zs=["w"], y="y">(x, w)
            r = Mul(dx, dx)  s = ReduceSum<keepdims=0>(r) }""",
        lambda x, w: np.sum((3 * x * x * w) ** 2),
    ),
    "two, one after the other": (
        """g (double[3] x, double[3] w) => (double s) {
            q = Mul(x, x)  c = Mul(q, x)  p = Mul(c, w)  y = ReduceSum<keepdims=0>(p)
            dx = ai.onnx.preview.training.Gradient<xs=["x"], zs=["w"], y="y">(x, w)
            ddx = ai.onnx.preview.training.Gradient<xs=["x"], zs=["w"], y="dx">(x, w)
            r = Mul(ddx, dx)  s = ReduceSum<keepdims=0>(r) }""",
        lambda x, w: np.sum(6 * x * w * 3 * x * x * w),
    ),
    "taken at another point": (
        """g (double[3] x, double[3] w) => (double s) {
            e = Exp(x)  p = Mul(e, w)  y = ReduceSum<keepdims=0>(p)  at = Mul(x, w)
            dx = ai.onnx.preview.training.Gradient<xs=["x"], zs=["w"], y="y">(at, x)
            s = ReduceSum<keepdims=0>(dx) }""",
        lambda x, w: np.sum(np.exp(x * w) * x),
    ),
    "in a branch": (
        """g (double[3] x, double[3] w) => (double s) {
            zero = Constant<value = double {0.0}>()  t = ReduceSum<keepdims=0>(w)  more = Greater(t, zero)
            d = If(more) <
              then_branch = yes () => (double[3] a) {
                q = Mul(x, x)  p = Mul(q, w)  y = ReduceSum<keepdims=0>(p)
                a = ai.onnx.preview.training.Gradient<xs=["x"], zs=["w"], y="y">(x, w) },
              else_branch = no () => (double[3] b) { b = Identity(x) }>
            r = Mul(d, d)  s = ReduceSum<keepdims=0>(r) }""",
        lambda x, w: np.sum((2 * x * w) ** 2),
    ),
    "in a function": (
        """g (double[3] x, double[3] w) => (double s) { d = local.f(x, w)  r = Mul(d, d)  s = ReduceSum<keepdims=0>(r) }
        <domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]>
        f (u, v) => (d) {
            q = Mul(u, u)  p = Mul(q, v)  y = ReduceSum<keepdims=0>(p)
            d = ai.onnx.preview.training.Gradient<xs=["u"], zs=["v"], y="y">(u, v) }""",
        lambda x, w: np.sum((2 * x * w) ** 2),
    ),
}  # fmt: skip
POINT = np.array([0.3, -0.7, 1.1]), np.array([1.2, 0.4, 0.9])


def model(name: str) -> onnx.ModelProto:
    return parser.parse_model(HEAD + MODELS[name][0])


def slopes(f, x, w, step=1e-6):
    return np.array([(f(x + step * e, w) - f(x - step * e, w)) / (2 * step) for e in np.eye(3)])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MODELS)
def test_every_transform_sees_through_them(name):
    (x, w), f = POINT, MODELS[name][1]
    m, want = model(name), slopes(f, *POINT)
    np.testing.assert_allclose(Function(m)(x, w), f(x, w), rtol=1e-12)
    np.testing.assert_allclose(Function(grad(m, wrt="x"))(x, w), want, rtol=1e-7)
    np.testing.assert_allclose(Function(vjp(m, wrt="x"))(x, w, np.float64(2))["x_grad"], 2 * want, rtol=1e-7)
    np.testing.assert_allclose(Function(jvp(m, wrt="x"))(x, w, w)["s_tangent"], want @ w, rtol=1e-7)
    np.testing.assert_allclose(Function(jacobian(m, wrt="x"))(x, w)["s_x_jacobian"], want, rtol=1e-7)
    np.testing.assert_allclose(Function(m).grad(wrt="x")(x, w), want, rtol=1e-7)
    assert split_vjp(m, wrt="x").linear.graph.node
    report = check(m)
    assert report.differentiable
    assert report.wrt == ["x", "w"]


def test_their_outputs_keep_their_names():
    (x, w), m = POINT, model("slope of a cubic")
    np.testing.assert_allclose(Function(m, outputs="dx")(x, w), 3 * x * x * w, rtol=1e-12)
    np.testing.assert_allclose(Function(jacobian(m, wrt="x", of="dx"))(x, w)["dx_x_jacobian"], np.diag(6 * x * w))
    np.testing.assert_allclose(Function(grad(m, wrt="dx"))(x, w), 6 * x * x * w, rtol=1e-12)


def test_one_that_is_wrong_is_refused_by_name():
    m = model("slope of a cubic")
    m.graph.node[4].attribute[2].s = b"nowhere"
    for derive in (lambda: vjp(m, wrt="x"), lambda: check(m)):
        with pytest.raises(BadInput, match="nowhere"):
            derive()


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_batch(name):
    (x, w), f = POINT, MODELS[name][1]
    rows = np.stack([x, 2 * x, x - 1])
    mapped = vmap(model(name), in_axes={"x": 0, "w": None})
    np.testing.assert_allclose(Function(mapped)(rows, w), [f(row, w) for row in rows], rtol=1e-10)
