"""A new head reads what it is told to, and the model below it stays what it was."""

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, attach, with_head
from tests.training.models import blobs

NET = """
    <ir_version: 10, opset_import: ["": 21]>
    net (float[N, 6] x) => (float[N, 4] h, float[N, M] open, int64[N] best)
    <float[6, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1, 1,1,0,0, 0,0,1,1}, int64[2] shape = {0, -1}> {
        h = MatMul (x, w)
        open = Reshape (h, shape)
        best = ArgMax <axis = 1, keepdims = 0> (h)
    }"""


def net():
    return onnx.parser.parse_model(NET)


def test_what_it_computes():
    model = with_head(net(), 3, of="h")
    onnx.checker.check_model(model, full_check=True)
    held = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    x = blobs()["x"]
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(y, x @ held["w"] @ held["logits_weight"] + held["logits_bias"], rtol=1e-5, atol=1e-5)
    assert np.abs(held["logits_weight"]).max() <= 0.5
    assert [v.name for v in model.graph.output] == ["logits"]
    assert [n.op_type for n in model.graph.node] == ["MatMul", "MatMul", "Add"]
    again = {t.name: onnx.numpy_helper.to_array(t) for t in with_head(net(), 3, of="h", seed=1).graph.initializer}
    assert (again["logits_weight"] != held["logits_weight"]).all()


def test_it_averages_over_places():
    text = "<ir_version: 10, opset_import: ['': 21]> g (float[N, 5, H, W] x) => (float[N, 5, H, W] y) { y = Relu (x) }"
    model = with_head(onnx.parser.parse_model(text.replace("'", '"')), 2)
    held = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    x = np.random.default_rng(0).standard_normal((3, 5, 4, 2), np.float32)
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    expected = np.maximum(x, 0).mean((2, 3)) @ held["logits_weight"] + held["logits_bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_it_learns():
    trainer = Trainer(attach(with_head(net(), 3, of="h"), learning_rate=0.1), options=Options(threads=1))
    history = trainer.fit(blobs(), epochs=10, validation=blobs(seed=1))
    assert history.epochs[-1]["validation_accuracy"] > 0.9


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"of": "hh"}, UnknownName, "did you mean 'h'"),
        ({"of": "best"}, BadInput, "'best': it holds INT64"),
        ({"of": "open"}, BadInput, "'open': the number of its features"),
        ({"of": "h", "name": "w"}, BadInput, "has a value 'w' already"),
        ({"outputs": 0}, BadInput, "at least 1 number"),
    ],
)
def test_what_cannot_be(options, error, words):
    with pytest.raises(error, match=words):
        with_head(net(), **({"outputs": 3} | options))


def test_several_outputs_are_ambiguous():
    model = net()
    model.graph.output.append(onnx.helper.make_tensor_value_info("h2", 1, ["N", 4]))
    model.graph.node.append(onnx.helper.make_node("Relu", ["h"], ["h2"]))
    with pytest.raises(BadInput, match="say which value the head shall read"):
        with_head(model, 3)
