"""Reductions and the cumulative sum up the ladder: every way to give the axes, sizes 0 and 1, zeros, ties."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad import grad, jvp, vjp
from onnxgrad.testing import Case, reference
from tests.rules.dtypes import dtypes, session
from tests.rules.evaluators import Flatten
from tests.rules.ladder import ladder

X = np.array([[[0.4, -1.2, 2.1], [1.5, 0.3, -0.8]], [[-2.2, 0.9, 1.1], [0.6, -0.5, 1.9]]])
REDUCTIONS = ["Sum", "Mean", "Prod", "Max", "Min", "L1", "L2", "SumSquare", "LogSumExp", "LogSum"]


def axes(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def operand(op: str) -> np.ndarray:
    return np.abs(X) + 0.1 if op == "LogSum" else X


CASES = [
    *[Case(f"Reduce{op}", [operand(op), axes(1)], note="axis 1") for op in REDUCTIONS],
    *[Case(f"Reduce{op}", [operand(op), axes(-1)], {"keepdims": 0}, note="last, dropped") for op in REDUCTIONS],
    *[Case(f"Reduce{op}", [operand(op), axes(2, 0)], {"keepdims": 0}, note="axes 2 and 0") for op in REDUCTIONS],
    *[Case(f"Reduce{op}", [operand(op)], note="all") for op in REDUCTIONS],
    *[Case(f"Reduce{op}", [operand(op)], {"keepdims": 0}, note="all dropped") for op in REDUCTIONS],
    *[Case(f"Reduce{op}", [operand(op)], {"noop_with_empty_axes": 1, "keepdims": 0}, note="none") for op in REDUCTIONS],
    *[Case(f"Reduce{op}", [operand(op), axes()], {"noop_with_empty_axes": 1}, note="none") for op in REDUCTIONS],
    *[Case(f"Reduce{op}", [operand(op)[:, :1], axes(1)], note="size 1") for op in REDUCTIONS],
    *[Case(f"Reduce{op}", [(0, 3), axes(1)], {"keepdims": 0}, note="empty") for op in REDUCTIONS],
    Case(
        "ReduceProd",
        [np.array([[0.0, 1.5, -2.0], [0.0, 0.0, 1.3], [0.0, 0.0, 0.0], [1.1, 2.0, 0.7]]), axes(1)],
    ),
    Case("ReduceProd", [X, axes(0)], {"keepdims": 0}, note="axis 0"),
    Case("ReduceProd", [np.array([[0.0, 1.5], [-0.5, 1.3]])], {"keepdims": 0}, note="a zero"),
    Case("ReduceProd", [np.array([[1.1] * 17, [0.0, *[1.2] * 16], [*[0.9] * 15, 0.0, 0.0]]), axes(1)], note="many"),
    Case("ReduceProd", [np.array([[1.1, 0.0, -0.7, 1.3, 0.9], [0.0, 1.2, 0.0, 0.8, 1.5]]), axes(1)], note="five"),
    Case("CumSum", [(2, 3), np.array(1)]),
    *[
        Case(
            "CumSum",
            [(2, 3), np.array(-2)],
            {"exclusive": e, "reverse": r},
            note=f"exclusive {e} reverse {r}",
        )
        for e in (0, 1)
        for r in (0, 1)
    ],
    Case("CumSum", [(4,), np.array(0)], note="vector"),
    *[
        Case(
            "CumProd",
            [(2, 3), np.array(1)],
            {"exclusive": e, "reverse": r},
            opset=26,
            note=f"exclusive {e} reverse {r}",
        )
        for e in (0, 1)
        for r in (0, 1)
    ],
    Case("CumProd", [(3, 2, 2), np.array(-3)], opset=26, note="axis -3"),
    Case("CumProd", [np.array([1.5, 0.0, -2.0, 3.0]), np.array(0)], opset=26, note="a zero"),
    Case("CumProd", [np.array([0.0, 1.5, 0.0, -2.0, 0.0]), np.array(0)], {"reverse": 1}, opset=26, note="zeros"),
    Case("CumProd", [(0, 3), np.array(1)], opset=26),
    Case("CumProd", [(3,), np.array(0)], opset=26, fed=True, note="computed axis"),
    *[Case("CumProd", [(3, 2, 2), np.array(a)], opset=26, fed=True, note=f"axis {a}, computed") for a in (0, -2, 2)],
    *[
        Case(
            "CumProd", [(2, 3), np.array(a, np.int32)], {"exclusive": 1, "reverse": 1}, opset=26, fed=True, note=f"{a}"
        )
        for a in (0, -1)
    ],
    Case("CumProd", [(3, 1), np.array(1)], {"exclusive": 1}, opset=26),
]
test_rule = ladder("reduce", CASES)
test_dtype = dtypes(CASES)


def squared(op: str, given: np.ndarray | None, keepdims: int) -> onnx.ModelProto:
    """Σ y² with y = op(x, axes); the axes are an input, or fixed if `given`."""
    nodes = [
        helper.make_node(f"Reduce{op}", ["x", "axes"], ["y"], keepdims=keepdims),
        helper.make_node("ReduceSumSquare", ["y"], ["z"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.DOUBLE, ["a", "b", "c"])]
    constants = []
    if given is None:
        inputs.append(helper.make_tensor_value_info("axes", TensorProto.INT64, ["k"]))
    else:
        constants.append(onnx.numpy_helper.from_array(given, "axes"))
    outputs = [helper.make_tensor_value_info("z", TensorProto.DOUBLE, [])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("given", [axes(-2), axes(0, 2), axes()], ids=str)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_axes_may_be_computed_in_the_graph(op: str, keepdims: int, given: np.ndarray) -> None:
    """Empty ones, known only at run time, reduce everything."""
    agrees(op, keepdims, given, operand(op))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("given", [axes(0), axes(2, 1)], ids=str)
def test_axes_of_a_product_may_be_computed(given: np.ndarray, shape: tuple[int, ...]) -> None:
    """Empty ones, those of size 1, and zeros among the factors."""
    agrees("Prod", 0, given, np.ones(shape))
    agrees("Prod", 1, given, np.where(np.abs(X) > 0.7, X, 0))


def agrees(op: str, keepdims: int, given: np.ndarray, x: np.ndarray) -> None:
    """Both orders, with axes that are fed, agree with what fixed axes give."""
    t = np.linspace(-1, 1, x.size).reshape(x.shape)
    fed, fixed = squared(op, None, keepdims), squared(op, given, keepdims)
    for derive in (
        grad,
        lambda m, wrt: vjp(grad(m, wrt=wrt), wrt=wrt),
        lambda m, wrt: jvp(grad(m, wrt=wrt), wrt=wrt),
    ):
        got, want = derive(fed, wrt="x"), derive(fixed, wrt="x")
        onnx.checker.check_model(got, full_check=True)
        feeds = {i.name: t for i in got.graph.input} | {"x": x, "axes": given}
        expected = reference(want, feeds, [Flatten])
        for name, value in reference(got, feeds, [Flatten]).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
        run = session(got)
        for out, value in zip(run.get_outputs(), run.run(None, {i.name: feeds[i.name] for i in run.get_inputs()})):
            np.testing.assert_allclose(value, expected[out.name], rtol=1e-6, atol=1e-9, err_msg=out.name)
