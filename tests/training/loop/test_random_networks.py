"""Random networks train alike with kernels, standard operators and float64 (see `tests.fuzz.training`)."""

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.fuzz import training
from tests.fuzz.training import STEPS, Case, Failed

EACH = 3

#: Networks that fuzzing found to fail, and the settings with which they did.
FOUND = {
    "a softmax of products with weights": (
        """ { s = MatMul (x, w4x6) p = Softmax <axis = 2> (s) y = MatMul (p, w6x3) }""",
        {"loss": "mse", "optimizer": "nesterov", "learning_rate": 0.03, "weight_decay": 0.01},
    ),
    "a gated cell": (
        """ { t = Transpose <perm = [1, 0, 2]> (x)  f = Gather (t, zero)  h = MatMul (f, w4x5)
            last, every = Scan <num_scan_inputs = 1, body = cell (float[N, 5] s, float[N, 4] e)
                => (float[N, 5] next, float[N, 5] out) {
                p = MatMul (e, w4x5) q = MatMul (s, w5x5) m = Add (p, q) g = Sigmoid (m) z = Tanh (p)
                d = Sub (z, s) c = Mul (g, d) next = Add (s, c) out = Softplus (next) }> (h, t)
            b = Transpose <perm = [1, 0, 2]> (every)  y = MatMul (b, w5x3) }""",
        {"loss": "l1", "optimizer": "adam", "learning_rate": 0.01},
    ),
}


def network(text):
    """The model of `text`, whose initializers are named by their sizes."""
    head = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 5, 4] x) => (float[N, 5, 3] y)'
    model = onnx.parser.parse_model(head + text)
    rng = np.random.default_rng(0)
    for sizes in ((4, 5), (4, 6), (5, 3), (5, 5), (6, 3)):
        name = f"w{sizes[0]}x{sizes[1]}"
        if name in text:
            weight = (0.4 * rng.standard_normal(sizes)).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(weight, name))
    if "zero" in text:
        model.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
    return model


def made(text, settings, rows=4):
    rng = np.random.default_rng(1)
    data = {n: rng.standard_normal((STEPS * rows, 5, k)).astype(np.float32) for n, k in (("x", 4), ("labels", 3))}
    return Case(network(text), data, rows, settings)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name):
    assert training.judge(made(*FOUND[name])) < 1


@pytest.mark.sweep(8)
@pytest.mark.parametrize("start", range(0, 16 * EACH, EACH))
def test_random_networks(start):
    outcomes = [training.outcome(seed) for seed in range(start, start + EACH)]
    assert not [o.about for o in outcomes if o.kind == "failed"]
    assert Counter(o.kind for o in outcomes)["judged"] >= EACH // 2


@pytest.mark.parametrize("target", ["auto", "portable"])
def test_a_wrong_weight_is_found(monkeypatch, target):
    """The judge can fail: it does where one number of one target is off by a ten-thousandth."""
    real = training.trained

    def off(case, which):
        found = real(case, which)
        if which == target:
            found["w4x5"] = found["w4x5"] + np.float32(1e-4) * np.eye(4, 5, dtype=np.float32)
        return found

    monkeypatch.setattr(training, "trained", off)
    with pytest.raises(Failed, match=f"{target}: w4x5 is off by"):
        training.judge(made(*FOUND["a gated cell"]))


def test_a_wrong_gradient_is_found(monkeypatch):
    """The float64 gradient, the reference of all others, is compared with differences."""
    real = training.stepped

    def twice(step, data, rows, state=None, count=STEPS):
        found = real(step, data, rows, state, count)
        before = {n: t.initial.numpy() for n, t in step.state.items()} if state is None else state
        return {n: a if n == "losses" else 2 * a - before[n] for n, a in found.items()}

    monkeypatch.setattr(training, "stepped", twice)
    with pytest.raises(Failed, match="along a direction"):
        training.judge(made(FOUND["a gated cell"][0], {"loss": "mse", "optimizer": "sgd", "learning_rate": 0.01}))
