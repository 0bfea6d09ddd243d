"""Training mode: batch statistics, running statistics as state, Dropout — against PyTorch, on two threads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.training.build.attach import attach
from onnxgrad.training.graph.dropout_masks import COUNT
from onnxgrad.training.measure.predict import predict
from onnxgrad.training.step.compile import compile_step
from tests.training.nets import model_of, run, session, train

node = helper.make_node


def norm_net(channels=5, momentum=0.9, seed=0) -> onnx.ModelProto:
    """x[N, 4] → two layers with batch normalization between → y[N, 2]."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.standard_normal((4, channels)),
        "scale": rng.uniform(0.5, 1.5, channels),
        "bias": rng.standard_normal(channels) * 0.1,
        "mean": rng.standard_normal(channels) * 0.1,
        "var": rng.uniform(0.5, 1.5, channels),
        "w2": rng.standard_normal((channels, 2)),
    }
    nodes = [
        node("MatMul", ["x", "w1"], ["h"]),
        node("BatchNormalization", ["h", "scale", "bias", "mean", "var"], ["n"], momentum=momentum, name="bn"),
        node("Tanh", ["n"], ["t"]),
        node("MatMul", ["t", "w2"], ["y"]),
    ]
    held = {n: a.astype(np.float32) for n, a in weights.items()}
    return model_of(nodes, held, {"x": ["N", 4]}, {"y": ["N", 2]})


def batches(steps, size=32, seed=1):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(steps):
        x = (rng.standard_normal((size, 4)) * 2 + 1).astype(np.float32)
        made.append({"x": x, "labels": np.sin(x[:, :2]).astype(np.float32)})
    return made


def weights_of(model):
    return {t.name: numpy_helper.to_array(t).copy() for t in model.graph.initializer}


@pytest.mark.torch
@pytest.mark.parametrize("momentum", [0.9, 0.5])
def test_batch_normalization_is_that_of_torch(momentum):
    """40 steps with resident-like feeding on two threads; ONNX moves the *population* variance."""
    torch = pytest.importorskip("torch")
    model, data = norm_net(momentum=momentum), batches(40)
    step = compile_step(attach(model, loss="mse", optimizer="momentum", learning_rate=0.05))
    kinds = {n: t.kind for n, t in step.state.items()}
    assert kinds["mean"] == kinds["var"] == "statistic"
    assert kinds["scale"] == kinds["bias"] == kinds["w1"] == "parameter"
    state, history = train(step, data, threads=2)

    start = {n: torch.tensor(a) for n, a in weights_of(model).items()}
    p = {n: torch.nn.Parameter(start[n].clone()) for n in ("w1", "scale", "bias", "w2")}
    mean, var = start["mean"].clone(), start["var"].clone()
    optimizer = torch.optim.SGD(p.values(), lr=0.05, momentum=0.9)
    for batch, result in zip(data, history):
        h = torch.tensor(batch["x"]) @ p["w1"]
        y = torch.tanh(torch.nn.functional.batch_norm(h, None, None, p["scale"], p["bias"], training=True)) @ p["w2"]
        loss = torch.nn.functional.mse_loss(y, torch.tensor(batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            mean = momentum * mean + (1 - momentum) * h.mean(0)
            var = momentum * var + (1 - momentum) * h.var(0, unbiased=False)
        np.testing.assert_allclose(result["loss"], loss.item(), rtol=2e-4)
    for n, tensor in p.items():
        np.testing.assert_allclose(state[n], tensor.detach(), rtol=2e-3, atol=1e-4, err_msg=n)
    np.testing.assert_allclose(state["mean"], mean, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state["var"], var, rtol=1e-3, atol=1e-4)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]


def test_the_runtime_does_not_write_into_the_state():
    """Feeding the same arrays again and again: they keep their values, and the results repeat."""
    step = compile_step(attach(norm_net(), loss="mse", optimizer="sgd"))
    made = session(step.model, threads=2)
    (batch,) = batches(1)
    feeds = {n: batch[n] for n in step.batch} | {n: t.numpy() for n, t in step.rates.items()}
    feeds |= {t.input: t.initial.numpy().copy() for t in step.state.values()}
    before = {n: a.copy() for n, a in feeds.items()}
    first = made.run(None, feeds)
    for _ in range(20):
        again = made.run(None, feeds)
        for a, b in zip(first, again):
            np.testing.assert_array_equal(a, b)
    for n, a in before.items():
        np.testing.assert_array_equal(feeds[n], a, err_msg=n)


def test_no_kernel_gets_the_state_or_a_constant_as_statistics():
    """Every BatchNormalization of the step has momentum 0 and buffers that are computed in the graph."""
    step = compile_step(attach(norm_net(), loss="mse", optimizer="sgd"))
    norms = [n for n in step.model.graph if n.op_type == "BatchNormalization"]
    assert norms
    buffers = [v for n in norms for v in n.inputs[3:5]]
    assert len({id(v) for v in buffers}) == len(buffers)
    for n in norms:
        assert n.attributes["momentum"].as_float() == 0
        for value in n.inputs[3:5]:
            assert value.producer().op_type == "Mul"
            assert [u for u, _ in value.uses()] == [n]
            assert value.producer().inputs[0].is_graph_input()


def test_shared_statistics_are_moved_twice():
    """A module that is used twice moves its running mean twice, as in PyTorch."""
    weights = {n: np.float32(a) for n, a in {"s": [1], "b": [0], "m": [10], "v": [1], "w": [[2.0]]}.items()}
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("BatchNormalization", ["h", "s", "b", "m", "v"], ["n1"], momentum=0.5),
        node("Add", ["n1", "h"], ["k"]),
        node("BatchNormalization", ["k", "s", "b", "m", "v"], ["y"], momentum=0.5),
    ]
    model = model_of(nodes, weights, {"x": ["N", 1]}, {"y": ["N", 1]})
    step = compile_step(attach(model, loss="mse", optimizer="sgd"))
    x = np.float32([[1], [2], [6]])
    state, _ = train(step, [{"x": x, "labels": x}], threads=2)
    # the means of h and of k = normalized h + h are both 2·3
    np.testing.assert_allclose(state["m"], [(10 * 0.5 + 6 * 0.5) * 0.5 + 6 * 0.5], rtol=1e-5)


def test_inference_mode_on_request():
    """With train_mode=False the running statistics are constants, and neither copied nor trained."""
    model = norm_net()
    attached = attach(model, loss="mse", optimizer="sgd", train_mode=False)
    assert not any(n.op_type == "BatchNormalization" for n in attached.training_info[0].algorithm.node)
    step = compile_step(attached, outputs=["y"])
    assert set(step.state) == {"w1", "scale", "bias", "w2"}
    (batch,) = batches(1)
    _, (result,) = train(step, [batch])
    np.testing.assert_allclose(result["y"], run(model, {"x": batch["x"]})["y"], rtol=1e-5, atol=1e-6)


def test_only_what_training_changes_is_copied():
    """The part before the first BatchNormalization is shared, and the inference graph is as it was."""
    model = norm_net()
    attached = attach(model, loss="mse", optimizer="sgd")
    assert [n.op_type for n in attached.graph.node] == [n.op_type for n in model.graph.node]
    assert [n.op_type for n in attached.training_info[0].algorithm.node[:3]] == [
        "BatchNormalization",
        "Tanh",
        "MatMul",
    ]
    assert [n.op_type for n in compile_step(attached).model.graph].count("BatchNormalization") == 1


def dropout_net(ratio=None, rest=(), **held):
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Dropout", ["h", *(["r"] if ratio is not None else []), *rest], ["y"], name="drop"),
    ]
    weights = {"w": np.ones((1, 400), np.float32), **held}
    if ratio is not None:
        weights["r"] = np.array(ratio, np.float32)
    return model_of(nodes, weights, {"x": ["N", 1]}, {"y": ["N", 400]})


@pytest.mark.parametrize(("ratio", "dropped"), [(None, 0.5), (0.25, 0.25), (0.0, 0.0)])
def test_dropout_drops_in_training(ratio, dropped):
    """The gradient of a dropped y is dropped; elsewhere both have the factor 1/(1 - r)."""
    step = compile_step(
        attach(
            dropout_net(ratio),
            loss="mse:reduction=sum",
            optimizer="sgd",
            learning_rate=1.0,
        ),
        outputs=["train_y"],
    )
    assert set(step.state) - {COUNT} == {"w"}, "the ratio is a scalar constant, not a weight"
    batch = {"x": np.float32([[1]]), "labels": np.zeros((1, 400), np.float32)}
    state, (result,) = train(step, [batch])
    y, scale = result["train_y"][0], 1 / (1 - dropped)
    assert set(np.unique(y)) <= {np.float32(0), np.float32(scale)}
    assert abs((y == 0).mean() - dropped) < 0.1
    np.testing.assert_allclose(state["w"][0], 1 - 2 * y * scale, rtol=1e-5)


def test_statistics_that_are_computed_are_refused():
    nodes = [
        node("Exp", ["m"], ["m2"]),
        node("BatchNormalization", ["x", "s", "b", "m2", "v"], ["y"], name="bn"),
    ]
    weights = {n: np.float32([1, 1]) for n in ("s", "b", "m", "v")}
    model = model_of(nodes, weights, {"x": ["N", 2]}, {"y": ["N", 2]})
    with pytest.raises(BadInput, match="'bn': its running statistic 'm2' is no initializer"):
        attach(model, loss="mse")


def test_dropout_inside_a_branch_is_refused():
    inner = helper.make_graph(
        [node("Dropout", ["x"], ["d"], name="inner")],
        "b",
        [],
        [helper.make_tensor_value_info("d", 1, ["N", 1])],
    )
    nodes = [
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("IsNaN", ["m"], ["c"]),
        node("If", ["c"], ["h"], then_branch=inner, else_branch=inner, name="if"),
        node("Mul", ["h", "w"], ["y"]),
    ]
    model = model_of(nodes, {"w": np.float32([2])}, {"x": ["N", 1]}, {"y": ["N", 1]})
    with pytest.raises(BadInput, match="'inner' is inside a branch or loop body of If node 'if'"):
        attach(model, loss="mse")


def in_training_mode(model):
    """The same model, as an exporter writes it in training mode."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for n in made.graph.node:
        if n.op_type == "BatchNormalization":
            n.attribute.append(helper.make_attribute("training_mode", 1))
            n.output.extend(["batch_mean", "batch_var"])
    return made


@pytest.mark.parametrize("settings", [{}, {"freeze_bn": True}, {"train_mode": False}])
def test_file_in_training_mode_trains_as_one_in_inference_mode(settings):
    plain, given = (attach(m, loss="mse", **settings) for m in (norm_net(), in_training_mode(norm_net())))
    assert [n.op_type for n in given.graph.node] == [n.op_type for n in plain.graph.node]
    assert list(given.graph.node[1].output) == ["n"]
    assert not any(a.name == "training_mode" for a in given.graph.node[1].attribute)
    data = batches(3)
    (state, _), (expected, _) = (train(compile_step(m), data) for m in (given, plain))
    assert state.keys() == expected.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert "mean" in state or settings


def test_statistics_that_the_file_reads_stay_its_own():
    """A graph that hands out what a batch leaves of its statistics moves them itself."""
    model = in_training_mode(norm_net())
    model.graph.output.append(helper.make_tensor_value_info("batch_mean", onnx.TensorProto.FLOAT, [5]))
    assert list(attach(model, loss="mse", output="y").graph.node[1].output)[:2] == ["n", "batch_mean"]


def test_dropout_of_a_file_in_training_mode_drops_in_training_only():
    given = attach(dropout_net(0.25, ["on"], on=np.array(True)), loss="mse", optimizer="sgd")
    plain = attach(dropout_net(0.25), loss="mse", optimizer="sgd")
    assert "on" not in {t.name for t in given.graph.initializer}
    x = np.float32([[1], [2]])
    np.testing.assert_array_equal(run(given, {"x": x})["y"], np.repeat(x, 400, axis=1))
    fed = [{"x": x, "labels": np.zeros((2, 400), np.float32)}]
    (state, _), (expected, _) = (train(compile_step(m), fed) for m in (given, plain))
    np.testing.assert_array_equal(state["w"], expected["w"])


def test_predictions_of_a_file_in_training_mode_come_with_a_warning():
    x = np.float32([[1, 2, 3, 4], [0, 1, 0, 1]])
    with pytest.warns(UserWarning, match="'bn' runs in training mode, so what is predicted for a row depends on"):
        predict(in_training_mode(norm_net()), {"x": x})
