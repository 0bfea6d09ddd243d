"""Operators on stored integers train: the saved file has the same operators, and runs with the same kernels."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from onnxgrad.model_io.save import to_proto
from onnxgrad.training import Trainer
from onnxgrad.training.quantization.place import opened_floats
from tests.training.models import blobs, classifier
from tests.training.quantization.models import network, rows, scores


class Rows(quantization.CalibrationDataReader):
    """Every batch once."""

    def __init__(self, data: dict[str, np.ndarray]) -> None:
        self.left = iter([{"x": data["x"]}])

    def get_next(self):
        return next(self.left, None)


def pooled() -> onnx.ModelProto:
    """A network whose quantized numbers go through a MaxPool, a Transpose and a Flatten."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        network (float[N, 2, 6, 6] x) => (float[N, 3] y) {
            c = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)  r = Relu (c)
            p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)  t = Transpose <perm = [0, 2, 3, 1]> (p)
            f = Flatten (t)  y = Gemm (f, w2, b2)
        }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (4, 2, 3, 3), "b1": (4,), "w2": (36, 3), "b2": (3,)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 2, name))
    return model


def static(model: onnx.ModelProto, data: dict[str, np.ndarray], path, **options) -> onnx.ModelProto:
    quantization.quantize_static(
        to_proto(opened_floats(model)), path, Rows(data), quant_format=quantization.QuantFormat.QOperator, **options
    )
    return onnx.load(path)


def dynamic(model: onnx.ModelProto, path) -> onnx.ModelProto:
    quantization.quantize_dynamic(to_proto(opened_floats(model)), path)
    return onnx.load(path)


def recurrent() -> onnx.ModelProto:
    """float32[N, 4, 6] x → LSTM → MatMul → float32[N, 3] y"""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        network (float[N, 4, 6] x) => (float[N, 3] y) {
            t = Transpose <perm = [1, 0, 2]> (x)
            s, h = LSTM <hidden_size = 8> (t, w, r, b)  q = Squeeze (h, axis)  y = MatMul (q, head)
        }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w": (1, 32, 6), "r": (1, 32, 8), "b": (1, 64), "head": (8, 3)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 3, name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axis"))
    return model


def packed(points: bool, size: int = 16) -> onnx.ModelProto:
    """x[N, 32] → MatMulNBits → Relu → MatMul → y[N, 3]"""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        network (float[N, 32] x) => (float[N, 3] y) { h = MatMul (x, w1)  r = Relu (h)  y = MatMul (r, w2) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (32, 24), "w2": (24, 3)}.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 4, name))
    made = MatMulNBitsQuantizer(model, block_size=size, is_symmetric=not points, nodes_to_exclude=["last"])
    made.process()
    return made.model.model


def vectors(count: int = 96) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, count)
    x = np.random.default_rng(5).standard_normal((3, 32))[labels] + 0.3 * rng.standard_normal((count, 32))
    return {"x": x.astype(np.float32), "labels": labels}


def sequences(count: int = 96) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, count)
    x = np.random.default_rng(5).standard_normal((3, 4, 6))[labels] + 0.3 * rng.standard_normal((count, 4, 6))
    return {"x": x.astype(np.float32), "labels": labels}


def cast(columns: bool) -> onnx.ModelProto:
    """x[N, 32] → MatMul → Relu → MatMul → y[N, 3], of matrices that are cast and scaled by columns, or as a whole."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 17]>
        network (float[N, 32] x) => (float[N, 3] y) {
            c1 = Cast <to = 1> (q1)  w1 = Mul (c1, s1)  h = MatMul (x, w1)  r = Relu (h)
            c2 = Cast <to = 1> (q2)  w2 = Mul (s2, c2)  z = MatMul (r, w2)
            m = Cast <to = 1> (mask)  p = Mul (m, s2)  y = Add (z, p)
        }""")
    rng = np.random.default_rng(0)
    for k, shape in enumerate(((32, 24), (24, 3)), 1):
        q = rng.integers(-127, 128, shape).astype(np.int8)
        s = rng.uniform(0.002, 0.004, (1, shape[1]) if columns and k == 1 else ()).astype(np.float32)
        model.graph.initializer.extend([numpy_helper.from_array(q, f"q{k}"), numpy_helper.from_array(s, f"s{k}")])
    model.graph.initializer.append(numpy_helper.from_array(np.int8([[0, 1, 0]]), "mask"))  # no weight of a layer
    return model


CASES = {
    "cast and scaled": lambda path: (cast(columns=False), vectors()),
    "cast and scaled by columns": lambda path: (cast(columns=True), vectors()),
    "per tensor": lambda path: (static(network(norm=False), rows(), path), rows()),
    "per channel": lambda path: (static(network(norm=False), rows(), path, per_channel=True), rows()),
    "numbers that are passed on": lambda path: (static(pooled(), rows(), path), rows()),
    "rows": lambda path: (static(classifier(), blobs(), path), blobs()),
    "dynamic": lambda path: (dynamic(classifier(), path), blobs()),
    "dynamic convolutions": lambda path: (dynamic(pooled(), path), rows()),
    "4 bits": lambda path: (packed(points=False), vectors()),
    "4 bits with zero points": lambda path: (packed(points=True), vectors()),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_the_saved_file_has_the_same_operators(name, tmp_path):
    model, data = CASES[name](tmp_path / "q.onnx")
    feeds = {"x": data["x"]}
    trainer = Trainer(model, loss="cross_entropy", optimizer="adam", learning_rate=3e-3)
    same = trainer.inference_model()
    kinds = Counter((n.domain, n.op_type) for n in model.graph.node)
    assert Counter((n.domain, n.op_type) for n in same.graph.node) == kinds
    before = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    for tensor in same.graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), before[tensor.name])
    np.testing.assert_array_equal(scores(same, feeds), scores(model, feeds))
    first = trainer.evaluate(data)["loss"]
    trainer.fit(data, epochs=8)
    trained = trainer.inference_model()
    assert Counter((n.domain, n.op_type) for n in trained.graph.node) == kinds
    assert trainer.evaluate(data)["loss"] < 0.8 * first
    after = {t.name: numpy_helper.to_array(t) for t in trained.graph.initializer}
    changed = {n for n, a in after.items() if a.dtype.kind in "iu" and (a != before[n]).any()}
    assert len(changed) >= (1 if "4 bits" in name else 2)
    assert {n: a.dtype for n, a in after.items()} == {n: before[n].dtype for n in after}


def test_packed_matrices_that_do_not_train_stay_packed():
    trainer = Trainer(packed(points=False), loss="cross_entropy", freeze=["w1*"])
    assert "MatMulNBits" in [n.op_type for n in trainer.step.model.graph]
    trainer.fit(vectors(), epochs=1)


@pytest.mark.parametrize("columns", [False, True])
def test_a_recurrence_in_integers(columns, tmp_path):
    model, data = dynamic_lstm(columns), sequences()
    trainer = Trainer(model, loss="cross_entropy", optimizer="adam", learning_rate=1e-2)
    np.testing.assert_array_equal(scores(trainer.inference_model(), {"x": data["x"]}), scores(model, {"x": data["x"]}))
    assert {"w", "r", "b"} <= set(trainer.step.state)
    trainer.fit(data, epochs=15)
    trained = trainer.inference_model()
    assert [n.op_type for n in trained.graph.node] == [n.op_type for n in model.graph.node]
    right = scores(trained, {"x": data["x"]}).argmax(1) == data["labels"]
    assert right.mean() > 0.9


def dynamic_lstm(columns: bool) -> onnx.ModelProto:
    """`recurrent` with the weights of its LSTM in integers, one scale for all, or one for each column."""
    model = recurrent()
    held = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    operands = ["t"]
    for name in ("w", "r"):
        array = held.pop(name).transpose(0, 2, 1)
        scale = np.abs(array).max((1,)) / 127 if columns else np.abs(array).max().reshape(1) / 127
        held[f"{name}_quantized"] = np.rint(array / (scale[:, None] if columns else scale)).astype(np.int8)
        held[f"{name}_scale"], held[f"{name}_zero"] = scale.astype(np.float32), np.zeros(scale.shape, np.int8)
        operands.append(f"{name}_quantized")
    operands += ["b", "", "", "", "", "w_scale", "w_zero", "r_scale", "r_zero"]
    node = helper.make_node("DynamicQuantizeLSTM", operands, ["s", "h"], domain="com.microsoft", hidden_size=8)
    model.graph.node[1].CopyFrom(node)
    del model.graph.initializer[:]
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in held.items())
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model
