"""The reference runner does what the specification words, and the compiled step does what the runner does."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.runtime import ReferenceSession, Session
from onnxgrad.training import (
    ReferenceTraining,
    attach,
    compile_entries,
    compile_step,
    initialize,
    lower_gradients,
    validate,
)
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.training.nets import mlp, run, train
from tests.training.spec.test_entries import BATCHES, norm_net
from tests.training.spec.test_graph_call import called
from tests.training.spec.test_validation_state import shared_state
from tests.training.step.test_entries import spoiled, two_entries, with_initialization


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


def test_state_that_both_entries_declare():
    """Both have an initializer p_T, and one binds it: it is one variable."""
    model = shared_state()
    model.training_info[1].algorithm.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "p_T"))
    assert agree(model).state["p_T"] == len(BATCHES)
    same = ReferenceTraining(shared_state())
    for batch in BATCHES:
        same.step(batch)
    runner = agree(model)
    for name in same.state:
        np.testing.assert_array_equal(runner.state[name], same.state[name])
    model.training_info[1].algorithm.initializer[-1].CopyFrom(numpy_helper.from_array(np.array(1, np.int64), "p_T"))
    for refuse in (compile_step, ReferenceTraining):
        with pytest.raises(BadInput, match="entries 0 and 1 declare the state 'p_T', which is one variable"):
            refuse(model)


def variance_reduced() -> onnx.ModelProto:
    """w2 ← w2 - r·(∂L(w2) - ∂L(s) + m), s a snapshot of w2 with m = ∂L(s) as it was: substitution in an algorithm.

    The rate goes down with d³/dT³ of T⁴/24, which is T: third order beside it.
    """
    model = two_entries()
    del model.training_info[1]
    algorithm = model.training_info[0].algorithm
    nodes = [n for n in algorithm.node if n.op_type != "Momentum"]
    nodes += [
        helper.make_node("Gradient", ["snapshot", "x", "labels"], ["g_s"], domain=DOMAIN, xs=["w2"],
                         zs=["x", "labels"], y="loss"),
        helper.make_node("Sub", ["g", "g_s"], ["less"]),
        helper.make_node("Add", ["less", "mean"], ["direction"]),
        helper.make_node("Mul", ["U", "U"], ["U2"]),
        helper.make_node("Mul", ["U2", "U2"], ["U4"]),
        helper.make_node("Gradient", ["U"], ["e1"], domain=DOMAIN, xs=["U"], y="U4"),
        helper.make_node("Gradient", ["U"], ["e2"], domain=DOMAIN, xs=["U"], y="e1"),
        helper.make_node("Gradient", ["U"], ["e3"], domain=DOMAIN, xs=["U"], y="e2"),
        helper.make_node("Div", ["e3", "full"], ["count"]),
        helper.make_node("Div", ["direction", "count"], ["divided"]),
        helper.make_node("Mul", ["divided", "rate"], ["step"]),
        helper.make_node("Sub", ["w2", "step"], ["new"]),
        helper.make_node("Add", ["U", "one"], ["Unew"]),
    ]  # fmt: skip
    del algorithm.node[:]
    algorithm.node.extend(nodes)
    rng = np.random.default_rng(0)
    held = {
        "snapshot": rng.standard_normal((8, 3)),
        "mean": rng.standard_normal((8, 3)),
        "U": 1.0,
        "one": 1.0,
        "full": 24.0,
    }
    algorithm.initializer.extend(numpy_helper.from_array(np.array(a, np.float32), n) for n, a in held.items())
    algorithm.output[2].name = "Unew"
    model.training_info[0].update_binding.add(key="U", value="Unew")
    return model


def test_substitution_and_third_order_in_an_algorithm():
    model = variance_reduced()
    runner = agree(model)
    w = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    held = {t.name: numpy_helper.to_array(t) for t in model.training_info[0].algorithm.initializer}

    def gradient(w2, batch):
        h = np.tanh(batch["x"] @ w["w1"] + w["b1"])
        return h.T @ (2 * (h @ w2 + w["b2"] - batch["labels"])) / batch["labels"].size

    for t, batch in enumerate(BATCHES, start=1):
        direction = gradient(w["w2"], batch) - gradient(held["snapshot"], batch) + held["mean"]
        w["w2"] = w["w2"] - 0.1 * direction / t
    np.testing.assert_allclose(runner.state["w2"], w["w2"], rtol=1e-4, atol=1e-5)
    assert runner.state["U"] == len(BATCHES) + 1
    agree(lower_gradients(model))


def test_learning_to_learn():
    """The inner step w' = w - a·∂l/∂w is a Gradient; the outer one differentiates the loss at w' through it."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
        net (float[2] x) => (float[2] y)
        <float[2] w = {1.0, -0.5}> { y = Mul (x, w) }""")
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        onnx.parser.parse_graph("""learn (float[2] t, float[2] u) => (float L, float[2] w_new)
        <float a = {0.3}> {
            r = Sub (y, t)
            q = Mul (r, r)
            inner = ReduceSum <keepdims = 0> (q)
            g = ai.onnx.preview.training.Gradient <xs = ["w"], zs = ["x", "t"], y = "inner"> (w, x, t)
            move = Mul (a, g)
            adapted = Sub (w, move)
            s = Sub (adapted, u)
            s2 = Mul (s, s)
            L = ReduceSum <keepdims = 0> (s2)
            G = ai.onnx.preview.training.Gradient <xs = ["w"], zs = ["x", "t", "u"], y = "L"> (w, x, t, u)
            down = Mul (a, G)
            w_new = Sub (w, down)
        }""")
    )
    info.update_binding.add(key="w", value="w_new")
    batch = {"x": np.float32([0.7, 1.2]), "t": np.float32([1, 2]), "u": np.float32([0.1, -0.2])}
    runner = agree(model, [batch] * 3)
    w, (x, t, u) = np.array([1.0, -0.5]), batch.values()
    for _ in range(3):
        adapted = w - 0.3 * 2 * x * (x * w - t)
        w = w - 0.3 * 2 * (adapted - u) * (1 - 0.6 * x * x)
    np.testing.assert_allclose(runner.state["w"], w, rtol=1e-5)


def test_optimizer_in_a_branch():
    """An update that is skipped where the loss is too large."""
    model = two_entries()
    del model.training_info[1]
    algorithm = model.training_info[0].algorithm
    update = next(n for n in algorithm.node if n.op_type == "Momentum")
    branches = []
    for name in ("then", "else"):
        out = helper.make_tensor_value_info(f"{name}_w", 1, [8, 3])
        if name == "then":
            inner = onnx.NodeProto()
            inner.CopyFrom(update)
            inner.output[:] = ["then_w", "then_v"]
        else:
            inner = helper.make_node("Identity", ["w2"], ["else_w"])
        branches.append(helper.make_graph([inner], name, [], [out]))
    algorithm.node.remove(update)
    algorithm.node.append(helper.make_node("Less", ["loss", "limit"], ["small"]))
    algorithm.node.append(helper.make_node("If", ["small"], ["new"], then_branch=branches[0], else_branch=branches[1]))
    algorithm.initializer.append(numpy_helper.from_array(np.array(1.5, np.float32), "limit"))
    del algorithm.output[2]
    assert validate(model) == []
    wild = {"x": BATCHES[0]["x"], "labels": 10 * BATCHES[0]["labels"]}
    runner = ReferenceTraining(model)
    before = runner.state["w2"]
    runner.step(wild)
    np.testing.assert_array_equal(runner.state["w2"], before)
    agree(model, [wild, *BATCHES])
    agree(lower_gradients(model), [wild, *BATCHES])


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


def test_every_initialization_draws_anew():
    """An operator without a seed: the specification has one generated, ONNX Runtime has one per process."""
    model = initialize(
        two_entries(("p_", "q_")), {"w1": "he_normal", "w2": "orthogonal", "b1": "normal", "b2": "normal"}
    )
    runners = [ReferenceTraining(model, runs=runs) for runs in (Session, ReferenceSession)]

    def drawn(seed):
        step = compile_step(model, seed=seed)
        weights = {n: v.const_value.numpy() for n, v in step.source.model.graph.initializers.items()}
        assert not np.array_equal(weights["b1"][:3], weights["b2"])  # each operator has its own
        yield {n: weights[n] for n in ("w1", "w2")}
        steps = compile_entries(model, seed=seed).values()
        yield {n: t.initial.numpy() for step in steps for n, t in step.state.items()}
        for runner in runners:
            runner.initialize(seed)
            yield {n: runner.state[n] for n in ("w1", "w2")}

    first, second, third = (list(drawn(seed)) for seed in (None, 3, 3))
    for name in ("w1", "w2"):
        assert len({held[name].tobytes() for held in first}) == 4
        for held in second[1:3]:  # the reference has another generator; kernels may sum in another order
            np.testing.assert_allclose(held[name], second[0][name], rtol=0, atol=1e-6)
        for a, b in zip(second, third):
            np.testing.assert_array_equal(a[name], b[name])


def test_initialization_of_state_that_both_entries_declare():
    model = shared_state()
    model.training_info[1].algorithm.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "p_T"))
    info = model.training_info[0]
    info.initialization.CopyFrom(
        onnx.parser.parse_graph("initialization () => (int64 s) { s = Constant <value = int64 {5}> () }")
    )
    info.initialization_binding.add(key="p_T", value="s")
    runner = ReferenceTraining(model)
    runner.initialize()
    steps = compile_entries(model)
    assert runner.state["p_T"] == steps[0].state["p_T"].initial.numpy() == steps[1].reads["p_T"].numpy() == 5


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
