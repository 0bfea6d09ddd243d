"""Classification losses up the ladder: reductions, weights, ignored targets, more axes, log-probabilities."""

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxgrad import vjp
from onnxgrad.model_io import signature
from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes, session
from tests.rules.ladder import ladder

SCORES = np.array([[0.4, -1.2, 2.1], [1.5, 0.3, -0.8], [-2.2, 0.9, 1.1], [0.6, -0.5, 1.9]])
LABELS = np.array([2, 0, 2, 1])
WEIGHT = np.array([0.5, 1.7, 0.8])
IMAGES = np.random.default_rng(1).standard_normal((2, 3, 2, 2))
PIXELS = np.array([[[0, 2], [1, 1]], [[2, 2], [0, 1]]])
LOGS = SCORES - np.log(np.exp(SCORES).sum(1, keepdims=True))

CASES = []
for reduction, weighted, ignore in itertools.product(["none", "sum", "mean"], [False, True], [None, 2]):
    attrs = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
    note = f"{reduction}{' weighted' * weighted}{'' if ignore is None else ' ignore'}"
    more = [WEIGHT] if weighted else []
    CASES += [
        Case("NegativeLogLikelihoodLoss", [LOGS, LABELS, *more], attrs, note=note),
        Case("SoftmaxCrossEntropyLoss", [SCORES, LABELS, *more], attrs, note=note),
        Case("SoftmaxCrossEntropyLoss", [SCORES, LABELS, *more], attrs, note=f"{note} both", outputs=2),
    ]
CASES += [
    Case("SoftmaxCrossEntropyLoss", [SCORES, LABELS], {}, note="of log_prob", outputs=2, of=[1]),
    Case("SoftmaxCrossEntropyLoss", [IMAGES, PIXELS, WEIGHT], {}, note="images"),
    Case("SoftmaxCrossEntropyLoss", [IMAGES, PIXELS, WEIGHT], {"reduction": "none"}, note="images none"),
    Case("NegativeLogLikelihoodLoss", [IMAGES, PIXELS, WEIGHT], {}, note="images"),
    Case("NegativeLogLikelihoodLoss", [IMAGES, PIXELS], {"ignore_index": 1}, note="images ignore"),
    Case("SoftmaxCrossEntropyLoss", [SCORES, LABELS.astype(np.int32)], {"ignore_index": 0}, note="int32"),
    Case("SoftmaxCrossEntropyLoss", [SCORES, LABELS], {"reduction": "mean"}, note="labels fed", fed=True),
]
test_rule = ladder("loss", CASES)
test_dtype = dtypes(CASES)


def model(op: str, *, classes: int = 3, weighted: bool = False, **attrs: object) -> onnx.ModelProto:
    """One loss over fed labels, of a batch of any size, in float32."""
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", classes]),
        helper.make_tensor_value_info("t", TensorProto.INT64, ["N"]),
    ]
    if weighted:
        inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [classes]))
    node = helper.make_node(op, [i.name for i in inputs], ["y"], **attrs)
    dims = ["N"] if attrs.get("reduction") == "none" else []
    graph = helper.make_graph([node], "loss", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def pulled(primal: onnx.ModelProto, feeds: dict, wrt: str = "x") -> tuple[np.ndarray, np.ndarray]:
    """Loss and gradient on ONNX Runtime for a cotangent of one."""
    derived = vjp(primal, wrt=wrt, of="y")
    sig = signature(derived)
    run = session(derived)
    dims = feeds["t"].shape if len(primal.graph.output[0].type.tensor_type.shape.dim) else ()
    y, g = run.run(["y", sig.gradients[wrt]], feeds | {sig.cotangents["y"]: np.ones(dims, np.float32)})
    return y, g


@pytest.mark.parametrize("ignore", [-1, -100, 7])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ignored_targets_outside_the_classes(ignore: int, weighted: bool, reduction: str) -> None:
    """A row that is ignored counts for nothing: the others get what they get without it."""
    x = SCORES.astype(np.float32)
    t = np.array([2, ignore, 0, ignore])
    kept = t != ignore
    w = {"w": WEIGHT.astype(np.float32)} if weighted else {}
    with_ignored = model("SoftmaxCrossEntropyLoss", weighted=weighted, reduction=reduction, ignore_index=ignore)
    without = model("SoftmaxCrossEntropyLoss", weighted=weighted, reduction=reduction)
    for wrt in ["x", *w]:
        _, got = pulled(with_ignored, {"x": x, "t": t} | w, wrt)
        _, want = pulled(without, {"x": x[kept], "t": t[kept]} | w, wrt)
        if wrt == "x":
            np.testing.assert_array_equal(got[~kept], 0)
            got = got[kept]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_over_ignored_rows_only_is_nan_and_its_gradient_zero(weighted: bool) -> None:
    primal = model("SoftmaxCrossEntropyLoss", weighted=weighted, ignore_index=-1)
    feeds = {"x": SCORES.astype(np.float32), "t": np.full(4, -1)}
    feeds |= {"w": WEIGHT.astype(np.float32)} if weighted else {}
    loss, g = pulled(primal, feeds)
    assert np.isnan(loss)
    np.testing.assert_array_equal(g, 0)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    x = np.array([[1000.0, -1000.0, 0.0], [-800.0, 900.0, 899.0]], np.float32)
    loss, g = pulled(model("SoftmaxCrossEntropyLoss", reduction="sum"), {"x": x, "t": np.array([0, 2])})
    p = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(loss, -np.log(1 - p), rtol=1e-5)
    np.testing.assert_allclose(g, [[0, 0, 0], [0, p, -p]], atol=1e-6)


def test_no_operator_races_and_no_one_hot_is_built() -> None:
    """ScatterND(add) gives wrong sums on several threads; OneHot is twice as slow."""
    for weighted in (False, True):
        primal = model("SoftmaxCrossEntropyLoss", weighted=weighted, ignore_index=-1)
        derived = vjp(primal, wrt=["x", "w"] if weighted else "x", of="y")
        kinds = [n.op_type for n in derived.graph.node]
        assert not {"ScatterND", "OneHot", "LogSoftmax", "Softmax"} & set(kinds)
        assert kinds.count("SoftmaxCrossEntropyLoss") == 1


def test_an_empty_batch() -> None:
    """ONNX Runtime has no softmax cross-entropy of an empty batch, but a negative log-likelihood."""
    derived = vjp(model("NegativeLogLikelihoodLoss", reduction="sum"), wrt="x", of="y")
    sig = signature(derived)
    feeds = {"x": np.zeros((0, 3), np.float32), "t": np.zeros(0, np.int64)}
    feeds[sig.cotangents["y"]] = np.array(1, np.float32)
    (g,) = session(derived).run([sig.gradients["x"]], feeds)
    assert g.shape == (0, 3)
