"""Training information survives renaming, and the tools that drop it; what they break is noticed."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.compose
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxgrad.errors import BadInput
from onnxgrad.model_io import load_model, save_model
from onnxgrad.training import (
    ReferenceTraining,
    attach,
    carry_training_info,
    compile_step,
    initialize,
    lower_gradients,
    renamed,
    validate,
)
from tests.training.nets import mlp, run, train
from tests.training.spec.test_entries import BATCHES, norm_net
from tests.training.spec.test_gradient_node import FUNCTION, A, B, model
from tests.training.step.test_entries import two_entries


def test_prefix():
    """Bindings, Gradient nodes and initializations follow; the model trains as before."""
    plain = initialize(attach(mlp(), loss="mse", optimizer="adam"), {"w1": "ones"})
    other = renamed(plain, lambda name: f"p/{name}")
    assert validate(other) == []
    onnx.checker.check_model(other, full_check=True)
    assert {b.key for b in other.training_info[0].update_binding} == {
        f"p/{b.key}" for b in plain.training_info[0].update_binding
    }
    one, two = compile_step(plain), compile_step(other)
    (state, history), (state_2, history_2) = (
        train(one, BATCHES),
        train(two, [{f"p/{n}": a for n, a in b.items()} for b in BATCHES]),
    )
    for name, value in state.items():
        np.testing.assert_array_equal(state_2[f"p/{name}"], value)
    assert [h["loss"] for h in history] == [h["p/loss"] for h in history_2]
    back = renamed(other, lambda name: name.removeprefix("p/"))
    assert back.SerializeToString(deterministic=True) == plain.SerializeToString(deterministic=True)


def test_what_a_prefix_of_another_tool_leaves_is_noticed():
    """onnx.compose renames the inference graph alone."""
    other = onnx.compose.add_prefix(attach(mlp(), loss="mse"), "p/")
    if not other.training_info:
        other.training_info.extend(attach(mlp(), loss="mse").training_info)
    assert {p.rule for p in validate(other)} >= {"key", "visibility"}
    with pytest.raises(BadInput, match=r"(?s)not valid.*no initializer named 'w1'; did you mean 'p/w1'"):
        compile_step(other)


def test_some_names():
    other = renamed(two_entries(("p_", "q_")), {"w2": "head", "labels": "targets", "h3": "features"})
    assert validate(other) == []
    step = compile_step(other)
    assert list(step.state) == ["head", "w1"]
    assert step.batch == ["x", "targets"]
    with pytest.raises(BadInput, match="'b1' and 'w2' would both be called 'b1'"):
        renamed(two_entries(("p_", "q_")), {"w2": "b1"})


def test_names_inside_control_flow():
    proto = model("""g (float[2] a, float[2] b, bool p) => (float[2] o) {
        y = Mul (a, b)
        o = If (p) <then_branch = t () => (float[2] d) {
                        x = Exp (y)
                        d, z = Gradient <xs = ["a", "b"], y = "x"> (a, b)
                    },
                    else_branch = f () => (float[2] e) { e = Neg (a) }>
    }""")
    other = renamed(proto, str.upper)
    assert [i.name for i in other.graph.input] == ["A", "B", "P"]
    found = run(lower_gradients(other), {"A": A, "B": B, "P": np.array(True)})
    np.testing.assert_allclose(found["O"], B * np.exp(A * B), rtol=1e-6)


def test_what_the_inliner_leaves_is_noticed():
    """It renames the values of a function, not the strings in a Gradient: no number comes out, but a reason."""
    proto = model(
        """g (float[2] u, float[2] v) => (float[2] y, float[2] d) { y, d = local.slope (u, v) }""",
        FUNCTION,
    )
    inlined = onnx.inliner.inline_local_functions(proto)
    assert "name" in {p.rule for p in validate(inlined)}
    with pytest.raises(BadInput, match="no value named"):
        lower_gradients(inlined)
    assert validate(proto) == []
    assert onnx.inliner.inline_local_functions(lower_gradients(proto)) == lower_gradients(proto)


def test_what_merging_leaves_is_noticed():
    """onnx.compose.merge_models renames by a prefix, and not what a Gradient says."""
    first = model("one (float[2] a, float[2] b) => (float[2] y) { y = Mul (a, b) }")
    second = model("""two (float[2] u) => (float[2] d) {
        z = Exp (u)
        d = Gradient <xs = ["u"], y = "z"> (u)
    }""")
    merged = onnx.compose.merge_models(first, second, [("y", "u")], prefix1="1_", prefix2="2_")
    assert [p.message.partition(";")[0] for p in validate(merged)] == [
        "Gradient node '2_d': no value named 'u'",
        "Gradient node '2_d': no value named 'z'",
    ]
    with pytest.raises(BadInput, match="no value named 'u'"):
        lower_gradients(merged)
    named = [renamed(m, lambda name, p=p: p + name) for m, p in ((first, "1_"), (second, "2_"))]
    other = onnx.compose.merge_models(*named, [("1_y", "2_u")])
    (problem,) = validate(other)  # its u has become the y of the first, and has other leaves there
    assert "no value named '2_u'" in problem.message
    good = onnx.compose.merge_models(first, lower_gradients(second), [("y", "u")], prefix1="1_", prefix2="2_")
    np.testing.assert_allclose(run(good, {"1_a": A, "1_b": B})["2_d"], np.exp(A * B), rtol=1e-6)


def test_data_in_several_files(tmp_path):
    """Weights, the state of the algorithm and constants of the initialization, at offsets of three files."""
    plain = attach(mlp(), loss="mse", optimizer="adam")
    info = plain.training_info[0]
    held = {t.name: t for t in info.algorithm.initializer}
    held["w2_mean"].CopyFrom(numpy_helper.from_array(np.full((8, 3), 0.25, np.float32), "w2_mean"))
    held["w1_square"].CopyFrom(numpy_helper.from_array(np.full((4, 8), 0.5, np.float32), "w1_square"))
    start = numpy_helper.from_array(np.linspace(-1, 1, 8, dtype=np.float32), "start")
    info.initialization.CopyFrom(
        helper.make_graph(
            [helper.make_node("Neg", ["start"], ["started"])],
            "initialization",
            [],
            [helper.make_tensor_value_info("started", 1, [8])],
            [start],
        )
    )
    info.initialization_binding.add(key="b1", value="started")
    beside = onnx.ModelProto()
    beside.CopyFrom(plain)
    info = beside.training_info[0]
    held = {t.name: t for t in (*beside.graph.initializer, *info.algorithm.initializer)}
    files = {
        "a.bin": [held["w1"], held["w2_mean"]],
        "b.bin": [held["w2"], held["w1_square"]],
        "c.bin": [info.initialization.initializer[0]],
    }
    for file, tensors in files.items():
        data = b"\1" * 12
        for tensor in tensors:
            raw = numpy_helper.to_array(tensor).tobytes()
            for key, value in (("location", file), ("offset", str(len(data))), ("length", str(len(raw)))):
                tensor.external_data.add(key=key, value=value)
            data += raw + b"\2" * 20
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
        (tmp_path / file).write_bytes(data)
    (tmp_path / "m.onnx").write_bytes(beside.SerializeToString())
    (tmp_path / "sub").mkdir()
    save_model(load_model(tmp_path / "m.onnx"), tmp_path / "sub" / "again.onnx")
    expected, _ = train(compile_step(plain), BATCHES)
    for made in (tmp_path / "m.onnx", tmp_path / "sub" / "again.onnx", lower_gradients(tmp_path / "m.onnx")):
        assert validate(made) == []
        step = compile_step(made)
        np.testing.assert_array_equal(step.state["b1"].initial.numpy(), np.linspace(1, -1, 8, dtype=np.float32))
        assert (step.state["w2_mean"].initial.numpy() == 0.25).all()
        state, _ = train(step, BATCHES)
        for name, value in expected.items():
            np.testing.assert_allclose(state[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert ReferenceTraining(tmp_path / "m.onnx").state["w1_square"].sum() == 16


def test_version_conversion():
    """The converter of onnx drops training information; what it drops is carried over, and trains the same."""
    plain = attach(mlp(), loss="mse", optimizer="adam")
    converted = onnx.version_converter.convert_version(mlp(), 23)
    carried = carry_training_info(plain, converted)
    assert next(o.version for o in carried.opset_import if o.domain == "") == 23
    state, _ = train(compile_step(plain), BATCHES)
    other, _ = train(compile_step(carried), BATCHES)
    for name, value in state.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-6, atol=1e-7)


def test_what_cannot_be_carried_over():
    plain = attach(mlp(), loss="mse")
    with pytest.raises(BadInput, match=r"does not fit[^!]*no initializer named 'w1'"):
        carry_training_info(plain, onnx.compose.add_prefix(mlp(), "p/"))
    old = mlp()
    old.opset_import[0].version = 12
    info = old.training_info.add()
    total = helper.make_node("ReduceSum", ["b1"], ["total"], axes=[0], keepdims=1)
    info.algorithm.CopyFrom(
        helper.make_graph([total], "algorithm", [], [helper.make_tensor_value_info("total", 1, [1])])
    )
    with pytest.raises(BadInput, match="uses ReduceSum, which opset 21 defines otherwise than opset 12"):
        carry_training_info(old, mlp())


def test_onnx_ir_and_back(tmp_path):
    """Our own doors keep it, through a file, and through an ``onnx_ir.Model``, with data beside the file or not."""
    plain = attach(norm_net(), loss="mse", optimizer="adam")
    beside = attach(norm_net(), loss="mse", optimizer="adam")  # onnx.save empties what it writes beside
    onnx.save(beside, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=64)
    held = load_model(tmp_path / "m.onnx")
    (tmp_path / "sub").mkdir()
    save_model(held, tmp_path / "sub" / "again.onnx")
    assert (tmp_path / "sub" / "again.onnx.data").exists()
    for made in (tmp_path / "m.onnx", held, tmp_path / "sub" / "again.onnx"):
        assert validate(made) == []
        one, other = compile_step(plain), compile_step(made)
        batch = {"x": np.ones((5, 2, 4, 4), np.float32), "labels": BATCHES[0]["labels"]}
        (state, _), (again, _) = train(one, [batch] * 2), train(other, [batch] * 2)
        for name, value in state.items():
            np.testing.assert_allclose(again[name], value, rtol=1e-5, atol=1e-6)
    assert isinstance(lower_gradients(held), ir.Model)
