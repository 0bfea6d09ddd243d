"""Training information survives renaming, and the tools that drop it; what they break is noticed."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.compose
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir
import pytest
from onnx import helper

from onnxgrad.door import load_model, save_model
from onnxgrad.errors import BadInput
from onnxgrad.training import (
    attach,
    carry_training_info,
    compile_step,
    initialize,
    lower_gradients,
    renamed,
    validate,
)
from tests.training.nets import mlp, run, train
from tests.training.test_entries import BATCHES, norm_net
from tests.training.test_gradient import FUNCTION, A, B, model
from tests.training.test_step import two_entries


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
