"""`check` calls a model differentiable if and only if `vjp` succeeds: node tests, random graphs, hand-made refusals."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxgrad import NotDifferentiable, vjp
from onnxgrad.check import check
from tests.fuzz.graphs import model_of
from tests.fuzz.random_graphs import grown
from tests.nodes.cases import representatives

pytestmark = pytest.mark.filterwarnings("ignore")
HEAD = '<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3, "ai.onnx.preview.training": 1]>'
REFUSED = 'ai.onnx.ml.LinearRegressor<coefficients=[1.0,2.0], post_transform="PROBIT">'
BY_HAND = {
    "a rule refuses an attribute": (False, 'g (float[N,2] x) => (float[N,1] y) { y = PROBIT(x) }'),
    "a Gradient over a refused operator": (False, """g (float[1,2] x) => (float[1,2] d) {
        y = PROBIT(x) s = ReduceSum<keepdims=0>(y)
        d = ai.onnx.preview.training.Gradient<xs=["x"], y="s">(x) }"""),
    "a Gradient": (True, """g (float[2] x) => (float[2] d) { q = Mul(x, x) s = ReduceSum<keepdims=0>(q)
        d = ai.onnx.preview.training.Gradient<xs=["x"], y="s">(x) }"""),
    "refused in a branch": (False, """g (float[2,2] x, bool c) => (float[2,1] y) {
        y = If(c) <then_branch = t () => (float[2,1] a) { a = PROBIT(x) },
                   else_branch = e () => (float[2,1] b) { b = ReduceSum<keepdims=1>(x) }> }"""),
}  # fmt: skip


def disagreement(model: onnx.ModelProto) -> str:
    """The error in the report of `check` on `model`; empty if it agrees with `vjp`."""
    try:
        report = check(model)
    except NotDifferentiable as e:
        return f"check raises {type(e).__name__}: {e}"
    try:
        vjp(model, wrt=report.wrt or "x", of=report.of or None)
    except NotDifferentiable as e:
        return f"check sees no problem, vjp {e}" if report.differentiable else ""
    return "" if report.differentiable else f"vjp works, check says {report.problem}"


def test_on_the_node_tests():
    found = {}
    for case in representatives():
        if said := disagreement(case.model):
            found[case.name] = said
    assert not found


def test_on_random_graphs():
    models = (model_of(grown(np.random.default_rng(seed)), np.float32) for seed in range(60))
    assert not [said for model in models if (said := disagreement(model))]


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    wanted, text = BY_HAND[name]
    model = parser.parse_model(HEAD + text.replace("PROBIT", REFUSED))
    assert disagreement(model) == ""
    assert check(model).differentiable == wanted
