"""Adapters on parts of fused weights: which outputs are queries, keys and values, and that nothing else moves."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy

from onnxgrad import LoRA, Trainer, load_adapter
from onnxgrad.training import attach
from tests.training.adapters.models import with_weights
from tests.training.adapters.test_lora import refusal, scores

#: How the outputs of a weight [8, 24] become queries, keys and values: nodes, and which outputs are the values.
FORMS = {
    "split": ("q, k, v = Split <axis = -1, num_outputs = 3> (y)", range(16, 24)),
    "split after a bias": ("z = Add (y, bias)  q, k, v = Split <axis = 2, num_outputs = 3> (z)", range(16, 24)),
    "slices": (
        """zero = Constant <value_ints = [0]> ()  one = Constant <value_ints = [8]> ()
        two = Constant <value_ints = [16]> ()  end = Constant <value_ints = [9223372036854775807]> ()
        last = Constant <value_ints = [2]> ()
        q = Slice (y, zero, one, last)  k = Slice (y, one, two, last)  v = Slice (y, two, end, last)""",
        range(16, 24),
    ),
    "reshaped": (
        """sizes = Constant <value_ints = [0, 0, 3, 2, 4]> ()  back = Constant <value_ints = [0, 0, 8]> ()
        r = Reshape (y, sizes)  t = Transpose <perm = [2, 0, 1, 3, 4]> (r)
        i = Constant <value_int = 0> ()  j = Constant <value_int = 1> ()  l = Constant <value_int = 2> ()
        q4 = Gather <axis = 0> (t, i)  k4 = Gather <axis = 0> (t, j)  v4 = Gather <axis = 0> (t, l)
        q = Reshape (q4, back)  k = Reshape (k4, back)  v = Reshape (v4, back)""",
        range(16, 24),
    ),
    "by heads": (
        """sizes = Constant <value_ints = [0, 0, 2, 12]> ()  back = Constant <value_ints = [0, 0, 8]> ()
        r = Reshape (y, sizes)  q4, k4, v4 = Split <axis = 3, num_outputs = 3> (r)
        q = Reshape (q4, back)  k = Reshape (k4, back)  v = Reshape (v4, back)""",
        [8, 9, 10, 11, 20, 21, 22, 23],
    ),
}
REST = """
    turned = Transpose <perm = [0, 2, 1]> (k)  alike = MatMul (q, turned)  shares = Softmax (alike)
    mixed = MatMul (shares, v)  axes = Constant <value_ints = [1]> ()
    scores = ReduceMean <keepdims = 0> (mixed, axes)
"""
DATA = {
    "x": np.random.default_rng(0).standard_normal((16, 5, 8)).astype(np.float32),
    "labels": np.random.default_rng(1).integers(0, 8, 16),
}
FEEDS = {"x": DATA["x"]}


def fused(form="split", product="y = MatMul (x, c_attn)"):
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        fused (float[N, 5, 8] x) => (float[N, 8] scores) {{ {product}  {FORMS[form][0]} {REST} }}"""
    return with_weights(text, {"c_attn": (8, 24)} | ({"bias": (24,)} if "bias" in FORMS[form][0] else {}))


def trainer(model, *targets, rank=2, **asked):
    adapter = LoRA(rank=rank, targets=targets, **asked)
    return Trainer(model, loss="cross_entropy", optimizer="adam", learning_rate=0.05, adapter=adapter)


def trained(model, *targets, **asked):
    found = trainer(model, *targets, **asked)
    rounding = 1e-6 if asked.get("dora") else 0
    np.testing.assert_allclose(scores(found.adapted_model(), FEEDS), scores(model, FEEDS), rtol=0, atol=rounding)
    found.fit(DATA, epochs=4, batch_size=8)
    assert found.history.epochs[-1]["loss"] < found.history.epochs[0]["loss"]
    return found


def moved(found, model):
    """The columns of the weight that have changed."""
    new = found.inference_ir().graph.initializers["c_attn"].const_value.numpy()
    (old,) = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "c_attn"]
    return np.flatnonzero((new != old).any(0)).tolist()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("form", FORMS)
def test_values_alone(form, dora):
    model = fused(form)
    found = trained(model, "c_attn[v]", dora=dora)
    assert moved(found, model) == list(FORMS[form][1])
    assert {n for n, t in found.step.state.items() if t.kind == "parameter"} == {
        f"c_attn[v].lora_{end}" for end in ("A", "B", *(["magnitude_vector"] if dora else []))
    }
    np.testing.assert_allclose(
        scores(found.adapted_model(), FEEDS), scores(found.inference_ir(), FEEDS), rtol=0, atol=1e-5
    )
    assert np.abs(scores(found.inference_ir(), FEEDS) - scores(model, FEEDS)).max() > 0.05


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("form", ["split after a bias", "by heads"])
def test_queries_and_values_saved_and_loaded(form, dora, tmp_path):
    model = fused(form)
    found = trained(model, "c_attn[q,v]", dora=dora)
    whole = scores(found.inference_ir(), FEEDS)
    assert len(moved(found, model)) == 16
    assert set(FORMS[form][1]) < set(moved(found, model))
    found.save_adapter(tmp_path, switchable=True)
    np.testing.assert_allclose(scores(load_adapter(model, tmp_path, merge=True), FEEDS), whole, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(scores(load_adapter(model, tmp_path), FEEDS), scores(found.adapted_model(), FEEDS))
    run = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(tmp_path / "adapter.onnx_adapter"))
    options.add_active_adapter(adapter)
    np.testing.assert_allclose(run.run(None, FEEDS)[0], scores(model, FEEDS), rtol=0, atol=1e-6 if dora else 0)
    np.testing.assert_allclose(run.run(None, FEEDS, options)[0], whole, rtol=0, atol=1e-5)
    again = Trainer(load_adapter(model, tmp_path), loss="cross_entropy", learning_rate=0.05)
    again.fit(DATA, epochs=1, batch_size=8)
    assert moved(again, model) == moved(found, model)


def test_what_peft_gets_is_one_pair_of_factors_in_blocks(tmp_path):
    model = fused("by heads")
    found = trained(model, "c_attn[q,v]", alpha=3)
    found.save_adapter(tmp_path)
    held = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    a, b = (held[f"base_model.model.c_attn.lora_{n}.weight"] for n in "AB")
    assert a.shape == (4, 8)
    assert b.shape == (24, 4)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["rank_pattern"] == {"c_attn": 4}
    scale = settings["alpha_pattern"]["c_attn"] / 4
    assert scale == 3 / 2
    new = found.inference_ir().graph.initializers["c_attn"].const_value.numpy()
    (old,) = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "c_attn"]
    np.testing.assert_allclose(old + scale * (b @ a).T, new, rtol=0, atol=1e-6)


def test_lengths_of_a_part_are_those_of_its_columns(tmp_path):
    """DoRA's formula on the columns of the part, by the file for PEFT; other lengths are those of the weight."""
    model = fused("by heads")
    found = trained(model, "c_attn[q,v]", dora=True)
    found.save_adapter(tmp_path)
    held = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    a, b = (held[f"base_model.model.c_attn.lora_{n}.weight"].astype(np.float64) for n in "AB")
    m = held["base_model.model.c_attn.lora_magnitude_vector"].astype(np.float64)
    (old,) = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "c_attn"]
    direction = old + 2 * (b @ a).T
    new = found.inference_ir().graph.initializers["c_attn"].const_value.numpy()
    np.testing.assert_allclose(m / np.linalg.norm(direction, axis=0) * direction, new, rtol=0, atol=1e-6)
    keys = [i for i in range(24) if i not in moved(found, model)]
    np.testing.assert_allclose(m[keys], np.linalg.norm(old[:, keys], axis=0), rtol=1e-6)
    assert np.abs(m - np.linalg.norm(old, axis=0)).max() > 0.01


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_other_outputs_stay_to_the_last_bit(dora):
    """Also where the node itself adds a bias."""
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        biased (float[N, 8] x) => (float[N, 6] y) { y = Gemm <beta = 0.5> (x, w, bias) }""",
        {"w": (8, 6), "bias": (6,)},
    )
    data = {"x": DATA["x"][:, 0], "labels": DATA["labels"] % 6}
    found = trainer(model, "w[1:3]", "w[4:5]", rank=1, dora=dora)
    found.fit(data, epochs=3, batch_size=8)
    feeds = {"x": data["x"]}
    before, after = scores(model, feeds), scores(found.adapted_model(), feeds)
    assert np.flatnonzero((before != after).any(0)).tolist() == [1, 2, 4]
    np.testing.assert_allclose(after, scores(found.inference_ir(), feeds), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_numbers_and_gemm_and_left(dora):
    """A Gemm that is turned, and a weight that is the left operand."""
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        both (float[N, 8] x) => (float[N, 6] scores) {
            y = Gemm <transB = 1, alpha = 0.5> (x, turned)
            t = Transpose (y)
            z = MatMul (left, t)
            scores = Transpose (z)
        }""",
        {"turned": (12, 8), "left": (6, 12)},
    )
    data = {"x": DATA["x"][:, 0], "labels": DATA["labels"] % 6}
    found = trainer(model, "turned[4:8]", "turned[10:12]", "left[2:5]", dora=dora)
    found.fit(data, epochs=3, batch_size=8)
    whole = found.inference_ir()
    feeds = {"x": data["x"]}
    np.testing.assert_allclose(scores(found.adapted_model(), feeds), scores(whole, feeds), rtol=0, atol=1e-5)
    for name, rows in {"turned": [4, 5, 6, 7, 10, 11], "left": [2, 3, 4]}.items():
        (old,) = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name]
        new = whole.graph.initializers[name].const_value.numpy()
        assert np.flatnonzero((new != old).any(1)).tolist() == rows


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_channels_of_a_convolution(dora, tmp_path):
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        channels (float[N, 4, 5, 5] image) => (float[N, 2] scores) {
            y = Conv <pads = [1, 1, 1, 1]> (image, qkv, bias)
            q, k, v = Split <axis = 1, num_outputs = 3> (y)
            p = Mul (q, k)
            r = Tanh (p)
            s = Mul (r, v)
            axes = Constant <value_ints = [2, 3]> ()
            scores = ReduceMean <keepdims = 0> (s, axes)
        }""",
        {"qkv": (6, 4, 3, 3), "bias": (6,)},
    )
    rng = np.random.default_rng(0)
    data = {"image": rng.standard_normal((16, 4, 5, 5)).astype(np.float32), "labels": rng.integers(0, 2, 16)}
    found = trainer(model, "qkv[k]", "qkv[0:1]", rank=1, dora=dora)
    found.fit(data, epochs=3, batch_size=8)
    feeds = {"image": data["image"]}
    whole = found.inference_ir()
    np.testing.assert_allclose(scores(found.adapted_model(), feeds), scores(whole, feeds), rtol=0, atol=1e-5)
    (old,) = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "qkv"]
    new = whole.graph.initializers["qkv"].const_value.numpy()
    assert np.flatnonzero((new != old).any((1, 2, 3))).tolist() == [0, 2, 3]
    found.save_adapter(tmp_path)
    np.testing.assert_allclose(
        scores(load_adapter(model, tmp_path, merge=True), feeds), scores(whole, feeds), rtol=0, atol=1e-6
    )


def test_a_weight_that_is_named_with_parts_has_only_those():
    model = fused()
    assert len(moved(trained(model, "attention", "c_attn[q]"), model)) == 8


def test_refusals():
    def asked(*targets, model=None, rank=2):
        return lambda: attach(model or fused(), adapter=LoRA(rank=rank, targets=targets))

    assert "did you mean 'c_attn'" in refusal(asked("c_atn[q]"))
    assert "'c_attn' has 24 outputs; 16:32 are none of them" in refusal(asked("c_attn[16:32]"))
    assert "8:8 are none of them" in refusal(asked("c_attn[8:8]"))
    assert "[4:12] and [q] of 'c_attn' overlap" in refusal(asked("c_attn[q,4:12]"))
    assert "leaves out a part" in refusal(asked("c_attn", "!c_attn[k]"))
    assert "rank 9 is larger than that of 'c_attn', which is 8 × 8 at [q]" in refusal(asked("c_attn[q]", rank=9))
    halves = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        halves (float[N, 8] x) => (float[N, 6] scores) {
            y = MatMul (x, w)  a, b = Split <axis = -1, num_outputs = 2> (y)  scores = Mul (a, b)
        }""",
        {"w": (8, 12)},
    )
    assert "not seen to be queries, keys and values" in refusal(asked("w[q]", model=halves))
    words = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        words (int64[N] x) => (float[N, 12] scores) { y = Gather (w, x)  scores = MatMul (y, v) }""",
        {"w": (9, 12), "v": (12, 12)},
    )
    assert "'w' is an embedding, which is adapted as a whole" in refusal(asked("w[0:3]", model=words))
