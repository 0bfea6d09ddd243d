"""The whole way: attach, save, load, compile, train, put the weights back; several entries; bad bindings."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.model_io import to_proto
from onnxgrad.training import Step, attach, compile_step
from tests.training.nets import initial, mlp, model_of, run, train

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
    from onnxgrad.model_io import load_model

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
    with pytest.raises(BadInput, match=r"'b1' is float32\[8\], not float64\[8\]"):
        step.inference_model({"b1": np.zeros(8, np.float64)})
    with pytest.raises(BadInput, match=r"'b1' is float32\[8\], not float32\[7\]"):
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
