"""A new head reads what it is told to, and the model below it stays what it was."""

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad.errors import BadInput, UnknownName
from onnxgrad.runtime import Options
from onnxgrad.training import LoRA, Trainer, attach, with_head
from onnxgrad.training.build.heads import placed_head
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


def test_a_head_takes_the_place_of_one_with_its_names():
    older = with_head(net(), 5, of="h")  # ends in 'logits', as most exported classifiers do
    model = with_head(older, 2)
    onnx.checker.check_model(model, full_check=True)
    held = {t.name: list(t.dims) for t in model.graph.initializer}
    assert held == {"w": [6, 4], "logits_weight": [4, 2], "logits_bias": [2]}
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(["logits"], {"x": blobs()["x"]})
    assert y.shape == (len(blobs()["x"]), 2)
    with pytest.raises(BadInput, match="has a value 'logits_weight' already"):
        with_head(older, 2, of="logits")


def test_a_head_reads_an_output_of_its_name():
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[N, 5] x) => (float[N, 5] logits) { logits = Relu (x) }'
    model = with_head(onnx.parser.parse_model(text), 3, of="logits")
    onnx.checker.check_model(model, full_check=True)
    assert [v.name for v in model.graph.output] == ["logits"]


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
    ("targets", "rank", "whole"), [("all", 3, True), (["w"], 4, True), (["w", "logits_weight"], 2, False)]
)
def test_it_trains_as_a_whole_beside_adapters(targets, rank, whole):
    """Unless it is asked for by name: a random head would stay what it is."""
    model = attach(with_head(net(), 3, of="h"), adapter=LoRA(rank=rank, targets=targets))
    bound = {b.value for b in model.training_info[0].update_binding} | {
        b.key for b in model.training_info[0].update_binding
    }
    assert {"w.lora_A", "w.lora_B"} <= bound
    assert ("logits_weight" in bound, "logits_weight.lora_A" in bound) == (whole, not whole)
    assert "logits_bias" in bound
    assert not [p for p in model.metadata_props if p.key == "onnxgrad.head"]  # a head that was trained is not new


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


#: Models of x [N, 6]: what they compute, what a head reads by default, and its size.
ENDS = {
    "scores": ("h = Relu (a)  z = MatMul (h, w)", "h", 4),
    "probabilities": ("h = Relu (a)  y = Gemm (h, w, b)  z = Softmax (y)", "h", 4),
    "renamed": ("h = Relu (a)  y = MatMul (h, w)  s = Add (y, b)  p = Softmax (s)  z = Identity (p)", "h", 4),
    "temperature": ("h = Relu (a)  y = MatMul (h, w)  s = Div (y, t)  z = Sigmoid (s)", "h", 4),
    "two classes": (
        "h = Relu (a)  y = MatMul (h, w)  p = Sigmoid (y)  q = Sub (t, p)  z = Concat <axis = 1> (q, p)",
        "h",
        4,
    ),
    "hidden sigmoid": ("h = Sigmoid (a)  z = MatMul (h, w)", "h", 4),
    "turned weight": ("h = Relu (a)  wt = Transpose (v)  z = MatMul (h, wt)", "h", 4),
    "features": ("h = MatMul (a, w)  z = Tanh (h)", "z", 3),
    "residual": ("h = MatMul (a, w2)  z = Add (a, h)", "z", 4),
    "convolution": (
        "i = Unsqueeze (a, last)  h = Conv (i, k)  g = GlobalAveragePool (h)  z = Squeeze (g, last)",
        "i",
        4,
    ),
    "tokens": ("i = Unsqueeze (a, first)  h = Relu (i)  y = MatMul (h, w)  z = Softmax (y)", "h", 4),
}


def ending(text):
    made = "N, 1, M" if "Unsqueeze (a, first)" in text else "N, M"
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[N, 6] x) => (float[{made}] z) <float[1] t = {{1}}, int64[1] last = {{2}}, int64[1] first = {{1}}> {{
            a = MatMul (x, w1)  {text}
        }}""")
    shapes = {"w1": (6, 4), "w": (4, 3), "v": (3, 4), "w2": (4, 4), "b": (3,), "k": (3, 4, 1)}
    draw = np.random.default_rng(0)
    held = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in held.items())
    return model


@pytest.mark.parametrize("case", ENDS)
def test_by_default_it_takes_the_place_of_the_last_linear_layer(case):
    text, reads, size = ENDS[case]
    model, where = placed_head(ending(text), 5)
    onnx.checker.check_model(model, full_check=True)
    held = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    assert held["logits_weight"].shape == (size, 5)
    assert where.startswith(f"the head reads {reads!r}, {size} features")
    assert ("last linear layer" in where) == (reads != "z")
    names = {name for n in model.graph.node for name in n.input}
    assert reads in names
    assert {"w", "v", "k"}.isdisjoint(names) or reads == "z"
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": blobs()["x"][:7]})
    assert y.shape == ((7, 1, 5) if case == "tokens" else (7, 5))


@pytest.mark.parametrize("of", [None, "z", "p"])
def test_probabilities_are_no_features(of):
    """Also where no linear layer is found before them."""
    text = "y = MatMul (a, w)  p = Softmax (y)  z = Identity (p)" if of else "y = Tanh (a)  z = Softmax (y)"
    with pytest.raises(
        BadInput, match="(?s)holds the probabilities that the model ends in.*take " + ("'a'" if of else "")
    ):
        with_head(ending(text), 3, of=of)
    if of:
        assert with_head(ending(text), 3, of="y").graph.node[-1].op_type == "Add", "scores may be features"
