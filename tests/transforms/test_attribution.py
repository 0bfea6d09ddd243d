"""Attributions: what they add up to, and what they are where the gradient is known."""

import numpy as np
import onnx
import pytest

import onnxgrad
from onnxgrad.errors import BadInput

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (double[N, 3] x, double[N] s) => (double[N] y) <int64[1] axes = {1}> {
    a = Sin(x)
    b = Exp(a)
    c = ReduceSum<keepdims=0>(b, axes)
    y = Mul(c, s)
}"""
X, S = np.random.default_rng(0).standard_normal((4, 3)), np.arange(1.0, 5)


def model(text=MODEL):
    return onnx.parser.parse_model(text)


def test_attributions_add_up_to_what_the_output_gains():
    f = onnxgrad.Function(model())
    errors = []
    for steps in (8, 16):
        explained = onnxgrad.integrated_gradients(model(), wrt=["x", "s"], of="y", steps=steps)
        found = onnxgrad.Function(explained)(x=X, s=S, x_baseline=0 * X, s_baseline=0 * S + 0.5)
        total = found["x_attribution"].sum(1) + found["s_attribution"]
        errors.append(np.abs(total - (f(X, S) - f(0 * X, 0 * S + 0.5))).max())
    assert errors[1] < 0.01
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)  # the midpoint rule is of second order


def test_of_a_linear_model_they_are_weight_times_input():
    linear = model(
        '<ir_version: 10, opset_import: ["": 21]> g (double[N, 3] x) => (double[N, 2] y) '
        "<double[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }"
    )
    explained = onnxgrad.integrated_gradients(linear, wrt="x", of="y[:, 1]", steps=1)
    found = onnxgrad.Function(explained)(x=X, x_baseline=0 * X)
    np.testing.assert_allclose(found, X * [2, 4, 6])


def test_through_a_loop():
    text = """<ir_version: 10, opset_import: ["": 21]>
    g (double[N] x) => (double[N] y) <int64 n = {3}, bool go = {1}> {
        y = Loop(n, go, x) <body = b (int64 i, bool c, double[N] h) => (bool k, double[N] z) {
            k = Identity(c)
            z = Mul(h, h)
        }>
    }"""
    explained = onnxgrad.integrated_gradients(model(text), wrt="x", of="y", steps=200)
    x = np.array([0.5, 1.1])
    found = onnxgrad.Function(explained)(x=x, x_baseline=0 * x)
    np.testing.assert_allclose(found, x**8, rtol=1e-3)


def test_smooth_grad_is_the_mean_of_gradients_near_by():
    explained = onnxgrad.smooth_grad(model(), wrt="x", of="y", steps=64, noise=1e-4, seed=3)
    found = onnxgrad.Function(explained)(X, S)
    np.testing.assert_allclose(found, np.cos(X) * np.exp(np.sin(X)) * S[:, None], rtol=1e-2, atol=1e-3)
    square = model('<ir_version: 10, opset_import: ["": 21]> g (double[N] x) => (double[N] y) { y = Mul(x, x) }')
    many = onnxgrad.smooth_grad(square, wrt="x", of="y", steps=4000, noise=0.5)
    spread = onnxgrad.Function(many)(np.zeros(200))  # the mean of 4,000 of 2·0.5·N(0, 1)
    assert spread.std() == pytest.approx(1 / np.sqrt(4000), rel=0.2)


def test_grad_cam_by_its_formula():
    net = model(
        """<ir_version: 10, opset_import: ["": 21]>
        g (double[N, 2, 4, 5] x, double[2, 3] w) => (double[N, 3] y) <int64[2] axes = {2, 3}> {
            a = Tanh(x)
            p = ReduceMean<keepdims=0>(a, axes)
            y = MatMul(p, w)
        }"""
    )
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((2, 2, 4, 5)), rng.standard_normal((2, 3))
    found = onnxgrad.Function(onnxgrad.grad_cam(net, layer="a", of="y[:, 2]"))(x=x, w=w)
    weights = w[:, 2] / 20
    np.testing.assert_allclose(found, np.maximum(np.einsum("c,nchw->nhw", weights, np.tanh(x)), 0), rtol=1e-12)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda: onnxgrad.integrated_gradients(model(), wrt="a", of="y"), "'a' is no input"),
        (lambda: onnxgrad.integrated_gradients(model(), wrt="x", of="y", steps=0), "at least 1"),
        (lambda: onnxgrad.smooth_grad(model(), wrt="x", of="y", steps=-1), "at least 1"),
        (lambda: onnxgrad.grad_cam(model(), layer="c", of="y"), "has 1 axes"),
        (lambda: onnxgrad.grad_cam(model(), layer="z", of="y"), "'z'"),
    ],
)
def test_what_cannot_be_explained_is_refused(do, words):
    with pytest.raises(BadInput, match=words):
        do()
