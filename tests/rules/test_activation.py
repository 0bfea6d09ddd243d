"""Activations, the softmax family and Dropout up the ladder; away from kinks, on both sides of each."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad import jvp, vjp
from onnxgrad.model_io import signature
from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes, session
from tests.rules.evaluators import Erf, Gelu
from tests.rules.ladder import ladder

X = np.array([[-4.3, -2.1, -0.7, -0.2], [0.3, 0.9, 2.4, 5.2]])
SLOPE = np.array([0.3, -0.2, 1.4, 0.1])

CASES = [
    *[Case(op, [X]) for op in ("Tanh", "Sigmoid", "Relu", "Softplus", "Softsign", "HardSigmoid", "HardSwish")],
    *[Case(op, [X]) for op in ("LeakyRelu", "Elu", "Selu", "ThresholdedRelu", "Shrink")],
    Case("Mish", [X], opset=22),
    Case("LeakyRelu", [X], {"alpha": 1.5}, note="steep"),
    Case("LeakyRelu", [X], {"alpha": -0.3}, note="falling"),
    Case("Elu", [X], {"alpha": 0.7}, note="alpha"),
    Case("Selu", [X], {"alpha": 1.2, "gamma": 0.8}, note="alpha and gamma"),
    Case("PRelu", [X, SLOPE]),
    Case("PRelu", [X, np.array(0.25)], note="one slope"),
    Case("PRelu", [(2, 3, 2), (3, 1)]),
    Case("HardSigmoid", [X], {"alpha": 0.5, "beta": 0.6}, note="alpha and beta"),
    Case("HardSigmoid", [X], {"alpha": -0.5, "beta": 0.4}, note="falling"),
    Case("ThresholdedRelu", [X], {"alpha": 0.5}, note="alpha"),
    Case("ThresholdedRelu", [X], {"alpha": -1.5}, note="alpha below 0"),
    Case("Shrink", [X], {"lambd": 1.0, "bias": 0.4}, note="bias"),
    Case("Gelu", [X], note="exact", evaluators=[Erf, Gelu]),
    Case("Gelu", [X], {"approximate": "tanh"}, note="tanh", evaluators=[Erf, Gelu]),
    Case("Swish", [X], opset=24),
    Case("Swish", [X], {"alpha": 1.7}, opset=24, note="alpha"),
    *[Case(op, [(2, 3, 4)]) for op in ("Softmax", "LogSoftmax", "Hardmax")],
    *[Case(op, [(2, 3, 4)], {"axis": 1}, note="axis 1") for op in ("Softmax", "LogSoftmax", "Hardmax")],
    Case("Softmax", [X * 300], note="large"),
    *[Case(op, [(2, 1)], note="one class") for op in ("Softmax", "LogSoftmax")],
    Case("Dropout", [X, np.array(0.4)], wrt=[0], note="inference"),
    Case("Dropout", [X, np.array(0.4), np.array(False)], wrt=[0], note="inference by input", of=[0]),
    Case("Dropout", [X, np.array(0.4), np.array(True)], {"seed": 3}, wrt=[0], note="training", runtime=False),
]
test_rule = ladder("activation", CASES)
test_dtype = dtypes([c for c in CASES if c.note != "large"])


def dropout(ratio: float | None, training: bool, of_mask: bool = False) -> onnx.ModelProto:
    """A Dropout whose ratio and mode are fixed in the graph."""
    given = "" if ratio is None else "ratio"
    constants = [
        helper.make_tensor("ratio", TensorProto.FLOAT, [], [ratio or 0.0]),
        helper.make_tensor("training", TensorProto.BOOL, [], [training]),
    ]
    outs = ["y", "mask"] if of_mask else ["y"]
    graph = helper.make_graph(
        [helper.make_node("Dropout", ["x", given, "training"], outs)],
        "dropout",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [400])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [400])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("of_mask", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.25, None, 0.9])
def test_dropout_scales_the_cotangent_by_the_very_mask_of_the_primal(ratio: float | None, of_mask: bool) -> None:
    model = vjp(dropout(ratio, True, of_mask), wrt="x", of="y")
    x = np.linspace(1, 2, 400, dtype=np.float32)
    g = np.linspace(-3, 3, 400, dtype=np.float32)
    sig = signature(model)
    y, dx = session(model).run(["y", sig.gradients["x"]], {"x": x, sig.cotangents["y"]: g})
    np.testing.assert_allclose(dx, g * (y / x), rtol=1e-5, atol=1e-6)
    kept = np.mean(y != 0)
    assert abs(kept - (1 - (0.5 if ratio is None else ratio))) < 0.1


def test_dropout_in_inference_adds_no_product() -> None:
    model = vjp(dropout(0.5, False), wrt="x", of="y")
    assert {n.op_type for n in model.graph.node} <= {"Dropout", "Identity"}


def test_dropout_of_everything_has_gradient_zero() -> None:
    """The reference evaluator's output is NaN for a ratio of 1; the gradient is 0 all the same."""
    from onnxgrad.testing import reference

    model = vjp(dropout(1.0, True), wrt="x", of="y")
    sig = signature(model)
    got = reference(model, {"x": np.ones(400, np.float32), sig.cotangents["y"]: np.ones(400, np.float32)})
    np.testing.assert_array_equal(got[sig.gradients["x"]], 0)


def test_dropout_in_training_is_differentiated_as_if_its_mask_were_fixed_in_both_modes() -> None:
    """The derived model draws one mask: primal, tangent and cotangent agree on it."""
    model = jvp(dropout(0.5, True), wrt="x", of="y")
    sig = signature(model)
    x, t = np.full(400, 2, np.float32), np.arange(400, dtype=np.float32)
    names = ["y", sig.output_tangents["y"]]
    y, moved = session(model).run(names, {"x": x, sig.input_tangents["x"]: t})
    np.testing.assert_allclose(moved, t * y / 2)
    assert [n.op_type for n in model.graph.node].count("Dropout") == 1
