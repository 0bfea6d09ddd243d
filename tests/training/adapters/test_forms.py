"""DoRA and VeRA: no effect at first, right gradients, merged and switched without a difference, saved and loaded."""

import json
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onnxgrad import IA3, BadInput, LoHa, LoKr, LoRA, Trainer, VeRA, load_adapter
from onnxgrad.training import attach, compile_step
from onnxgrad.training.adapters import forms
from onnxgrad.training.adapters.merge import merged
from tests.training.adapters.models import every_kind, with_weights
from tests.training.adapters.test_lora import DATA, FEEDS, refusal, scores, session

LINEAR = ["wq", "wk", "wv", "wo", "fc", "inner", "branch", "body", "head"]
MATRICES = [*LINEAR, "before", "spatial", "grouped"]
FORMS = {
    "dora": LoRA(rank=2, targets="all", dora=True),
    "vera": VeRA(rank=7, targets=LINEAR),
    "pissa": LoRA(rank=2, targets=["wq", "wk[0:4]", "fc", "before", "body", "branch", "head"], init="pissa"),
    "olora": LoRA(rank=2, targets=["wv", "inner", "fc", "head"], init="olora", dora=True),
    "loha": LoHa(rank=2, targets=MATRICES, alpha=6),
    "lokr": LoKr(rank=1, targets=MATRICES, alpha=3),
    "lokr of products": LoKr(rank=1, targets=MATRICES, decompose_both=True, decompose_factor=4),
    "ia3": IA3(
        targets=["wk", "wv", "fc", "body", "spatial", "before", "branch"], feedforward=["head", "wo", "grouped"]
    ),
}


@pytest.fixture(scope="module")
def base():
    return every_kind()


def trainer(model, asked):
    return Trainer(model, loss="cross_entropy", optimizer="adam", learning_rate=0.05, adapter=asked)


RARE = ("olora", "lokr of products")  # as the others, in the main


@pytest.fixture(scope="module", params=[pytest.param(f, marks=[pytest.mark.complete] * (f in RARE)) for f in FORMS])
def trained(base, request):
    found = trainer(base, FORMS[request.param])
    np.testing.assert_allclose(scores(found.adapted_model()), scores(base), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(scores(found.inference_ir()), scores(base))
    found.fit(DATA, epochs=4, batch_size=8)
    assert found.history.epochs[-1]["loss"] < found.history.epochs[0]["loss"]
    return found


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    place = tmp_path_factory.mktemp("adapter") / "a"
    trained.save_adapter(place, switchable=True)
    return place


def test_vera_has_no_effect_at_all_before_the_first_step(base):
    np.testing.assert_array_equal(scores(trainer(base, FORMS["vera"]).adapted_model()), scores(base))


def test_what_trains(trained):
    ends = {n.rpartition(".")[2] for n, t in trained.step.state.items() if t.kind == "parameter"}
    factors = {"lora_A", "lora_B"}
    known = (factors, factors | {"lora_magnitude_vector"}, {"vera_lambda_d", "vera_lambda_b"}, forms.TENSORS["loha"][0])
    assert ends in (*known, {"ia3_l"}) or all(end.startswith("lokr_w") for end in ends)
    assert not any(n.startswith("vera_") for n in trained.step.state), "what all share never changes"


def test_merged_is_unmerged(trained, base, plain):
    adapted, whole = trained.adapted_model(), trained.inference_ir()
    np.testing.assert_allclose(scores(whole), scores(adapted), rtol=0, atol=1e-5)
    assert np.abs(scores(whole) - scores(base)).max() > 0.1
    assert set(whole.graph.initializers) == {t.name for t in base.graph.initializer}
    assert [n.op_type for n in whole.graph] == [n.op_type for n in plain.graph]
    for graph in whole.graphs():
        assert not any("lora" in (v.name or "") for n in graph for v in n.outputs)


@pytest.fixture(scope="module")
def plain(base):
    """The model as a run without an adapter writes it."""
    return Trainer(base, loss="cross_entropy").inference_ir()


def test_switched_in_one_session(trained, base, folder):
    run = session(str(folder / "model.onnx"))
    np.testing.assert_allclose(run.run(None, FEEDS)[0], scores(base), rtol=0, atol=1e-6)
    adapter = onnxruntime.LoraAdapter()
    adapter.Load(str(folder / "adapter.onnx_adapter"))
    options = onnxruntime.RunOptions()
    options.add_active_adapter(adapter)
    switched = run.run(None, FEEDS, options)[0]
    np.testing.assert_allclose(switched, scores(trained.inference_ir()), rtol=0, atol=1e-5)


def test_loaded_it_is_what_was_saved(trained, base, folder):
    whole, beside = scores(trained.inference_ir()), scores(trained.adapted_model())
    np.testing.assert_array_equal(scores(load_adapter(base, folder)), beside)
    np.testing.assert_array_equal(scores(load_adapter(base, folder, merge=True)), whole)
    np.testing.assert_array_equal(scores(load_adapter(folder / "model.onnx", folder, merge=True)), whole)
    again = Trainer(load_adapter(base, folder), loss="cross_entropy", learning_rate=0.01)
    assert {n for n, t in again.step.state.items() if t.kind == "parameter"} == {
        n for n, t in trained.step.state.items() if t.kind == "parameter"
    }
    before = again.evaluate(DATA)["loss"]
    again.fit(DATA, epochs=2, batch_size=8)
    assert again.evaluate(DATA)["loss"] < before


@pytest.mark.sweep(3)
@pytest.mark.parametrize("form", FORMS)
def test_saved_in_mid_training_it_goes_on(base, tmp_path, form):
    targets = ["wq", "head", *(["spatial", "table"] if form == "dora" else [])]
    half = trainer(base, replace(FORMS[form], targets=targets))
    half.fit(DATA, epochs=1, shuffle=False)
    half.save_training_model(tmp_path / "going.onnx")
    rest = Trainer(tmp_path / "going.onnx")
    for run in (half, rest):
        run.fit(DATA, epochs=1, shuffle=False)
    assert all((rest.state()[name] == array).all() for name, array in half.state().items())


def one_step(model, asked, change):
    """The state before and after a step of plain descent at a rate of 1, from changed first values."""
    step = compile_step(attach(model, optimizer="sgd", learning_rate=1.0, adapter=asked))
    rates = {n: t.numpy() for n, t in step.rates.items()}
    state = {n: change(n, t.initial.numpy()) for n, t in step.state.items()}
    run, names = session(step.model), [v.name for v in step.model.graph.outputs]

    def stepped(values):
        return dict(zip(names, run.run(None, DATA | values | rates)))

    return step, state, stepped


def test_gradients_of_vera_by_central_differences(base):
    rng = np.random.default_rng(5)
    asked = VeRA(rank=7, targets=["body", "fc", "wq"])
    step, state, stepped = one_step(base, asked, lambda n, a: rng.standard_normal(a.shape).astype(np.float32))
    check(step, state, stepped, step.state)


def test_gradients_of_magnitudes_by_central_differences(base):
    rng = np.random.default_rng(5)

    def change(name, array):
        return (array + 0.3 * rng.standard_normal(array.shape)).astype(np.float32)

    asked = LoRA(rank=2, targets=["body", "fc", "before", "table", "spatial", "grouped", "branch"], dora=True)
    step, state, stepped = one_step(base, asked, change)
    check(step, state, stepped, [n for n in step.state if n.endswith("vector")])


def check(step, state, stepped, names):
    there = stepped(state)
    for name in names:
        gradient = state[name] - there[step.state[name].output]
        direction = gradient / np.linalg.norm(gradient)
        up, down = ({**state, name: state[name] + s * 3e-2 * direction} for s in (1, -1))
        slope = (stepped(up)[step.loss] - stepped(down)[step.loss]) / 6e-2
        np.testing.assert_allclose(slope, np.linalg.norm(gradient), rtol=2e-2, err_msg=name)


def test_the_norm_is_a_constant_of_gradients(base):
    """∂L/∂A is that of y = g∘(x·W + s·(x·A)·B) at a fixed g: what LoRA says of weights that are scaled by g."""
    rng = np.random.default_rng(3)
    noise = {}

    def change(name, array):
        noise[name] = (array + 0.3 * rng.standard_normal(array.shape)).astype(np.float32)
        return noise[name]

    step, state, stepped = one_step(base, LoRA(rank=2, alpha=4, targets=["head"], dora=True), change)
    there = stepped(state)
    got = {n: state[n] - there[t.output] for n, t in step.state.items()}
    weight = next(t for t in base.graph.initializer if t.name == "head")
    w = np.frombuffer(weight.raw_data, np.float32).reshape(6, 5)
    a, b, m = (state[f"head.{n}"] for n in ("lora_A", "lora_B", "lora_magnitude_vector"))
    g = m / np.linalg.norm(w + 2 * a @ b, axis=0)
    scaled = every_kind()
    next(t for t in scaled.graph.initializer if t.name == "head").raw_data = (g * w).astype(np.float32).tobytes()
    plain = {"head.lora_A": a, "head.lora_B": (g * b).astype(np.float32)}
    step, state, stepped = one_step(scaled, LoRA(rank=2, alpha=4, targets=["head"]), lambda n, _: plain[n])
    there = stepped(state)
    plain = {n: state[n] - there[t.output] for n, t in step.state.items()}
    np.testing.assert_allclose(got["head.lora_A"], plain["head.lora_A"], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got["head.lora_B"], g * plain["head.lora_B"], rtol=1e-3, atol=1e-5)


def test_dora_beside_a_gemm_with_all_its_attributes():
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        gemm (float[4, N] x) => (float[N, 3] y) {
            y = Gemm <transA = 1, transB = 1, alpha = 0.5, beta = 3.0> (x, w, c)
        }""",
        {"w": (3, 4), "c": (1, 3)},
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)}
    run = attach(model, adapter=LoRA(rank=2, targets="all", dora=True))
    held = {t.name: t for t in run.graph.initializer}
    del run.training_info[:]
    rng = np.random.default_rng(1)
    for tensor in (held["w.lora_A"], held["w.lora_B"], held["w.lora_magnitude_vector"]):
        tensor.raw_data = rng.standard_normal(list(tensor.dims)).astype(np.float32).tobytes()
    adapted = ir.from_proto(run)
    np.testing.assert_allclose(scores(merged(adapted.clone()), feeds), scores(adapted, feeds), rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_outputs_without_a_direction_stay_as_they_are(optimizer):
    """Channels that training has switched off are all zero in real files, or as small as a float can be."""
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        dead (float[N, 4] x) => (float[N, 5] y) {
            h = Gemm (x, w, c)
            y = MatMul (h, v)
        }""",
        {"w": (4, 5), "c": (5,), "v": (5, 5)},
    )
    sizes = np.array([1, 0, 1e-39, 1e-17, 1], np.float32)
    for tensor in model.graph.initializer:
        if tensor.name != "c":
            array = np.frombuffer(tensor.raw_data, np.float32).reshape(tensor.dims)
            tensor.raw_data = (array * sizes).tobytes()
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((16, 4)).astype(np.float32)}
    found = Trainer(model, loss="mse", optimizer=optimizer, learning_rate=0.05,
                    adapter=LoRA(rank=2, targets="all", dora=True))  # fmt: skip
    np.testing.assert_allclose(scores(found.adapted_model(), feeds), scores(model, feeds), rtol=0, atol=1e-6)
    found.fit(feeds | {"labels": rng.standard_normal((16, 5)).astype(np.float32)}, epochs=4, batch_size=8)
    new = found.inference_ir()
    for name in ("w", "v"):
        array = new.graph.initializers[name].const_value.numpy()
        assert np.isfinite(array).all()
        assert not array[:, 1:3].any()
    np.testing.assert_allclose(scores(new, feeds), scores(found.adapted_model(), feeds), rtol=0, atol=1e-5)
    assert np.abs(scores(new, feeds) - scores(model, feeds)).max() > 0.01


def test_refusals(base):
    def asked(adapter, model=base):
        return lambda: attach(model, adapter=adapter)

    assert "'spatial' is read by Conv otherwise" in refusal(asked(VeRA(targets=["spatial"])))
    assert "'table' is read by Gather otherwise" in refusal(asked(VeRA(targets=["table"])))
    assert "'before' is read by MatMul otherwise" in refusal(asked(VeRA(targets=["before"])))
    assert "did you mean 'wq'" in refusal(asked(VeRA(targets=["wqq"])))
    assert "rank 6 is larger than that of 'head', which is 6 × 5" in refusal(
        asked(LoRA(rank=6, targets=["head"], dora=True))
    )
    assert "VeRA adapts whole weights, not [0:4] of 'wq'" in refusal(asked(VeRA(targets=["wq[0:4]"])))
    assert "LoHa adapts whole weights, not [0:4] of 'wq'" in refusal(asked(LoHa(targets=["wq[0:4]"])))
    assert "'table' is read by Gather otherwise" in refusal(asked(LoKr(targets=["table"])))
    assert "must be -1 or a number from 1 on" in refusal(lambda: LoKr(decompose_factor=0))
    assert "'spatial' is none" in refusal(asked(LoRA(rank=2, targets=["spatial"], init="pissa")))
    assert "'table' is none" in refusal(asked(LoRA(rank=2, targets=["table"], init="olora")))
    assert "did you mean 'pissa'" in refusal(lambda: LoRA(init="pisa"))
    assert "from 1 on" in refusal(lambda: VeRA(rank=0))
    assert "other than 0" in refusal(lambda: VeRA(d_initial=0.0))
    assert "32 bits" in refusal(lambda: VeRA(seed=-1))
    tied = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        tied (int64[N, T] ids) => (float[N, T, 9] scores) {
            words = Gather (table, ids)
            turned = Transpose <perm = [1, 0]> (table)
            scores = MatMul (words, turned)
        }""",
        {"table": (9, 6)},
    )
    assert "'table' is read from both sides" in refusal(asked(LoRA(rank=1, targets="all", dora=True), tied))


@pytest.fixture(scope="module")
def others(base):
    """A model with a VeRA, and one with a DoRA."""
    return {name: trainer(base, FORMS[name]).adapted_model() for name in ("dora", "vera")}


def test_adapters_of_other_models_are_refused(others, folder):
    assert "that of another model" in refusal(lambda: load_adapter(every_kind(seed=1), folder))
    form = json.loads((folder / "adapter_config.json").read_text())["peft_type"]
    other = others["dora" if form == "VERA" else "vera"]
    assert "that of the model is" in refusal(lambda: load_adapter(other, folder))


def test_a_rank_of_vera_may_be_larger_than_that_of_a_weight(base):
    assert trainer(base, VeRA(rank=300, targets=["head"])).initial["head.vera_lambda_d"].shape == (300,)


def test_a_form_of_another_kind_is_no_adapter():
    with pytest.raises(BadInput, match="a LoRA"):
        attach(every_kind(), adapter={"rank": 8})


def test_projections_are_drawn_once_for_all(base):
    one, other = (trainer(base, VeRA(rank=7, targets=t, seed=s)).adapted_model() for t, s in ((LINEAR, 0), (LINEAR, 1)))
    a, b = (m.graph.initializers["vera_A"].const_value.numpy() for m in (one, other))
    assert a.shape == (8, 7)
    assert one.graph.initializers["vera_B"].const_value.shape == (7, 8)
    assert (a != b).mean() > 0.9
    assert np.abs(a).max() <= (6 / 8) ** 0.5


@pytest.mark.parametrize("asked", [LoHa(rank=2, targets="all"), LoKr(rank=1, targets="all"), IA3(targets="all"),
                                   IA3(targets="type:MatMul", feedforward="type:MatMul")])  # fmt: skip
def test_gradients_of_further_forms_by_central_differences(asked):
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        gemm (float[4, N] x) => (float[N, 4] y) {
            h = Gemm <transA = 1, transB = 1, alpha = 0.5, beta = 3.0> (x, w, c)
            p = MatMul (h, v)
            q = Add (b, p)
            y = Tanh (q)
        }""",
        {"w": (6, 4), "c": (1, 6), "v": (6, 4), "b": (4,)},
    )
    rng = np.random.default_rng(5)
    data = {
        "x": rng.standard_normal((4, 8)).astype(np.float32),
        "labels": rng.standard_normal((8, 4)).astype(np.float32),
    }
    step = compile_step(attach(model, loss="mse", optimizer="sgd", learning_rate=1.0, adapter=asked))
    state = {
        n: (t.initial.numpy() + 0.5 * rng.standard_normal(t.initial.shape)).astype(np.float32)
        for n, t in step.state.items()
    }
    run, names = session(step.model), [v.name for v in step.model.graph.outputs]
    rates = {n: t.numpy() for n, t in step.rates.items()}
    check(step, state, lambda values: dict(zip(names, run.run(None, data | values | rates))), step.state)
    adapted = step.inference_model(state)
    feeds = {"x": data["x"]}
    np.testing.assert_allclose(scores(merged(adapted.clone()), feeds), scores(adapted, feeds), rtol=0, atol=1e-5)


def test_a_bias_that_another_layer_shares_is_scaled_apart():
    """Exporters store equal tensors once, such as biases that are all zero at first."""
    model = with_weights(
        """<ir_version: 10, opset_import: ["": 21]>
        shared (float[N, 4] x) => (float[N, 4] y) {
            p = MatMul (x, w)
            h = Add (p, b)
            q = MatMul (h, v)
            y = Add (q, b)
        }""",
        {"w": (4, 4), "v": (4, 4), "b": (4,)},
    )
    rng = np.random.default_rng(0)
    data = {n: rng.standard_normal((16, 4)).astype(np.float32) for n in ("x", "labels")}
    found = Trainer(model, loss="mse", learning_rate=0.1, adapter=IA3(targets="all"))
    found.fit(data, epochs=3, batch_size=8)
    feeds = {"x": data["x"]}
    assert np.abs(scores(found.inference_ir(), feeds) - scores(model, feeds)).max() > 0.05
    np.testing.assert_allclose(
        scores(found.inference_ir(), feeds), scores(found.adapted_model(), feeds), rtol=0, atol=1e-5
    )
