"""State that entries share is checked, and what the command reports."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

from onnxgrad.errors import BadInput
from onnxgrad.training import ReferenceTraining, compile_step, lower_gradients, validate
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.commands import command
from tests.training.nets import train
from tests.training.spec.test_entries import BATCHES
from tests.training.spec.test_validation import CHANGES, FLOAT, _gradient_says, rules
from tests.training.step.test_entries import entry, spoiled, two_entries

# --- state that entries share -----------------------------------------------------------------------


def shared_state() -> onnx.ModelProto:
    """The second entry reads the counter and the momentum of the first, which are visible everywhere."""
    model = two_entries(("p_", "q_"))
    first, second = model.training_info
    first.algorithm.node.append(helper.make_node("Add", ["p_T", "p_one"], ["p_Tnew"]))
    first.algorithm.initializer.append(numpy_helper.from_array(np.array(1, np.int64), "p_one"))
    first.algorithm.output.append(helper.make_tensor_value_info("p_Tnew", onnx.TensorProto.INT64, []))
    first.update_binding.add(key="p_T", value="p_Tnew")
    for node in second.algorithm.node:
        if node.op_type == "Momentum":
            node.input[1] = "p_T"
            next(a for a in node.attribute if a.name == "beta").f = 0.5
    del second.algorithm.initializer[1]
    return model


def test_state_of_another_entry():
    """Sequentially, the count is 1 when the second entry reads it: its β counts from the first step on."""
    model = shared_state()
    assert validate(model) == []
    step = compile_step(model)
    halved = two_entries(("p_", "q_"))
    halved.training_info[1].CopyFrom(entry((4, 8), "w1", 0.1, prefix="q_"))  # half the rate is half of β
    state, _ = train(step, BATCHES)
    expected, _ = train(compile_step(halved), BATCHES)
    assert state["p_T"] == len(BATCHES)
    np.testing.assert_allclose(state["w1"], expected["w1"], rtol=1e-5)


def test_sparse_state():
    """An initializer of an algorithm may be sparse; it is dense from the first step on."""

    def change(info):
        dense = next(t for t in info.algorithm.initializer if t.name == "V")
        info.algorithm.initializer.remove(dense)
        sparse = info.algorithm.sparse_initializer.add(dims=[8, 3])
        sparse.values.CopyFrom(numpy_helper.from_array(np.float32([1.5]), "V"))
        sparse.indices.CopyFrom(numpy_helper.from_array(np.int64([3]), "at"))
        info.update_binding.add(key="V", value="Vnew")

    model = spoiled(change)
    assert validate(model) == []
    assert compile_step(model).state["V"].initial.numpy().reshape(-1)[3] == 1.5
    assert ReferenceTraining(model).state["V"].sum() == 1.5


def test_gradient_in_an_initialization():
    """It is a graph like others: s = d(c³)/dc = 3c²."""

    def change(info):
        info.initialization.CopyFrom(
            parser.parse_graph("""initialization () => (float[3] s) {
                c = Constant <value = float[3] {1, 2, 3}> ()
                c2 = Mul (c, c)
                c3 = Mul (c2, c)
                s = ai.onnx.preview.training.Gradient <xs = ["c"], y = "c3"> (c)
            }""")
        )
        info.initialization_binding.add(key="b2", value="s")

    model = spoiled(change)
    assert validate(model) == []
    lowered = lower_gradients(model)
    assert DOMAIN not in {n.domain for n in lowered.training_info[0].initialization.node}
    for made in (model, lowered):
        step = compile_step(made)
        np.testing.assert_array_equal(
            step.inference_model({}).graph.initializers["b2"].const_value.numpy(), [3, 12, 27]
        )
        runner = ReferenceTraining(made)
        runner.initialize()
        np.testing.assert_array_equal(runner.state["b2"], [3, 12, 27])


def test_attributes_of_another_type():
    model = spoiled(_gradient_says(xs="w2"))
    assert "operator" in rules(model)
    for refuse in (compile_step, lower_gradients):
        with pytest.raises(BadInput, match="the attributes xs and y are required"):
            refuse(model)


def test_entry_that_only_initializes():
    model = spoiled(lambda info: None)
    info = model.training_info.add()
    start = helper.make_node("Constant", [], ["start"], value_floats=[1.0, 2.0, 3.0])
    outputs = [helper.make_tensor_value_info("start", FLOAT, [3])]
    info.initialization.CopyFrom(helper.make_graph([start], "initialization", [], outputs))
    info.initialization_binding.add(key="b2", value="start")
    assert validate(model) == []
    step = compile_step(model)
    assert (step.loss, list(step.state)) == ("loss", ["w2"])
    np.testing.assert_array_equal(step.inference_model({}).graph.initializers["b2"].const_value.numpy(), [1, 2, 3])


# --- the command -----------------------------------------------------------------------------------


def test_check_reports_them_as_a_table(tmp_path):
    onnx.save(
        spoiled(lambda i: [CHANGES[c][0](i) for c in ("key is computed", "unknown operator")]), tmp_path / "m.onnx"
    )
    done = command("check", tmp_path / "m.onnx")
    assert done.returncode == 1
    assert "no initializer named 'h1'" in done.stdout
    assert "no such operator" in done.stdout
    assert "not valid for training: 2 problems" in done.stdout
    assert not done.stderr
    onnx.save(spoiled(lambda info: None), tmp_path / "good.onnx")
    done = command("check", tmp_path / "good.onnx")
    assert done.returncode == 0
    assert "training information: 1 entry, valid" in done.stdout


def test_check_of_a_graph_that_holds_a_gradient(tmp_path):
    """The graph that the Gradient stands for can be differentiated."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "ai.onnx.preview.training": 1]>
        g (float[2] a) => (float[2] d) {
            y = Exp (a)
            d = ai.onnx.preview.training.Gradient <xs = ["a"], y = "y"> (a)
        }""")
    onnx.save(model, tmp_path / "m.onnx")
    done = command("check", tmp_path / "m.onnx")
    assert done.returncode == 0, done.stdout
    assert "differentiable: d with respect to a" in done.stdout
    next(a for a in model.graph.node[1].attribute if a.name == "y").s = b"gone"
    onnx.save(model, tmp_path / "stale.onnx")
    done = command("check", tmp_path / "stale.onnx")
    assert done.returncode == 1
    assert "no value named 'gone'" in done.stdout
    assert "Traceback" not in done.stderr
