"""Operands that are broadcast instead of expanded: the same numbers, to the bit."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxgrad import vjp
from onnxgrad.runtime import Options, Session
from tests.runtime.passes import optimized


def _model(body, source="N, 1"):
    text = f'<ir_version: 10, opset_import: ["": 20]> g (float[N, 3] x, float[{source}] m) => (y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True))


def _operators(model):
    return [node.op_type for node in optimized(model).graph]


def _same(model, **feeds):
    auto, plain = (Session(model, Options(layout=how)).run(feeds) for how in ("auto", "plain"))
    for name, wanted in plain.items():
        np.testing.assert_array_equal(auto[name], wanted)
        assert auto[name].shape == wanted.shape


@pytest.mark.parametrize("source", ["N, 1", "3", "1", "N, 3"])
@pytest.mark.parametrize("step", ["y = Add (e, x)", "y = Div (x, e)", "z = Sub (e, x) y = Mul (e, z)"])
def test_same_numbers(source, step):
    model = _model(f"s = Shape (x) e = Expand (m, s) {step}", source)
    for node in model.graph:  # as the derivative of a mean has it
        if node.op_type in ("Expand", "Sub"):
            node.outputs[0].shape = ir.Shape(["N", 3])
    assert "Expand" not in _operators(model)
    rng = np.random.default_rng(0)
    shape = [{"N": 4}.get(d) or int(d) for d in source.split(", ")]
    _same(model, x=rng.standard_normal((4, 3), np.float32), m=rng.standard_normal(shape, np.float32))


@pytest.mark.parametrize("weights", ["1, 4, 1, 5", "4, 1, 5", "N, 1, 1, 5", "N, 4, 1, 1"])
def test_both_operands_are_broadcast(weights):
    """The cotangent of a sum along the last axis, times weights that another axis shares."""
    model = ir.from_proto(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[N, 4, 3, 1] g, float[{weights}] w) => (float[N, 4, 3, 5] y) {{
            s = Constant <value_ints = [1, 1, 1, 5]> () e = Expand (g, s) y = Mul (w, e) }}""")
    )
    for node in model.graph:
        if node.op_type == "Expand":
            node.outputs[0].shape = ir.Shape(["N", 4, 3, 5])
    is_needed = weights.endswith("1")  # nothing else has the last axis
    assert ("Expand" in _operators(model)) == is_needed
    rng = np.random.default_rng(0)
    shape = [{"N": 2}.get(d) or int(d) for d in weights.split(", ")]
    _same(model, g=rng.standard_normal((2, 4, 3, 1), np.float32), w=rng.standard_normal(shape, np.float32))


def test_what_gives_the_shape_stays():
    model = _model("s = Shape (x) e = Expand (m, s) two = Add (m, m) f = Expand (two, s) y = Mul (e, f)")
    for node in model.graph:
        if node.op_type == "Expand":
            node.outputs[0].shape = ir.Shape(["N", 3])
    assert _operators(model).count("Expand") == 1
    model = _model("s = Shape (x) e = Expand (m, s) y = Add (e, e)")
    assert optimized(model) is model
    model = _model("s = Constant <value_ints = [5, 3]> () e = Expand (m, s) y = Add (e, m)", "1, 1")
    assert optimized(model) is model


def test_the_cotangent_of_a_mean_is_not_expanded():
    source = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        g (float[N, 4, 5, 5] x) => (float[N, 4, 1, 1] y) { r = Tanh (x) y = GlobalAveragePool (r) }""")
    model = ir.from_proto(vjp(source, wrt="x"))
    assert "Expand" in [n.op_type for n in model.graph]
    assert all(len(n.outputs[0].shape or ()) != 4 for n in optimized(model).graph if n.op_type == "Expand")
    rng = np.random.default_rng(0)
    _same(
        model,
        x=rng.standard_normal((2, 4, 5, 5), np.float32),
        y_cotangent=rng.standard_normal((2, 4, 1, 1), np.float32),
    )


@pytest.mark.parametrize("rows", [4, 1, 0])
@pytest.mark.parametrize("step", ["Mul (e, two)", "Mul (two, e)", "Sub (two, e)", "Div (two, e)", "Div (e, two)"])
def test_scalars_come_first(step, rows):
    """As in the cotangent of a mean of squares."""
    model = _model(f"two = Constant <value = float {{2}}> () s = Shape (x) e = Expand (m, s) f = {step} y = Mul (f, x)")
    for node in model.graph:
        if node.op_type == "Expand" or node.outputs[0].name == "f":
            node.outputs[0].shape = ir.Shape(["N", 3])
    assert "Expand" not in _operators(model)
    rng = np.random.default_rng(0)
    _same(model, x=rng.standard_normal((rows, 3), np.float32), m=rng.standard_normal((rows, 1), np.float32))


@pytest.mark.parametrize(
    "steps",
    [
        "f = Mul (e, two) y = Add (f, e)",  # read twice
        "f = Mul (e, e) y = Add (f, two)",
        "v = Reshape (two, one) f = Mul (e, v) y = Relu (f)",  # a vector
    ],
)
def test_others_stay_expanded(steps):
    constants = "two = Constant <value = float {2}> () one = Constant <value = int64[1] {1}> ()"
    model = _model(f"{constants} s = Shape (x) e = Expand (m, s) {steps}")
    scalars = [
        n for n in optimized(model).graph if n.op_type in ("Add", "Mul") and n.inputs[0].shape == ir.Shape(["N", 1])
    ]
    assert not scalars
    _same(model, x=np.ones((2, 3), np.float32), m=np.float32([[3], [4]]))


def test_a_square_of_which_a_mean_is_taken():
    """The gradient of rows of a root mean square, without an Expand."""
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[N, 3] x) => (float[N, 1] y) {
        two = Constant <value = float {2}> () p = Pow (x, two) y = ReduceMean <keepdims = 1> (p, last) }"""
    text = text.replace("two =", "last = Constant <value = int64[1] {-1}> () two =", 1)
    derived = vjp(ir.from_proto(onnx.parser.parse_model(text)), wrt="x")
    assert "Expand" not in _operators(derived)
    x, g = np.float32([[1, -2, 0], [3, 4, 5]]), np.float32([[3], [-1]])
    found = Session(derived, Options(target="portable")).run({"x": x, "y_cotangent": g})["x_grad"]
    np.testing.assert_allclose(found, 2 * x * g / 3, rtol=1e-6)
