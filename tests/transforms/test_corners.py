"""Corner cases of transforms: no element, one number, rows that do not belong together, ragged loops."""

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper, parser

from onnxgrad import (
    BadInput,
    Function,
    UnknownName,
    grad,
    hessian,
    hvp,
    jacobian,
    jvp,
    linear_operator,
    per_example_grad,
    signature,
)
from onnxgrad.demo import MODEL
from tests.models import assert_sound, chain, model, nodes_of, value
from tests.transforms.numbers import differences, net, session

pytestmark = pytest.mark.usefixtures("form")  # everything here holds of both forms of many directions

rng = np.random.default_rng(12)
SOURCE = net([3, 4, 2])
X = rng.standard_normal((5, 3))


def text(body):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {body}')


def count(proto, op):
    return sum(n.op_type == op for n in nodes_of(proto.graph))


# --- sizes ------------------------------------------------------------------------------------------


def test_of_a_scalar_with_respect_to_a_scalar():
    source = text("g (double x) => (double y) { y = Mul (x, x) }")
    for mode in ("auto", "reverse", "forward"):
        found = session(jacobian(source, wrt="x", mode=mode))({"x": np.float64(3)})["y_x_jacobian"]
        assert found.shape == ()
        assert found == 6
    assert session(hessian(source, wrt="x"))({"x": np.float64(3)})["x_x_hessian"] == 2


def filled(proto, feeds):
    """All outputs, at the third run, after ONNX Runtime has reused its memory."""
    run, other = session(proto), {"x": X}
    for _ in range(2):
        run(feeds | other)
    return run(feeds)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_of_an_empty_batch(mode):
    none = {"x": X[:0]}
    for wrt, shape in (("x", (0, 2, 0, 3)), ("w0", (0, 2, 3, 4)), ("t0", (0, 2, 0, 4))):
        assert filled(jacobian(SOURCE, wrt=wrt, mode=mode), none)[f"y_{wrt}_jacobian"].shape == shape
    assert filled(jacobian(SOURCE, wrt="x", mode=mode, batch=0), none)["y_x_jacobian"].shape == (0, 2, 3)
    assert filled(hessian(SOURCE, wrt="x"), none)["x_x_hessian"].shape == (0, 3, 0, 3)
    slopes = jacobian(grad(SOURCE, wrt=["w0", "b0"]), wrt=["w0", "b0"], mode=mode)
    for derived in (hessian(SOURCE, wrt=["w0", "b0"]), slopes):
        for name, h in filled(derived, none).items():
            assert name == "y" or (h == 0).all(), name  # a sum over nothing
    assert filled(per_example_grad(SOURCE, wrt="w0"), none)["w0_grad"].shape == (0, 3, 4)


@pytest.mark.parametrize(("a", "b"), [("x", "w"), ("w", "x")])
def test_stacks_of_sums_over_nothing(a, b):
    """Each side of a product may be the stack, and transposed; ONNX Runtime fuses that, and leaves memory as it was."""
    nodes = [
        helper.make_node("Transpose", [a], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["t", b], ["p"]),
        helper.make_node("Exp", ["p"], ["y"]),
    ]
    source = model(
        nodes, [value("x", ["N", 3], T.DOUBLE), value("w", ["N", 4], T.DOUBLE)], [value("y", None, T.DOUBLE)]
    )
    for wrt in ("x", "w"):
        derived = jvp(source, wrt=wrt, directions="K")
        feeds = {"x": np.ones((0, 3)), "w": np.ones((0, 4)), f"{wrt}_tangent": np.ones((6, 0, 3 if wrt == "x" else 4))}
        run, full = (
            session(derived),
            {k: np.ones((6, 2, v.shape[2]) if v.ndim == 3 else (2, v.shape[1])) for k, v in feeds.items()},
        )
        for _ in range(3):
            run(full)
            assert (run(feeds)["y_tangent"] == 0).all()


def test_in_float16_and_with_integers_beside():
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])]
    weights = {"w": rng.standard_normal((3, 2)).astype(np.float16)}
    f = Function(model(nodes, [value("x", ["N", 3], T.FLOAT16)], [value("y", ["N", 2], T.FLOAT16)], weights))
    x = X.astype(np.float16)
    want = (1 - np.tanh(X @ weights["w"]) ** 2)[:, :, None] * weights["w"].T
    for mode in ("reverse", "forward"):
        found = f.jacobian(wrt="x", mode=mode, batch=0)(x)
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, want, atol=5e-3)
    assert linear_operator(f, {"x": x}, wrt="x").dtype == np.float16
    table = text("g (double[4,3] t, int64[N] i) => (double[N,3] y) { e = Gather (t, i)\n y = Tanh (e) }")
    t, i = rng.standard_normal((4, 3)), np.array([1, 3, 1])
    g = Function(table)
    each = g.per_example_grad(wrt="t", shared="t")(t, i)
    np.testing.assert_allclose(each.sum(0), g.grad(wrt="t")(t, i))
    assert np.flatnonzero(each[1].any(1)).tolist() == [3]
    with pytest.raises(BadInput, match="only float tensors have derivatives"):
        g.grad(wrt="i")


# --- what does not fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["a", True, 1.5])
def test_a_batch_that_is_no_axis(bad):
    for derive in (lambda: jacobian(SOURCE, wrt="x", batch=bad), lambda: per_example_grad(SOURCE, wrt="w0", batch=bad)):
        with pytest.raises(BadInput, match="the number of an axis"):
            derive()


def test_rows_that_do_not_belong_together():
    with pytest.raises(BadInput, match="'x' has 3, 'y' has 2"):
        jacobian(SOURCE, wrt="x", batch=1)
    with pytest.raises(BadInput, match="does not fit together"):
        per_example_grad(SOURCE, wrt="w0", batch=1)
    two = text("g (double[3] x, double[4] z) => (double y) { a = ReduceSum (x)\n b = ReduceSum (z)\n y = Mul (a, b) }")
    with pytest.raises(BadInput, match="'x' has 3, 'z' has 4"):
        per_example_grad(two, wrt="x", shared=())


def test_a_model_that_cannot_be():
    source = text("g (double[N,3] x, double[2,4] w) => (double[N,4] y) { y = MatMul (x, w) }")
    with pytest.raises(BadInput, match="3 vs 2"):
        grad(source, wrt="x")


def test_other_outputs():
    f = Function(SOURCE, outputs=["t0", "y"])
    found = f(X)
    np.testing.assert_allclose(found["y"], Function(SOURCE)(X))
    assert found["t0"].shape == (5, 4)
    g = Function(SOURCE, outputs="t0")
    assert {n.op_type for n in g.model.graph} == {"MatMul", "Add", "Tanh"}
    assert len(g.model.graph) == 3  # and nothing more
    assert g.jacobian(wrt="x", batch=0)(X).shape == (5, 4, 3)
    with pytest.raises(UnknownName, match="computed value named 'x'"):
        Function(SOURCE, outputs="x")


# --- control flow, in stacks -------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_a_recurrence_keeps_one_scan_for_all_directions(kind, mode, form):
    gates = {"RNN": 1, "LSTM": 4, "GRU": 3}[kind]
    weights = {"w": rng.standard_normal((2, gates * 2, 3)), "r": rng.standard_normal((2, gates * 2, 2))}
    node = helper.make_node(kind, ["x", "w", "r"], ["y"], hidden_size=2, direction="bidirectional")
    weights = {k: w.astype(np.float32) for k, w in weights.items()}
    source = model([node], [value("x", [4, 2, 3])], [value("y", None)], weights)
    derived = jacobian(source, wrt="x", mode=mode)
    assert_sound(derived)
    assert form == "scan" or count(derived, "Scan") == 4  # forward and backward, in both directions of time
    x = rng.standard_normal((4, 2, 3)).astype(np.float32)
    rows = Function(source)
    want = np.stack([rows.vjp(wrt="x")(x, u.reshape(4, 2, 2, 2)) for u in np.eye(32, dtype=np.float32)])
    np.testing.assert_allclose(session(derived)({"x": x})["y_x_jacobian"].reshape(want.shape), want, atol=1e-5)


SCAN = """
    g (double[N,T] x, double[N] w) => (double[N,T] y) {
        z = Sub (w, w)
        h, y = Scan <num_scan_inputs = 1, scan_input_axes = [AXIS], scan_output_axes = [AXIS],
                     scan_input_directions = [1], scan_output_directions = [BACK],
            body = b (double[N] s, double[N] xi) => (double[N] s2, double[N] yi) {
                p = Mul (s, w)
                q = Add (p, xi)
                s2 = Tanh (q)
                yi = Mul (s2, w) }> (z, x)
    }"""


@pytest.mark.parametrize(("axis", "back"), [("1", "1"), ("-1", "0")])
def test_a_scan_along_another_axis(axis, back):
    source = text(SCAN.replace("AXIS", axis).replace("BACK", back))
    feeds = {"x": rng.standard_normal((2, 3)), "w": rng.standard_normal(2)}
    for wrt in ("x", "w"):
        want = differences(source, feeds, wrt, "y")
        for mode in ("reverse", "forward"):
            derived = jacobian(source, wrt=wrt, mode=mode)
            assert_sound(derived)
            np.testing.assert_allclose(session(derived)(feeds)[f"y_{wrt}_jacobian"], want, atol=1e-7)


LOOP = """
    g (double[N,2] x, double w) => (double y) <int64 n = {10}, bool yes = {1}, double most = {20}> {
        x0 = Mul (x, w)
        y0 = Loop (n, yes, x0) <body = l (int64 i, bool k, double[N,2] s) => (bool o, double[N,2] r) {
            r = Mul (s, s)
            t = ReduceSum <keepdims = 0> (r)
            o = Less (t, most) }>
        y = ReduceSum <keepdims = 0> (y0)
    }"""


def test_a_loop_that_runs_longer_for_some_examples():
    """Its tape has another length for each example: no stack can store that."""
    source, w = text(LOOP), np.float64(1.1)
    x = np.array([[1.3, 1.2], [3.0, 1.0], [1.01, 1.02]])
    one = session(grad(source, wrt="w"))
    want = [one({"x": x[k : k + 1], "w": w})["w_grad"] for k in range(3)]
    np.testing.assert_allclose(session(per_example_grad(source, wrt="w", shared="w"))({"x": x, "w": w})["w_grad"], want)
    whole = {"x": x[:1], "w": w}
    for mode in ("reverse", "forward"):
        derived = jacobian(source, wrt="x", mode=mode)
        np.testing.assert_allclose(
            session(derived)(whole)["y_x_jacobian"], differences(source, whole, "x", "y"), rtol=1e-5
        )


def test_examples_of_a_convolutional_network_need_no_loop_but_for_its_filters(form):
    names = ["conv1.weight", "dense2.bias", "conv2.norm.scale"]
    derived = per_example_grad(str(MODEL), wrt=names)
    assert count(derived, "Scan") == 1
    x = rng.standard_normal((3, 1, 8, 8)).astype(np.float32)
    found, one = session(derived)({"images": x}), session(grad(str(MODEL), wrt=names))
    for name, g in found.items():
        want = np.stack([one({"images": x[k : k + 1]})[name] for k in range(3)])
        np.testing.assert_allclose(g, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())
    for mode in ("reverse", "forward"):
        assert form == "scan" or count(jacobian(str(MODEL), wrt="images", batch=0, mode=mode), "Scan") == 0


# --- cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [net([3, 4, 5, 2]), chain(40), str(MODEL)], ids=["net", "chain", "cnn"])
def test_a_hessian_product_costs_less_than_four_gradients(source):
    f = Function(source)
    wrt = f.inputs[0]
    gradient, product = (len(s(wrt=wrt).model.graph) for s in (f.grad, f.hvp))
    assert product <= 4 * gradient
    assert signature(hvp(source, wrt=wrt)).products


def test_products_through_a_pool_whose_mask_has_no_slope():
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Mul", ["p", "p"], ["y"]),
    ]
    source = model(nodes, [value("x", ["N", 1, 4, 4])], [value("y", ["N", 1, 2, 2])])
    x, t = rng.permutation(16).reshape(1, 1, 4, 4) / 16, rng.standard_normal((1, 1, 4, 4))
    wins = x == np.repeat(np.repeat(x.reshape(2, 2, 2, 2).max((1, 3)), 2, 0), 2, 1)
    a = np.tanh(x)
    want = wins * (2 * (1 - a**2) ** 2 - 4 * a**2 * (1 - a**2)) * t
    np.testing.assert_allclose(Function(source).hvp(wrt="x")(x, t), want, rtol=1e-4, atol=1e-5)
