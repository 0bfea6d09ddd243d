"""Adapters: no effect at first, right gradients, merged and switched without a difference, saved and loaded."""

import json
import shutil

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.numpy

from onnxgrad import BadInput, LoRA, load_adapter
from onnxgrad.training import Trainer, attach, compile_step
from onnxgrad.training.adapters.merge import merged
from tests.training.adapters.models import ADAPTED, every_kind, rows, with_weights

DATA = rows()
FEEDS = {name: array for name, array in DATA.items() if name != "labels"}


def session(model):
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3  # it warns of initializers that are inputs
    return onnxruntime.InferenceSession(model if isinstance(model, str) else proto(model).SerializeToString(), quiet)


def proto(model):
    return ir.to_proto(model) if isinstance(model, ir.Model) else model


def scores(model, feeds=FEEDS):
    return session(model).run(None, feeds)[0]


def trainer(model, **asked):
    settings = {"rank": 2, "targets": "all"} | asked
    return Trainer(model, loss="cross_entropy", optimizer="adam", learning_rate=0.05, adapter=LoRA(**settings))


@pytest.fixture(scope="module")
def base():
    return every_kind()


@pytest.fixture(scope="module")
def trained(base):
    found = trainer(base, train_also=["fc_bias"], dropout=0.0)
    found.fit(DATA, epochs=4, batch_size=8)
    assert found.history.epochs[-1]["loss"] < found.history.epochs[0]["loss"]
    return found


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    place = tmp_path_factory.mktemp("adapter") / "a"
    trained.save_adapter(place, switchable=True)
    return place


def test_every_weight_gets_an_adapter_and_nothing_else_trains(trained):
    parameters = {n for n, t in trained.step.state.items() if t.kind == "parameter"}
    assert parameters == {f"{n}.lora_{x}" for n in ADAPTED for x in "AB"} | {"fc_bias"}
    held = trained.step.model.graph.initializers
    frozen = [t for t in held.values() if t.const_value is not None and tuple(t.const_value.shape) == (8, 8)]
    assert len(frozen) >= 4, "frozen weights are constants of the step"


def test_no_effect_before_the_first_step(base):
    adapted = trainer(base)
    np.testing.assert_array_equal(scores(adapted.adapted_model()), scores(base))
    np.testing.assert_array_equal(scores(adapted.inference_ir()), scores(base))
    assert adapted.initial["wq.lora_A"].any()
    assert not adapted.initial["wq.lora_B"].any()


def test_fresh_factors_are_those_of_peft(base):
    drawn = trainer(every_kind(), rank=2, targets=["table", "spatial"]).initial
    assert drawn["spatial.lora_A"].shape == (2, 3, 3, 3)
    assert np.abs(drawn["spatial.lora_A"]).max() <= 27**-0.5
    assert np.abs(drawn["spatial.lora_A"]).std() > 0.03
    assert not drawn["table.lora_A"].any()
    assert drawn["table.lora_B"].any()
    other = trainer(base, rank=2, targets=["spatial"], seed=1).initial["spatial.lora_A"]
    assert (other != drawn["spatial.lora_A"]).all()


def test_gradients_are_those_of_the_weights_by_the_chain_rule(base):
    """∂L/∂A = s·∂L/∂W·Bᵀ and ∂L/∂B = s·Aᵀ·∂L/∂W, at W + s·A·B: what the merged model says by itself."""
    lora = LoRA(rank=2, alpha=6, targets="all")
    adapted = attach(base, optimizer="sgd", learning_rate=0.0, adapter=lora)
    (node,) = [n for n in adapted.training_info[0].algorithm.node if n.op_type == "Gradient"]
    names = [s.decode() for a in node.attribute if a.name == "xs" for s in a.strings]
    step = compile_step(adapted, outputs=list(node.output))
    rng = np.random.default_rng(3)
    state = {n: 0.3 * rng.standard_normal(step.state[n].initial.shape).astype(np.float32) for n in names}
    found = session(step.model).run(None, DATA | state | {n: t.numpy() for n, t in step.rates.items()})
    values = dict(zip([v.name for v in step.model.graph.outputs], found))
    got = {n: values[o] for n, o in zip(names, step.results[1:])}
    whole = attach(proto(merged(step.inference_model(state))), optimizer="sgd", learning_rate=0.0, trainable=ADAPTED)
    (node,) = [n for n in whole.training_info[0].algorithm.node if n.op_type == "Gradient"]
    order = [s.decode() for a in node.attribute if a.name == "xs" for s in a.strings]
    plain = compile_step(whole, outputs=list(node.output))
    feeds = DATA | {n: t.initial.numpy() for n, t in plain.state.items()}
    feeds |= {n: t.numpy() for n, t in plain.rates.items()}
    values = dict(zip([v.name for v in plain.model.graph.outputs], session(plain.model).run(None, feeds)))
    of_weights = {n: values[o] for n, o in zip(order, plain.results[1:])}
    for name, gradient in of_weights.items():
        a, b = state[f"{name}.lora_A"], state[f"{name}.lora_B"]
        g = gradient
        if name in ("fc", "before"):
            g = g.T
        if name in ("spatial", "grouped"):
            groups = 2 if name == "grouped" else 1
            parts, outs = a.reshape(groups, 2, -1), b.reshape(groups, -1, 2)
            g = g.reshape(groups, outs.shape[1], -1)
            of_a = np.einsum("gor,goc->grc", outs, g).reshape(a.shape)
            of_b = np.einsum("grc,goc->gor", parts, g).reshape(b.shape)
        else:
            of_a, of_b = g @ b.T, a.T @ g
        np.testing.assert_allclose(got[f"{name}.lora_A"], 3 * of_a, rtol=2e-4, atol=2e-6, err_msg=name)
        np.testing.assert_allclose(got[f"{name}.lora_B"], 3 * of_b, rtol=2e-4, atol=2e-6, err_msg=name)


def test_a_gradient_by_central_differences(base):
    step = compile_step(attach(base, optimizer="sgd", learning_rate=1.0, adapter=LoRA(rank=1, targets=["body", "fc"])))
    rates = {n: t.numpy() for n, t in step.rates.items()}
    rng = np.random.default_rng(5)
    state = {n: rng.standard_normal(t.initial.shape).astype(np.float32) for n, t in step.state.items()}
    run = session(step.model)
    outputs = [v.name for v in step.model.graph.outputs]

    def stepped(state):
        return dict(zip(outputs, run.run(None, DATA | state | rates)))

    there = stepped(state)
    for name, tensor in step.state.items():
        gradient = state[name] - there[tensor.output]
        direction = gradient / np.linalg.norm(gradient)
        up, down = ({**state, name: state[name] + s * 3e-2 * direction} for s in (1, -1))
        slope = (stepped(up)[step.loss] - stepped(down)[step.loss]) / 6e-2
        np.testing.assert_allclose(slope, np.linalg.norm(gradient), rtol=1e-2, err_msg=name)


def test_merged_is_unmerged(trained, base):
    adapted, whole = trained.adapted_model(), trained.inference_ir()
    np.testing.assert_allclose(scores(whole), scores(adapted), rtol=0, atol=1e-5)
    assert np.abs(scores(whole) - scores(base)).max() > 0.1
    assert set(whole.graph.initializers) == {t.name for t in base.graph.initializer}
    assert "onnxgrad.adapter" not in whole.metadata_props
    assert not any("lora" in (v.name or "") for g in whole.graphs() for n in g for v in n.outputs)


def test_an_adapter_switched_in_one_session_is_the_adapter_fed(trained, base, folder):
    run = session(str(folder / "model.onnx"))
    np.testing.assert_array_equal(run.run(None, FEEDS)[0], scores(base))
    adapter = onnxruntime.LoraAdapter()
    adapter.Load(str(folder / "adapter.onnx_adapter"))
    options = onnxruntime.RunOptions()
    options.add_active_adapter(adapter)
    switched = run.run(None, FEEDS, options)[0]
    held = onnxruntime.AdapterFormat.read_adapter(str(folder / "adapter.onnx_adapter")).get_parameters()
    fed = run.run(None, FEEDS | {name: np.array(value.numpy()) for name, value in held.items()})[0]
    np.testing.assert_array_equal(switched, fed)
    np.testing.assert_allclose(switched, scores(trained.inference_ir()), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(run.run(None, FEEDS)[0], scores(base), err_msg="switched off again")


def test_loaded_it_is_what_was_saved(trained, base, folder):
    loaded = load_adapter(base, folder)
    assert isinstance(loaded, onnx.ModelProto)
    np.testing.assert_array_equal(scores(loaded), scores(trained.adapted_model()))
    np.testing.assert_array_equal(scores(load_adapter(base, folder, merge=True)), scores(trained.inference_ir()))
    on_own = load_adapter(folder / "model.onnx", folder, merge=True)
    np.testing.assert_array_equal(scores(on_own), scores(trained.inference_ir()))


def test_a_loaded_adapter_trains_on(trained, base, folder, tmp_path):
    again = Trainer(load_adapter(base, folder), loss="cross_entropy", learning_rate=0.05)
    assert {n for n, t in again.step.state.items() if t.kind == "parameter"} == {
        n for n, t in trained.step.state.items() if t.kind == "parameter"
    }
    before = again.evaluate(DATA)["loss"]
    again.fit(DATA, epochs=2, batch_size=8)
    assert again.evaluate(DATA)["loss"] < before
    again.save_adapter(tmp_path / "b")
    np.testing.assert_array_equal(scores(load_adapter(base, tmp_path / "b", merge=True)), scores(again.inference_ir()))


def test_resumed_it_is_the_same_run(base, tmp_path):
    whole, first, second = (trainer(base, dropout=0.0, targets="attention") for _ in range(3))
    whole.fit(DATA, epochs=3, batch_size=8)
    first.fit(DATA, epochs=1, batch_size=8, checkpoint=tmp_path / "run")
    second.fit(DATA, epochs=3, batch_size=8, checkpoint=tmp_path / "run", resume=True)
    assert all((second.state()[name] == array).all() for name, array in whole.state().items())


def test_saved_in_mid_training_it_goes_on(base, tmp_path):
    half = trainer(base, targets="attention", train_also=["fc_bias"])
    half.fit(DATA, epochs=1, shuffle=False)
    half.save_training_model(tmp_path / "going.onnx")
    rest = Trainer(tmp_path / "going.onnx")
    for run in (half, rest):
        run.fit(DATA, epochs=1, shuffle=False)
    assert all((rest.state()[name] == array).all() for name, array in half.state().items())
    rest.save_adapter(tmp_path / "a")
    assert load_adapter(base, tmp_path / "a", merge=True) is not None


def test_dropout_is_of_training_only(base):
    asked = {"targets": ["wq", "head"], "dropout": 0.5}
    dropping, plain = trainer(base, **asked), trainer(base, **asked | {"dropout": 0.0})
    for run in (dropping, plain):
        run.fit(DATA, epochs=1, batch_size=8, shuffle=False)
    assert (dropping.state()["head.lora_B"] != plain.state()["head.lora_B"]).any()
    adapted, whole = scores(dropping.adapted_model()), scores(dropping.inference_ir())
    np.testing.assert_allclose(adapted, whole, rtol=0, atol=1e-5)


def test_scales(base):
    assert LoRA(rank=4).scale == 2
    assert LoRA(rank=4, alpha=16).scale == 4
    assert LoRA(rank=4, alpha=16, rslora=True).scale == 8


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("attention", {"wq", "wk", "wv", "wo"}),
        ("type:Conv,Gemm", {"spatial", "grouped", "fc"}),
        ("w[qv]", {"wq", "wv"}),
        (["all", "!w*", "!type:Conv"], {"table", "fc", "before", "inner", "branch", "body", "head"}),
    ],
)
def test_targets(base, targets, found):
    adapted = attach(base, adapter=LoRA(rank=1, targets=targets))
    (told,) = [p.value for p in adapted.metadata_props if p.key == "onnxgrad.adapter"]
    assert {e["weight"] for e in json.loads(told)["entries"]} == found


def test_weights_of_a_lower_rank_are_left_out_together(base):
    adapted = attach(base, adapter=LoRA(rank=6, targets=["all", "!small"]))
    (told,) = [p.value for p in adapted.metadata_props if p.key == "onnxgrad.adapter"]
    small = {"spatial", "grouped", "head"}
    assert [e["weight"] for e in json.loads(told)["entries"]] == [n for n in ADAPTED if n not in small]
    with pytest.raises(BadInput, match="leaves nothing"):
        attach(base, adapter=LoRA(rank=12, targets=["all", "!small"]))


def test_a_list_of_types_may_name_some_that_the_model_does_not_have():
    one = '<ir_version: 10, opset_import: ["": 21]> one (float[N, 3] x) => (float[N, 2] y) { y = MatMul (x, w) }'
    model = with_weights(one, {"w": (3, 2)})
    attach(model, adapter=LoRA(rank=1, targets="type:MatMul,Gemm,Conv"))


def test_branches_that_are_always_taken(tmp_path):
    """ONNX Runtime fails on what such an If reads; weights that only the other branch has are none of the model."""
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 18]>
        one (float[1, 6] x) => (float[N] y) {
            m = MatMul (x, w)
            h = Add (bias, m)
            shape = Shape (h)
            axis = Constant <value = int64[1] {1}> ()
            size = Gather (shape, axis)
            one = Constant <value = int64[1] {1}> ()
            is_one = Equal (size, one)
            y = If (is_one) <
                then_branch = yes () => (float[N] a) { other = Constant <value = float[4] {1, 2, 3, 4}> ()
                                                       p = Mul (h, other)  first = Constant <value = int64[1] {0}> ()
                                                       a = Squeeze (p, first) },
                else_branch = no () => (float[N] b) { r = ReduceMean <keepdims = 0> (h, axis) b = Relu (r) }
            >
        }""",
        {"w": (6, 4), "bias": (4,)},
    )
    data = {"x": np.ones((1, 6), np.float32), "labels": np.ones(1, np.float32)}
    trainer = Trainer(model, loss="mse", adapter=LoRA(rank=2, targets="all"), learning_rate=0.1)
    trainer.fit(data, epochs=1, batch_size=1)
    trainer.save_adapter(tmp_path / "a")
    for merge in (False, True):
        loaded = load_adapter(model, tmp_path / "a", merge=merge)
        assert not [n for n in loaded.graph.node if n.op_type == "If"]
        np.testing.assert_allclose(scores(loaded, {"x": data["x"]}), trainer.predict({"x": data["x"]})["y"], atol=1e-6)
    trained = trainer.inference_ir().graph
    assert {n for n, v in trained.initializers.items() if not v.uses()} == set(), "ONNX Runtime warns of each"


def test_the_merged_file_is_measured_where_the_training_graph_drops(tmp_path):
    """Nodes behind an added Dropout exist twice in training; the merged file has them once, without A and B."""
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        two (float[N, 4] x) => (float[N, 3] y) { h = MatMul (x, v)  r = Relu (h)  y = MatMul (r, w) }""",
        {"v": (4, 5), "w": (5, 3)},
    )
    data = {"x": np.random.default_rng(0).standard_normal((12, 4), np.float32), "labels": np.arange(12) % 3}
    trainer = Trainer(model, loss="cross_entropy", adapter=LoRA(rank=2, targets="all"), dropout={"Relu": 0.2})
    trainer.fit(data, epochs=1, batch_size=4)
    trainer.save(tmp_path / "merged.onnx")
    measured = trainer.evaluation.file(tmp_path / "merged.onnx", trainer.data(data))
    assert measured == pytest.approx(trainer.evaluate(data), rel=1e-5)


def test_tied_weights_share_an_adapter():
    """An embedding that is the head as well, by way of a Transpose."""
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        tied (int64[N, T] ids) => (float[N, T, 9] scores) {
            words = Gather (table, ids)
            h = MatMul (words, w)
            turned = Transpose <perm = [1, 0]> (table)
            scores = MatMul (h, turned)
        }""",
        {"table": (9, 6), "w": (6, 6)},
    )
    feeds = {"ids": np.arange(8).reshape(2, 4)}
    tied = Trainer(model, loss="cross_entropy:axis=-1", adapter=LoRA(rank=2, targets=["table"]), learning_rate=0.1)
    tied.fit(feeds | {"labels": feeds["ids"]}, epochs=3, batch_size=2)
    assert {n for n, t in tied.step.state.items() if t.kind == "parameter"} == {"table.lora_A", "table.lora_B"}
    moved = scores(tied.adapted_model(), feeds)
    np.testing.assert_allclose(scores(tied.inference_ir(), feeds), moved, rtol=0, atol=1e-5)
    assert np.abs(moved - scores(model, feeds)).max() > 0.01


def test_quantized_weights_stay_beside_their_adapters():
    """QLoRA: the frozen weight is int8, in blocks, and is never rewritten."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        quantized (float[N, 8] x) => (float[N, 3] y) {
            w = DequantizeLinear <axis = 0, block_size = 4> (ints, scales)
            h = MatMul (x, w)
            a = Tanh (h)
            y = MatMul (a, head)
        }""")
    for name, array in {
        "ints": rng.integers(-127, 127, (8, 6)).astype(np.int8),
        "scales": np.full((2, 6), 0.004, np.float32),
        "head": rng.standard_normal((6, 3)).astype(np.float32),
    }.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    data = {"x": rng.standard_normal((32, 8)).astype(np.float32), "labels": rng.integers(0, 3, 32)}
    run = Trainer(model, loss="cross_entropy", adapter=LoRA(rank=2, targets="all"), learning_rate=0.05)
    run.fit(data, epochs=3, batch_size=8)
    whole = run.inference_ir()
    assert whole.graph.initializers["ints"].const_value.numpy().tobytes() == model.graph.initializer[0].raw_data
    assert {"ints.lora_A", "ints.lora_B"} <= set(whole.graph.initializers)
    assert "head.lora_A" not in whole.graph.initializers
    feeds = {"x": data["x"]}
    np.testing.assert_allclose(scores(whole, feeds), scores(run.adapted_model(), feeds), rtol=0, atol=1e-5)
    assert run.history.epochs[-1]["loss"] < run.history.epochs[0]["loss"]


def test_matrices_of_four_bits_stay_beside_their_adapters():
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        packed (float[N, 32] x) => (float[N, 3] y) {
            h = com.microsoft.MatMulNBits <K = 32, N = 6, bits = 4, block_size = 16> (x, fours, scales)
            a = Tanh (h)
            y = MatMul (a, head)
        }""")
    fours, steps = rng.integers(0, 256, (6, 2, 8)).astype(np.uint8), np.full((6, 2), 0.05, np.float32)
    head = rng.standard_normal((6, 3)).astype(np.float32)
    for name, array in {"fours": fours, "scales": steps, "head": head}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x = rng.standard_normal((32, 32)).astype(np.float32)
    run = Trainer(model, loss="cross_entropy", adapter=LoRA(rank=2, targets=["fours"]), learning_rate=0.05)
    np.testing.assert_array_equal(scores(run.inference_ir(), {"x": x}), scores(model, {"x": x}))
    run.fit({"x": x, "labels": rng.integers(0, 3, 32)}, epochs=3, batch_size=8)
    assert run.history.epochs[-1]["loss"] < run.history.epochs[0]["loss"]
    low, high = fours & 15, fours >> 4
    whole = (np.stack([low, high], -1).reshape(6, 2, 16).astype(np.float32) - 8) * steps[..., None]
    state = run.state()
    delta = 2 * state["fours.lora_A"] @ state["fours.lora_B"]
    expected = np.tanh(x @ (whole.reshape(6, 32).T + delta)) @ head
    np.testing.assert_allclose(scores(run.inference_ir(), {"x": x}), expected, rtol=0, atol=1e-4)


def refusal(call):
    with pytest.raises(BadInput) as caught:
        call()
    first, *hints = str(caught.value).splitlines()
    assert all(line.startswith("  hint: ") for line in hints)
    return first


def test_refusals(base, folder, trained):
    def asked(**adapter):
        return lambda: attach(base, adapter=LoRA(**adapter))

    assert "did you mean 'wq'" in refusal(asked(targets=["wqq"]))
    assert "these do: Conv, Gather, Gemm, MatMul" in refusal(asked(targets="type:LSTM"))
    assert "no 'Mul' node" in refusal(asked(targets="type:MatMul,Mul"))
    assert "rank 6 is larger than that of 'head', which is 6 × 5" in refusal(asked(rank=6, targets=["head"]))
    assert "in each group" in refusal(asked(rank=3, targets=["grouped"]))
    assert "loop body" in refusal(asked(rank=2, targets=["body"], dropout=0.1))
    assert "leaves nothing" in refusal(asked(targets=["wq", "!wq"]))
    assert "has an adapter" in refusal(lambda: attach(load_adapter(base, folder), adapter=LoRA()))
    assert "that of another model" in refusal(lambda: load_adapter(every_kind(seed=1), folder))
    assert "no adapter" in refusal(lambda: Trainer(base, loss="cross_entropy").save_adapter(folder))
    assert "from 1 on" in refusal(lambda: LoRA(rank=0))
    assert "positive" in refusal(lambda: LoRA(alpha=-1))
    assert "[0, 1)" in refusal(lambda: LoRA(dropout=1))
    plain = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        plain (float[N, 4] x) => (float[N, 3] y) { h = MatMul (x, one)  a = Tanh (h)  y = MatMul (a, two) }""",
        {"one": (4, 4), "two": (4, 3)},
    )
    assert "no attention that can be seen" in refusal(lambda: attach(plain, adapter=LoRA()))


ENTRY = {
    "weight": "wq", "tensors": {"A": "wq.lora_A", "B": "wq.lora_B"}, "kind": "linear", "module": "wq", "scale": 1,
    "part": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        "{",
        "[]",
        '{"version": 2}',
        {"tensors": {"A": "none", "B": "wq.lora_B"}},
        {"tensors": {"A": "head.lora_A", "B": "fc.lora_B"}},
        {"tensors": {"A": "wq.lora_A"}},
        {"kind": "conv", "groups": 0},
        {"scale": "x"},
        {"part": {"start": 0, "stop": 9, "every": 8}},
        {"part": {"start": 0, "stop": 2, "every": "8"}},
        {"form": "dora"},
    ],
)
def test_metadata_of_strangers(trained, told):
    model = trained.adapted_model()
    if isinstance(told, dict):
        form = {"form": told.pop("form", "lora"), "entries": [ENTRY | told], "also": []}
        told = json.dumps(json.loads(model.metadata_props["onnxgrad.adapter"]) | form)
    model.metadata_props["onnxgrad.adapter"] = told
    refusal(lambda: merged(model))


def test_marks_of_strangers(trained):
    model = trained.adapted_model()
    next(n for n in model.graph if n.op_type == "Softmax").metadata_props["onnxgrad.adapter"] = "wq"
    refusal(lambda: merged(model))


@pytest.mark.parametrize("damage", ["cut", "config", "missing", "extra"])
def test_damaged_folders(base, folder, tmp_path, damage):
    place = tmp_path / "a"
    shutil.copytree(folder, place)
    file = place / "adapter_model.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage == "missing":
        file.unlink()
    else:
        tensors = safetensors.numpy.load_file(file)
        safetensors.numpy.save_file(tensors | {"own": np.zeros(3, np.float32)}, file, {"format": "pt"})
        (place / "adapter_config.json").write_text("{" if damage == "config" else '{"peft_type": "LORA", "r": true}')
    assert refusal(lambda: load_adapter(base, place))
