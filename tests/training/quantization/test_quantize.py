"""Quantized, trained, folded and saved: what stock ONNX Runtime computes is what training evaluated."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad import BadInput, LoRA, UnknownName, quantize
from onnxgrad.model_io.save import to_proto
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, attach
from onnxgrad.training.loop.quantize import quantized
from onnxgrad.training.quantization.fold import folded
from onnxgrad.training.quantization.masters import with_masters
from onnxgrad.training.quantization.norms import fold_norms
from onnxgrad.training.quantization.place import Scheme
from tests.training.models import blobs, classifier
from tests.training.quantization.models import network, pair, proto, rows, scores

DATA = rows()
FEEDS = {"x": DATA["x"]}
SCHEMES = {
    "int8": {},
    "per tensor": {"per_channel": False, "activations": "int8"},
    "int4": {"weights": "int4"},
    "entropy": {"calibration": "entropy"},
}


def stored(model) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in proto(model).graph.initializer}


def kernels(model, place) -> list[str]:
    """The operators that ONNX Runtime runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(place / "optimized.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    return [n.op_type for n in onnx.load(place / "optimized.onnx").graph.node]


def _showing(model, name):
    """`model` with the quantized numbers called `name` as its output."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    node = next(n for n in shown.graph.node if n.output[0] == name)
    kind = next(t.data_type for t in shown.graph.initializer if t.name == node.input[2])
    shown.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    return shown


def trained(model, epochs=2, **asked):
    settings = {"loss": "cross_entropy", "optimizer": "adam", "learning_rate": 0.01} | asked
    trainer = Trainer(model, **settings)
    trainer.fit(DATA, epochs=epochs, batch_size=16)
    return trainer


@pytest.fixture(scope="module")
def floats():
    """Trained in floats, by standard operators: how far rounding to integers moves it depends on its last bits."""
    return to_proto(trained(network(), epochs=20, options=Options(target="portable")).inference_ir())


def test_what_no_node_reads_is_left_out_without_a_word(floats, capfd):
    model = onnx.ModelProto.FromString(floats.SerializeToString())
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.int64), "spare"))
    assert "spare" not in stored(quantize(model, DATA, rows=8))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("calibration", ["entropy", "percentile"])
def test_histograms_of_any_number_of_rows(floats, calibration, capsys):
    """The last batch may be smaller than the others; equal rows in two batches have the scales of one."""
    some = {name: array[:33] for name, array in DATA.items()}
    assert len(stored(quantize(floats, some, calibration=calibration))) > len(stored(floats))
    first = {name: array[:32] for name, array in DATA.items()}
    twice = {name: np.concatenate([array, array]) for name, array in first.items()}
    once, again = (stored(quantize(floats, data, calibration=calibration)) for data in (first, twice))
    for name, array in once.items():
        np.testing.assert_array_equal(array, again[name])
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def integers():
    """A product of integers as `quantize_dynamic` writes it."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        integers (float[N, 4] x) => (float[N, 3] y)
        <int8[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float step = {0.01}, float[3] bias = {1, 2, 3}> {
            q, scale, point = DynamicQuantizeLinear (x)
            p = MatMulInteger (q, w, point)
            f = Cast <to = 1> (p)
            both = Mul (scale, step)
            z = Mul (f, both)
            y = Add (z, bias)
        }""")
    model.graph.initializer[1].name = model.graph.node[3].input[1] = "fc.weight_scale"  # as modules have parameters
    return model


def test_stored_integers_train_with_their_scale(integers):
    trainer = Trainer(integers, loss="mse", optimizer="sgd", learning_rate=0.1)
    trained = {n for n, t in trainer.step.state.items() if t.kind == "parameter"}
    assert trained == {"bias", "w", "fc.weight_scale"}


def test_adapters_of_integer_products_are_refused_by_name(integers):
    with pytest.raises(BadInput, match=r"integers \(DynamicQuantizeLinear, MatMulInteger\); adapt the model of floats"):
        attach(integers, loss="mse", optimizer="sgd", adapter=LoRA(rank=1, targets="all"))


@pytest.fixture(scope="module")
def plain(floats):
    return quantize(floats, DATA)


def test_the_usual_way(floats, plain, tmp_path):
    path = tmp_path / "q.onnx"
    onnx.save(floats, tmp_path / "m.onnx")
    made = quantize(tmp_path / "m.onnx", DATA, output=path)
    onnx.checker.check_model(made, full_check=True)
    file = onnx.load(path)  # its tensors may be encoded otherwise
    assert (file.graph.node, file.graph.output, file.metadata_props) == (
        made.graph.node,
        made.graph.output,
        made.metadata_props,
    )
    assert stored(file).keys() == stored(made).keys()
    for name, array in stored(file).items():
        np.testing.assert_array_equal(array, stored(made)[name], strict=True)
    for name, array in stored(plain).items():
        np.testing.assert_array_equal(array, stored(made)[name])
    assert {a.dtype.name for n, a in stored(plain).items() if n.endswith("_quantized")} == {"int8", "int32"}
    assert not plain.metadata_props or all("onnxgrad" not in p.key for p in plain.metadata_props)
    found = kernels(plain, tmp_path)
    assert {"QLinearConv", "QLinearMatMul"} <= set(found), "kernels for integers"
    assert "BatchNormalization" not in found
    assert found[-1] == "Softmax", "the activation that the model ends in stays in floats"
    assert np.abs(scores(plain, FEEDS) - scores(floats, FEEDS)).max() < 0.1
    as_ir = quantize(ir.from_proto(floats), DATA)
    assert isinstance(as_ir, ir.Model)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_saved_file_is_what_training_evaluated(floats, scheme, tmp_path):
    ready = quantized(floats, DATA, Scheme(**SCHEMES[scheme]))
    trainer = trained(ready, epochs=1)
    trainer.save(tmp_path / "q.onnx")
    made = onnx.load(tmp_path / "q.onnx")
    onnx.checker.check_model(made, full_check=True)
    kinds = {a.dtype.name for n, a in stored(made).items() if n.endswith("_quantized")}
    assert kinds == {SCHEMES[scheme].get("weights", "int8"), "int32"}
    training = to_proto(trainer.adapted_model())
    scales = {name: stored(made)[f"{name}_scale"] for name in ("x", "conv_weight", "r")}
    for optimized in (True, False):
        first, last = (
            [scores(_showing(m, name), FEEDS, optimized).astype(int) for m in (made, training)]
            for name in ("r_QuantizeLinear_Output", "z_QuantizeLinear_Output")
        )
        # a bias is stored to within half of s_x·s_w: so often may what is behind it fall on the other side of a step
        assert np.abs(first[0] - first[1]).max() <= 1
        assert np.mean(first[0] != first[1]) <= 0.5 * (scales["x"] * scales["conv_weight"]).max() / scales["r"]
        assert np.abs(last[0] - last[1]).mean() < 0.5
    measured = trainer.evaluation.file(tmp_path / "q.onnx", trainer.data(DATA))
    assert measured["accuracy"] == pytest.approx(trainer.evaluate(DATA)["accuracy"], abs=0.011)


def test_training_makes_up_for_four_bits(floats):
    """A coarse scale, per tensor, loses; training gets most of that back, in the saved file."""
    asked = {"weights": "int4", "per_channel": False, "activations": "int8"}

    def loss(model):
        p = scores(model, FEEDS)
        return -np.log(p[np.arange(len(p)), DATA["labels"]] + 1e-9).mean()

    settings = {"loss": "cross_entropy", "optimizer": "adam", "learning_rate": 5e-3, "epochs": 6, "batch_size": 16}
    before, after = (loss(quantize(floats, DATA, **asked, **more)) for more in ({}, {"qat": True, **settings}))
    exact = loss(floats)
    assert before > exact + 0.02
    assert after < exact + 0.5 * (before - exact)


def test_a_quantized_model_trains_as_it_is(plain):
    untouched = Trainer(plain, loss="cross_entropy").inference_ir()
    mine, theirs = stored(untouched), stored(plain)
    assert mine.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(mine[name], array, err_msg=name)
    np.testing.assert_array_equal(scores(untouched, FEEDS), scores(plain, FEEDS))
    trainer = trained(plain, epochs=2)
    assert trainer.history.epochs[-1]["loss"] < trainer.history.epochs[0]["loss"]
    after = stored(trainer.inference_ir())
    assert after.keys() == theirs.keys()
    weights = [n for n in theirs if n.endswith("weight_quantized")]
    assert weights
    assert all((after[n] != theirs[n]).any() and after[n].dtype == np.int8 for n in weights)
    np.testing.assert_allclose(
        after["conv_bias_quantized_scale"], after["x_scale"] * after["conv_weight_scale"], rtol=1e-6
    )


def test_the_loss_is_taken_before_a_softmax_that_is_rounded():
    """ONNX Runtime's quantizer quantizes the probabilities, too, where it is asked as usual."""
    model = network(norm=False)
    text = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        ending (float[N, 3] z) => (float[N, 3] y) {
            s = Constant <value = float {0.00392156862745098}> ()
            u = Constant <value = uint8 {0}> ()
            e = Softmax (z)
            q = QuantizeLinear (e, s, u)
            y = DequantizeLinear (q, s, u)
        }""")
    del model.graph.node[-1]
    model.graph.node.extend(text.graph.node)
    told = attach(model, loss="cross_entropy").training_info[0].algorithm.metadata_props
    assert any("logits 'z' of the probabilities 'y'" in p.value for p in told)


def test_normalization_is_folded():
    model = ir.from_proto(network())
    names = set(model.graph.initializers)
    fold_norms(model.graph)
    assert all(n.op_type != "BatchNormalization" for n in model.graph)
    assert names - set(model.graph.initializers) == {"gamma", "beta", "mean", "variance"}
    np.testing.assert_allclose(scores(model, FEEDS), scores(network(), FEEDS), atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape", "weight", "bias", "folds"),
    [
        ("Gemm <alpha = 1.0, beta = 1.0>", (6, 4), (4, 6), (1, 6), True),
        ("Gemm <transB = 1>", (6, 4), (6, 4), (), True),
        ("Gemm", (6, 4), (4, 6), (6, 1), False),
        ("ConvTranspose <group = 2>", (2, 4, 5), (4, 3, 2), (6,), True),
        ("Conv <group = 2>", (2, 4, 5), (6, 2, 2), (6,), True),
    ],
)
def test_normalization_is_folded_into_layers_of_each_form(layer, shape, weight, bias, folds):
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]> net (float{list(shape)} x) => (y) {{
        z = {layer} (x, w, b)
        y = BatchNormalization (z, gamma, beta, mean, variance)
    }}""")
    draw, sizes = np.random.default_rng(0), dict.fromkeys(("gamma", "beta", "mean", "variance"), (6,))
    for name, size in {"w": weight, "b": bias, **sizes}.items():
        array = np.asarray(draw.random(size) + 0.5, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    feeds, opened = {"x": draw.standard_normal(shape).astype(np.float32)}, ir.from_proto(model)
    fold_norms(opened.graph)
    assert len(opened.graph) == (1 if folds else 2)
    before, after = (
        onnxruntime.InferenceSession(m.SerializeToString()).run(None, feeds) for m in (model, proto(opened))
    )
    np.testing.assert_allclose(after[0], before[0], rtol=1e-5, atol=1e-5)


def test_shared_layers_keep_their_weights_when_normalization_is_folded():
    model = network()
    model.graph.node.append(onnx.helper.make_node("Conv", ["x", "conv_weight"], ["other"], pads=[1, 1, 1, 1]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("other", 1, ["N", 4, 6, 6]))
    before = onnxruntime.InferenceSession(model.SerializeToString()).run(None, FEEDS)
    opened = ir.from_proto(model)
    fold_norms(opened.graph)
    after = onnxruntime.InferenceSession(proto(opened).SerializeToString()).run(None, FEEDS)
    for a, b in zip(before, after):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_blocks_of_four_bits(tmp_path):
    data = blobs()
    model = to_proto(Trainer(classifier(hidden=32), loss="cross_entropy").inference_ir())
    for weights in ("int4", "uint4"):
        made = quantize(
            model, data, weights=weights, block_size=16, qat=True, loss="cross_entropy", epochs=2, learning_rate=0.02
        )
        assert kernels(made, tmp_path).count("MatMulNBits") == 2
        node = next(n for n in made.graph.node if n.op_type == "DequantizeLinear")
        assert {a.name: a.i for a in node.attribute} == {"axis": 0, "block_size": 16}
        assert stored(made)["w2_DQ_Q4"].dtype.name == weights
        assert stored(made)["w2_DQ_scales"].shape == (2, 3)


def test_blocks_of_a_weight_that_two_nodes_read():
    text = """<ir_version: 10, opset_import: ["": 21]> tied (float[N, 32] x) => (float[N, 32] y) {
        h = MatMul (x, w)  r = Relu (h)  y = MatMul (r, %s) }"""
    tied, apart = (onnx.parser.parse_model(text % name) for name in ("w", "u"))
    weight = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    for model, names in ((tied, "w"), (apart, "wu")):
        model.graph.initializer.extend(onnx.numpy_helper.from_array(weight, name) for name in names)
    feeds = {"x": weight[:5]}
    found, expected = (quantize(m, feeds, weights="int4", block_size=16) for m in (tied, apart))
    np.testing.assert_array_equal(scores(found, feeds, False), scores(expected, feeds, False))
    assert sum(t.name.endswith("_Q4") for t in found.graph.initializer) == 1
    steps = [Trainer(m, loss="mse").machine.step(feeds | {"labels": weight[:5]}) for m in (found, expected)]
    assert float(steps[0]["loss"]) == pytest.approx(float(steps[1]["loss"]), rel=1e-6)


def test_a_scale_that_is_zero_stays_harmless():
    made = quantize(classifier(hidden=32), blobs(), weights="int4", block_size=16)
    scales = next(t for t in made.graph.initializer if t.name == "w2_DQ_scales")
    array = onnx.numpy_helper.to_array(scales).copy()
    array[0, 1] = 0
    scales.CopyFrom(onnx.numpy_helper.from_array(array, "w2_DQ_scales"))
    data = blobs()
    trainer = Trainer(made, loss="cross_entropy")
    feeds = {"x": data["x"]}
    np.testing.assert_allclose(scores(trainer.inference_ir(), feeds, False), scores(made, feeds, False), atol=1e-6)
    trainer.machine.step(data)
    assert all(np.isfinite(a).all() for a in trainer.state().values())


def test_a_bias_that_an_int32_cannot_hold_widens_the_weight(floats):
    model = quantized(floats, DATA, Scheme())
    held = model.graph.initializers
    scale = held["conv_weight_scale"].const_value.numpy().copy()
    scale[1] *= 1e-9
    held["conv_weight_scale"].const_value = ir.tensor(scale, name="conv_weight_scale")
    weight = held["conv_weight"].const_value.numpy().copy()
    weight[1] *= 1e-9
    held["conv_weight"].const_value = ir.tensor(weight, name="conv_weight")
    before = scores(to_proto(model), FEEDS, False)
    made = folded(model)
    assert abs(stored(made)["conv_bias_quantized"][1]) <= 2**30 + 64
    moved = np.abs(scores(made, FEEDS) - before).max(1)  # of a row that falls on the other side of a step, by several
    assert np.mean(moved > 0.02) < 0.03
    assert moved.max() < 0.05


def test_adapters_train_through_what_is_rounded(plain):
    trainer = trained(plain, adapter=LoRA(2, targets=["conv2_weight_quantized", "head_quantized"]), learning_rate=0.05)
    assert trainer.history.epochs[-1]["loss"] < trainer.history.epochs[0]["loss"]
    assert trainer.state()["conv2_weight_quantized.lora_B"].any(), "four roundings before the loss"
    after, before = stored(trainer.inference_ir()), stored(plain)
    np.testing.assert_array_equal(after["conv2_weight_quantized"], before["conv2_weight_quantized"])


def test_adapters_without_effect_change_nothing_that_the_graph_computes(plain):
    """Integer kernels, which the adapted layers leave, round a number near a border to the other side."""
    asked = LoRA(2, targets=["conv2_weight_quantized", "head_quantized"])
    adapted = to_proto(Trainer(plain, loss="cross_entropy", adapter=asked).inference_ir())
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    before, after = (
        onnxruntime.InferenceSession(m.SerializeToString(), options).run(None, FEEDS)[0] for m in (plain, adapted)
    )
    np.testing.assert_array_equal(after, before)


def test_old_opsets_are_raised():
    made = quantize(network(opset=12), DATA)
    assert "int8" in {a.dtype.name for a in stored(made).values()}


def test_normalization_that_cannot_be_folded_is_frozen():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 21]>
        network (float[N, 2, 6, 6] x) => (float[N, 3] y) <float[2] g = {1, 2}, float[2] b = {0, 1}, float[2] m = {0, 1},
            float[2] v = {1, 2}> {
            n = BatchNormalization (x, g, b, m, v)
            c = Conv (n, w)
            p = GlobalAveragePool (c)
            y = Flatten (p)
        }""")
    weight = np.random.default_rng(0).standard_normal((3, 2, 3, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    trainer = trained(quantized(model, DATA, Scheme()), epochs=1)
    assert not trainer.step.state.keys() & {"m", "v"}
    assert "w" in trainer.step.state


def test_only_what_is_asked_for(floats):
    asked = {"operators": ["Conv"], "exclude": ["Conv_2"]}
    named = onnx.ModelProto()
    named.CopyFrom(floats)
    for k, node in enumerate(n for n in named.graph.node if n.op_type == "Conv"):
        node.name = f"Conv_{k + 1}"
    made = quantize(named, DATA, **asked)
    assert [n for n in stored(made) if n.endswith("weight_quantized")] == ["conv_weight_quantized"]


def test_data_are_prepared_as_for_training():
    named = {"pixels" if name == "x" else name: array for name, array in DATA.items()}
    assert quantize(network(), named, inputs={"x": "pixels"}, image_mean=0.5) == quantize(network(), DATA)


CASES = {
    "quantized already": (lambda: quantize(pair(), {"x": np.zeros((4, 3))}), "quantized already: it has a Quantize"),
    "training": (lambda: quantize(attach(network()), DATA), "carries training information"),
    "nothing": (lambda: quantize(_sine(), {"x": np.zeros((4, 3))}), "nothing in the model can be quantized"),
    "nothing in blocks": (
        lambda: quantize(_sine(), {"x": np.zeros((4, 3))}, weights="int4", block_size=16),
        "only weights of MatMul are quantized in blocks",
    ),
    "no rows": (lambda: quantize(network(), {"x": np.zeros((0, 2, 6, 6), np.float32)}), "0 rows"),
    "other data": (lambda: quantize(network(), {"x": np.zeros((4, 2, 5, 6), np.float32)}), "[N, 2, 6, 6]"),
    "no such type": (lambda: quantize(network(), DATA, weights="int5"), "there are: int8, uint8, int4, uint4"),
    "no such calibration": (lambda: quantize(network(), DATA, calibration="mean"), "minmax, entropy, percentile"),
    "blocks": (lambda: quantize(network(), DATA, weights="int4", block_size=10), "16, 32, 64"),
    "blocks of 8 bits": (lambda: quantize(network(), DATA, block_size=16), "are int4 or uint4, not int8"),
    "rows": (lambda: quantize(network(), DATA, rows=0), "at least 1 row"),
    "training settings": (lambda: quantize(network(), DATA, epochs=3), "'epochs' says how to train, which qat"),
    "operator": (lambda: quantize(network(), DATA, operators=["Convv"]), "did you mean 'Conv'"),
    "node": (lambda: quantize(network(), DATA, exclude=["Con*_9"]), "Con*_9"),
}


def _sine():
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3] x) => (float[N, 3] y) { y = Sin (x) }'
    )


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case):
    call, message = CASES[case]
    with pytest.raises((BadInput, UnknownName)) as error:
        call()
    assert message in str(error.value)


def test_metadata_of_strangers(floats):
    for text in ("[]", '{"version": 1, "weights": {"a": 1}, "biases": {}}', '{"version": 2}', "{" * 100000,
                 '{"version": 1, "weights": {"nobody": "x"}, "biases": {}}'):  # fmt: skip
        model = ir.from_proto(floats)
        model.metadata_props["onnxgrad.quantized"] = text
        with pytest.raises(BadInput, match=r"onnxgrad\.quantized"):
            folded(model)


def test_shared_integers_with_other_scales_stay():
    """Weights that several nodes dequantize in their own ways cannot be folded back: they stay what they are."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 2] x) => (float[N, 2] y) <int8[2, 2] q = {1, 2, 3, 4}, float s = {0.5}, float t = {0.25}> {
            a = DequantizeLinear (q, s)
            b = DequantizeLinear (q, t)
            c = MatMul (x, a)
            y = MatMul (c, b)
        }""")
    opened = ir.from_proto(model)
    record = with_masters(opened)
    assert record is not None
    assert not record.weights
    assert "q" in opened.graph.initializers


@pytest.mark.sweep(2)
@pytest.mark.parametrize("constants", [False, True])
def test_quantized_by_others(plain, constants):
    """Operators of ONNX Runtime's own domain; scales and weights in Constant nodes."""
    model = onnx.ModelProto()
    model.CopyFrom(plain)
    graph = model.graph
    if constants:
        nodes = [onnx.helper.make_node("Constant", [], [t.name], value=t) for t in graph.initializer]
        nodes += graph.node
        del graph.initializer[:], graph.node[:]
        graph.node.extend(nodes)
    else:
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
        for node in graph.node:
            if "Quantize" in node.op_type or "Dequantize" in node.op_type:
                node.domain = "com.microsoft"
        del graph.value_info[:]
    np.testing.assert_array_equal(scores(model, FEEDS, False), scores(plain, FEEDS, False))
    trainer = trained(model, epochs=1)
    usual = trained(plain, epochs=1)
    assert trainer.history.epochs[0]["loss"] == pytest.approx(usual.history.epochs[0]["loss"], rel=1e-5)
    assert trainer.step.state.keys() == usual.step.state.keys()
    after, wanted = stored(trainer.inference_ir()), stored(usual.inference_model())
    for name in ("x_scale", "conv_weight_scale", "head_scale"):
        np.testing.assert_allclose(after[name], wanted[name], rtol=1e-4)
    assert (after["conv_weight_quantized"] == wanted["conv_weight_quantized"]).mean() > 0.95


def test_weights_of_integer_operators_are_named():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[N, 2] x) => (float[N, 2] y)
        <int8[2, 2] q = {1, 2, 3, 4}, float s = {0.5}, uint8 u = {0}, int8 z = {0}> {
            a = QuantizeLinear (x, s, u)
            b = QLinearMatMul (q, s, z, a, s, u, s, u)
            y = DequantizeLinear (b, s, u)
        }""")
    with pytest.raises(BadInput, match=r"nothing to train\n  hint: the weights of QLinearMatMul are integers"):
        attach(model, loss="mse")


def test_layers_that_share_a_bias():
    """ONNX Runtime's quantizer copies a shared bias as ``b2``, …, which may be the name of an activation."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 21]>
        network (float[N, 2, 6, 6] x) => (float[N, 3, 6, 6] y) {
            b1 = Conv (x, v, b)
            b2 = Conv (b1, w, b)
            b3 = Conv (b2, u, b)
            n = Neg (b2)
            y = Add (b3, n)
        }""")
    rng = np.random.default_rng(0)
    for name, shape in {"v": (3, 2, 1, 1), "w": (3, 3, 1, 1), "u": (3, 3, 1, 1), "b": (3,)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    wanted = scores(model, FEEDS)
    assert np.abs(scores(quantize(model, FEEDS), FEEDS) - wanted).max() < 0.1 * np.ptp(wanted)
