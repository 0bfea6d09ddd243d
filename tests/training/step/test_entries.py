"""Steps of several entries, what the specification forbids of bindings and graphs, and initialization."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training import ReferenceTraining, attach, compile_entries, compile_step, lower_gradients
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.training.nets import initial, mlp, session, train
from tests.training.step.test_compile import batch_of, described, node

# --- several entries --------------------------------------------------------------------------------


def entry(shape, key: str, rate: float, label: str = "labels", prefix: str = "") -> onnx.TrainingInfoProto:
    """One entry by hand: key ← key - rate·∂mean((y - label)²)/∂key."""
    p = prefix
    info = onnx.TrainingInfoProto()
    info.algorithm.CopyFrom(
        helper.make_graph(
            [
                node("Sub", ["y", label], [p + "d"]),
                node("Mul", [p + "d", p + "d"], [p + "d2"]),
                node("ReduceMean", [p + "d2"], [p + "loss"], keepdims=0),
                node("Gradient", [key, "x", label], [p + "g"], domain=DOMAIN,
                     xs=[key], zs=["x", label], y=p + "loss"),
                node("Momentum", [p + "rate", p + "T", key, p + "g", p + "V"], [p + "new", p + "Vnew"],
                     alpha=0.0, beta=1.0, norm_coefficient=0.0, mode="standard", domain=DOMAIN),
            ],
            "algorithm",
            [helper.make_tensor_value_info(label, 1, ["N", 3])],
            [helper.make_tensor_value_info(p + n, 1, None) for n in ("loss", "new", "Vnew")],
            [
                numpy_helper.from_array(np.array(rate, np.float32), p + "rate"),
                numpy_helper.from_array(np.array(0, np.int64), p + "T"),
                numpy_helper.from_array(np.zeros(shape, np.float32), p + "V"),
            ],
        )
    )  # fmt: skip
    info.update_binding.add(key=key, value=p + "new")
    return info


def two_entries(prefixes=("", "")):
    model = mlp()
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    model.training_info.append(entry((8, 3), "w2", 0.1, prefix=prefixes[0]))
    model.training_info.append(entry((4, 8), "w1", 0.2, prefix=prefixes[1]))
    return model


def test_entries_in_sequence_see_what_was_updated():
    model, batch = two_entries(), batch_of()
    first, second = compile_step(model, entry=0), compile_step(model, entry=1)
    assert list(first.state) == ["w2"]
    assert list(second.state) == ["w1"]
    both = compile_step(model)
    assert list(both.state) == ["w2", "w1"]
    assert both.batch == ["x", "labels"]
    assert both.results == ["loss", "loss_1"]
    assert list(both.rates) == ["rate", "rate_1"]
    onnx.checker.check_model(ir.to_proto(both.model), full_check=True)

    state, (result,) = train(both, [batch])
    a, (one,) = train(first, [batch])
    moved = two_entries()
    for t in moved.graph.initializer:
        if t.name == "w2":
            t.CopyFrom(numpy_helper.from_array(a["w2"], "w2"))
    b, (two,) = train(compile_step(moved, entry=1), [batch])
    np.testing.assert_allclose(state["w2"], a["w2"], rtol=1e-6)
    np.testing.assert_allclose(state["w1"], b["w1"], rtol=1e-6)
    np.testing.assert_allclose([result["loss"], result["loss_1"]], [one["loss"], two["loss"]], rtol=1e-6)
    assert result["loss_1"] < result["loss"]


def test_entry_that_reads_what_a_later_one_updates():
    """The first entry reads w1, which the second updates: as it was before the step."""
    batch = batch_of()
    both = compile_step(two_entries(("p_", "q_")))
    state, history = train(both, [batch] * 30)
    assert history[-1]["q_loss"] < history[0]["p_loss"] * 0.7
    assert all(float(h["q_loss"]) < float(h["p_loss"]) for h in history)
    assert set(both.inference_model(state).graph.initializers) == {"w1", "b1", "w2", "b2"}


def test_entry_numbers():
    with pytest.raises(BadInput, match="there is no training entry 2: the model has 2"):
        compile_step(two_entries(), entry=2)
    with pytest.raises(BadInput, match="carries no training information"):
        compile_step(mlp())


# --- bindings and graphs that the specification forbids ---------------------------------------------


def spoiled(change) -> onnx.ModelProto:
    model = mlp()
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    model.training_info.append(entry((8, 3), "w2", 0.1))
    change(model.training_info[0])
    return model


def _rename_output(info):
    info.algorithm.node[0].output[0] = "h1"


BAD = {
    "key is no initializer": (
        lambda i: i.update_binding.add(key="h1", value="Vnew"),
        "no initializer named 'h1'",
    ),
    "key twice": (lambda i: i.update_binding.add(key="w2", value="Vnew"), "'w2' is bound twice"),
    "value is no output": (lambda i: i.update_binding.add(key="V", value="g"), "no output named 'g'"),
    "shape": (
        lambda i: i.update_binding.add(key="b1", value="Vnew"),
        "a tensor of shape [8] cannot take one of",
    ),
    "dtype": (
        lambda i: i.update_binding.add(key="T", value="loss"),
        "a tensor of INT64 cannot take one of FLOAT",
    ),
    "nothing bound": (lambda i: i.ClearField("update_binding"), "has no update bindings"),
    "name defined twice": (_rename_output, "'h1' is defined in it and in the inference graph"),
    "unknown name": (
        lambda i: i.algorithm.node[0].input.__setitem__(0, "nope"),
        "Sub node 'd' reads 'nope', which is defined nowhere that it can see",
    ),
    "out of order": (
        lambda i: i.algorithm.node[0].input.__setitem__(0, "g"),
        "Sub node 'd' reads 'g', which is computed only after it",
    ),
    "output without a node": (
        lambda i: i.algorithm.output.add(name="ghost"),
        "no node computes its output 'ghost'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_entries_are_refused_by_name(case):
    change, message = BAD[case]
    for refuse in (compile_step, compile_entries, lower_gradients, ReferenceTraining):
        if case == "nothing bound" and refuse is not compile_step:  # it is allowed, but a step would do nothing
            continue
        with pytest.raises(BadInput) as caught:
            refuse(spoiled(change))
        assert message in str(caught.value)
        assert "entry 0" in str(caught.value)


def test_key_bound_by_two_entries():
    model = two_entries()
    model.training_info[1].update_binding.add(key="w2", value="new")
    with pytest.raises(BadInput, match="'w2' is bound twice, by entry 0, 1"):
        compile_step(model)


def test_entry_without_a_loss():
    """Nothing need be minimized: b2 ← 2·b2."""
    model = mlp()
    info = model.training_info.add()
    outputs = [helper.make_tensor_value_info("twice", 1, [3])]
    info.algorithm.CopyFrom(helper.make_graph([node("Add", ["b2", "b2"], ["twice"])], "algorithm", [], outputs))
    info.update_binding.add(key="b2", value="twice")
    step = compile_step(model)
    assert (step.loss, step.results, step.batch) == ("", [], [])
    state, _ = train(step, [{}] * 3)
    np.testing.assert_array_equal(state["b2"], 8 * initial(step)["b2"])


def test_two_bindings_of_one_value():
    """Both tensors of state take the same value; each leaves by an output of its own."""
    step = compile_step(spoiled(lambda i: i.update_binding.add(key="V", value="new")))
    assert step.state["V"].output != step.state["w2"].output
    state, _ = train(step, [batch_of()])
    np.testing.assert_array_equal(state["V"], state["w2"])
    assert step.state["V"].initial.dtype == TensorProto.FLOAT
    assert session(step.model)


# --- initialization ---------------------------------------------------------------------------------


def with_initialization(key="w2", value="start", shape=(8, 3), inputs=(), drawn=None):
    def change(info):
        info.initialization.CopyFrom(
            helper.make_graph(
                [
                    node("RandomNormal", [], ["start"], shape=list(drawn or shape)),
                    node("Exp", ["start"], ["positive"]),
                ],
                "initialization",
                [helper.make_tensor_value_info(n, 1, []) for n in inputs],
                [helper.make_tensor_value_info(n, 1, list(shape)) for n in ("start", "positive")],
            )
        )
        info.initialization_binding.add(key=key, value=value)

    return spoiled(change)


@pytest.mark.parametrize("key", ["w2", "V"])
def test_initialization_is_done_when_training_starts(key):
    """The state starts from what the graph gives, be it a weight or a tensor of the algorithm."""
    step = compile_step(_bound(with_initialization(key, "positive"), "V", "Vnew"))
    start = step.state[key].initial.numpy()
    assert start.shape == (8, 3)
    assert (start > 0).all()
    assert len(np.unique(start)) == 24
    other = "V" if key == "w2" else "w2"
    untouched = compile_step(_bound(spoiled(lambda i: None), "V", "Vnew")).state[other].initial.numpy()
    np.testing.assert_array_equal(step.state[other].initial.numpy(), untouched)
    if key == "w2":
        np.testing.assert_array_equal(step.inference_model({}).graph.initializers["w2"].const_value.numpy(), start)


def _bound(model, key, value):
    model.training_info[0].update_binding.add(key=key, value=value)
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "w3"}, "no initializer named 'w3'"),
        ({"value": "stop"}, "no output named 'stop'"),
        ({"shape": (8, 2)}, "cannot take one of"),
        ({"inputs": ["x"]}, "entry 0, initialization: it has inputs ('x')"),
        ({"drawn": (-1, 3)}, "cannot be evaluated"),
        ({"drawn": (8, 2)}, "cannot"),
    ],
)
def test_bad_initialization(options, message):
    with pytest.raises(BadInput, match="entry 0") as caught:
        compile_step(with_initialization(**options))
    assert message in str(caught.value)


def test_output_that_only_one_entry_has():
    step = compile_step(two_entries(("p_", "q_")), outputs=["q_g", "y"])
    assert step.results == ["p_loss", "y", "q_loss", "q_g", "y_1"]
    with pytest.raises(UnknownName, match="did you mean"):
        compile_step(two_entries(("p_", "q_")), outputs=["r_g"])


# --- initializers that are listed as inputs, as IR versions below 4 demand ---------------------------


def test_initializers_that_are_inputs_too():
    model = mlp()
    for t in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))
    batch = batch_of()
    expected, _ = train(compile_step(attach(mlp(), loss="mse", optimizer="sgd")), [batch])
    step = compile_step(attach(model, loss="mse", optimizer="sgd"))
    assert step.batch == ["x", "labels"]
    state, _ = train(step, [batch])
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value)

    def listed(info):
        for t in info.algorithm.initializer:
            info.algorithm.input.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))

    plain, other = compile_step(spoiled(lambda i: None)), compile_step(spoiled(listed))
    assert described(other) == described(plain)
