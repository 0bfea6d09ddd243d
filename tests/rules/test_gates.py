"""x·σ(x) as two nodes: what comes back to x takes four more, whoever else reads x, σ or the product."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnxruntime
import pytest
from onnx import parser

from onnxgrad import grad, vjp

HEAD = '<ir_version: 10, opset_import: ["": 21]> g (double[3, 4] x) => '
#: Text of a model, wrt, and the operators that its gradient adds; None: whatever there are.
MODELS = {
    "x by its gate": ("(double[3, 4] y) { s = Sigmoid (x) y = Mul (x, s) }", ["x"], "Sub Mul Add Mul"),
    "gate by x": ("(double[3, 4] y) { s = Sigmoid (x) y = Mul (s, x) }", ["x"], "Sub Mul Add Mul"),
    "x read elsewhere": ("(double[3, 4] z) { s = Sigmoid (x) y = Mul (x, s) t = Exp (x) z = Add (y, t) }", ["x"], None),
    "gate read elsewhere": ("(double[3, 4] z) { s = Sigmoid (x) y = Mul (x, s) z = Mul (y, s) }", ["x"], None),
    "gate asked for": ("(double[3, 4] y) { s = Sigmoid (x) y = Mul (x, s) }", ["x", "s"], None),
    "a gate of another": ("(double[3, 4] y) { t = Tanh (x) s = Sigmoid (t) y = Mul (x, s) }", ["x"], None),
    "twice": ("(double[3, 4] y) { s = Sigmoid (x) a = Mul (x, s) b = Sigmoid (a) y = Mul (a, b) }", ["x"], None),
    "square of a gate": ("(double[3, 4] y) { s = Sigmoid (x) y = Mul (s, s) }", ["x"], None),
}


@pytest.mark.parametrize("case", MODELS)
def test_silu(case):
    text, wrt, adds = MODELS[case]
    model = parser.parse_model(HEAD + text)
    found = grad(model, wrt=wrt)
    if adds is not None:
        before, after = (Counter(n.op_type for n in m.graph.node) for m in (model, vjp(model, wrt=wrt)))
        assert after - before == Counter(adds.split())
    session, primal = (onnxruntime.InferenceSession(m.SerializeToString()) for m in (found, model))
    x = np.random.default_rng(0).standard_normal((3, 4)) * 3
    given = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = 1e-6
        given[at] = sum((f * primal.run(None, {"x": x + f * step})[0].sum()) for f in (1, -1)) / 2e-6
    results = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x})))
    np.testing.assert_allclose(results["x_grad"], given, rtol=1e-7, atol=1e-8)
    if "s" in wrt:
        np.testing.assert_allclose(results["s_grad"], x)


def test_large_operands_do_not_become_nan():
    """(g·x)·(σ·(1 - σ)) would be ∞·0."""
    model = parser.parse_model(HEAD.replace("double", "float") + MODELS["x by its gate"][0].replace("double", "float"))
    session = onnxruntime.InferenceSession(vjp(model, wrt="x").SerializeToString())
    x = np.full((3, 4), 1e38, np.float32)
    found = session.run(["x_grad"], {"x": x, "y_cotangent": np.full_like(x, 100)})[0]
    np.testing.assert_array_equal(found, 100)
