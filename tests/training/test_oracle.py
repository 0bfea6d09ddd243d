"""The reference runner does what the specification words, and the compiled step does what the runner does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Session
from onnxgrad.training import ReferenceTraining, attach, compile_step
from tests.training.nets import mlp, run, train
from tests.training.test_entries import BATCHES, called, norm_net
from tests.training.test_step import spoiled, two_entries, with_initialization
from tests.training.test_validation import shared_state


def agree(model: onnx.ModelProto, batches=BATCHES, **options) -> ReferenceTraining:
    """Runner and step leave the same state."""
    runner = ReferenceTraining(model, **options)
    losses = [runner.step(b) for b in batches]
    step = compile_step(model)
    state, history = train(step, batches)
    assert set(state) == set(runner.state)
    for name, value in state.items():
        np.testing.assert_allclose(runner.state[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    for found, h in zip(losses, history):
        np.testing.assert_allclose(found[0].get(step.loss, h[step.loss]), h[step.loss], rtol=1e-5)
    return runner


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad"])
def test_what_attach_writes(optimizer):
    runner = agree(attach(mlp(), loss="mse", optimizer=optimizer, weight_decay=0.01))
    if "steps" in runner.state:
        assert runner.state["steps"] == len(BATCHES)


def test_batch_statistics():
    batch = {"x": np.random.default_rng(0).standard_normal((5, 2, 4, 4)).astype(np.float32)}
    batch["labels"] = BATCHES[0]["labels"]
    agree(attach(norm_net(), loss="mse", optimizer="adam"), [batch] * 3, runs=Session)


@pytest.mark.parametrize("prefixes", [("p_", "q_"), ("", "")])
def test_all_entries_in_order(prefixes):
    runner = agree(two_entries(prefixes))
    found = runner.step(BATCHES[0])
    assert found[1][f"{prefixes[1]}loss"] < found[0][f"{prefixes[0]}loss"]


def test_state_that_entries_share():
    assert agree(shared_state()).state["p_T"] == len(BATCHES)


def test_graph_call():
    rng = np.random.default_rng(0)
    batch = {n: rng.standard_normal((4, k)).astype(np.float32) for n, k in (("x_1", 2), ("z_1", 3), ("c", 3))}
    assert agree(called(["x_1", "", "z_1"]), [batch] * 3).state["t"] == 3


def test_one_entry_at_a_time():
    """In any order that the host likes; each sees what the others have left."""
    model, batch = two_entries(("p_", "q_")), BATCHES[0]
    alone, together = ReferenceTraining(model), ReferenceTraining(model)
    (first,) = alone.step(batch, entry=0)
    (second,) = alone.step(batch, entry=1)
    both = together.step(batch)
    np.testing.assert_array_equal(first["p_loss"], both[0]["p_loss"])
    np.testing.assert_array_equal(second["q_loss"], both[1]["q_loss"])
    for name in alone.state:
        np.testing.assert_array_equal(alone.state[name], together.state[name])
    other = ReferenceTraining(model)
    other.step(batch, entry=1)
    other.step(batch, entry=0)
    assert np.abs(other.state["w2"] - alone.state["w2"]).max() > 1e-6
    w2 = other.state["w2"].copy()
    other.step(batch, entry=1)
    np.testing.assert_array_equal(other.state["w2"], w2)


def test_inference_with_the_state_as_it_is():
    model, x = attach(mlp(), loss="mse", optimizer="sgd", learning_rate=0.1), BATCHES[0]["x"]
    runner = ReferenceTraining(model)
    np.testing.assert_allclose(runner.infer({"x": x})["y"], run(mlp(), {"x": x})["y"], rtol=1e-5, atol=1e-6)
    runner.step(BATCHES[0])
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(runner.state[tensor.name], tensor.name))
    np.testing.assert_allclose(runner.infer({"x": x})["y"], run(model, {"x": x})["y"], rtol=1e-5, atol=1e-6)


def test_initialization_resets():
    """State goes back to what the initializers say, and then what is bound takes what the graph gives."""
    model = with_initialization("w2", "positive")
    info = model.training_info[0]
    info.initialization.node.append(helper.make_node("Constant", [], ["zero"], value_int=7))
    info.initialization.output.append(helper.make_tensor_value_info("zero", onnx.TensorProto.INT64, []))
    info.initialization_binding.add(key="T", value="zero")
    info.update_binding.add(key="V", value="Vnew")
    runner = ReferenceTraining(model)
    np.testing.assert_array_equal(runner.state["w2"], numpy_helper.to_array(mlp().graph.initializer[2]))
    assert runner.state["T"] == 0
    runner.step(BATCHES[0])
    assert np.abs(runner.state["V"]).max() > 0
    runner.initialize()
    assert (runner.state["w2"] > 0).all()
    assert runner.state["T"] == 7
    np.testing.assert_array_equal(runner.state["V"], np.zeros((8, 3)))


def test_rate_may_be_given():
    model = attach(mlp(), loss="mse", optimizer="sgd", learning_rate=0.1)
    runner = ReferenceTraining(model)
    before = runner.state["w1"].copy()
    runner.step(BATCHES[0] | {"learning_rate": np.array(0, np.float32)})
    np.testing.assert_array_equal(runner.state["w1"], before)


def test_what_is_refused():
    with pytest.raises(BadInput, match=r"(?s)not valid.*'h1'.*Vnew2") as caught:
        ReferenceTraining(spoiled(lambda i: [i.update_binding.add(key="h1", value="Vnew2")]))
    assert str(caught.value).count("\n") == 2
    with pytest.raises(BadInput, match="reads 'labels', which the batch lacks"):
        ReferenceTraining(attach(mlp(), loss="mse")).step({"x": BATCHES[0]["x"]})
