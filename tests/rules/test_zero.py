"""Zero derivatives and missing ones: which operators, what a path through them gives, and what it says."""

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad import NoDerivative, grad
from onnxgrad.rules import registry
from onnxgrad.rules.op import schema_of
from onnxgrad.testing import Case, reference
from tests.rules.ladder import ladder

X = np.array([[-1.3, 0.4, 2.1], [0.9, -0.6, 1.7]])
CASES = [Case(op, [X]) for op in ("Ceil", "Floor", "Round", "Sign", "Hardmax", "EyeLike")]
test_rule = ladder("zero", CASES)

ZEROS = [(d, o, r) for d, o, _, r in registry.items() if r.kind == "zero"]
REFUSALS = [(d, o, r) for d, o, _, r in registry.items() if r.kind == "undefined"]


def of_x_and(op: str, takes: int) -> onnx.ModelProto:
    """y = x·2 + float(op(x, …)): the derivative of y is 2 where op has none."""
    nodes = [
        helper.make_node(op, ["x"] * takes, ["z"]),
        helper.make_node("Cast", ["z"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "x"], ["d"]),
        helper.make_node("Add", ["d", "c"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("op", "takes"),
    [
        *itertools.product(["Shape", "Size", "Ceil", "Floor", "Round", "Sign", "Hardmax", "IsInf", "IsNaN"], [1]),
        *itertools.product(["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"], [2]),
        *itertools.product(["ArgMax", "ArgMin", "RandomNormalLike", "RandomUniformLike"], [1]),
    ],
)
def test_a_zero_adds_nothing_to_the_other_paths(op: str, takes: int) -> None:
    model = grad(of_x_and(op, takes), wrt="x", of="d")
    x = np.array([0.3, -1.2, 2.6], np.float32)
    assert reference(model, {"x": x})["x_grad"].tolist() == [2, 2, 2]
    through = grad(of_x_and(op, takes), wrt="x", of="y")
    assert reference(through, {"x": x})["x_grad"].tolist() == [2, 2, 2]


def test_a_sample_is_refused_with_its_reason() -> None:
    with pytest.raises(NoDerivative, match="random sample"):
        grad(of_x_and("Bernoulli", 1), wrt="x", of="y")


def test_a_reinterpretation_of_bits_is_refused() -> None:
    nodes = [helper.make_node("BitCast", ["x"], ["y"], to=TensorProto.BFLOAT16)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [3])],
        [helper.make_tensor_value_info("y", TensorProto.BFLOAT16, [3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 26)])
    with pytest.raises(NoDerivative, match="bits"):
        grad(model, wrt="x", of="y")


@pytest.mark.parametrize(("domain", "op", "rule"), [*ZEROS, *REFUSALS], ids=lambda v: v if isinstance(v, str) else "")
def test_every_statement_is_about_an_operator_that_exists_and_says_why(domain: str, op: str, rule: object) -> None:
    assert schema_of(domain, op, onnx.defs.onnx_opset_version() if not domain else 5) is not None
    assert len(rule.reason.split()) > 3
