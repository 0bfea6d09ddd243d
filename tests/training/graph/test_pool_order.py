"""Pooling before a Relu: the same step, ties and kinks included, on a smaller tensor."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from onnxgrad.training.build.attach import attach
from onnxgrad.training.step.compile import compile_step
from tests.training.nets import model_of, train

node = helper.make_node


def net(**pool):
    rng = np.random.default_rng(0)
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("MaxPool", ["r"], ["p"], **{"kernel_shape": [2, 2], "strides": [2, 2]} | pool),
        node("Flatten", ["p"], ["f"]),
        node("ReduceSum", ["f"], ["y"]),
    ]
    weights = {"w": rng.integers(-2, 3, (3, 2, 2, 2)).astype(np.float32), "b": np.float32([0, 1, -1])}
    return attach(model_of(nodes, weights, {"x": ["N", 2, 5, 5]}, {"y": [1, 1]}), loss="mse", optimizer="sgd")


def order(step):
    return [n.op_type for n in step.model.graph if n.op_type in ("Relu", "MaxPool")][:2]


@pytest.mark.parametrize("pool", [{}, {"strides": [1, 1]}, {"pads": [1, 1, 0, 0]}, {"kernel_shape": [3, 3]}])
def test_the_same_step(pool):
    """Whole numbers: windows are full of ties, at 0 and above."""
    attached = net(**pool)
    first = compile_step(attached)
    plain = compile_step(attached, without=["pool_first"])
    assert order(first) == ["MaxPool", "Relu"]
    assert order(plain) == ["Relu", "MaxPool"]
    x = np.random.default_rng(1).integers(-1, 2, (4, 2, 5, 5)).astype(np.float32)
    batch = {"x": x, "labels": np.float32([[3]])}
    (a, losses), (b, wanted) = (train(s, [batch] * 2, rate=1e-4) for s in (first, plain))
    np.testing.assert_allclose([r["loss"] for r in losses], [r["loss"] for r in wanted], rtol=1e-6)
    assert not np.array_equal(b["w"], first.state["w"].initial.numpy()), "something is learned"
    for name in b:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6)


def test_names_mean_what_they_meant():
    """A Relu that is asked for stays where it is; what is called after the MaxPool is the end of both."""
    batch = {"x": np.ones((1, 2, 5, 5), np.float32), "labels": np.float32([[3]])}
    kept, exchanged = compile_step(net(), outputs=["r"]), compile_step(net(), outputs=["p"])
    assert order(kept) == ["Relu", "MaxPool"]
    assert order(exchanged) == ["MaxPool", "Relu"]
    (_, (r,)), (_, (p,)) = train(kept, [batch]), train(exchanged, [batch])
    assert r["r"].min() == 0 < r["r"].max()
    np.testing.assert_array_equal(p["p"], r["r"][:, :, :2, :2])  # each channel is constant


def test_what_the_relu_hands_to_others_too_stays():
    rng = np.random.default_rng(0)
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2]),
        node("Mul", ["p", "w"], ["m"]),
        node("ReduceSum", ["m"], ["a"], keepdims=0),
        node("ReduceSum", ["r"], ["s"], keepdims=0),
        node("Add", ["a", "s"], ["y"]),
    ]
    model = model_of(nodes, {"w": rng.random((1, 1, 2, 2), np.float32)}, {"x": [1, 1, 3, 3]}, {"y": []})
    assert order(compile_step(attach(model, loss="mse", optimizer="sgd"))) == ["Relu", "MaxPool"]
