"""Trained weights: their choice, names and types."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training import attach, compile_step
from tests.training.nets import mlp, model_of, train
from tests.training.step.test_compile import batch_of, node

# --- what is trained --------------------------------------------------------------------------------


def test_what_is_trained_by_default():
    """Float tensors of rank 1 or more on the way to the loss: no scalar, no mask, no table of integers."""
    weights = {
        "w": np.ones((4, 3), np.float32),
        "scale": np.array(0.5, np.float32),
        "mask": np.float32([0, -np.inf, 0]),
        "low": np.float32([0, np.finfo(np.float32).min, 0]),
        "elsewhere": np.ones(3, np.float32),
        "shape": np.int64([-1, 3]),
    }
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Mul", ["a", "scale"], ["b"]),
        node("Add", ["b", "mask"], ["c0"]),
        node("Add", ["c0", "low"], ["c"]),
        node("Reshape", ["c", "shape"], ["d"]),
        node("Softmax", ["d"], ["y"]),
        node("Add", ["y", "elsewhere"], ["other"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["N", 4])],
        [helper.make_tensor_value_info(n, 1, ["N", 3]) for n in ("y", "other")],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    attached = attach(model, loss="mse", output="y", optimizer="sgd")
    assert [b.key for b in attached.training_info[0].update_binding] == ["w"]
    for name, message in {
        "elsewhere": "the loss does not depend on 'elsewhere'",
        "shape": "'shape' is a tensor of int64",
        "v": "no initializer named 'v'",
    }.items():
        with pytest.raises(BadInput, match=message):
            attach(model, loss="mse", output="y", trainable=[name])
    with pytest.raises(BadInput, match=r"name the output that meets the labels.*'y', 'other'"):
        attach(model, loss="mse")
    with pytest.raises(UnknownName, match="'yy'"):
        attach(model, loss="mse", output="yy")


def test_frozen_weights_stay():
    step = compile_step(attach(mlp(), loss="mse", optimizer="adam", trainable=["w2", "b2"]))
    assert {n for n, t in step.state.items() if t.kind == "parameter"} == {"w2", "b2"}
    state, _ = train(step, [batch_of()] * 3)
    trained = step.inference_model(state).graph.initializers
    np.testing.assert_array_equal(
        trained["w1"].const_value.numpy(), step.source.model.graph.initializers["w1"].const_value.numpy()
    )


def test_one_text_is_one_pattern():
    def of(**settings):
        state = compile_step(attach(mlp(), loss="mse", optimizer="sgd", **settings)).state
        return {n for n, t in state.items() if t.kind == "parameter"}

    assert of(trainable="all") == {"w1", "b1", "w2", "b2"}
    assert of(trainable="w2") == of(trainable=["w2"]) == {"w2"}
    assert of(freeze="b*") == of(groups="b*:frozen=true") == {"w1", "w2"}
    with pytest.raises(UnknownName, match="no initializer named 'w9'"):
        of(trainable="w9")


def test_names_that_clash_or_are_no_identifiers():
    """A model that uses our names, and names with dots and slashes."""
    model = mlp()
    rename = {"w1": "layer.0/w", "b1": "loss", "w2": "steps", "h2": "labels", "y": "learning_rate"}
    for n in model.graph.node:
        n.input[:] = [rename.get(v, v) for v in n.input]
        n.output[:] = [rename.get(v, v) for v in n.output]
    for t in (*model.graph.initializer, *model.graph.output):
        t.name = rename.get(t.name, t.name)
    step = compile_step(attach(model, loss="mse", optimizer="adam"))
    plain = compile_step(attach(mlp(), loss="mse", optimizer="adam"))
    batch = batch_of()
    (mine,) = [n for n in step.batch if n != "x"]
    state, history = train(step, [{"x": batch["x"], mine: batch["labels"]}] * 5)
    expected, losses = train(plain, [batch] * 5)
    assert [float(h[step.loss]) for h in history] == [float(h["loss"]) for h in losses]
    for old in ("w1", "b1", "w2", "b2"):
        np.testing.assert_array_equal(state[rename.get(old, old)], expected[old])
    produced = [t.output for t in step.state.values()]
    assert all(o.isidentifier() for o in produced)
    with pytest.raises(BadInput, match="cannot compare with 'labels', which is a value of the model, but no input"):
        attach(model, loss="mse", labels="labels")


def test_model_with_a_label_input():
    """A label input that the model has is used; one of the wrong type is refused."""
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Add", ["y", "t"], ["sum"])]
    weights = {"w": np.ones((4, 3), np.float32)}
    model = model_of(nodes, weights, {"x": ["N", 4], "t": ["N", 3]}, {"y": ["N", 3], "sum": ["N", 3]})
    step = compile_step(attach(model, loss="mse", output="y", labels="t", optimizer="sgd"))
    assert step.batch == ["x", "t"]
    with pytest.raises(BadInput, match="the label input 't' is a tensor of"):
        attach(model, loss="cross_entropy", output="y", labels="t")


def test_float16_trains_beside_weights_of_float32():
    model = mlp(dtype=np.float16)
    for optimizer, moments in (("adam", 8), ("sgd", 0)):
        state = compile_step(attach(model, loss="mse", optimizer=optimizer)).state
        held = [t.initial.dtype.numpy() for t in state.values() if t.kind in ("parameter", "optimizer")]
        assert (held.count(np.float16), held.count(np.float32)) == (4, 4 + moments)


def test_float64_trains():
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((5, 4)), "labels": rng.standard_normal((5, 3))}
    for optimizer in ("sgd", "adamw"):
        step = compile_step(attach(mlp(dtype=np.float64), loss="mse", optimizer=optimizer))
        state, history = train(step, [batch] * 3)
        assert state["w1"].dtype == np.float64
        assert history[2]["loss"] < history[0]["loss"]
