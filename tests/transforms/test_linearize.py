"""linearize, split_vjp, transpose: two halves that together are the whole."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper

from onnxgrad import BadInput, jacobian, jvp, linearize, signature, split_vjp, transpose, vjp
from tests.models import assert_sound, model, nodes_of, value
from tests.transforms.numbers import net, session

pytestmark = pytest.mark.usefixtures("form")  # everything here holds of both forms of many directions

rng = np.random.default_rng(4)
SOURCE = net([3, 4, 4, 2])
X, V, U = (rng.standard_normal(s) for s in ((5, 3), (5, 3), (5, 2)))


def close(a, b, tolerance=1e-12):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wrt", [["x"], ["x", "w0", "b1"], ["t0"], ["w2"]])
def test_the_halves_make_the_whole(wrt):
    shapes = {"x": (5, 3), "w0": (3, 4), "b1": (4,), "t0": (5, 4), "w2": (4, 2)}
    tangents = {f"{n}_tangent": rng.standard_normal(shapes[n]) for n in wrt}
    forward, linear = linearize(SOURCE, wrt=wrt)
    for half in (forward, linear):
        assert_sound(half)
    primal = session(forward)({"x": X})
    close(primal["y"], session(SOURCE)({"x": X})["y"])
    assert signature(forward).residuals == signature(linear).residuals
    assert set(primal) == {"y", *signature(forward).residuals}
    feeds = {"x": X, **primal}
    want = session(jvp(SOURCE, wrt=wrt))({"x": X, **tangents})["y_tangent"]
    assert [o.name for o in linear.graph.output] == ["y_tangent"]
    close(session(linear)({**feeds, **tangents})["y_tangent"], want)

    forward, backward = split_vjp(SOURCE, wrt=wrt)
    for half in (forward, backward):
        assert_sound(half)
    feeds = {"x": X, **session(forward)({"x": X})}
    whole, got = (session(vjp(SOURCE, wrt=wrt))({"x": X, "y_cotangent": U}),
                  session(backward)({**feeds, "y_cotangent": U}))  # fmt: skip
    assert set(got) == {f"{n}_grad" for n in wrt}
    for n in got:
        close(got[n], whole[n])


def test_the_linear_half_has_no_primal_in_it():
    forward, linear = linearize(SOURCE, wrt="x")
    assert "Tanh" not in {n.op_type for n in nodes_of(linear.graph)}
    assert {t.name for t in linear.graph.initializer} == {"w0", "w1", "w2"}
    assert [i.name for i in linear.graph.input] == ["x_tangent", *signature(linear).residuals]
    assert [i.name for i in forward.graph.input] == ["x"]
    assert len(signature(forward).residuals) == 2
    kept = linearize(ir.from_proto(SOURCE), wrt="x")
    assert isinstance(kept.forward, ir.Model)
    assert isinstance(kept.linear, ir.Model)


def test_inputs_of_the_primal_are_read_by_their_own_name():
    nodes = [helper.make_node("Mul", ["x", "z"], ["y"])]
    source = model(nodes, [value(n, ["N"], T.DOUBLE) for n in "xz"], [value("y", ["N"], T.DOUBLE)])
    forward, linear = linearize(source, wrt="x")
    assert signature(forward).residuals == []
    assert [i.name for i in linear.graph.input] == ["z", "x_tangent"]
    close(session(linear)({"z": np.arange(3.0), "x_tangent": np.ones(3)})["y_tangent"], np.arange(3.0))


def test_a_derivative_that_does_not_depend_on_the_tangent():
    nodes = [helper.make_node("Sin", ["x"], ["y"]), helper.make_node("Exp", ["z"], ["e"])]
    source = model(nodes, [value(n, ["N"], T.DOUBLE) for n in "xz"], [value("y", ["N"], T.DOUBLE),
                                                                     value("e", ["N"], T.DOUBLE)])  # fmt: skip
    forward, linear = linearize(source, wrt="x")
    assert_sound(linear)
    feeds = {"x": np.ones(2), "z": np.ones(2)}
    got = session(linear)({**feeds, **session(forward)(feeds), "x_tangent": np.ones(2)})
    close(got[signature(linear).output_tangents["e"]], np.zeros(2))
    close(got["y_tangent"], np.cos(np.ones(2)))


def test_both_halves_see_the_same_random_numbers():
    nodes = [
        helper.make_node("RandomNormal", [], ["r"], shape=[64], dtype=T.DOUBLE),
        helper.make_node("Mul", ["x", "r"], ["y"]),
    ]
    source = model(nodes, [value("x", [64], T.DOUBLE)], [value("y", [64], T.DOUBLE)])
    forward, linear = linearize(source, wrt="x")
    assert signature(forward).residuals == ["r"]
    primal = session(forward)({"x": np.ones(64)})
    close(session(linear)({**primal, "x_tangent": np.ones(64)})["y_tangent"], primal["y"])


def test_transposes():
    forward, linear = linearize(SOURCE, wrt="x")
    back = transpose(linear, wrt="x_tangent")
    assert_sound(back)
    names = signature(back)
    assert "x_tangent" not in {i.name for i in back.graph.input}
    feeds = session(forward)({"x": X})
    pulled = session(back)({**feeds, names.cotangents["y_tangent"]: U})[names.gradients["x_tangent"]]
    pushed = session(linear)({**feeds, "x_tangent": V})["y_tangent"]
    close(np.vdot(U, pushed), np.vdot(pulled, V))
    again = transpose(back, wrt=names.cotangents["y_tangent"])
    assert_sound(again)
    (out,) = signature(again).gradients.values()
    (into,) = signature(again).cotangents.values()
    close(session(again)({**feeds, into: V})[out], pushed)


def test_a_transpose_takes_shapes_from_what_is_left():
    """Σ over an axis: its transpose must know how far to spread, and takes it from the weights."""
    nodes = [helper.make_node("Mul", ["x", "z"], ["m"]), helper.make_node("ReduceSum", ["m"], ["y"], keepdims=0)]
    source = model(nodes, [value("x", ["N", 2], T.DOUBLE), value("z", ["N", 2], T.DOUBLE)], [value("y", [], T.DOUBLE)])
    back = transpose(source, wrt="x")
    assert_sound(back)
    assert [i.name for i in back.graph.input] == ["z", "y_cotangent"]
    z = rng.standard_normal((3, 2))
    close(session(back)({"z": z, "y_cotangent": np.float64(2)})["x_grad"], 2 * z)
    nodes = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)]
    alone = model(nodes, [value("x", ["N", 2], T.DOUBLE)], [value("y", [], T.DOUBLE)])
    with pytest.raises(BadInput, match="known from 'x' only"):
        transpose(alone, wrt="x")


def test_only_linear_models_have_a_transpose():
    with pytest.raises(BadInput, match="not linear in 'x'"):
        transpose(SOURCE, wrt="x")
    with pytest.raises(BadInput, match="is no input"):
        transpose(net([3, 2]), wrt="h0")
    affine = transpose(net([3, 2]), wrt="x")
    assert [i.name for i in affine.graph.input] == ["y_cotangent"]


def test_halves_are_models_like_any_other():
    """The linear half is linear: its Jacobian with respect to the tangent is the Jacobian."""
    forward, linear = linearize(SOURCE, wrt="x")
    derived = jacobian(linear, wrt="x_tangent", batch=0)
    assert_sound(derived)
    feeds = session(forward)({"x": X})
    got = session(derived)({**feeds, "x_tangent": V})["y_tangent_x_tangent_jacobian"]
    close(got, session(jacobian(SOURCE, wrt="x", batch=0))({"x": X})["y_x_jacobian"])
    second = jvp(forward, wrt="x", of=signature(forward).residuals)
    assert_sound(second)
