"""jacobian and hessian: shapes, both modes, rows of a batch, sizes of one and zero, composition."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper

from onnxgrad import BadInput, UnknownName, grad, hessian, jacobian, jvp, signature, vjp
from tests.models import assert_sound, mlp, model, nodes_of, value
from tests.transforms.numbers import differences, net, session

pytestmark = pytest.mark.usefixtures("form")  # everything here holds of both forms of many directions

MODES = ["auto", "reverse", "forward"]
rng = np.random.default_rng(5)


def close(a, b, tolerance=1e-8):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def scalar_and_more(x_shape, dtype=T.DOUBLE):
    """y = sin(x)·Σx, s = Σy²."""
    nodes = [
        helper.make_node("Sin", ["x"], ["c"]),
        helper.make_node("ReduceSum", ["x"], ["t"], keepdims=0),
        helper.make_node("Mul", ["c", "t"], ["y"]),
        helper.make_node("Mul", ["y", "y"], ["q"]),
        helper.make_node("ReduceSum", ["q"], ["s"], keepdims=0),
    ]
    return model(nodes, [value("x", x_shape, dtype)], [value("y", x_shape, dtype), value("s", [], dtype)], opset=22)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("declared", "shape"),
    [([], ()), ([1], (1,)), ([3], (3,)), (["N"], (3,)), (["N"], (1,)), ([2, 3], (2, 3)), (["N", "M"], (2, 3)),
     (["N", 3], (0, 3)), ([0, 3], (0, 3)), (["N", 1], (2, 1))],
)  # fmt: skip
def test_jacobian_against_differences(declared, shape, mode):
    source, x = scalar_and_more(declared), rng.standard_normal(shape)
    derived = jacobian(source, wrt="x", mode=mode)
    assert_sound(derived)
    assert [o.name for o in derived.graph.output] == ["y", "s", "y_x_jacobian", "s_x_jacobian"]
    assert signature(derived).jacobians == {"y": {"x": "y_x_jacobian"}, "s": {"x": "s_x_jacobian"}}
    got = session(derived)({"x": x})
    for of in ("y", "s"):
        want = differences(source, {"x": x}, "x", of)
        assert got[f"{of}_x_jacobian"].shape == want.shape
        close(got[f"{of}_x_jacobian"], want)


@pytest.mark.parametrize(("declared", "shape"), [([], ()), ([3], (3,)), (["N", 2], (2, 2)), (["N", 2], (0, 2))])
def test_hessian_against_differences_of_the_gradient(declared, shape):
    source, x = scalar_and_more(declared), rng.standard_normal(shape)
    derived = hessian(source, wrt="x", of="s")
    assert_sound(derived)
    want = differences(grad(source, wrt="x", of="s"), {"x": x}, "x", "x_grad")
    got = session(derived)({"x": x})["x_x_hessian"]
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_blocks_of_a_hessian():
    source, x = net([3, 2, 2]), rng.standard_normal((2, 3))
    derived = hessian(source, wrt=["x", "w0", "t0"])
    assert_sound(derived)
    names, got = signature(derived).hessians, session(derived)({"x": x})
    assert got["x_w0_hessian"].shape == (2, 3, 3, 2)
    close(got[names["x"]["w0"]], got[names["w0"]["x"]].transpose(2, 3, 0, 1))
    close(got[names["x"]["x"]], differences(grad(source, wrt="x"), {"x": x}, "x", "x_grad"), 1e-7)
    close(got[names["w0"]["x"]], differences(grad(source, wrt="w0"), {"x": x}, "x", "w0_grad"), 1e-7)
    close(got[names["t0"]["t0"]], 0)  # linear from there on


@pytest.mark.parametrize("mode", MODES)
def test_several_of_and_wrt_intermediate_ones_too(mode):
    source, x = net([3, 4, 2]), rng.standard_normal((2, 3))
    derived = jacobian(source, wrt=["x", "t0", "b1", "w0"], of=["y", "t0"], mode=mode)
    assert_sound(derived)
    got, names = session(derived)({"x": x}), signature(derived).jacobians
    close(got[names["y"]["x"]], differences(source, {"x": x}, "x", "y"))
    assert got[names["t0"]["w0"]].shape == (2, 4, 3, 4)
    close(got[names["t0"]["t0"]], np.eye(8).reshape(2, 4, 2, 4))
    close(got[names["t0"]["b1"]], np.zeros((2, 4, 2)))
    close(got[names["y"]["b1"]], np.broadcast_to(np.eye(2), (2, 2, 2)))
    w1 = onnx.numpy_helper.to_array(next(t for t in source.graph.initializer if t.name == "w1"))
    close(got[names["y"]["t0"]], np.einsum("nm,io->nomi", np.eye(2), w1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", ["N", 4])
@pytest.mark.parametrize("axis", [0, -2])
def test_rows_of_a_batch(mode, batch, axis):
    source, x = net([3, 4, 2], batch=batch), rng.standard_normal((4, 3))
    derived = jacobian(source, wrt=["x", "t0"], mode=mode, batch=axis)
    assert_sound(derived)
    got = session(derived)({"x": x})["y_x_jacobian"]
    whole = differences(source, {"x": x}, "x", "y")
    close(got, np.stack([whole[n, :, n] for n in range(4)]))
    if batch == "N":
        assert session(derived)({"x": x[:0]})["y_x_jacobian"].shape == (0, 2, 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", [1, -1])
def test_rows_along_the_last_axis(mode, axis):
    nodes = [helper.make_node("MatMul", ["w", "x"], ["h"]), helper.make_node("Sin", ["h"], ["y"])]
    source = model(nodes, [value("x", [3, "N"], T.DOUBLE)], [value("y", [2, "N"], T.DOUBLE)],
                   {"w": rng.standard_normal((2, 3))})  # fmt: skip
    x = rng.standard_normal((3, 4))
    derived = jacobian(source, wrt="x", mode=mode, batch=axis)
    assert_sound(derived)
    whole = differences(source, {"x": x}, "x", "y")
    close(session(derived)({"x": x})["y_x_jacobian"], np.stack([whole[:, n, :, n] for n in range(4)]))


def test_auto_takes_the_fewer_directions(form):
    wide, tall, square = net([2, 5], batch=None), net([5, 2], batch=None), net([3, 3], batch=None)
    unknown = jacobian(net([2, 5]), wrt="x").SerializeToString()
    for source, mode in ((wide, "forward"), (tall, "reverse"), (square, "reverse")):
        chosen = jacobian(source, wrt="x").SerializeToString()
        assert chosen == jacobian(source, wrt="x", mode=mode).SerializeToString()
    assert unknown == jacobian(net([2, 5]), wrt="x", mode="forward").SerializeToString()
    rows = jacobian(net([2, 5]), wrt="x", batch=0).SerializeToString()
    assert rows == jacobian(net([2, 5]), wrt="x", batch=0, mode="forward").SerializeToString()


def test_what_does_not_depend_on_the_direction_runs_once(form):
    derived = jacobian(net([3, 4, 2], batch=None), wrt="x", mode="reverse")
    assert sum(n.op_type == "Tanh" for n in nodes_of(derived.graph)) == 1
    scans = [n for n in derived.graph.node if n.op_type == "Scan"]
    assert len(scans) == (form == "scan")
    if scans:
        body = next(a.g for a in scans[0].attribute if a.name == "body")
        assert sorted(n.op_type for n in body.node) == ["MatMul", "MatMul", "Mul"]


def test_a_scalar_takes_no_scan():
    derived = jacobian(scalar_and_more(["N"]), wrt="x", of="s", mode="reverse")
    assert not [n for n in nodes_of(derived.graph) if n.op_type in ("Scan", "If")]


def test_derivatives_compose():
    source, x = net([3, 2, 2]), rng.standard_normal((2, 3))
    whole = session(hessian(source, wrt="x"))({"x": x})["x_x_hessian"]
    of_grad = jacobian(grad(source, wrt="x"), wrt="x", mode="forward")
    assert_sound(of_grad)
    close(session(of_grad)({"x": x})["x_grad_x_jacobian"], whole)
    for mode in ("reverse", "forward"):
        first = jacobian(source, wrt="x", mode=mode)
        want = differences(first, {"x": x}, "x", "y_x_jacobian")
        for other in ("reverse", "forward"):
            second = jacobian(first, wrt="x", of="y_x_jacobian", mode=other)
            assert_sound(second)
            close(session(second)({"x": x})["y_x_jacobian_x_jacobian"], want, 1e-7)
        u, v = rng.standard_normal((2, 2, 2, 3)), rng.standard_normal((2, 3))
        pulled, pushed = vjp(first, wrt="x", of="y_x_jacobian"), jvp(first, wrt="x", of="y_x_jacobian")
        for derived in (pulled, pushed):
            assert_sound(derived)
        close(session(pulled)({"x": x, "y_x_jacobian_cotangent": u})["x_grad"], np.tensordot(u, want, 4), 1e-7)
        got = session(pushed)({"x": x, "x_tangent": v})["y_x_jacobian_tangent"]
        close(got, np.tensordot(want, v, 2), 1e-7)
    # the Hessian of an element of a Jacobian is a third derivative
    third = hessian(jacobian(source, wrt="x"), wrt="x", of="y_x_jacobian")
    want = differences(grad(jacobian(source, wrt="x"), wrt="x", of="y_x_jacobian"), {"x": x}, "x", "x_grad")
    close(session(third)({"x": x})["x_x_hessian"], want, 1e-6)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_operators_that_are_lowered_on_the_way(mode):
    """A value whose node is replaced by a function body, also where it is `of` itself, twice over."""
    nodes = [
        helper.make_node("MeanVarianceNormalization", ["x"], ["m"], axes=[1]),
        helper.make_node("MeanVarianceNormalization", ["m"], ["z"], axes=[0]),
        helper.make_node("Sin", ["z"], ["y"]),
    ]
    source = model(nodes, [value("x", ["N", 3], T.DOUBLE)],
                   [value("y", ["N", 3], T.DOUBLE), value("z", ["N", 3], T.DOUBLE)])  # fmt: skip
    x = rng.standard_normal((4, 3))
    derived = jacobian(_as_float(source), wrt="x", mode=mode)
    assert_sound(derived)
    got = session(derived)({"x": x.astype(np.float32)})
    want = differences(_written_out(), {"x": x}, "x", "y")
    np.testing.assert_allclose(got["y_x_jacobian"], want, rtol=1e-3, atol=1e-4)
    assert np.abs(got["z_x_jacobian"]).max() > 0.1


def _written_out():
    """The same function in operators that ONNX Runtime has in float64."""
    nodes = []
    for i, (a, b, axis) in enumerate([("x", "m", 1), ("m", "z", 0)]):
        nodes += [
            helper.make_node("ReduceMean", [a, f"axis{axis}"], [f"mean{i}"]),
            helper.make_node("Sub", [a, f"mean{i}"], [f"c{i}"]),
            helper.make_node("Mul", [f"c{i}", f"c{i}"], [f"q{i}"]),
            helper.make_node("ReduceMean", [f"q{i}", f"axis{axis}"], [f"v{i}"]),
            helper.make_node("Sqrt", [f"v{i}"], [f"s{i}"]),
            helper.make_node("Div", [f"c{i}", f"s{i}"], [b]),
        ]
    nodes.append(helper.make_node("Sin", ["z"], ["y"]))
    axes = {f"axis{i}": np.int64([i]) for i in (0, 1)}
    return model(nodes, [value("x", ["N", 3], T.DOUBLE)], [value("y", ["N", 3], T.DOUBLE)], axes)


def _as_float(source):
    copy = onnx.ModelProto.FromString(source.SerializeToString())
    for v in (*copy.graph.input, *copy.graph.output):
        v.type.tensor_type.elem_type = T.FLOAT
    return copy


@pytest.mark.parametrize("dtype", [T.FLOAT, T.FLOAT16, T.BFLOAT16])
def test_dtype_of_the_primal(dtype):
    derived = jacobian(scalar_and_more([3], dtype), wrt="x")
    assert_sound(derived)
    assert {o.type.tensor_type.elem_type for o in derived.graph.output} == {dtype}


def test_the_model_keeps_its_kind_and_names_do_not_clash():
    derived = jacobian(ir.from_proto(mlp()), wrt="x")
    assert isinstance(derived, ir.Model)
    nodes = [helper.make_node("Sin", ["x"], ["y_x_jacobian"]), helper.make_node("Exp", ["y_x_jacobian"], ["y"])]
    source = model(nodes, [value("x", [2], T.DOUBLE)], [value("y", [2], T.DOUBLE)])
    derived = jacobian(source, wrt="x")
    assert_sound(derived)
    name = signature(derived).jacobians["y"]["x"]
    assert name == "y_x_jacobian_1"
    x = rng.standard_normal(2)
    close(session(derived)({"x": x})[name], differences(source, {"x": x}, "x", "y"))


def test_bad_input():
    with pytest.raises(BadInput, match="mode is"):
        jacobian(mlp(), wrt="x", mode="backward")
    with pytest.raises(BadInput, match="no axis 2"):
        jacobian(mlp(), wrt="x", batch=2)
    with pytest.raises(UnknownName):
        hessian(mlp(), wrt="nothing")
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    unknown = model(nodes, [value("x", ["N"]), value("s", ["K"], T.INT64)], [value("y", None)])
    with pytest.raises(BadInput, match="the rank of 'y' is not known"):
        jacobian(unknown, wrt="x")


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_rows_of_a_value_that_is_lowered(mode):
    """The number of rows is read off the value itself, and that is replaced while the derivative is written."""
    nodes = [
        helper.make_node("Gather", ["x", "i"], ["h"]),
        helper.make_node("MeanVarianceNormalization", ["h"], ["z"], axes=[2]),
    ]
    source = model(nodes, [value("x", ["M", 2, 3]), value("i", ["K"], T.INT64)], [value("z", ["K", 2, 3])])
    feeds = {"x": rng.standard_normal((4, 2, 3)).astype(np.float32), "i": np.int64([2, 0, 1])}
    rows, whole = (jacobian(source, wrt="h", mode=mode, **how) for how in ({"batch": 0}, {}))
    assert_sound(rows)
    got, full = session(rows)(feeds)["z_h_jacobian"], session(whole)(feeds)["z_h_jacobian"]
    assert got.shape == (3, 2, 3, 2, 3)
    close(got, np.stack([full[n, ..., n, :, :] for n in range(3)]), 1e-4)
    assert np.abs(got).max() > 0.1
