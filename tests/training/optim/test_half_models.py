"""Models of float16 and bfloat16 train as they are: float32 weights beside theirs, on the CPU provider as well."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from onnxgrad import Trainer
from onnxgrad.runtime import Options, Session
from onnxgrad.training import predict
from onnxgrad.training.build.attach import attach
from onnxgrad.training.step.compile import compile_step

KINDS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
OPTIONS = Options(threads=1, target="portable")


def network(kind):
    """x [N, 1, 6, 6] → y [N, 3]: a convolution, a linear layer, a normalization, Gelu, a product."""
    rng = np.random.default_rng(0)
    dtype = helper.np_dtype_to_tensor_dtype(KINDS[kind])
    arrays = {
        "k": rng.standard_normal((4, 1, 3, 3)) * 0.3, "w": rng.standard_normal((4 * 36, 8)) * 0.1, "c": np.zeros(8),
        "scale": np.ones(8), "shift": np.zeros(8), "v": rng.standard_normal((8, 3)) * 0.3,
    }  # fmt: skip
    tensors = [
        helper.make_tensor(n, dtype, a.shape, a.astype(np.float16).astype(KINDS[kind]).tobytes(), raw=True)
        for n, a in arrays.items()
    ]
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "k"], ["a"], pads=[1, 1, 1, 1]), node("Relu", ["a"], ["b"]), node("Flatten", ["b"], ["f"]),
        node("Gemm", ["f", "w", "c"], ["h"]), node("LayerNormalization", ["h", "scale", "shift"], ["l"]),
        node("Gelu", ["l"], ["g"]), node("MatMul", ["g", "v"], ["y"]),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info(n, dtype, s) for n, s in (("x", ["N", 1, 6, 6]), ("y", ["N", 3]))]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def data(kind, rows=32):
    x = np.random.default_rng(1).standard_normal((rows, 1, 6, 6)).astype(np.float16)
    labels = np.digitize(x.astype(np.float32)[:, 0, :3].mean((1, 2)), [-0.1, 0.1])
    return {"x": x.astype(KINDS[kind]), "labels": labels.astype(np.int64)}


def trainer(kind, **options):
    return Trainer(network(kind), loss="cross_entropy", options=OPTIONS, **{"optimizer": "adam", **options})


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
def test_a_half_model_learns_as_its_float32_twin(kind, optimizer):
    curves = []
    for k in ("float32", kind):
        runner = trainer(k, optimizer=optimizer, learning_rate=0.02).machine
        curves.append([float(runner.step(data(k))["loss"]) for _ in range(15)])
    assert curves[1][-1] < 0.95 * curves[1][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.1)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_steps_smaller_than_16_bits_tell_apart_add_up(kind):
    found = trainer(kind, optimizer="sgd", learning_rate=1e-5)
    before = found.state()
    first = found.machine.step(data(kind)) and found.state()
    assert any(first[n].tobytes() == before[n].tobytes() for n in "kwv")  # too small a step to see
    for _ in range(400):
        found.machine.step(data(kind))
    state = found.state()
    for name in "kwv":
        held = state[f"{name}_master"]
        assert held.dtype == np.float32
        assert state[name].dtype == KINDS[kind]
        assert (held != before[f"{name}_master"]).any()
        np.testing.assert_array_equal(held.astype(KINDS[kind]), state[name])
    assert any(state[n].tobytes() != before[n].tobytes() for n in "kwv")


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_fit_evaluate_predict_save_and_go_on(kind, tmp_path):
    feeds = data(kind)
    found = trainer(kind, learning_rate=0.02, ema=0.9)
    before = found.evaluate(feeds)
    found.fit(feeds, epochs=4, batch_size=16, validation=feeds, progress=False)
    scores = found.evaluate(feeds)
    assert scores["loss"] < 0.95 * before["loss"]
    found.save(tmp_path / "m.onnx")
    saved = onnx.load(tmp_path / "m.onnx")
    assert {t.data_type for t in saved.graph.initializer} == {helper.np_dtype_to_tensor_dtype(KINDS[kind])}
    assert found.evaluation.file(tmp_path / "m.onnx", found.data(feeds))["loss"] == pytest.approx(scores["loss"], 1e-2)
    assert predict(tmp_path / "m.onnx", {"x": feeds["x"]})["y"].shape == (32, 3)
    rest = Trainer(found.training_model(), options=OPTIONS)
    for each in (found, rest):
        each.machine.step(feeds)
    expected = found.state()
    assert all(array.tobytes() == expected[name].tobytes() for name, array in rest.state().items())


def test_bfloat16_is_that_of_rounding_after_every_node():
    """Of two layers, against numpy in float32 with every result rounded to bfloat16."""
    model = network("bfloat16")
    (x,) = (data("bfloat16")["x"],)
    asked = ir.from_proto(model)
    for node in asked.graph:
        if node.op_type in ("Flatten", "Gemm"):
            node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.BFLOAT16), ir.Shape([None, None])
            asked.graph.outputs.append(node.outputs[0])
    found = Session(asked, OPTIONS).run({"x": x})
    weights = {t.name: onnx.numpy_helper.to_array(t).astype(np.float32) for t in model.graph.initializer}
    assert found["f"].dtype == KINDS["bfloat16"]
    expected = (found["f"].astype(np.float32) @ weights["w"] + weights["c"]).astype(KINDS["bfloat16"])
    np.testing.assert_allclose(found["h"].astype(np.float32), expected.astype(np.float32), rtol=2**-7)


def test_the_state_of_a_half_weight_has_its_name():
    step = compile_step(attach(network("float16"), loss="cross_entropy", optimizer="adam", trainable=["v"]))
    assert {"v", "v_master", "v_mean", "v_square"} <= step.state.keys()
    assert step.state["v_mean"].initial.dtype == ir.DataType.FLOAT
