"""The examples of the proposals from which the specification grew, executed: what they say is what happens.

The names in them are kept: X, W, Z, C, T, O of the picture of GraphCall, which is also the one of the issue in which
users first met it; A, B, C, X, Y of the first test of TrainingInfoProto; x = x - r·g of its comment.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

from onnxgrad.runtime import StepRunner, share
from onnxgrad.training import ReferenceTraining, compile_entries, compile_step, lower_gradients, validate
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.training.nets import run, train

RNG = np.random.default_rng(3)
W = RNG.standard_normal((2, 1, 2, 2)).astype(np.float32)
FEEDS = {n: RNG.standard_normal(s).astype(np.float32) for n, s in (("X", (3, 1, 3, 3)), ("Z", (8, 2)), ("C", (3, 2)))}


def picture(called: str = "X_1, W, Z_1", weights: str = "") -> onnx.ModelProto:
    """MyInferenceGraph (X, W, Z) → Y, and an algorithm (X_1, Z_1, C) → W_new that calls it; IR version 7, opset 12.

    W_new = W - (∂O/∂W)/T, T_new = T + 1; "Loss" is the mean of the squared distance to C.
    """
    model = parser.parse_model("""<ir_version: 7, opset_import: ["": 12, "ai.onnx.preview.training": 1]>
        MyInferenceGraph (float[3, 1, 3, 3] X, float[2, 1, 2, 2] W, float[8, 2] Z) => (float[3, 2] Y) {
            convolved = Conv (X, W)
            H = Flatten (convolved)
            Y = Gemm (H, Z)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(W, "W"))
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        parser.parse_graph(f"""MyTraining (float[3, 1, 3, 3] X_1, float[8, 2] Z_1, float[3, 2] C)
                => (float[2, 1, 2, 2] W_new, float T_new, float O)
            <float T = {{1.0}}, float one = {{1.0}}{weights}> {{
            Y_1 = {DOMAIN}.GraphCall <graph_name = "MyInferenceGraph"> ({called})
            apart = Sub (Y_1, C)
            squared = Mul (apart, apart)
            O = ReduceMean <keepdims = 0> (squared)
            dO_dW = {DOMAIN}.Gradient <xs = ["W"], zs = ["X_1", "Z_1", "C"], y = "O"> (W, X_1, Z_1, C)
            step = Div (dO_dW, T)
            W_new = Sub (W, step)
            T_new = Add (T, one)
        }}""")
    )
    for key in ("W", "T"):
        info.update_binding.add(key=key, value=f"{key}_new")
    return model


def today() -> onnx.ModelProto:
    """The same since 1.8: no call, the algorithm goes on from Y, and reads X and Z."""
    model = picture()
    algorithm = model.training_info[0].algorithm
    del algorithm.node[0], algorithm.input[:2]
    algorithm.node[0].input[0] = "Y"
    gradient = next(n for n in algorithm.node if n.op_type == "Gradient")
    gradient.input[:] = ["W", "X", "Z", "C"]
    gradient.attribute[1].strings[:] = [b"X", b"Z", b"C"]
    assert gradient.attribute[1].name == "zs"
    return model


def by_torch(steps: int) -> tuple[np.ndarray, list[float]]:
    torch = pytest.importorskip("torch")
    w = torch.tensor(W, requires_grad=True)
    x, z, c = (torch.tensor(FEEDS[n]) for n in "XZC")
    losses = []
    for t in range(1, steps + 1):
        loss = ((torch.conv2d(x, w).flatten(1) @ z - c) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, w)
        w = (w - gradient / t).detach().requires_grad_()
        losses.append(float(loss.detach()))
    return w.detach().numpy(), losses


@pytest.mark.torch
@pytest.mark.parametrize(
    "model",
    [picture(), picture("X_1, , Z_1"), today(), lower_gradients(picture()), lower_gradients(today())],
    ids=["GraphCall", "W omitted", "since 1.8", "GraphCall, lowered", "since 1.8, lowered"],
)
def test_the_picture_of_graph_call(model):
    assert validate(model) == []
    batch = {
        n if n in {v.name for v in model.training_info[0].algorithm.input} else f"{n}_1": a for n, a in FEEDS.items()
    }
    batch |= FEEDS
    runner = ReferenceTraining(model)
    want, losses = by_torch(4)
    found = [float(runner.step(batch)[0]["O"]) for _ in range(4)]
    state, history = train(compile_step(model), [batch] * 4)
    for got, loss in ((runner.state, found), (state, [h["O"] for h in history])):
        np.testing.assert_allclose(got["W"], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loss, losses, rtol=1e-4)
        assert got["T"] == 5


def test_the_inference_graph_stays_callable():
    """ "An inference-only runtime can consume a training model": with the W of training, and with one that is given."""
    x, z = FEEDS["X"], FEEDS["Z"]
    step = compile_step(picture())
    batch = {"X_1": x, "Z_1": z, "C": FEEDS["C"]}
    state, _ = train(step, [batch])
    trained = step.inference_model(state)
    found = run(trained, {"X": x, "Z": z})["Y"]
    given = run(picture(), {"X": x, "Z": z, "W": state["W"]})["Y"]  # W is an input with a default value
    np.testing.assert_allclose(found, given, rtol=1e-5)
    assert np.abs(found - run(picture(), {"X": x, "Z": z})["Y"]).max() > 1e-3


def test_values_may_be_passed_for_a_mutable_weight():
    """ "The users always can pass values to optional inputs": the call then has nothing to do with the global W."""
    model = picture("X_1, V, Z_1", ", float[2, 1, 2, 2] V = {1, 2, 3, 4, 5, 6, 7, 8}")
    runner = ReferenceTraining(model)
    batch = {"X_1": FEEDS["X"], "Z_1": FEEDS["Z"], "C": FEEDS["C"]}
    (found,) = runner.step(batch)
    v = np.arange(1, 9, dtype=np.float32).reshape(2, 1, 2, 2)
    y = run(picture(), {"X": FEEDS["X"], "Z": FEEDS["Z"], "W": v})["Y"]
    np.testing.assert_allclose(found["O"], ((y - FEEDS["C"]) ** 2).mean(), rtol=1e-5)
    np.testing.assert_array_equal(runner.state["W"], W)
    state, _ = train(compile_step(model), [batch])
    np.testing.assert_array_equal(state["W"], W)


def test_the_first_test_of_training_info():
    """C = A·B is the inference graph, Y = X·C the algorithm, B ← Y; weights are inputs with defaults in both graphs."""
    a, b, x = (RNG.random((2, 2)).astype(np.float32) for _ in range(3))

    def graph(name, inputs, out, held):
        values = [helper.make_tensor_value_info(n, 1, [2, 2]) for n in (*held, out)]
        tensors = [numpy_helper.from_array(array, n) for n, array in held.items()]
        return helper.make_graph([helper.make_node("MatMul", inputs, [out])], name, values[:-1], values[-1:], tensors)

    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph("simple_inference", ["A", "B"], "C", {"A": a, "B": b}), opset_imports=opsets)
    onnx.checker.check_model(model)
    training = graph("simple_training", ["X", "C"], "Y", {"X": x})
    model.training_info.append(helper.make_training_info(training, [("B", "Y")], None, None))
    model.ir_version = 10
    assert validate(model) == []
    runner = ReferenceTraining(model)
    (found,) = runner.step({})
    state, _ = train(compile_step(model), [{}] * 2)
    np.testing.assert_allclose(found["Y"], x @ a @ b, rtol=1e-5)
    np.testing.assert_array_equal(runner.state["B"], found["Y"])
    np.testing.assert_allclose(state["B"], x @ a @ (x @ a @ b), rtol=1e-5)
    np.testing.assert_allclose(runner.infer({})["C"], a @ found["Y"], rtol=1e-5)


def descent() -> onnx.ModelProto:
    """x = x - r·g, "split into y = x - r·g and x = y"; the count is reset, x drawn, by the initialization."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
        net (float[3] a) => (float[3] p) <float[3] x = {1, 2, 3}> { p = Mul (x, a) }""")
    info = helper.make_training_info(
        parser.parse_graph(f"""algorithm () => (float[3] y, int64 count_new, float loss)
            <float r = {{0.1}}, int64 count = {{5}}, int64 one = {{1}}> {{
            p2 = Mul (p, p)
            loss = ReduceSum <keepdims = 0> (p2)
            g = {DOMAIN}.Gradient <xs = ["x"], zs = ["a"], y = "loss"> (x, a)
            move = Mul (r, g)
            y = Sub (x, move)
            count_new = Add (count, one)
        }}"""),
        [("x", "y"), ("count", "count_new")],
        parser.parse_graph("""initialization () => (float[3] drawn, int64 zero) {
            drawn = RandomUniform <shape = [3], low = 4.0, high = 5.0> ()
            zero = Constant <value_int = 0> ()
        }"""),
        [("x", "drawn"), ("count", "zero")],
    )
    model.training_info.append(info)
    return model


def test_descent_and_reset():
    """ "Initialization resets the model back to its original state as if no training has been performed"."""
    model, a = descent(), np.float32([0.5, 1, -1])
    assert validate(model) == []
    runner = ReferenceTraining(model)
    np.testing.assert_array_equal(runner.state["x"], [1, 2, 3])  # "pre-initialized to the value in the initializer"
    assert runner.state["count"] == 5
    runner.step({"a": a})
    np.testing.assert_allclose(runner.state["x"], np.float32([1, 2, 3]) * (1 - 0.2 * a * a), rtol=1e-6)
    assert runner.state["count"] == 6
    runner.initialize()
    drawn = runner.state["x"]
    assert ((drawn >= 4) & (drawn <= 5)).all()
    assert runner.state["count"] == 0
    step = compile_step(model)
    start = step.state["x"].initial.numpy()
    assert ((start >= 4) & (start <= 5)).all()
    state, _ = train(step, [{"a": a}] * 2)
    np.testing.assert_allclose(state["x"], start * (1 - 0.2 * a * a) ** 2, rtol=1e-5)
    assert state["count"] == 2


def test_consecutive_update_stages():
    """ "Sequentially executing" all is one iteration: u ← s + v, then v ← s + u with the new u; or any one."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        net () => (float s) <float u = {1.0}, float v = {10.0}> { s = Add (u, v) }""")
    for key, other in (("u", "v"), ("v", "u")):
        stage = parser.parse_graph(f"stage_{key} () => (float {key}_new) {{ {key}_new = Add (s, {other}) }}")
        model.training_info.append(helper.make_training_info(stage, [(key, f"{key}_new")], None, None))
    runner = ReferenceTraining(model)
    runner.step({})
    assert (runner.state["u"], runner.state["v"]) == (21, 52)  # 11 + 10; (21 + 10) + 21
    state, _ = train(compile_step(model), [{}])
    assert (state["u"], state["v"]) == (21, 52)
    other = ReferenceTraining(model)
    machines = {i: StepRunner(step) for i, step in compile_entries(model).items()}
    share(*machines.values())
    for entry in (1, 0):
        other.step({}, entry=entry)
        machines[entry].step({})
    assert (other.state["u"], other.state["v"]) == (25, 12)  # the other order: 11 + 1; (1 + 12) + 12
    assert (machines[0].state()["u"], machines[1].state()["v"]) == (25, 12)
