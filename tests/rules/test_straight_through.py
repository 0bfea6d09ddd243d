"""Operators that round, taken for what they round: quantization, per tensor, slice and block, in every form."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxgrad
from onnxgrad import UnknownName, grad, jvp, signature, straight_through, vjp
from onnxgrad.check import check
from onnxgrad.testing import reference
from tests.commands import command
from tests.rules.dtypes import session

RNG = np.random.default_rng(0)
X = (3 * RNG.standard_normal((2, 4, 3))).astype(np.float32)
Q = straight_through


def program(*nodes: onnx.NodeProto, opset: int = 21, symbolic: bool = False, **held: np.ndarray) -> onnx.ModelProto:
    """A model of `nodes` from x (and s, if `held` has none) to y."""
    dims = ["a", "b", "c"] if symbolic else X.shape
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)]
    constants = [numpy_helper.from_array(v, n) for n, v in held.items() if v is not None]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(list(nodes), "g", infos, [out], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def pair(*between: onnx.NodeProto, scale, point=None, symbolic=False, opset=21, **attrs) -> onnx.ModelProto:
    """x quantized, moved by `between` from q to p, and dequantized, with one scale s."""
    shared = ["s"] if point is None else ["s", "z"]
    first = helper.make_node("QuantizeLinear", ["x", *shared], ["q"], **attrs)
    last = helper.make_node("DequantizeLinear", ["p" if between else "q", *shared], ["y"], **attrs)
    return program(first, *between, last, opset=opset, symbolic=symbolic, s=np.asarray(scale, np.float32), z=point)


def expected(x, scale, point, low, high, u, axis=None, block=None):
    """The cotangents of x and of the scale by Esser et al. 2020, element by element."""
    s, z = np.asarray(scale, np.float64), np.asarray(0 if point is None else point, np.float64)
    if block:
        s, z = (np.repeat(v, block, axis) if v.ndim else v for v in (s, z))
    elif s.ndim == 1 and s.size > 1:
        room = [-1 if a == axis else 1 for a in range(x.ndim)]
        s, z = s.reshape(room), z.reshape(room) if z.ndim else z
    r = np.round(x / s) + z
    inside = (r >= low) & (r <= high)
    share = u * (np.clip(r, low, high) - z - np.where(inside, x / s, 0))
    scale = np.asarray(scale)
    if scale.size == 1:
        total = share.sum().reshape(scale.shape)
    elif block:
        total = share.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]).sum(axis + 1)
    else:
        total = share.sum(tuple(a for a in range(x.ndim) if a != axis))
    return u * inside, total


BLOCKS = RNG.uniform(0.02, 0.05, (2, 2, 3))
#: scale, zero point, attributes, range
WAYS = {
    "tensor": (0.03, None, {}, (0, 255)),
    "tensor, int8": (0.03, np.array(4, np.int8), {}, (-128, 127)),
    "tensor, int16": (0.0001, np.array(-9, np.int16), {}, (-(2**15), 2**15 - 1)),
    "a vector of one": ([0.03], np.array([7], np.uint8), {}, (0, 255)),
    "slices": ([0.02, 0.03, 0.01, 0.04], np.array([3, -5, 0, 7], np.int8), {"axis": 1}, (-128, 127)),
    "slices of the first axis": ([0.02, 0.05], np.array([3, -5], np.int8), {"axis": 0}, (-128, 127)),
    "slices of the last axis": ([0.02, 0.03, 0.01], np.array([100, 128, 9], np.uint8), {"axis": -1}, (0, 255)),
    "blocks": (BLOCKS, np.ones((2, 2, 3), np.int8), {"axis": 1, "block_size": 2}, (-128, 127)),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_quantize_and_dequantize(way: str, symbolic: bool) -> None:
    scale, point, attrs, (low, high) = WAYS[way]
    model = pair(scale=scale, point=point, symbolic=symbolic, **attrs)
    u = RNG.standard_normal(X.shape).astype(np.float32)
    with Q("QuantizeLinear"):
        back, push = vjp(model, wrt=["x", "s"]), jvp(model, wrt=["x", "s"])
    onnx.checker.check_model(back, full_check=True)
    plain = session(model).run(None, {"x": X})[0]
    y, dx, ds = session(back).run(["y", "x_grad", "s_grad"], {"x": X, "y_cotangent": u})
    np.testing.assert_array_equal(y, plain)
    of_x, of_s = expected(X, scale, point, low, high, u, attrs.get("axis", 1) % 3, attrs.get("block_size"))
    assert 0 < (of_x == 0).sum() < X.size, "some are saturated, not all"
    np.testing.assert_allclose(dx, of_x, rtol=1e-5)
    np.testing.assert_allclose(ds, of_s, rtol=1e-4, atol=2e-3)
    tx, ts = (RNG.standard_normal(a.shape).astype(np.float32) for a in (X, np.asarray(scale)))
    (t,) = session(push).run(["y_tangent"], {"x": X, "x_tangent": tx, "s_tangent": ts})
    np.testing.assert_allclose(np.vdot(u, t), np.vdot(dx, tx) + np.vdot(ds, ts), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("opset", [18, 21, 23, 25])
def test_every_version(opset: int) -> None:
    with Q("QuantizeLinear"):
        back = grad(pair(scale=0.03, opset=opset), wrt="x")
    (g,) = session(back).run(None, {"x": X})
    np.testing.assert_array_equal(g, (np.round(X / np.float32(0.03)) >= 0) & (np.round(X / np.float32(0.03)) <= 255))


def test_numbers_moved_between() -> None:
    """Operators that move quantized numbers hand their tangents on."""
    turn = helper.make_node("Transpose", ["q"], ["t"], perm=[2, 0, 1])
    flat = helper.make_node("Reshape", ["t", "shape"], ["p"])
    model = pair(turn, flat, scale=0.03, point=np.array(0, np.int8))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "shape"))
    u = RNG.standard_normal(X.size).astype(np.float32)
    with Q("QuantizeLinear"):
        back, push = vjp(model, wrt="x"), jvp(model, wrt="x")
    (g,) = session(back).run(["x_grad"], {"x": X, "y_cotangent": u})
    inside = np.abs(X / 0.03) < 127.5
    np.testing.assert_allclose(g, u.reshape(3, 2, 4).transpose(1, 2, 0) * inside, rtol=1e-5)
    (t,) = session(push).run(["y_tangent"], {"x": X, "x_tangent": X})
    np.testing.assert_allclose(np.vdot(u, t), np.vdot(g, X), rtol=1e-4)


def test_without_it_the_gradient_is_zero_and_check_says_so() -> None:
    model = pair(scale=0.03)
    (g,) = session(grad(model, wrt="x")).run(None, {"x": X})
    np.testing.assert_array_equal(g, 0)
    row = next(r for r in check(model, wrt="x").rows if r.op_type == "QuantizeLinear")
    assert row.status == "zero"
    assert "straight_through" in row.detail
    with Q("QuantizeLinear"):
        report = check(model, wrt="x")
    assert report.differentiable
    assert [r.status for r in report.rows] == ["rule", "rule"]


@pytest.mark.parametrize("op", ["Round", "Floor", "Ceil", "Sign"])
def test_rounding(op: str) -> None:
    model = program(helper.make_node(op, ["x"], ["y"]))
    with Q(op):
        back, push = vjp(model, wrt="x"), jvp(model, wrt="x")
    u = RNG.standard_normal(X.shape).astype(np.float32)
    want = u * (np.abs(X) <= 1) if op == "Sign" else u
    np.testing.assert_array_equal(reference(back, {"x": X, "y_cotangent": u})["x_grad"], want)
    np.testing.assert_array_equal(reference(push, {"x": X, "x_tangent": u})["y_tangent"], want)
    assert not reference(vjp(model, wrt="x"), {"x": X, "y_cotangent": u})["x_grad"].any()


def test_only_what_is_named_inside_the_block() -> None:
    nodes = [helper.make_node("Round", ["x"], ["r"]), helper.make_node("Floor", ["r"], ["y"])]
    for names, slope in ((["Round"], 0), (["Floor"], 0), (["Round", "Floor"], 1)):
        with Q(*names):
            model = grad(program(*nodes), wrt="x")
        assert (reference(model, {"x": X})["x_grad"] == slope).all()
    with Q("Round"), Q("Floor"):
        model = grad(program(*nodes), wrt="x")
    assert (reference(model, {"x": X})["x_grad"] == 1).all()
    with pytest.raises(ZeroDivisionError), Q("Round", "Floor"):
        raise ZeroDivisionError
    assert not reference(grad(program(*nodes), wrt="x"), {"x": X})["x_grad"].any()


@pytest.mark.parametrize("name", ["Add", "QuantiseLinear"])
def test_operators_without_an_estimator_are_refused(name: str) -> None:
    with pytest.raises(UnknownName, match=name), Q(name):
        pass


def test_second_order() -> None:
    """The derivative of y² with y rounded: 2y, whose derivative is 2 in turn."""
    nodes = [helper.make_node("Round", ["x"], ["r"]), helper.make_node("Mul", ["r", "r"], ["y"])]
    with Q("Round"):
        first = grad(program(*nodes), wrt="x")
        second = grad(first, wrt="x")
    np.testing.assert_array_equal(reference(first, {"x": X})["x_grad"], 2 * np.round(X))
    assert (reference(second, {"x": X})[signature(second).gradients["x"]] == 2).all()


def test_a_scale_that_is_found_at_run_time() -> None:
    """DynamicQuantizeLinear quantizes by QuantizeLinear, with a scale that depends on the extrema."""
    shared = ["s", "z"]
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", *shared]),
        helper.make_node("DequantizeLinear", ["q", *shared], ["y"]),
    ]
    u = RNG.standard_normal(X.shape).astype(np.float32)
    with Q("QuantizeLinear"):
        back = vjp(program(*nodes), wrt="x")
    g = session(back).run(["x_grad"], {"x": X, "y_cotangent": u})[0]
    low, high = min(0, X.min()), max(0, X.max())
    s = (high - low) / 255
    residual = float(np.vdot(u, np.round(X / s) - X / s)) / 255
    want = u + residual * ((X.max() == X) * 1.0 - (X.min() == X))
    np.testing.assert_allclose(g, want, rtol=1e-3, atol=1e-3)


def test_four_bits() -> None:
    model = pair(scale=0.5, point=np.array(0, ml_dtypes.int4))
    with Q("QuantizeLinear"):
        g = session(grad(model, wrt="x")).run(None, {"x": X})[0]
    np.testing.assert_array_equal(g, (np.round(X / 0.5) >= -8) & (np.round(X / 0.5) <= 7))


def test_on_the_command_line(tmp_path: Path) -> None:
    onnx.save(pair(scale=0.03), tmp_path / "m.onnx")
    named = ["--straight-through", "QuantizeLinear"]
    derive = ["grad", "m.onnx", "--wrt", "x", "-o"]
    for target, more, zero in (("a.onnx", [], True), ("b.onnx", named, False)):
        done = command(*derive, target, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (g,) = session(onnx.load(tmp_path / target)).run(None, {"x": X})
        assert g.any() != zero
    for more, says in (([], "zero"), (named, "taken")):
        done = command("check", "m.onnx", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        quantizes = next(row for row in done.stdout.splitlines() if row.startswith("QuantizeLinear"))
        assert ("zero" in quantizes) == (says == "zero")
    done = command(*derive, "c.onnx", "--straight-through", "Rond", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'Round'" in done.stderr


def test_it_is_public() -> None:
    assert onnxgrad.straight_through is straight_through
