"""The choice of trained weights: by name, glob, type and depth, also inside branches and bodies."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training import attach, compile_step
from tests.training.nets import mlp, model_of, run, train

node = helper.make_node


def parameters(model):
    (found,) = [n for n in model.training_info[0].algorithm.node if n.op_type == "Gradient"]
    return next([s.decode() for s in a.strings] for a in found.attribute if a.name == "xs")


def deep():
    """Conv, norm, two dense layers; one weight passes a Transpose at the very front, as some exporters have it."""
    rng = np.random.default_rng(0)
    shapes = {"k": (2, 1, 3, 3), "kb": (2,), "s": (2,), "t": (2,), "m": (2,), "v": (2,)}
    shapes |= {"w1": (3, 8), "b1": (3,), "w2": (3, 2), "b2": (2,)}
    weights = {n: rng.uniform(0.5, 1, s).astype(np.float32) for n, s in shapes.items()}
    nodes = [
        node("Transpose", ["w1"], ["w1t"], perm=[1, 0]),
        node("Conv", ["x", "k", "kb"], ["c"]),
        node("BatchNormalization", ["c", "s", "t", "m", "v"], ["n"], name="norm"),
        node("Relu", ["n"], ["r"], name="act"),
        node("Flatten", ["r"], ["f"]),
        node("MatMul", ["f", "w1t"], ["h"]),
        node("Add", ["h", "b1"], ["hb"]),
        node("Tanh", ["hb"], ["a"]),
        node("MatMul", ["a", "w2"], ["p"]),
        node("Add", ["p", "b2"], ["y"]),
    ]
    return model_of(nodes, weights, {"x": ["N", 1, 4, 4]}, {"y": ["N", 2]})


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["last:1"], {"w2", "b2"}),
        (["last:2"], {"w1", "b1", "w2", "b2"}),
        (["last:9"], {"k", "kb", "s", "t", "w1", "b1", "w2", "b2"}),
        (["first:1"], {"k", "kb", "s", "t"}),
        (["type:Conv"], {"k", "kb"}),
        (["type:MatMul"], {"w1", "w2"}),
        (["b?", "s"], {"b1", "b2", "s"}),
        (["type:BatchNormalization", "w2"], {"s", "t", "w2"}),
    ],
)
def test_patterns(patterns, names):
    assert set(parameters(attach(deep(), loss="mse", optimizer="sgd", trainable=patterns))) == names


def test_freeze_is_the_rest():
    found = parameters(attach(deep(), loss="mse", optimizer="sgd", freeze=["first:1", "b*"]))
    assert set(found) == {"w1", "w2"}


@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        (["z*"], UnknownName, r"no weight named 'z\*'; there are: b1"),
        (["type:Gemm"], BadInput, "no 'Gemm' node reads a weight; these do: Add, BatchNormalization, Conv, MatMul"),
        (["last:0"], BadInput, "last:0 must end in a number of layers"),
        (["last:two"], BadInput, "last:two must end in a number of layers"),
    ],
)
def test_patterns_that_mean_nothing(patterns, error, message):
    with pytest.raises(error, match=message):
        attach(deep(), loss="mse", trainable=patterns)


# --- training mode -----------------------------------------------------------------------------------


def algorithm(**options):
    return attach(deep(), loss="mse", optimizer="sgd", **options).training_info[0].algorithm


def test_freeze_bn_keeps_the_statistics():
    for freeze in (True, ["no*"], ["n"]):
        model = attach(deep(), loss="mse", optimizer="sgd", freeze_bn=freeze)
        assert "BatchNormalization" not in {n.op_type for n in model.training_info[0].algorithm.node}
        assert not {"m", "v"} & compile_step(model).state.keys()
        assert {"s", "t"} <= compile_step(model).state.keys(), "its scale and shift still train"
    assert {"m", "v"} <= compile_step(attach(deep(), loss="mse", optimizer="sgd")).state.keys()


def test_freeze_bn_where_there_is_none_says_why():
    with pytest.raises(BadInput, match="the model has none, or its exporter has folded them into the weights"):
        attach(mlp(), loss="mse", freeze_bn=True)
    with pytest.raises(BadInput, match=r"no BatchNormalization matches 'q\*'; there are: norm"):
        attach(deep(), loss="mse", freeze_bn=["q*"])


@pytest.mark.parametrize("pattern", ["Relu", "act", "r", "a?t"])
def test_dropout_behind_a_type_or_a_name(pattern):
    """It stands behind the node, in the algorithm alone, with the share that was asked for."""
    found = algorithm(dropout={pattern: 0.25})
    (drop,) = [n for n in found.node if n.op_type == "Dropout"]
    assert drop.input[0] == "train_r"
    reader = next(n for n in found.node if drop.output[0] in n.input)
    assert reader.op_type == "Flatten"
    held = {t.name: numpy_helper.to_array(t) for t in found.initializer}
    assert held[drop.input[1]] == 0.25


def test_dropout_drops_its_share():
    w = np.ones((1, 2000), np.float32)
    model = model_of([node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["y"])], {"w": w}, {"x": ["N", 1]},
                     {"y": ["N", 2000]})  # fmt: skip
    attached = attach(model, loss="mse", optimizer="sgd", dropout={"Relu": 0.2})
    step = compile_step(attached, outputs=["dropped_y"])
    batch = {"x": np.ones((1, 1), np.float32), "labels": np.zeros((1, 2000), np.float32)}
    _, (result,) = train(step, [batch])
    assert abs((result["dropped_y"] == 0).mean() - 0.2) < 0.05
    np.testing.assert_allclose(result["dropped_y"].max(), 1 / 0.8, rtol=1e-6)
    np.testing.assert_array_equal(run(model, {"x": batch["x"]})["y"], 1), "inference does not drop"


def test_a_share_of_zero_drops_nothing():
    assert "Dropout" not in {n.op_type for n in algorithm(dropout={"Relu": 0.0}).node}


# --- weights inside ----------------------------------------------------------------------------------


def branches(constants: bool):
    """y = x·w + b with another w and b per branch; weights as Constants or as initializers of the branches."""
    graphs = []
    for sign in (1.0, -1.0):
        w, b = np.full((2, 3), 0.5 * sign, np.float32), np.full(3, 0.1 * sign, np.float32)
        inner = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "b"], ["out"])]
        held = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")]
        if constants:
            inner = [node("Constant", [], [t.name], value=t) for t in held] + inner
            held = []
        out = helper.make_tensor_value_info("out", 1, ["N", 3])
        graphs.append(helper.make_graph(inner, "branch", [], [out], held))
    cond = helper.make_tensor_value_info("cond", onnx.TensorProto.BOOL, [])
    x = helper.make_tensor_value_info("x", 1, ["N", 2])
    y = helper.make_tensor_value_info("y", 1, ["N", 3])
    choose = node("If", ["cond"], ["y"], then_branch=graphs[0], else_branch=graphs[1])
    model = helper.make_model(
        helper.make_graph([choose], "net", [cond, x], [y]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("constants", [True, False], ids=["constants", "initializers"])
def test_weights_of_branches_train(constants):
    """The branch that is taken learns, the other one keeps its weights; names may be the same in both."""
    model = attach(branches(constants), loss="mse", optimizer="sgd", learning_rate=0.5)
    onnx.checker.check_model(model, full_check=True)
    step = compile_step(model)
    assert len(step.state) == 4
    x = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
    for taken, sign in ((True, 1.0), (False, -1.0)):
        batch = {"cond": np.array(taken), "x": x, "labels": np.full((8, 3), 2.0, np.float32)}
        state, history = train(step, [batch] * 30)
        assert history[-1]["loss"] < 0.2 * history[0]["loss"]
        for name, tensor in step.state.items():
            start = tensor.initial.numpy()
            learns = np.sign(start.flat[0]) == sign
            assert np.array_equal(state[name], start) != learns
        trained = step.inference_model(state)
        y = run(trained, {"cond": np.array(taken), "x": x})["y"]
        np.testing.assert_allclose(((y - 2) ** 2).mean(), history[-1]["loss"], rtol=0.3)


def test_weights_of_a_loop_body_train():
    """x ← tanh(x·w), three times, with w in the body."""
    w = np.random.default_rng(0).standard_normal((2, 2)).astype(np.float32)
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("MatMul", ["h", "w"], ["hw"]), node("Tanh", ["hw"], ["next"])],
        "body",
        [value("i", 7, []), value("go", 9, []), value("h", 1, ["N", 2])],
        [value("on", 9, []), value("next", 1, ["N", 2])],
        [numpy_helper.from_array(w, "w")],
    )
    three = numpy_helper.from_array(np.array(3), "three")
    graph = helper.make_graph(
        [node("Loop", ["three", "", "x"], ["y"], body=body)],
        "net",
        [value("x", 1, ["N", 2])],
        [value("y", 1, ["N", 2])],
        [three],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    step = compile_step(attach(model, loss="mse", optimizer="adam", learning_rate=0.05))
    assert set(step.state) == {"w", "w_mean", "w_square", "steps"}
    x = np.random.default_rng(1).standard_normal((8, 2)).astype(np.float32)
    _, history = train(step, [{"x": x, "labels": np.tanh(x)}] * 60)
    assert history[-1]["loss"] < 0.3 * history[0]["loss"]


def test_weights_of_a_function_train():
    """Functions are written out, so their constants are weights of the model."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "own": 1]>
        net (float[N, 2] x) => (float[N, 1] y) { y = own.dense (x) }
        <domain: "own", opset_import: ["": 21]>
        dense (x) => (y) { w = Constant <value = float[2, 1] {0.5, -0.5}> ()  y = MatMul (x, w) }""")
    step = compile_step(attach(model, loss="mse", optimizer="sgd", learning_rate=0.1))
    assert [t.kind for t in step.state.values()] == ["parameter"]
    x = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
    _, history = train(step, [{"x": x, "labels": x.sum(1, keepdims=True)}] * 60)
    assert history[-1]["loss"] < 0.05 * history[0]["loss"]
