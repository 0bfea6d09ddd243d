"""Constant folding in derived graphs: what is exact is folded, with the same bits, and nothing else."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxgrad
from onnxgrad.ir import constants


def parsed(body: str, initializers: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[N,3] x) => (float[N,3] y) <{initializers}> {{{body}}}'
    )


def operators(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)


ATTRIBUTES = {
    "Concat": [{"axis": 0}, {"axis": -1}],
    "ConstantOfShape": [{}, {"value": ir.tensor(np.array([7]))}],
    "Mod": [{}, {"fmod": 1}],
    "Range": [{}],
    "ReduceProd": [{"keepdims": keep, "noop_with_empty_axes": noop} for keep in (0, 1) for noop in (0, 1)],
    "Reshape": [{}, {"allowzero": 0}],
    "Slice": [{}],
    "Transpose": [{}, {"perm": [1, 2, 0]}],
}


@pytest.mark.parametrize(("op_type", "attributes"), [(op, a) for op, each in ATTRIBUTES.items() for a in each])
def test_numpy_computes_what_the_evaluator_does_with_attributes(op_type, attributes, monkeypatch):
    assert ATTRIBUTES.keys() == constants._OF_NODE.keys()
    x = np.arange(1, 13).reshape(1, 3, 4)
    of_type = {
        "Concat": [[x, x + 1]],
        "ConstantOfShape": [[x[0, 0, :2]]],
        "Mod": [[x - 6, np.array([3, -3, 5, -5])]],
        "Range": [[np.array(2), np.array(11), np.array(3)], [np.array(5), np.array(-1), np.array(-2)]],
        "ReduceProd": [[x], [x, np.zeros(0, np.int64)], [x, np.array([0, -1])]],
        "Reshape": [[x, np.array([4, 0, -1])], [x, np.array([-1])]],
        "Slice": [
            [x, np.array([0, -2]), np.array([1, 2**62])],
            [x, np.array([-1, 3]), np.array([-(2**62), 1]), np.array([2, -2]), np.array([-2, -1])],
            [x, np.array([5]), np.array([9]), np.array([1])],
        ],
    }
    for operands in of_type.get(op_type, [[x]]):
        values = [ir.Value(name=f"v{i}", type=ir.TensorType(ir.DataType.INT64)) for i in range(len(operands))]
        node = ir.node(op_type, values, attributes)
        node.outputs[0].name, node.outputs[0].dtype = "y", ir.DataType.INT64
        feeds = dict(zip(values, operands))
        found = constants.evaluate(node, feeds, 21)
        with monkeypatch.context() as patch:
            patch.setattr(constants, "_OF_NODE", {})
            expected = constants.evaluate(node, feeds, 21)
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("op_type", sorted(constants._NUMPY))
def test_numpy_computes_what_the_evaluator_of_the_onnx_package_does(op_type, monkeypatch):
    x, y = np.array([[0.1, -3e38, 2]], np.float32), np.array([3e38, -0.7, 2], np.float32)
    n, m = np.array([[-7, 3, 2**62]]), np.array([2, 3, 4])
    flags = x > 0, np.array([True, False, True])
    moved = {"Expand": [2, 1, 3], "Squeeze": [0], "Unsqueeze": [0, 2]}.get(op_type)
    pairs = [(a, np.array(moved)) for a in (x, n)] if moved else [flags] if op_type == "And" else [(x, y), (n, m)]
    for operands in pairs:
        operands = {"Not": flags[:1], "Where": (flags[1], *operands), "Identity": operands[:1]}.get(op_type, operands)
        values = [
            ir.Value(name=f"v{i}", type=ir.TensorType(ir.DataType.from_numpy(a.dtype))) for i, a in enumerate(operands)
        ]
        node = ir.Node("", op_type, values, name="node")
        compares = op_type in ("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not")
        node.outputs[0].name, node.outputs[0].type = (
            "y",
            ir.TensorType(ir.DataType.BOOL) if compares else values[-1].type,
        )
        node.outputs[0].type = values[0].type if moved else node.outputs[0].type
        ours = constants.evaluate(node, dict(zip(values, operands)), 21)
        with monkeypatch.context() as patch:
            patch.setattr(constants, "_NUMPY", {})
            wanted = constants.evaluate(node, dict(zip(values, operands)), 21)
        assert wanted is not None
        assert ours is not None
        assert (ours.dtype, ours.shape, ours.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


CONSTANTS = """
    c = Constant <value = float[3] {0.1, -0.7, 3.0}> ()
    two = Constant <value = float {2.0}> ()
    shape = Constant <value = int64[2] {1, 3}> ()
"""
X = np.float32([[0.3, -1.2, 2.5]])


def test_arithmetic_on_constants_is_folded_with_the_same_bits():
    body = """
        square = Mul (c, c)  third = Div (square, c)  row = Reshape (third, shape)
        big = Greater (row, two)  chosen = Where (big, row, square)
        h = Mul (x, chosen)  y = Tanh (h)
    """
    model = parsed(CONSTANTS + body)
    derived = onnxgrad.grad(model, wrt="x", of="y")
    assert not {"Div", "Greater", "Where", "Reshape"} & set(operators(derived))
    c = np.float32([0.1, -0.7, 3.0])
    chosen = np.where(c * c / c > 2, c * c / c, c * c)
    folded = [onnx.numpy_helper.to_array(n.attribute[0].t) for n in derived.graph.node if n.op_type == "Constant"]
    assert any(a.shape == (1, 3) and (a == chosen).all() for a in folded)
    (value,), (from_derived, _) = run(model, x=X), run(onnxgrad.value_and_grad(model, wrt="x", of="y"), x=X)
    assert value.tobytes() == from_derived.tobytes()


def test_what_was_folded_once_is_a_constant_of_the_next_derivation():
    model = parsed(CONSTANTS + "s = Mul (c, c)  h = Mul (x, s)  y = Mul (h, x)")
    second = onnxgrad.grad(onnxgrad.grad(model, wrt="x", of="y"), wrt="x", of="x_grad")
    (found,) = run(second, x=X)
    np.testing.assert_allclose(found[0], 2 * np.float32([0.1, -0.7, 3.0]) ** 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "initializers", "stays"),
    [
        ("e = Exp (c)  y = Mul (x, e)", "", "Exp"),  # runtimes approximate it, each in its own way
        ("e = Mul (w, w)  h = Mul (x, e)  y = Tanh (h)", "float[3] w = {1, 2, 3}", "Mul"),  # a parameter
        ("r = RandomNormal <shape = [3]> ()  e = Neg (r)  y = Mul (x, e)", "", "Neg"),
        ("z = Sub (two, two)  n = Div (z, z)  y = Mul (x, n)", "", "Div"),  # NaN, whose sign differs
        ("t = Constant <value = float {1e-30}> ()  e = Mul (t, t)  d = Mul (t, two)  y = Mul (x, d)", "", "Mul"),
    ],
)
def test_what_stays(body, initializers, stays):
    derived = onnxgrad.value_and_grad(parsed(CONSTANTS + body, initializers), wrt="x", of="y")
    assert stays in operators(derived)


def test_denormals_are_left_to_the_runtime():
    body = """
        t = Constant <value = float {1e-30}> ()
        s = Constant <value = float {1e-12}> ()
        e = Mul (t, s)
        y = Div (x, e)
    """
    assert "Mul" in operators(onnxgrad.value_and_grad(parsed(body), wrt="x", of="y"))


def test_large_results_are_not_folded():
    body = """
        n = Constant <value = int64[2] {100, 3}> ()
        one = Constant <value = float {1.0}> ()
        e = Expand (one, n)  s = ReduceSum <keepdims = 0> (e)  y = Mul (x, s)
    """
    assert "Expand" in operators(onnxgrad.value_and_grad(parsed(body), wrt="x", of="y"))
