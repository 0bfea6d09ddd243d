"""hvp and gauss_newton_vp against Hessians and Jacobians, and what they cost."""

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper

from onnxgrad import BadInput, gauss_newton_vp, grad, hessian, hvp, jacobian, signature
from tests.models import assert_sound, model, nodes_of, value
from tests.transforms.numbers import differences, net, session

pytestmark = pytest.mark.usefixtures("form")  # everything here holds of both forms of many directions

rng = np.random.default_rng(9)


def close(a, b, tolerance=1e-10):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_hvp_is_the_hessian_times_a_vector():
    source = net([3, 4, 3, 2])
    x, v, u = rng.standard_normal((2, 3)), rng.standard_normal((2, 3)), rng.standard_normal((3, 4))
    derived = hvp(source, wrt=["x", "w0"])
    assert_sound(derived)
    assert [i.name for i in derived.graph.input] == ["x", "x_tangent", "w0_tangent"]
    assert [o.name for o in derived.graph.output] == ["y", "x_hvp", "w0_hvp"]
    assert signature(derived).products == {"x": "x_hvp", "w0": "w0_hvp"}
    got = session(derived)({"x": x, "x_tangent": v, "w0_tangent": u})
    h = session(hessian(source, wrt=["x", "w0"]))({"x": x})
    close(got["x_hvp"], np.tensordot(h["x_x_hessian"], v, 2) + np.tensordot(h["x_w0_hessian"], u, 2))
    close(got["w0_hvp"], np.tensordot(h["w0_x_hessian"], v, 2) + np.tensordot(h["w0_w0_hessian"], u, 2))
    want = differences(grad(source, wrt="x"), {"x": x}, "x", "x_grad")
    only = session(hvp(source, wrt="x"))({"x": x, "x_tangent": v})["x_hvp"]
    np.testing.assert_allclose(only, np.tensordot(want, v, 2), rtol=1e-6, atol=1e-7)


def test_hvp_of_a_scalar_and_of_nothing():
    nodes = [helper.make_node("Mul", ["x", "x"], ["s"]), helper.make_node("Mul", ["s", "x"], ["y"])]
    cube = model(nodes, [value("x", [], T.DOUBLE)], [value("y", [], T.DOUBLE)])
    got = session(hvp(cube, wrt="x"))({"x": np.float64(2), "x_tangent": np.float64(3)})
    close(got["x_hvp"], 36)
    linear = net([3, 2])
    derived = hvp(linear, wrt=["x", "b0"], of="y")
    assert_sound(derived)
    feeds = {"x": rng.standard_normal((2, 3)), "x_tangent": rng.standard_normal((2, 3)), "b0_tangent": np.ones(2)}
    got = session(derived)(feeds)
    close(got["x_hvp"], np.zeros((2, 3)))
    close(got["b0_hvp"], np.zeros(2))


def test_hvp_costs_at_most_four_gradients():
    source = net([8, 8, 8, 8, 8, 4])
    count = {f: len(list(nodes_of(f(source, wrt="x").graph))) for f in (grad, hvp)}
    assert count[hvp] <= 4 * count[grad]


def test_gauss_newton_of_least_squares():
    source, x = net([3, 4, 2]), rng.standard_normal((2, 3))
    v, u = rng.standard_normal((2, 3)), rng.standard_normal((3, 4))
    derived = gauss_newton_vp(source, wrt=["x", "w0"])
    assert_sound(derived)
    got = session(derived)({"x": x, "x_tangent": v, "w0_tangent": u})
    j = session(jacobian(source, wrt=["x", "w0"]))({"x": x})
    pushed = np.tensordot(j["y_x_jacobian"], v, 2) + np.tensordot(j["y_w0_jacobian"], u, 2)
    for name in ("x", "w0"):
        close(got[signature(derived).products[name]], np.tensordot(pushed, j[f"y_{name}_jacobian"], 2))


def test_gauss_newton_of_a_loss():
    """y through LogSumExp: the middle matrix is diag(p) - p pᵀ."""
    source = net([3, 4, 5])
    source.graph.node.append(helper.make_node("ReduceLogSumExp", ["y"], ["loss"], keepdims=0))
    source.graph.output.append(value("loss", [], T.DOUBLE))
    x, v = rng.standard_normal((1, 3)), rng.standard_normal((1, 3))
    derived = gauss_newton_vp(source, wrt="x", of="y", loss="loss")
    assert_sound(derived)
    got = session(derived)({"x": x, "x_tangent": v})
    j = session(jacobian(source, wrt="x", of="y"))({"x": x})["y_x_jacobian"].reshape(5, 3)
    p = np.exp(got["y"][0]) / np.exp(got["y"]).sum()
    close(got["x_gnvp"][0], j.T @ (np.diag(p) - np.outer(p, p)) @ j @ v[0])
    with pytest.raises(BadInput, match="is also `of`"):
        gauss_newton_vp(source, wrt="x", of="y", loss="y")


def test_products_compose():
    """The derivative of a Hessian-vector product along another direction is symmetric in both."""
    source, x = net([3, 3, 2]), rng.standard_normal((2, 3))
    v = rng.standard_normal((2, 3))
    derived = jacobian(hvp(source, wrt="x"), wrt="x", of="x_hvp")
    assert_sound(derived)
    got = session(derived)({"x": x, "x_tangent": v})["x_hvp_x_jacobian"]
    want = differences(hvp(source, wrt="x"), {"x": x, "x_tangent": v}, "x", "x_hvp")
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    close(got, got.transpose(2, 3, 0, 1))
