"""Weights that stay integers times their scales: rounded by chance, without bias, and the same in every run."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from onnxruntime import quantization

from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import prune
from onnxgrad.model_io.save import to_proto
from onnxgrad.runtime import Session
from onnxgrad.training import Trainer
from onnxgrad.training.quantization.place import opened_floats
from onnxgrad.training.quantization.stochastic_rounding import COUNT, round_by_chance
from tests.training.models import classifier
from tests.training.quantization.models import network, pair, rows
from tests.training.quantization.test_operators import Rows, packed, static, vectors


def roundings(axis: int, scale: np.ndarray, x: np.ndarray, times: int) -> np.ndarray:
    """The roundings of x at several counts."""
    model = ir.from_proto(pair("int8", opset=21))
    graph = model.graph
    node = next(n for n in graph if n.inputs and n.inputs[0].name == "w")
    node.attributes["axis"] = ir.AttrInt64("axis", axis)
    node.replace_input_with(1, graph.initializers["w_scale"])
    graph.initializers["w_scale"].const_value = ir.tensor(scale, name="w_scale")
    builder = Builder(graph)
    new, count = (ir.Value(name=n, type=ir.TensorType(t), shape=ir.Shape(s)) for n, t, s in (
        ("new", ir.DataType.FLOAT, x.shape), ("count", ir.DataType.INT64, ())))  # fmt: skip
    graph.inputs[:] = [new, count]
    result = round_by_chance(builder, Var(builder, new), graph.initializers["w"], Var(builder, count), 3)
    graph.outputs[:] = [result.value]
    prune(graph)
    session = Session(model)
    name = result.value.name
    return np.stack([session.run({"new": x, "count": np.array(k)})[name] for k in range(times)])


@pytest.mark.parametrize("axis", [0, 1])
def test_the_mean_of_roundings_is_the_value(axis):
    x = np.float32([[0.31, -0.07], [0.002, 0.1], [-0.249, 0.0]])
    scale = np.float32([0.1, 0.02, 0.05][: x.shape[axis]])
    steps = np.float64(scale).reshape(-1, 1) if axis == 0 else np.float64(scale)
    found, times = roundings(axis, scale, x, 400).astype(np.float64) / steps, 400
    assert np.abs(found - np.rint(found)).max() < 1e-4  # multiples of the scale
    assert np.abs(found - x / steps).max() < 1 + 1e-4  # the neighbours
    share = x / steps - np.floor(x / steps)
    error = np.sqrt(share * (1 - share) / times) + 1e-4
    assert (np.abs(found.mean(0) - x / steps) < 4 * error).all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["QDQ", "operators", "4 bits"])
def test_integers_learn(kind, tmp_path):
    model, data = {
        "QDQ": lambda: (opened_qdq(tmp_path), rows()),
        "operators": lambda: (static(network(norm=False), rows(), tmp_path / "q.onnx"), rows()),
        "4 bits": lambda: (packed(points=True), vectors()),
    }[kind]()
    settings = {"loss": "cross_entropy", "optimizer": "sgd", "learning_rate": 0.02, "freeze": ["*scale*"]}
    trainers = [Trainer(model, integers="stochastic", **settings) for _ in range(2)]
    first = trainers[0].evaluate(data)["loss"]
    for trainer in trainers:
        trainer.fit(data, epochs=6)
    assert trainers[0].evaluate(data)["loss"] < 0.9 * first
    states = [t.state() for t in trainers]
    assert states[0][COUNT] == 18
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name])
    saved = {t.name: numpy_helper.to_array(t) for t in trainers[0].inference_model().graph.initializer}
    before = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    assert any((saved[n] != a).any() for n, a in before.items() if a.dtype.kind in "iu" and a.size > 20)


def opened_qdq(folder) -> onnx.ModelProto:
    quantization.quantize_static(to_proto(opened_floats(network())), folder / "q.onnx", Rows(rows()), per_channel=True)
    return onnx.load(folder / "q.onnx")


def test_refusals():
    with pytest.raises(BadInput, match="store weights as integers"):
        Trainer(classifier(), loss="cross_entropy", integers="stochastic")
    with pytest.raises(BadInput, match="floats or stochastic"):
        Trainer(classifier(), loss="cross_entropy", integers="int8")
