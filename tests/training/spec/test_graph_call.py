"""GraphCall: the inference graph called by an algorithm."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper, parser

from onnxgrad.errors import BadInput
from onnxgrad.training import compile_step, lower_gradients
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.training.nets import session, train
from tests.training.spec.test_entries import RNG

# --- GraphCall --------------------------------------------------------------------------------------


def called(inputs, outputs=("p",), listed=True, **attributes) -> onnx.ModelProto:
    """y = (x·w)⊙z with w listed among the inputs, as in 1.7; the entry calls it and has w ← w - 0.1·dw."""
    w = np.arange(6, dtype=np.float32).reshape(2, 3) * 0.1
    model = parser.parse_model("""<ir_version: 7, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
        net (float[N, 2] x, float[2, 3] w, float[N, 3] z) => (float[N, 3] y, float[N, 3] h) {
            h = MatMul (x, w)
            y = Mul (h, z)
        }""")
    if not listed:
        del model.graph.input[1]
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    held = {"graph_name": "net"} | attributes
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        helper.make_graph(
            [
                helper.make_node("GraphCall", inputs, outputs, domain=DOMAIN, name="call", **held),
                helper.make_node("Sub", ["p", "c"], ["d"]),
                helper.make_node("Mul", ["d", "d"], ["h"]),  # a name that the inference graph has, too
                helper.make_node("ReduceSum", ["h"], ["loss"], keepdims=0),
                helper.make_node("Gradient", ["w", "x_1", "z_1", "c"], ["g"], domain=DOMAIN, name="gradient",
                                 xs=["w"], zs=["x_1", "z_1", "c"], y="loss"),
                helper.make_node("Mul", ["g", "rate"], ["step"]),
                helper.make_node("Sub", ["w", "step"], ["w_new"]),
                helper.make_node("Add", ["t", "one"], ["t_new"]),
            ],
            "algorithm",
            [helper.make_tensor_value_info(n, 1, ["N", k]) for n, k in (("x_1", 2), ("z_1", 3), ("c", 3))],
            [helper.make_tensor_value_info("loss", 1, []), helper.make_tensor_value_info("w_new", 1, [2, 3]),
             helper.make_tensor_value_info("t_new", 7, []), helper.make_tensor_value_info("h", 1, None)],
            [numpy_helper.from_array(np.array(0.1, np.float32), "rate"),
             numpy_helper.from_array(np.array(0, np.int64), "t"),
             numpy_helper.from_array(np.array(1, np.int64), "one")],
        )
    )  # fmt: skip
    info.update_binding.add(key="w", value="w_new")
    info.update_binding.add(key="t", value="t_new")
    return model


@pytest.mark.parametrize(
    "model",
    [
        called(["x_1", "w", "z_1"]),
        called(["x_1", "", "z_1"]),
        called(["x_1", "z_1"], listed=False),
        called(["z_1", "x_1"], input_names=["z", "x"], output_names=["y"]),
        called(["x_1", "", "z_1"], ["p", "q"]),
    ],
    ids=["all given", "weight omitted", "weight not listed", "bound by name", "two outputs"],
)
def test_graph_call(model):
    """The weight and the counter are updated, whether or not the call mentions the weight."""
    x, z, c = (RNG.standard_normal((4, n)).astype(np.float32) for n in (2, 3, 3))
    w = numpy_helper.to_array(model.graph.initializer[0]).copy()
    losses = []
    for _ in range(3):
        d = (x @ w) * z - c
        losses.append((d * d).sum())
        w = w - 0.1 * (x.T @ (2 * d * z))
    for proto in (model, lower_gradients(model)):
        step = compile_step(proto)
        assert step.batch == ["x_1", "z_1", "c"]
        state, history = train(step, [{"x_1": x, "z_1": z, "c": c}] * 3)
        np.testing.assert_allclose(state["w"], w, rtol=1e-5)
        assert state["t"] == 3
        np.testing.assert_allclose([h["loss"] for h in history], losses, rtol=1e-5)
    assert session(lower_gradients(model))


def test_input_of_the_same_name_is_the_same_tensor():
    model = called(["x", "", "z_1"])
    algorithm = model.training_info[0].algorithm
    algorithm.input[0].name = "x"
    algorithm.node[4].input[1] = "x"
    algorithm.node[4].attribute[2].strings[0] = b"x"
    step = compile_step(model)
    assert step.batch == ["x", "z_1", "c"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (called(["x_1", "", "z_1"], graph_name="other"), "calls 'other'; only the inference graph, 'net'"),
        (called(["x_1", "", "z_1", "c"]), "has 4 inputs; the inference graph has 3"),
        (called(["x_1"]), "gives nothing for the input 'z'"),
        (called(["x_1", "", "z_1"], ["p", "q", "r"]), "has 3 outputs; the inference graph has 2"),
    ],
)
def test_bad_calls(model, message):
    with pytest.raises(BadInput) as caught:
        compile_step(model)
    assert message in str(caught.value)
    assert "training entry 0: GraphCall node 'call'" in str(caught.value)


def test_call_of_a_graph_with_control_flow():
    """Names inside branches are copied too, so that nothing is defined twice."""
    model = parser.parse_model("""<ir_version: 7, opset_import: ["": 18, "ai.onnx.preview.training": 1]>
        net (float[2] x, bool p) => (float[2] y)
        <float[2] w = {2, 3}> {
            y = If (p) <then_branch = t () => (float[2] o) { e = Exp (w)  o = Mul (e, x) },
                        else_branch = f () => (float[2] o2) { o2 = Mul (w, x) }>
        }""")
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        helper.make_graph(
            [
                helper.make_node("GraphCall", ["a", "p"], ["q"], domain=DOMAIN, graph_name="net", name="call"),
                helper.make_node("Gradient", ["w", "a", "p"], ["g"], domain=DOMAIN, xs=["w"], zs=["a", "p"], y="q"),
            ],
            "algorithm",
            [helper.make_tensor_value_info("a", 1, [2])],
            [helper.make_tensor_value_info(n, 1, [2]) for n in ("q", "g")],
        )
    )
    info.update_binding.add(key="w", value="g")
    step = compile_step(model)
    assert step.batch == ["p", "a"]
    a = np.float32([5, 7])
    state, _ = train(step, [{"a": a, "p": np.array(True)}])
    np.testing.assert_allclose(state["w"], np.exp([2, 3]) * a, rtol=1e-6)
    assert isinstance(lower_gradients(ir.from_proto(model)), ir.Model)
    call = 'ai.onnx.preview.training.GraphCall <graph_name = "net"> (a, p)'
    branches = parser.parse_graph(f"""g (bool p) => (float[2] q) {{
        q = If (p) <then_branch = t1 () => (float[2] r) {{ r = {call} }},
                    else_branch = f1 () => (float[2] s) {{ c = {call} s = Neg (c) }}>
    }}""")
    model.training_info[0].algorithm.node[0].CopyFrom(branches.node[0])
    for truth, wanted in ((True, np.exp([2, 3]) * a), (False, -a)):
        state, _ = train(compile_step(model), [{"a": a, "p": np.array(truth)}])
        np.testing.assert_allclose(state["w"], wanted, rtol=1e-6)


def test_whole_number_state_is_not_folded():
    """k ← 2k + 1, k in the inference graph, n ← 3n + 1 in the algorithm: nothing is computed in advance."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        net () => (int64 k_new)
        <int64 k = {1}, int64 two = {2}, int64 one = {1}> {
            k2 = Mul (k, two)
            k_new = Add (k2, one)
        }""")
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        parser.parse_graph("""algorithm () => (int64 n_new) <int64 n = {0}, int64 three = {3}> {
            n3 = Mul (n, three)
            n_new = Add (n3, one)
        }""")
    )
    info.update_binding.add(key="k", value="k_new")
    info.update_binding.add(key="n", value="n_new")
    lowered = lower_gradients(model)
    assert [n.op_type for n in lowered.graph.node] == ["Mul", "Add"]
    for proto in (model, lowered):
        state, _ = train(compile_step(proto), [{}] * 3)
        assert (state["k"], state["n"]) == (15, 13)
