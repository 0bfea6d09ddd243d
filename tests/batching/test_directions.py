"""Many cotangents or tangents at once; the gradient of each example."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto as T
from onnx import helper, parser

from onnxgrad import BadInput, grad, jacobian, jvp, per_example_grad, signature, vjp
from onnxgrad.ir import Builder
from onnxgrad.ir.subgraphs import empty
from tests.models import assert_sound, mlp, model, nodes_of, value
from tests.transforms.numbers import net, session

pytestmark = pytest.mark.usefixtures("form")  # everything here holds of both forms of many directions

rng = np.random.default_rng(6)
SOURCE = net([3, 4, 2])
X = rng.standard_normal((5, 3))


def close(a, b, tolerance=1e-12):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("declared", "count"), [("K", 3), ("K", 1), ("K", 0), (3, 3), (1, 1), (0, 0)])
def test_every_direction_is_one_of_its_own(declared, count):
    cotangents, by_x = rng.standard_normal((count, 5, 2)), rng.standard_normal((count, 5, 3))
    by_w = rng.standard_normal((count, 3, 4))
    pulled = vjp(SOURCE, wrt=["x", "w0", "t0"], directions=declared)
    pushed = jvp(SOURCE, wrt=["x", "w0"], of=["y", "t0"], directions=declared)
    for derived in (pulled, pushed):
        assert_sound(derived)
        assert sum(n.op_type == "Tanh" for n in nodes_of(derived.graph)) == 1
    got = session(pulled)({"x": X, "y_cotangent": cotangents})
    one = session(vjp(SOURCE, wrt=["x", "w0", "t0"]))
    singly = [one({"x": X, "y_cotangent": c}) for c in cotangents]
    for name, shape in (("x_grad", (5, 3)), ("w0_grad", (3, 4)), ("t0_grad", (5, 4))):
        assert got[name].shape == (count, *shape)
        close(got[name], np.array([s[name] for s in singly]).reshape(got[name].shape))
    got = session(pushed)({"x": X, "x_tangent": by_x, "w0_tangent": by_w})
    one = session(jvp(SOURCE, wrt=["x", "w0"], of=["y", "t0"]))
    singly = [one({"x": X, "x_tangent": a, "w0_tangent": b}) for a, b in zip(by_x, by_w)]
    for name, shape in (("y_tangent", (5, 2)), ("t0_tangent", (5, 4))):
        close(got[name], np.array([s[name] for s in singly]).reshape(count, *shape))


def test_directions_are_not_there_unless_asked_for():
    assert vjp(SOURCE, wrt="x", directions=None).SerializeToString() == vjp(SOURCE, wrt="x").SerializeToString()
    for bad in (True, -1, "", 2.5):
        with pytest.raises(BadInput, match="`directions` is a number"):
            vjp(SOURCE, wrt="x", directions=bad)


def test_through_control_flow():
    """A primal with a branch and a loop inside, differentiated along all directions, and that once more."""
    source = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (double[3] x, bool c) => (double[3] y)
        <int64 n = {3}, bool yes = {1}> {
          t = Sin(x)
          z = If (c) <then_branch = a () => (u) { u = Mul(t, x) }, else_branch = b () => (v) { v = Neg(t) }>
          y = Loop (n, yes, z) <body = l (int64 i, bool k, double[3] s) => (bool o, double[3] r)
              { o = Identity(k)
                r = Mul(s, x) }> }"""
    )
    x = rng.standard_normal(3)
    for c in (True, False):
        feeds = {"x": x, "c": np.array(c)}
        inner = x * np.sin(x) if c else -np.sin(x)
        slope = np.sin(x) + x * np.cos(x) if c else -np.cos(x)
        bent = 2 * np.cos(x) - x * np.sin(x) if c else np.sin(x)
        for mode in ("reverse", "forward"):
            first = jacobian(source, wrt="x", mode=mode)
            assert_sound(first)
            close(session(first)(feeds)["y_x_jacobian"], np.diag(slope * x**3 + inner * 3 * x**2))
            second = jacobian(grad(source, wrt="x"), wrt="x", mode=mode)
            want = bent * x**3 + 6 * slope * x**2 + 6 * inner * x
            close(session(second)(feeds)["x_grad_x_jacobian"], np.diag(want), 1e-10)


@pytest.mark.parametrize("batch", ["N", 5])
def test_gradients_of_each_example(batch):
    source = net([3, 4, 2], batch=batch)
    derived = per_example_grad(source, wrt=["w0", "b1"])
    assert_sound(derived)
    assert [i.name for i in derived.graph.input] == ["x"]
    assert signature(derived).gradients == {"w0": "w0_grad", "b1": "b1_grad"}
    got = session(derived)({"x": X})
    one = session(grad(net([3, 4, 2]), wrt=["w0", "b1"]))
    for name in ("w0_grad", "b1_grad"):
        close(got[name], np.stack([one({"x": X[n : n + 1]})[name] for n in range(5)]))
    if batch == "N":
        assert session(derived)({"x": X[:0]})["w0_grad"].shape == (0, 3, 4)
        close(session(derived)({"x": X[:1]})["w0_grad"][0], got["w0_grad"][0])


def test_gradients_of_each_example_of_several_inputs_along_another_axis():
    """loss = Σ (w·x - target)², examples along the last axis; w is an input, the targets are integers."""
    nodes = [
        helper.make_node("MatMul", ["w", "x"], ["h"]),
        helper.make_node("Cast", ["target"], ["f"], to=T.DOUBLE),
        helper.make_node("Sub", ["h", "f"], ["d"]),
        helper.make_node("Mul", ["d", "d"], ["q"]),
        helper.make_node("ReduceSum", ["q"], ["loss"], keepdims=0),
    ]
    inputs = [value("w", [2, 3], T.DOUBLE), value("x", [3, "N"], T.DOUBLE), value("target", [2, "N"], T.INT64)]
    source = model(nodes, inputs, [value("loss", [], T.DOUBLE)])
    derived = per_example_grad(source, wrt="w", batch=1, shared="w")
    assert_sound(derived)
    assert [i.name for i in derived.graph.input] == ["w", "x", "target"]
    w, x, target = rng.standard_normal((2, 3)), rng.standard_normal((3, 4)), rng.integers(0, 3, (2, 4))
    got = session(derived)({"w": w, "x": x, "target": target})["w_grad"]
    close(got, np.einsum("on,in->noi", 2 * (w @ x - target), x))


def test_what_holds_no_examples():
    with pytest.raises(BadInput, match="not shared by the examples"):
        per_example_grad(mlp(), wrt="x")
    with pytest.raises(BadInput, match="no axis 3"):
        per_example_grad(mlp(), wrt="w", batch=3)
    with pytest.raises(BadInput, match="names no input"):
        per_example_grad(mlp(), wrt="w", shared="q")
    with pytest.raises(BadInput, match="no input of the model holds examples"):
        per_example_grad(mlp(), wrt="w", shared="x")
    assert isinstance(per_example_grad(mlp(), wrt="w"), onnx.ModelProto)


def test_a_builder_forgets_what_moved_into_another_graph():
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", "M"]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="g")
    b = Builder(graph)
    negated, size, kept = b.Neg(b.var(x)), b.shape_of(b.var(x)), b.Exp(b.var(x))
    inner, other = empty(b, "inner")
    b.move([negated.value.producer(), size.value.producer()], inner)
    assert [n.op_type for n in other] == ["Neg", "Shape"]
    assert b.Neg(b.var(x)).value is not negated.value
    assert b.shape_of(b.var(x)).value is not size.value
    assert b.Exp(b.var(x)).value is kept.value
    assert [n.op_type for n in graph] == ["Exp", "Neg", "Shape"]
