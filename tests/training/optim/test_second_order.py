"""Levenberg-Marquardt and L-BFGS, step by step, against the same methods in numpy with dense matrices."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad import BadInput, Function, Trainer, attach
from tests.models import model, value
from tests.transforms.numbers import net

rng = np.random.default_rng(6)
X = rng.standard_normal((20, 3))
Y = np.sin(X @ rng.standard_normal((3, 2)))
NET = net([3, 4, 2])
NAMES = ["w0", "b0", "w1", "b1"]


def weights_of(source):
    held = {t.name: numpy_helper.to_array(t) for t in source.graph.initializer}
    return {n: held[n] for n in NAMES}


def with_weights(flat):
    """The network with other weights."""
    moved = onnx.ModelProto.FromString(NET.SerializeToString())
    start = 0
    for t in moved.graph.initializer:
        if t.name in NAMES:
            size = int(np.prod(t.dims))
            t.CopyFrom(numpy_helper.from_array(flat[start : start + size].reshape(t.dims), t.name))
            start += size
    return moved


def flattened(state):
    return np.concatenate([state[n].reshape(-1) for n in weights_of(NET)])


def loss_at(flat):
    return float(np.mean((Function(with_weights(flat))(X) - Y) ** 2))


def jacobian_at(flat):
    """Of all predictions by all weights, and the residuals."""
    f = Function(with_weights(flat))
    blocks = f.jacobian(wrt=NAMES)(X)
    return np.concatenate([blocks[n].reshape(Y.size, -1) for n in weights_of(NET)], axis=1), (f(X) - Y).reshape(-1)


def steps(optimizer, count, **settings):
    """The weights, the losses and the state after each step."""
    trainer = Trainer(NET, loss="mse", optimizer=optimizer, **settings)
    found = []
    for _ in range(count):
        losses = trainer.fit({"x": X, "labels": Y}, epochs=1, batch_size=20).epochs
        found.append((flattened(trainer.state()), losses[-1]["loss"], trainer.state()))
    return found


def test_levenberg_marquardt_with_dense_matrices():
    w, damping = flattened(weights_of(NET)), 0.5
    for got, loss, state in steps("lm", 6, damping=0.5, iterations=200, tolerance=1e-12):
        jacobian, residual = jacobian_at(w)
        g, gauss_newton = 2 / Y.size * jacobian.T @ residual, 2 / Y.size * jacobian.T @ jacobian
        assert loss == pytest.approx(loss_at(w), rel=1e-9)
        delta = np.linalg.solve(gauss_newton + damping * np.eye(w.size), -g)
        promised = -(g @ delta + delta @ gauss_newton @ delta / 2)
        share = (loss_at(w) - loss_at(w + delta)) / promised
        taken = loss_at(w + delta) < loss_at(w)
        damping = damping * (max(1 / 3, 1 - (2 * share - 1) ** 3) if taken else 4)
        w = w + delta if taken else w
        np.testing.assert_allclose(got, w, rtol=1e-6, atol=1e-8)
        assert state["damping"] == pytest.approx(damping, rel=1e-5)


def test_a_linear_model_is_solved_in_one_step_without_damping():
    source = model(
        [onnx.helper.make_node("Gemm", ["x", "w", "b"], ["y"])], [value("x", ["N", 3], 11)], [value("y", ["N", 2], 11)],
        {"w": np.zeros((3, 2)), "b": np.ones(2)},
    )  # fmt: skip
    trainer = Trainer(source, loss="mse", optimizer="lm:damping=0,tolerance=1e-9")
    trainer.fit({"x": X, "labels": Y}, epochs=1, batch_size=20)
    want = np.linalg.lstsq(np.c_[X, np.ones(20)], Y, rcond=None)[0]
    np.testing.assert_allclose(np.r_[trainer.state()["w"], trainer.state()["b"][None]], want, rtol=1e-6, atol=1e-8)


def test_no_derivative_passes_what_is_held_constant():
    """y = x·w + c, where c = x·w/2 is held constant, as by detach(): dy/dw = x, not 1.5·x."""
    half = onnx.helper.make_node("Constant", [], ["half"], value=numpy_helper.from_array(np.array(0.5)))
    nodes = [half, *(onnx.helper.make_node(*n) for n in (
        ("MatMul", ["x", "w"], ["p"]), ("Mul", ["p", "half"], ["c"]), ("Add", ["p", "c"], ["y"])))]  # fmt: skip
    nodes[2].metadata_props.add(key="onnxgrad.constant", value="detached")
    source = model(nodes, [value("x", ["N", 3], 11)], [value("y", ["N", 2], 11)], {"w": np.full((3, 2), 0.25)})
    trainer = Trainer(source, loss="mse", optimizer="lm:damping=0,tolerance=1e-9")
    trainer.fit({"x": X, "labels": Y}, epochs=1, batch_size=20)
    start = np.full((3, 2), 0.25)
    want = start + np.linalg.lstsq(X, Y - 1.5 * X @ start, rcond=None)[0]
    np.testing.assert_allclose(trainer.state()["w"], want, rtol=1e-6, atol=1e-8)


def test_a_step_that_does_not_help_is_not_taken():
    before = flattened(weights_of(NET))
    ((after, _, state),) = steps("lm", 1, learning_rate=1e4)
    np.testing.assert_array_equal(after, before)
    assert state["damping"] == 4


def test_lbfgs_as_in_numpy():
    w, past, last, scale = flattened(weights_of(NET)), [], None, 0.0
    for got, loss, _ in steps("lbfgs", 9, history=3):
        jacobian, residual = jacobian_at(w)
        g = 2 / Y.size * jacobian.T @ residual
        assert loss == pytest.approx(loss_at(w), rel=1e-9)
        if last is not None:
            s, y = last[0], g - last[1]
            if s @ y > 1e-10 * (y @ y):
                past, scale = [*past, (s, y)][-3:], s @ y / (y @ y)
        q, shares = g, []
        for s, y in reversed(past):
            shares.append(s @ q / (s @ y))
            q = q - shares[-1] * y
        q = q * (scale or min(1, 1 / np.linalg.norm(g)))
        for (s, y), share in zip(past, reversed(shares)):
            q = q + (share - y @ q / (s @ y)) * s
        t = 1.0
        while loss_at(w - t * q) > loss_at(w) - 1e-4 * t * (g @ q):
            t /= 2
        last = (-t * q, g)
        w = w - t * q
        np.testing.assert_allclose(got, w, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("optimizer", ["lm", "lbfgs"])
def test_both_get_lower_than_adam_in_fewer_steps(optimizer):
    data = {"x": X.astype(np.float32), "labels": Y.astype(np.float32)}
    source = net([3, 8, 2], dtype=1)

    def losses(name, epochs, **settings):
        trainer = Trainer(source, loss="mse", optimizer=name, **settings)
        return [e["loss"] for e in trainer.fit(data, epochs=epochs, batch_size=20).epochs]

    found = losses(optimizer, 30)
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(found))
    assert found[-1] < 0.5 * losses("adam", 150, learning_rate=0.01)[-1]


def test_the_curvature_of_classes():
    """The Gauss-Newton matrix of a cross entropy has the Hessian of the softmax inside."""
    labels = rng.integers(0, 2, 20)
    trainer = Trainer(NET, loss="cross_entropy", optimizer="lm:damping=0.3,iterations=200,tolerance=1e-12")
    data = {"x": X, "labels": labels}
    trainer.fit(data, epochs=1, batch_size=20)
    w = flattened(weights_of(NET))
    jacobian, _ = jacobian_at(w)
    e = np.exp(Function(NET)(X))
    p = e / e.sum(1, keepdims=True)
    g = jacobian.T @ (p - np.eye(2)[labels]).reshape(-1) / 20
    bend = np.zeros((40, 40))
    for k in range(20):
        bend[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = (np.diag(p[k]) - np.outer(p[k], p[k])) / 20
    delta = np.linalg.solve(jacobian.T @ bend @ jacobian + 0.3 * np.eye(w.size), -g)
    np.testing.assert_allclose(flattened(trainer.state()), w + delta, rtol=1e-6, atol=1e-8)
    found = [e["loss"] for e in trainer.fit(data, epochs=12, batch_size=20).epochs]
    assert all(b <= a for a, b in itertools.pairwise(found))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("optimizer", ["lm", "lbfgs"])
def test_a_file_goes_on_where_it_was(optimizer, tmp_path):
    data = {"x": X, "labels": Y}
    whole = Trainer(NET, loss="mse", optimizer=optimizer)
    whole.fit(data, epochs=6, batch_size=20)
    half = Trainer(NET, loss="mse", optimizer=optimizer)
    half.fit(data, epochs=3, batch_size=20)
    half.save_training_model(tmp_path / "half.onnx")
    rest = Trainer(tmp_path / "half.onnx")
    rest.fit(data, epochs=3, batch_size=20)
    np.testing.assert_allclose(flattened(rest.state()), flattened(whole.state()), rtol=1e-9)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"groups": ["w0:rate=1"]}, "takes no groups"),
        ({"schedule": "cosine:steps=5", "clip_norm": 1.0}, "takes no schedule, clip_norm"),
        ({"ema": 0.9}, "takes no ema"),
        ({"history": 3}, "history"),
        ({"iterations": 0}, "iterations must be a number from 1 on"),
        ({"damping": -1.0}, "damping must be a number"),
        ({"metrics": ["gradient_norm"]}, "has no gradient_norm"),
        ({"accumulate": True}, "has no parts of a batch"),
    ],
)
def test_refused_settings(settings, says):
    with pytest.raises(BadInput, match=says):
        attach(NET, loss="mse", optimizer="lm", **settings)


def test_losses_that_are_not_a_function_of_the_weights_are_refused():
    dropping = onnx.ModelProto.FromString(NET.SerializeToString())
    with pytest.raises(BadInput, match=r"draws numbers.*\n.*train_mode=False"):
        attach(dropping, loss="mse", optimizer="lbfgs", dropout={"Tanh": 0.5})
    attach(dropping, loss="mse", optimizer="lbfgs", dropout={"Tanh": 0.5}, train_mode=False)
    half = model(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], [value("x", ["N", 3], 10)], [value("y", ["N", 2], 10)],
        {"w": np.ones((3, 2), np.float16)},
    )  # fmt: skip
    with pytest.raises(BadInput, match="weights of one type, float or double"):
        attach(half, loss="mse", optimizer="lm")
