"""Gradient nodes mean what the specification says."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnxgrad.errors import BadInput, NoRule
from onnxgrad.training.spec.lower_model import lower_gradients
from onnxgrad.transforms.gradient_node import DOMAIN
from tests.training.nets import run, session

node = helper.make_node


def gradient(inputs, outputs, y, xs, zs=(), name="gradient"):
    held = {"zs": list(zs)} if zs else {}
    return node("Gradient", inputs, outputs, name=name, domain=DOMAIN, xs=list(xs), y=y, **held)


def model(nodes, inputs, outputs, dtype=TensorProto.FLOAT):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, dtype, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, dtype, s) for n, s in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("name", ["test_gradient_of_add", "test_gradient_of_add_and_mul"])
def test_backend_model_test(name):
    from pathlib import Path

    from onnx import numpy_helper
    from onnx.backend.test.loader import load_model_tests

    case = next(c for c in load_model_tests(kind="simple") if c.name == name)
    folder = Path(case.model_dir)
    proto = onnx.load(folder / "model.onnx")
    lowered = lower_gradients(proto)
    onnx.checker.check_model(lowered, full_check=True)
    assert {n.domain for n in lowered.graph.node} == {""}
    data = folder / "test_data_set_0"

    def tensors(kind):
        files = sorted(data.glob(f"{kind}_*.pb"), key=lambda f: int(f.stem.rsplit("_", 1)[1]))
        return [numpy_helper.to_array(onnx.TensorProto.FromString(f.read_bytes())) for f in files]

    found = run(lowered, dict(zip([i.name for i in proto.graph.input], tensors("input"))))
    for out, want in zip(proto.graph.output, tensors("output")):
        np.testing.assert_allclose(found[out.name], want, rtol=1e-6)


def test_skipped_output_and_disconnected_x():
    """An output that nobody names is skipped; a y that does not depend on x has the derivative zero."""
    proto = model(
        [node("Mul", ["a", "b"], ["y"]), gradient(["a", "b", "c"], ["", "db", "dc"], "y", ["a", "b", "c"])],
        {"a": [2], "b": [2], "c": [3]},
        {"y": [2], "db": [2], "dc": [3]},
    )
    lowered = lower_gradients(proto)
    a, b = np.float32([2, 3]), np.float32([5, 7])
    found = run(lowered, {"a": a, "b": b, "c": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(found["db"], a)
    np.testing.assert_array_equal(found["dc"], np.zeros(3))


def test_y_that_is_no_scalar_is_summed():
    """y = a·b broadcast over rows: the gradient of Σy."""
    proto = model(
        [node("Mul", ["a", "b"], ["y"]), gradient(["a", "b"], ["da"], "y", ["a"], ["b"])],
        {"a": [3], "b": ["N", 3]},
        {"da": [3]},
    )
    b = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = run(lower_gradients(proto), {"a": np.ones(3, np.float32), "b": b})
    np.testing.assert_array_equal(found["da"], b.sum(0))


def test_intermediate_x_is_a_cut():
    """H = a², y = H·b: dy/dH = b. Beside a, from which it is computed, H is no independent variable."""

    def of(inputs, xs, zs):
        nodes = [node("Mul", ["a", "a"], ["h"]), node("Mul", ["h", "b"], ["y"])]
        return model([*nodes, gradient(inputs, ["d"], "y", xs, zs)], {"a": [2], "b": [2]}, {"d": [2]})

    b = np.float32([5, 7])
    found = run(lower_gradients(of(["h", "b"], ["h"], ["b"])), {"a": np.float32([2, 3]), "b": b})
    np.testing.assert_array_equal(found["d"], b)
    for inputs, xs, zs in ((["h", "a"], ["h"], ["a"]), (["a", "h"], ["a"], ["h"])):
        with pytest.raises(BadInput, match="'h' is computed from 'a'"):
            lower_gradients(of(inputs, xs, zs))


def test_second_order():
    """o = x²·w: do/dx = 2xw, then d(do/dx)/dx = 2w and d(do/dx)/dw = 2x; between them stands another node."""
    proto = model(
        [
            node("Mul", ["x", "x"], ["x2"]),
            node("Mul", ["x2", "w"], ["o"]),
            gradient(["x", "w"], ["dx"], "o", ["x"], ["w"], name="first"),
            node("Exp", ["dx"], ["e"]),
            gradient(["x", "w"], ["dxx", "dxw"], "dx", ["x", "w"], name="second"),
            gradient(["w", "x"], ["dxxw"], "dxx", ["w"], ["x"], name="third"),
            gradient(["w", "x"], ["de"], "e", ["w"], ["x"], name="through"),
        ],
        {"x": [2], "w": [2]},
        {"dx": [2], "dxx": [2], "dxw": [2], "dxxw": [2], "de": [2]},
        TensorProto.DOUBLE,
    )
    lowered = lower_gradients(proto)
    assert [o.name for o in lowered.graph.output] == ["dx", "dxx", "dxw", "dxxw", "de"]
    x, w = np.array([0.5, -0.3]), np.array([0.7, 1.1])
    found = run(lowered, {"x": x, "w": w})
    np.testing.assert_allclose(found["dx"], 2 * x * w)
    np.testing.assert_allclose(found["dxx"], 2 * w)
    np.testing.assert_allclose(found["dxw"], 2 * x)
    np.testing.assert_allclose(found["dxxw"], [2, 2])
    np.testing.assert_allclose(found["de"], np.exp(2 * x * w) * 2 * x)


def test_kind_that_comes_in_comes_out(tmp_path):
    proto = model([node("Exp", ["a"], ["y"]), gradient(["a"], ["d"], "y", ["a"])], {"a": [2]}, {"d": [2]})
    onnx.save(proto, tmp_path / "m.onnx")
    assert isinstance(lower_gradients(proto), onnx.ModelProto)
    assert isinstance(lower_gradients(tmp_path / "m.onnx"), onnx.ModelProto)
    assert isinstance(lower_gradients(ir.from_proto(proto)), ir.Model)
    assert proto.graph.node[1].op_type == "Gradient", "the caller's model was changed"
    for made in (proto, tmp_path / "m.onnx", ir.from_proto(proto)):
        np.testing.assert_allclose(run(lower_gradients(made), {"a": np.zeros(2, np.float32)})["d"], [1, 1])


def test_gradient_that_is_an_input():
    """dy/da is b itself, and as two outputs: each output is made by a node and has its own name."""
    proto = model(
        [
            node("Mul", ["a", "b"], ["y"]),
            gradient(["a", "b"], ["da"], "y", ["a"], ["b"], name="one"),
            gradient(["a", "b"], ["da2"], "y", ["a"], ["b"], name="two"),
        ],
        {"a": [2], "b": [2]},
        {"da": [2], "da2": [2]},
    )
    b = np.float32([5, 7])
    found = run(lower_gradients(proto), {"a": b, "b": b})
    np.testing.assert_array_equal(found["da"], b)
    np.testing.assert_array_equal(found["da2"], b)


BAD = {
    "no name y": (gradient(["a"], ["d"], "nope", ["a"]), "no value named 'nope'"),
    "no name x": (gradient(["a"], ["d"], "y", ["A1"]), "no value named 'A1'"),
    "other type": (gradient(["i", "b"], ["d"], "y", ["a"], ["b"]), "'a' is a tensor of float32, and 'i'"),
    "nothing fed": (gradient(["", "b"], ["d"], "y", ["a"], ["b"]), "nothing is fed for 'a'"),
    "incomplete": (gradient(["a"], ["d"], "y", ["a"]), "'y' depends on 'b' too (b → Mul → y)"),
    "twice": (gradient(["a", "a", "b"], ["d"], "y", ["a", "a"], ["b"]), "'a' is named twice"),
    "no y": (node("Gradient", ["a"], ["d"], name="gradient", domain=DOMAIN, xs=["a"]), "xs and y are required"),
    "its own output": (gradient(["a", "b"], ["d"], "d", ["a"], ["b"]), "a cycle: 'd' is computed from its own output"),
    "around a node": (gradient(["a", "b"], ["d"], "o", ["a"], ["b"]), "a cycle: 'o' is computed from its own output"),
    "dependent": (gradient(["a", "e"], ["d"], "f", ["a"], ["e"]), "'e' is computed from 'a' (a → Exp → e)"),
    "too few inputs": (gradient(["a"], ["d"], "y", ["a", "b"]), "1 inputs for 2 xs and 0 zs"),
    "too many outputs": (gradient(["a"], ["d", "e2"], "y", ["a"]), "has 2 outputs for 1 xs"),
    "y too late": (gradient(["a"], ["d"], "late", ["a"]), "'late' is computed only after it"),
    "integers": (gradient(["i"], ["d"], "j", ["i"]), "'i' is a tensor of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_gradient_nodes(case):
    bad, message = BAD[case]
    proto = model(
        [
            node("Mul", ["a", "b"], ["y"]),
            node("Neg", ["i"], ["j"]),
            node("Exp", ["a"], ["e"]),
            node("Mul", ["a", "e"], ["f"]),
            bad,
            node("Exp", ["y"], ["late"]),
            node("Exp", ["d"], ["o"]),
        ],
        {"a": [2], "b": [2]},
        {"late": [2], "o": [2]},
    )
    proto.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, [2]))
    with pytest.raises(BadInput, match="Gradient node 'gradient'") as caught:
        lower_gradients(proto)
    assert message in str(caught.value)


def test_operator_without_a_rule():
    proto = model(
        [node("Rocket", ["a"], ["y"], domain="space"), gradient(["a"], ["d"], "y", ["a"])],
        {"a": [2]},
        {"d": [2]},
    )
    proto.opset_import.append(helper.make_opsetid("space", 1))
    with pytest.raises(NoRule, match=r"Rocket node 'y' \(space"):
        lower_gradients(proto)


def test_batch_normalization_that_a_rule_emits():
    """Its statistics are shared constants, which ONNX Runtime would overwrite: it gets buffers of its own."""
    from onnxgrad.rules.registry import registry
    from onnxgrad.rules.rule import General

    def double_norm(op, g, x):
        """y = x: g, by way of two normalizations that take each other away"""
        zero, one = op.const(np.zeros(2), x.dtype), op.const(np.ones(2), x.dtype)
        y, mean, var = op.BatchNormalization(x, one, zero, zero, one, training_mode=1, momentum=0.5, outputs=3)
        z, _, _ = op.BatchNormalization(x, one, one, zero, one, training_mode=1, momentum=0.5, outputs=3)
        late = op.Mul(zero, 0.5)  # as the running mean will be written
        return g * (z - y) + g * (mean + var) * 0.5 + late

    registry.set("Odd", General(double_norm, wrt=(0,)), "test.odd")
    proto = model(
        [node("Odd", ["a"], ["y"], domain="test.odd"), gradient(["a"], ["d"], "y", ["a"])],
        {"a": [4, 2]},
        {"d": [4, 2]},
    )
    proto.graph.value_info.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 2]))
    proto.opset_import.append(helper.make_opsetid("test.odd", 1))
    lowered = lower_gradients(proto)
    a = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)
    made = session(lowered, threads=2)
    want = 1 + 0.5 * (0.5 * a.mean(0) + 0.5 + 0.5 * a.var(0))
    for _ in range(5):
        np.testing.assert_allclose(made.run(None, {"a": a})[0], np.broadcast_to(want, (4, 2)), rtol=1e-5)
    norms = [n for n in lowered.graph.node if n.op_type == "BatchNormalization"]
    assert len({i for n in norms for i in n.input[3:5]}) == 4
    onnx.checker.check_model(lowered, full_check=True)
