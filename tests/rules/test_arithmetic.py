"""Elementwise arithmetic and elementary functions up the ladder, and their edges."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad import jvp, vjp
from onnxgrad.model_io import signature
from onnxgrad.testing import Case, reference
from tests.rules.dtypes import dtypes, session
from tests.rules.evaluators import Erf
from tests.rules.ladder import ladder

POSITIVE = np.array([[0.3, 1.2, 2.5], [0.7, 4.0, 1.5]])
SIGNED = np.array([[-1.3, 0.4, 2.1], [0.9, -0.6, 1.7]])
INSIDE = np.array([[-0.8, 0.3, 0.5], [0.1, -0.4, 0.9]])  # between -1 and 1
BASES = np.array([0.0, 0.0, 0.0, 0.0, 1.5, -1.5, -2.0])
POWERS = np.array([3.0, 2.0, 4.0, 3.0, 0.5, 2.0, -3.0])  # whole for the bases that have no logarithm
CONDITION = np.array([[True, False, True], [False, False, True]])

BINARY = ["Add", "Sub", "Mul", "Div", "Max", "Min"]
VARIADIC = ["Sum", "Mean", "Max", "Min"]

CASES = [
    *[Case(op, [SIGNED, POSITIVE]) for op in BINARY],
    *[Case(op, [(2, 1, 3), (4, 1)]) for op in ("Add", "Sub", "Mul", "Max", "Min")],
    *[Case(op, [(2, 3), ()]) for op in ("Add", "Sub", "Mul", "Max", "Min")],
    Case("Div", [(2, 1, 3), np.array([[1.5], [-0.7]])]),
    Case("Div", [(), POSITIVE]),
    Case("Add", [(0, 3), (3,)]),
    *[Case(op, [(2, 3), (2, 3), (3,)], note="three") for op in VARIADIC],
    *[Case(op, [(2, 3), (2, 1), (3,), ()], note="four") for op in VARIADIC],
    *[Case(op, [(2, 3)], note="one") for op in VARIADIC],
    *[Case(op, [SIGNED]) for op in ("Neg", "Reciprocal", "Exp", "Abs", "Sign", "Floor", "Ceil", "Round", "Identity")],
    *[Case(op, [SIGNED]) for op in ("Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Tanh", "Asinh")],
    Case("Erf", [SIGNED], evaluators=[Erf]),
    *[Case(op, [INSIDE]) for op in ("Asin", "Acos", "Atanh")],
    *[Case(op, [POSITIVE]) for op in ("Log", "Sqrt")],
    Case("Acosh", [POSITIVE + 1]),
    Case("Pow", [POSITIVE, SIGNED]),
    Case("Pow", [POSITIVE, np.array([1.5, -0.5, 0.0])], note="exponent of zero"),
    Case("Pow", [POSITIVE, ()]),
    Case("Pow", [np.array(1.7), SIGNED]),
    Case("Pow", [BASES, POWERS], wrt=[0], atol=1e-5),
    Case("Pow", [SIGNED, np.array([[2, 3, 0], [1, -1, -2]])], note="whole exponents"),
    *[Case("Pow", [SIGNED, np.array(k)], note=f"to the {k}") for k in (0, 1, 2, 3, -1, -2)],
    Case("Mod", [SIGNED * 3.1, POSITIVE], {"fmod": 1}),
    Case("Mod", [SIGNED * 3.1, np.array(-0.7)], {"fmod": 1}),
    Case("Clip", [SIGNED, np.array(-0.5), np.array(1.0)]),
    Case("Clip", [SIGNED, np.array(-0.5)], note="low only"),
    Case("Clip", [SIGNED, None, np.array(1.0)], note="high only"),
    Case("Clip", [SIGNED], note="no bounds"),
    Case("Clip", [SIGNED, np.array(1.0), np.array(-0.5)], note="bounds crossed", runtime=False),
    Case("Where", [CONDITION, (2, 3), (2, 3)]),
    Case("Where", [CONDITION, (3,), (4, 1, 1)]),
    Case("Where", [CONDITION, (), (2, 3)]),
    Case("Cast", [(2, 3)], {"to": 11}, runtime=False),
    Case("CastLike", [(2, 3), ()]),
]
test_rule = ladder("arithmetic", CASES)
test_dtype = dtypes([c for c in CASES if c.op not in ("Cast", "CastLike")])

POINTS = np.array([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 6.0, 7.0])
WITH_CONSTANTS = [
    *[(op, [np.array(c)]) for op in ("Max", "Min") for c in (0.0, 1.0, np.inf, -np.inf)],
    *[(op, [np.resize([1.0, -1.0, 0.0], 9)]) for op in ("Max", "Min")],
    ("Clip", [np.array(0.0), np.array(6.0)]),
    ("Clip", [np.array(-1.0), np.array(np.inf)]),
    ("Clip", [np.array(1.0), np.array(-1.0)]),
    ("Clip", [np.array(0.5)]),
    *[("Pow", [np.array(k)]) for k in (0.0, 1.0, 2.0, 3.0, 4.0)],
    ("Pow", [np.resize([0.0, 1.0, 2.0, 3.0], 9)]),
]


def one_node(op: str, dtype: type, constants: list, fed: bool) -> onnx.ModelProto:
    """y = op(x, …), the other operands constants of the graph, or fed."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [helper.make_tensor_value_info("x", kind, POINTS.shape)]
    held = [onnx.numpy_helper.from_array(c.astype(dtype), f"c{i}") for i, c in enumerate(constants)]
    if fed:
        inputs += [helper.make_tensor_value_info(c.name, kind, list(c.dims)) for c in held]
    node = helper.make_node(op, ["x", *(c.name for c in held)], ["y"])
    outputs = [helper.make_tensor_value_info("y", kind, POINTS.shape)]
    graph = helper.make_graph([node], "g", inputs, outputs, [] if fed else held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize(("op", "constants"), WITH_CONSTANTS, ids=lambda v: v if isinstance(v, str) else str(v[0]))
def test_an_operand_that_is_known_changes_the_graph_and_not_the_derivative(
    op: str, constants: list, dtype: type
) -> None:
    """At kinks and ties too, and to second order."""
    results = []
    for fed in (False, True):
        first = vjp(one_node(op, dtype, constants, fed), wrt="x")
        feeds = {f"c{i}": c.astype(dtype) for i, c in enumerate(constants)} if fed else {}
        feeds |= {"x": POINTS.astype(dtype), "y_cotangent": np.arange(1, 10).astype(dtype)}
        second = vjp(first, wrt=["x", "y_cotangent"], of="x_grad")
        names = signature(second)
        feeds[names.cotangents["x_grad"]] = np.linspace(-1, 1, 9).astype(dtype)
        run = session(second)
        given = {i.name: feeds[i.name] for i in run.get_inputs()}
        results.append(run.run(["x_grad", names.gradients["x"], names.gradients["y_cotangent"]], given))
    for known, fed_ in zip(*results):
        np.testing.assert_allclose(known, fed_, rtol=2e-3 if dtype is np.float16 else 1e-6)


@pytest.mark.parametrize("kinds", [("FLOAT", "DOUBLE"), ("DOUBLE", "FLOAT"), ("FLOAT16", "FLOAT")])
def test_a_power_of_two_float_types(kinds: tuple[str, str]) -> None:
    """Each operand's derivative has the operand's type, in both modes."""
    numbers = [getattr(TensorProto, k) for k in kinds]
    inputs = [helper.make_tensor_value_info(n, k, [3]) for n, k in zip("xk", numbers)]
    outputs = [helper.make_tensor_value_info("y", numbers[0], [3])]
    graph = helper.make_graph([helper.make_node("Pow", ["x", "k"], ["y"])], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x, k = np.array([0.5, 2.0, 1.5]), np.array([2.0, -1.0, 0.5])
    slopes = {"x": k * x ** (k - 1), "k": x**k * np.log(x)}
    types = {n: helper.tensor_dtype_to_np_dtype(t) for n, t in zip("xk", numbers)}
    feeds = {"x": x.astype(types["x"]), "k": k.astype(types["k"])}
    back = vjp(model, wrt=["x", "k"])
    onnx.checker.check_model(back, full_check=True)
    got = reference(back, feeds | {"y_cotangent": np.ones(3, types["x"])})
    for n in "xk":
        assert got[f"{n}_grad"].dtype == types[n]
        np.testing.assert_allclose(got[f"{n}_grad"], slopes[n], rtol=5e-3)
        push = jvp(model, wrt=n)
        onnx.checker.check_model(push, full_check=True)
        moved = reference(push, feeds | {f"{n}_tangent": np.ones(3, types[n])})["y_tangent"]
        assert moved.dtype == types["x"]
        np.testing.assert_allclose(moved, slopes[n], rtol=5e-3)
