"""The whole way: attach, save, load, compile, train, put the weights back; several entries; bad bindings."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxgrad.door import to_proto
from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.training import ReferenceTraining, Step, attach, compile_entries, compile_step, lower_gradients
from onnxgrad.training.gradients import DOMAIN
from tests.training.nets import initial, mlp, model_of, run, session, train

node = helper.make_node


def batch_of(seed=0, size=5):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, 4)).astype(np.float32)
    return {"x": x, "labels": rng.standard_normal((size, 3)).astype(np.float32)}


def described(step: Step):
    state = [(t.name, t.input, t.output, t.kind, t.initial.tobytes()) for t in step.state.values()]
    rates = {n: t.tobytes() for n, t in step.rates.items()}
    return ir.to_proto(step.model), state, step.batch, step.results, step.loss, rates


@pytest.fixture(scope="module")
def attached():
    return attach(mlp(), loss="mse", optimizer="adam")


# --- the training model -----------------------------------------------------------------------------


def test_it_is_still_the_inference_model(attached):
    onnx.checker.check_model(attached, full_check=True)
    x = batch_of()["x"]
    np.testing.assert_array_equal(run(attached, {"x": x})["y"], run(mlp(), {"x": x})["y"])
    assert [n.op_type for n in attached.graph.node] == [n.op_type for n in mlp().graph.node]


def test_algorithm_is_what_the_specification_wants(attached):
    """The merged graph is valid; bindings go from initializers to outputs of the algorithm."""
    (info,) = attached.training_info
    keys = [b.key for b in info.update_binding]
    held = {t.name for t in attached.graph.initializer} | {t.name for t in info.algorithm.initializer}
    assert set(keys) <= held
    assert len(set(keys)) == len(keys)
    assert {b.value for b in info.update_binding} <= {o.name for o in info.algorithm.output}
    (gradient,) = [n for n in info.algorithm.node if n.op_type == "Gradient"]
    attrs = {a.name: [s.decode() for s in a.strings] or a.s.decode() for a in gradient.attribute}
    assert attrs == {"xs": ["w1", "b1", "w2", "b2"], "zs": ["x", "labels"], "y": "loss"}
    assert list(gradient.input) == ["w1", "b1", "w2", "b2", "x", "labels"]
    merged = onnx.ModelProto()
    merged.CopyFrom(attached)
    merged.ClearField("training_info")
    for field in ("node", "input", "initializer", "output"):
        getattr(merged.graph, field).extend(getattr(info.algorithm, field))
    onnx.checker.check_model(merged)


def test_every_way_in_gives_the_same_step(attached, tmp_path):
    onnx.save(attached, tmp_path / "m.onnx")
    copy = onnx.ModelProto.FromString(attached.SerializeToString())  # saving changes it
    onnx.save(copy, tmp_path / "e.onnx", save_as_external_data=True, size_threshold=0, location="e.data")
    expected = described(compile_step(attached))
    for way in (onnx.load(tmp_path / "m.onnx"), tmp_path / "m.onnx", str(tmp_path / "e.onnx")):
        assert described(compile_step(way)) == expected
    from onnxgrad.door import load_model

    held = load_model(tmp_path / "m.onnx")
    assert described(compile_step(held)) == expected
    assert to_proto(held).training_info, "the caller's model lost its training information"


def test_caller_keeps_his_model(attached):
    before = attached.SerializeToString(deterministic=True)
    compile_step(attached)
    attach(attached, loss="mse", optimizer="sgd")
    assert attached.SerializeToString(deterministic=True) == before


def test_attach_again_replaces(attached):
    again = attach(attached, loss="l1", optimizer="sgd")
    assert len(again.training_info) == 1
    assert described(compile_step(again)) == described(compile_step(attach(mlp(), loss="l1", optimizer="sgd")))


# --- the step ---------------------------------------------------------------------------------------


def test_inputs_and_outputs_are_in_order(attached):
    step = compile_step(attached, outputs=["y", "loss", "w1_grad"])
    graph = step.model.graph
    assert [v.name for v in graph.inputs] == [
        *step.batch,
        *(t.input for t in step.state.values()),
        *step.rates,
    ]
    assert [v.name for v in graph.outputs] == [*(t.output for t in step.state.values()), *step.results]
    assert step.batch == ["x", "labels"]
    assert step.results == ["loss", "y", "w1_grad"]
    assert step.loss == "loss"
    assert list(step.rates) == ["learning_rate"]
    assert all(t.input == name for name, t in step.state.items())
    kinds = {n: t.kind for n, t in step.state.items()}
    assert [n for n, k in kinds.items() if k == "parameter"] == ["w1", "b1", "w2", "b2"]
    assert [n for n, k in kinds.items() if k == "counter"] == ["steps"]
    assert sum(k == "optimizer" for k in kinds.values()) == 8
    onnx.checker.check_model(ir.to_proto(step.model), full_check=True)
    assert {n.domain for n in graph} == {""}
    assert not any(n.op_type == "Identity" for n in graph)
    read = {id(v) for n in graph for v in n.inputs if v is not None}
    made = {id(v) for v in graph.outputs}
    assert all(any(id(v) in read | made for v in n.outputs) for n in graph), "a node that nobody needs"


def test_results_are_those_of_the_same_batch(attached):
    step, batch = compile_step(attached, outputs=["y"]), batch_of()
    _, (result,) = train(step, [batch])
    y = run(mlp(), {"x": batch["x"]})["y"]
    np.testing.assert_allclose(result["y"], y, rtol=1e-6)
    np.testing.assert_allclose(result["loss"], ((y - batch["labels"]) ** 2).mean(), rtol=1e-5)
    assert result["loss"].shape == ()


def test_batch_size_may_change_between_steps(attached):
    state, history = train(compile_step(attached), [batch_of(0, 5), batch_of(1, 2), batch_of(2, 1)])
    assert len(history) == 3
    assert state["steps"] == 3


def test_rate_is_fed_at_every_step(attached):
    step = compile_step(attached)
    state, _ = train(step, [batch_of()], rate=0.0)
    start = initial(step)
    for name, tensor in step.state.items():
        if tensor.kind == "parameter":
            np.testing.assert_array_equal(state[name], start[name])
        elif tensor.kind == "optimizer":
            assert np.any(state[name])


def test_extra_outputs_that_are_inputs_or_state(attached):
    """An input of the step as a result is a copy under another name; state as a result is its own output."""
    step = compile_step(attached, outputs=["x", "w1", "w1_next"])
    loss, x, w1, new = step.results
    batch = batch_of()
    state, (result,) = train(step, [batch])
    np.testing.assert_array_equal(result[x], batch["x"])
    np.testing.assert_array_equal(result[w1], initial(step)["w1"])
    np.testing.assert_array_equal(result[new], state["w1"])
    assert (loss, new) == ("loss", step.state["w1"].output)
    with pytest.raises(UnknownName, match=r"'w1_gard'.*did you mean 'w1_grad'"):
        compile_step(attached, outputs=["w1_gard"])


def test_two_names_of_one_value_are_two_results():
    """The gradients of two biases that are added are one value, with both names."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "b"], ["i"]), node("Add", ["i", "c"], ["y"])]
    weights = {"w": np.eye(2, dtype=np.float32), "b": np.float32([1, 2]), "c": np.float32([3, 4])}
    both = attach(model_of(nodes, weights, {"x": ["N", 2]}, {"y": ["N", 2]}), loss="mse", optimizer="sgd")
    step = compile_step(both, outputs=["b_grad", "c_grad"])
    assert step.results == ["loss", "b_grad", "c_grad"]
    x = np.ones((3, 2), np.float32)
    _, (result,) = train(step, [{"x": x, "labels": x}])
    np.testing.assert_allclose(result["b_grad"], [4, 6])
    np.testing.assert_array_equal(result["b_grad"], result["c_grad"])


# --- back to an inference model ---------------------------------------------------------------------


def test_weights_go_back(attached):
    step = compile_step(attached)
    state, history = train(step, [batch_of()] * 200, rate=0.02)
    assert history[-1]["loss"] < 0.3 * history[0]["loss"]
    trained = step.inference_model(state)
    proto = ir.to_proto(trained)
    onnx.checker.check_model(proto, full_check=True)
    assert [o.domain for o in proto.opset_import] == [""]
    assert not proto.training_info
    y = run(proto, {"x": batch_of()["x"]})["y"]
    _, (now,) = train(compile_step(_with(attached, state)), [batch_of()])
    np.testing.assert_allclose(((y - batch_of()["labels"]) ** 2).mean(), now["loss"], rtol=1e-5)
    again = ir.to_proto(step.inference_model(initial(step)))
    assert run(again, {"x": batch_of()["x"]})["y"].tobytes() == run(mlp(), {"x": batch_of()["x"]})["y"].tobytes()


def _with(attached, state):
    copy = onnx.ModelProto()
    copy.CopyFrom(attached)
    for graph in (copy.graph, copy.training_info[0].algorithm):
        for t in graph.initializer:
            if t.name in state:
                t.CopyFrom(numpy_helper.from_array(state[t.name], t.name))
    return copy


def test_weights_of_a_wrong_kind_do_not(attached):
    step = compile_step(attached)
    with pytest.raises(UnknownName, match="no state tensor named 'w3'"):
        step.inference_model({"w3": np.zeros(3)})
    with pytest.raises(BadInput, match="'b1' is a tensor of"):
        step.inference_model({"b1": np.zeros(8, np.float64)})
    with pytest.raises(BadInput, match="'b1' is a tensor of"):
        step.inference_model({"b1": np.zeros(7, np.float32)})


def constant_net():
    """y = x·w·s + c, the weights w and the scalar s in Constant nodes."""
    nodes = [
        node("Constant", [], ["w"], value=numpy_helper.from_array(np.eye(4, 3, dtype=np.float32))),
        node("Constant", [], ["s"], value=numpy_helper.from_array(np.array(2, np.float32))),
        node("MatMul", ["x", "w"], ["h"]),
        node("Mul", ["h", "s"], ["y"]),
    ]
    return model_of(nodes, {}, {"x": ["N", 4]}, {"y": ["N", 3]})


def test_weights_in_constant_nodes():
    step = compile_step(attach(constant_net(), loss="mse", optimizer="sgd"))
    assert list(step.state) == ["w"]
    state, history = train(step, [batch_of()] * 50, rate=0.05)
    assert history[-1]["loss"] < history[0]["loss"]
    y = run(step.inference_model(state), {"x": batch_of()["x"]})["y"]
    np.testing.assert_allclose(y, batch_of()["x"] @ state["w"] * 2, rtol=1e-5)
    assert set(compile_step(attach(constant_net(), loss="mse", optimizer="sgd", trainable=["s"])).state) == {"s"}


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
        "shape": "'shape' is a tensor of INT64",
        "v": "no initializer named 'v'",
    }.items():
        with pytest.raises(BadInput, match=message):
            attach(model, loss="mse", output="y", trainable=[name])
    with pytest.raises(BadInput, match=r"name the output that meets the labels.*'y', 'other'"):
        attach(model, loss="mse")
    with pytest.raises(UnknownName, match="'yy'"):
        attach(model, loss="mse", output="yy")


def test_frozen_weights_stay(attached):
    step = compile_step(attach(mlp(), loss="mse", optimizer="adam", trainable=["w2", "b2"]))
    assert {n for n, t in step.state.items() if t.kind == "parameter"} == {"w2", "b2"}
    state, _ = train(step, [batch_of()] * 3)
    trained = step.inference_model(state).graph.initializers
    np.testing.assert_array_equal(
        trained["w1"].const_value.numpy(), step.source.model.graph.initializers["w1"].const_value.numpy()
    )


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
    with pytest.raises(BadInput, match="'labels' is a value of the model, but no input"):
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


def test_float16_is_refused_where_the_operators_have_no_float16():
    model = mlp(dtype=np.float16)
    with pytest.raises(BadInput, match="which the operator Adam does not update"):
        attach(model, loss="mse", optimizer="adam")
    assert len(compile_step(attach(model, loss="mse", optimizer="sgd")).state) == 4


def test_float64_trains():
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((5, 4)), "labels": rng.standard_normal((5, 3))}
    for optimizer in ("sgd", "adamw"):
        step = compile_step(attach(mlp(dtype=np.float64), loss="mse", optimizer=optimizer))
        state, history = train(step, [batch] * 3)
        assert state["w1"].dtype == np.float64
        assert history[2]["loss"] < history[0]["loss"]


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
