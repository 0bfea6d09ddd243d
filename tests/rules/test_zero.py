"""Zero derivatives and missing ones: which operators, what a path through them gives, and what it says."""

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad import NoDerivative, grad
from onnxgrad.ir.schemas import schema_of
from onnxgrad.rules import registry
from onnxgrad.rules.rule import Undefined, Zero
from onnxgrad.testing import Case, reference
from tests.rules.ladder import ladder

X = np.array([[-1.3, 0.4, 2.1], [0.9, -0.6, 1.7]])
CASES = [Case(op, [X]) for op in ("Ceil", "Floor", "Round", "Sign", "Hardmax", "EyeLike")]
test_rule = ladder("zero", CASES)

ZEROS = [(d, o, r) for d, o, _, r in registry.items() if isinstance(r, Zero)]
REFUSALS = [(d, o, r) for d, o, _, r in registry.items() if isinstance(r, Undefined)]


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


@pytest.mark.parametrize("op", ["Bernoulli", "Multinomial"])
def test_a_sample_is_refused_with_its_reason(op: str) -> None:
    model = of_x_and(op, 1)
    if op == "Multinomial":  # of rows of scores, whole numbers: the class that was drawn
        del model.graph.input[0].type.tensor_type.shape.dim[:]
        for size in (2, 3):
            model.graph.input[0].type.tensor_type.shape.dim.add(dim_value=size)
        model.graph.node[0].attribute.append(helper.make_attribute("sample_size", 3))
        model.graph.node[0].attribute.append(helper.make_attribute("dtype", TensorProto.INT64))
        derived = grad(model, wrt="x", of="y")
        assert reference(derived, {"x": np.ones((2, 3), np.float32)})["x_grad"].tolist() == [[2] * 3] * 2
        return
    with pytest.raises(NoDerivative, match="random sample"):
        grad(model, wrt="x", of="y")


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


TREE = """nodes_treeids = [0], nodes_nodeids = [0], nodes_featureids = [0], nodes_modes = ["LEAF"],
    nodes_values = [0.0], nodes_truenodeids = [0], nodes_falsenodeids = [0]"""
LEAF = "treeids = [0], {0}_nodeids = [0], {0}_ids = [0], {0}_weights = [1.0]"
PATHS = {
    **{op: ("float[2,3] x", "", f"z = {op} (x)") for op in ("ArgMax", "ArgMin", "EyeLike", "NonZero")},
    "NonMaxSuppression": (
        "float[1,2,4] x, float[1,1,2] s",
        "int64[1] n = {1}, float[1] t = {0.5}",
        "z = NonMaxSuppression <center_point_box = 0> (x, s, n, t, t)",
    ),
    "QLinearMatMul": (
        "float x",
        "uint8[2,2] a = {1, 2, 3, 4}, uint8 o = {0}",
        "z = QLinearMatMul (a, x, o, a, x, o, x, o)",
    ),
    "QLinearConv": (
        "float x",
        "uint8[1,1,3] a = {1, 2, 3}, uint8[1,1,2] w = {1, 2}, uint8 o = {0}",
        "z = QLinearConv (a, x, o, w, x, o, x, o)",
    ),
    "MelWeightMatrix": (
        "float x, float s",
        "int64 bins = {4}, int64 length = {16}, int64 rate = {8192}",
        "z = MelWeightMatrix (bins, length, rate, x, s)",
    ),
    "SequenceLength": ("float[2,3] x", "", "q = SequenceConstruct (x, x) z = SequenceLength (q)"),
    "OptionalHasElement": ("float[2,3] x", "", "z = OptionalHasElement (x)"),
    "LabelEncoder": (
        "float[2,3] x",
        "",
        "z = ai.onnx.ml.LabelEncoder <keys_floats = [0.0, 1.0], values_floats = [2.0, 3.0], default_float = 0.0> (x)",
    ),
    "OneHotEncoder": ("float[3] x", "", "z = ai.onnx.ml.OneHotEncoder <cats_int64s = [0, 1]> (x)"),
    "TreeEnsembleRegressor": (
        "float[2,3] x",
        "",
        f"z = ai.onnx.ml.TreeEnsembleRegressor <{TREE}, target_{LEAF.format('target')}, n_targets = 1> (x)",
    ),
    "TreeEnsembleClassifier": (
        "float[2,3] x",
        "",
        f"""i, z = ai.onnx.ml.TreeEnsembleClassifier
            <{TREE}, class_{LEAF.format("class")}, classlabels_int64s = [0, 1]> (x)""",
    ),
}


@pytest.mark.parametrize("op", PATHS)
def test_a_path_through_a_zero_gives_zeros(op: str) -> None:
    operands, constants, body = PATHS[op]
    held = f"<{constants}>" if constants else ""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]>
        g ({operands}) => (float y) {held} {{ {body} c = Cast <to = 1> (z) y = ReduceSum <keepdims = 0> (c) }}"""
    )
    names = [i.name for i in model.graph.input]
    model = grad(model, wrt=names, of="y")
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    got = reference(model, {n: np.full(s, 0.5, np.float32) for n, s in shapes.items()})
    for n in names:
        np.testing.assert_array_equal(got[f"{n}_grad"], np.zeros(shapes[n]))


def test_a_sample_alone_is_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 22]>
        g (float[2,3] x) => (float[a,b] y) { y = Bernoulli (x) }"""
    )
    with pytest.raises(NoDerivative, match="random sample"):
        grad(model, wrt="x", of="y")
