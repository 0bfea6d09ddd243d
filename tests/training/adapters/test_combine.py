"""Combined adapters: as PEFT combines them, exact sums, and everything that a single adapter can do."""

import json
import warnings

import numpy as np
import onnxruntime
import pytest

from onnxgrad import LoHa, LoRA, Trainer, load_adapter
from onnxgrad.training import combine_adapters
from tests.training.adapters.models import every_kind
from tests.training.adapters.test_lora import DATA, FEEDS, refusal, scores, session

TARGETS = ["wq", "fc", "before", "table", "spatial", "grouped", "body"]


@pytest.fixture(scope="module")
def base():
    return every_kind()


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """Two adapters, of which the second one adapts another weight as well, with another scale."""
    place = tmp_path_factory.mktemp("adapters")
    for name, targets, alpha in (("one", TARGETS, 4), ("two", [*TARGETS, "wv"], 3)):
        asked = LoRA(rank=2, alpha=alpha, targets=targets, seed=len(name) + alpha)
        trainer = Trainer(base, loss="cross_entropy", optimizer="adam", learning_rate=0.05, adapter=asked)
        trainer.fit(DATA, epochs=2, batch_size=8, seed=alpha)
        trainer.save_adapter(place / name, switchable=name == "one")
    trainer = Trainer(base, loss="cross_entropy", adapter=LoRA(rank=3, targets=["wq", "head"]), learning_rate=0.05)
    trainer.fit(DATA, epochs=1, batch_size=8)
    trainer.save_adapter(place / "rank 3")
    return place


def merged_weights(model):
    opened = load_adapter(*model, merge=True)
    return {t.name: np.array(onnx_array(t)) for t in opened.graph.initializer}


def onnx_array(tensor):
    return np.frombuffer(tensor.raw_data, np.float32).reshape(tensor.dims)


def test_side_by_side_it_is_the_exact_sum(base, folders, tmp_path):
    names, counts = ["one", "two", "rank 3"], [0.5, -0.7, 2.0]
    combine_adapters([folders / n for n in names], tmp_path / "c", weights=counts, method="cat")
    before = {t.name: onnx_array(t) for t in base.graph.initializer}
    changes = [merged_weights((base, folders / n)) for n in names]
    found = merged_weights((base, tmp_path / "c"))
    for name, array in before.items():
        expected = array + sum(c * (change[name] - array) for c, change in zip(counts, changes))
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5, err_msg=name)
    assert json.loads((tmp_path / "c" / "adapter_config.json").read_text())["r"] == 7


def test_one_adapter_alone_is_itself(base, folders, tmp_path):
    combine_adapters([folders / "two"], tmp_path / "c")
    np.testing.assert_allclose(
        scores(load_adapter(base, tmp_path / "c")), scores(load_adapter(base, folders / "two")), rtol=0, atol=1e-6
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear", "dare_ties"])
def test_a_combination_is_switched_and_trained_on(base, folders, tmp_path, method):
    density = None if method == "linear" else 0.6
    combine_adapters(
        [folders / "one"] * 2, tmp_path / "c", weights=[0.25, 0.25], method=method, density=density, seed=3
    )
    whole = scores(load_adapter(base, tmp_path / "c", merge=True))
    if method == "linear":  # (√¼ + √¼)² times the product
        np.testing.assert_allclose(whole, scores(load_adapter(base, folders / "one")), rtol=0, atol=1e-5)
    run, adapter, options = session(str(folders / "one" / "model.onnx")), onnxruntime.LoraAdapter(), None
    adapter.Load(str(tmp_path / "c" / "adapter.onnx_adapter"))
    options = onnxruntime.RunOptions()
    options.add_active_adapter(adapter)
    np.testing.assert_allclose(run.run(None, FEEDS, options)[0], whole, rtol=0, atol=1e-5)
    again = Trainer(load_adapter(base, tmp_path / "c"), loss="cross_entropy", learning_rate=0.01)
    before = again.evaluate(DATA)["loss"]
    again.fit(DATA, epochs=2, batch_size=8)
    assert again.evaluate(DATA)["loss"] < before


def test_ties_by_hand(base, tmp_path):
    """Of three tasks, the smaller half is cut, the sign of the sum decides, and the mean is of those that agree."""
    from onnxgrad.training.adapters.combine import _mixed, _Term
    from onnxgrad.training.adapters.record import Entry

    entry = Entry("w", {}, "linear", "w", 1.0)
    tasks = [[4, -1, 3, 1], [-2, 5, 1, 4], [3, 3, -1, -2]]
    terms = [_Term(entry, dict.fromkeys("AB", np.array([t], np.float32)), 1.0) for t in tasks]
    mixed = _mixed(terms, "ties", 0.5, np.random.default_rng(0))
    np.testing.assert_array_equal(mixed["A"], [[3.5, 4, 3, 4]])


def test_refusals(base, folders, tmp_path):
    one, two, other = (folders / n for n in ("one", "two", "rank 3"))

    def combining(*given, **settings):
        return refusal(lambda: combine_adapters(given, tmp_path / "c", **settings))

    assert "have several ranks" in combining(one, other)
    assert "2 adapters and 1 weights" in combining(one, two, weights=[1])
    assert "did you mean 'ties'" in combining(one, two, method="tise")
    assert "ties needs a density" in combining(one, two, method="ties")
    assert "linear has no density" in combining(one, two, density=0.5)
    assert "a share in (0, 1]" in combining(one, two, method="ties", density=0)
    assert "finite" in combining(one, two, weights=[1, np.nan])
    assert "as a list" in combining()
    assert "there is no file" in combining(one, tmp_path)
    trainer = Trainer(base, loss="cross_entropy", adapter=LoHa(rank=2, targets="wq"))
    trainer.save_adapter(tmp_path / "loha")
    assert "no plain LoRA" in combining(one, tmp_path / "loha")
    trainer = Trainer(every_kind(seed=1), loss="cross_entropy", adapter=LoRA(rank=2, targets="wq"))
    trainer.save_adapter(tmp_path / "far")
    assert "are of two models" in combining(one, tmp_path / "far")
    assert "that of another model" in combining(one, two, model=every_kind(seed=1))
    for name in ("a", "b"):
        asked = LoRA(rank=2, targets="wq", train_also=["fc_bias"])
        Trainer(base, loss="cross_entropy", adapter=asked).save_adapter(tmp_path / name)
    assert "train as a whole: 'fc_bias'" in combining(tmp_path / "a", tmp_path / "b")
    combine_adapters([one, tmp_path / "a"], tmp_path / "d")  # one such weight is taken over
    assert not (tmp_path / "c").exists()


@pytest.mark.torch
class TestOfPEFT:
    """The same combinations by PEFT's add_weighted_adapter."""

    @pytest.fixture(scope="class")
    def pair(self, tmp_path_factory):
        net = pytest.importorskip("tests.training.adapters.test_peft", reason="PEFT is not installed, or not whole")
        torch, peft, place = net.torch, net.peft, tmp_path_factory.mktemp("peft")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter
            torch.onnx.export(net.Net().eval(), (torch.from_numpy(net.IDS),), place / "net.onnx", input_names=["ids"],
                              output_names=["scores"], dynamo=False, opset_version=18)  # fmt: skip
        torch.manual_seed(5)
        asked = {"one": (net.MODULES, 5), "two": (["head", "embed", "block.query"], 2)}
        model = None
        for name, (modules, alpha) in asked.items():
            settings = peft.LoraConfig(r=3, lora_alpha=alpha, target_modules=modules, init_lora_weights=False)
            if model is None:
                model = peft.get_peft_model(net.Net().eval(), settings, name)
            else:
                model.add_adapter(name, settings)
        with torch.no_grad():
            for tensor in (t for name, t in model.named_parameters() if "lora_" in name):
                tensor.mul_(0.5)
        model.save_pretrained(place)
        return net, model, place

    @pytest.mark.parametrize("weights", [[0.6, 0.3], [1.5, -0.5]])
    @pytest.mark.parametrize(
        ("method", "density"),
        [("linear", None), ("cat", None), ("ties", 0.4), ("dare_linear", 0.5), ("dare_ties", 0.7)],
    )
    def test_it_is_the_same(self, pair, tmp_path, monkeypatch, method, density, weights):
        net, model, place = pair
        name, rng = f"{method}, {weights[0] > 1}", np.random.default_rng(8)
        combined = [place / "one", place / "two"]
        combine_adapters(combined, tmp_path / "c", weights=weights, method=method, density=density, seed=8,
                         model=place / "net.onnx")  # fmt: skip
        if "dare" in method:  # in the order of PEFT, whose generator draws other masks
            order = [e["module"] for e in self.record(tmp_path / "c")["entries"]]
            modules = [m for m, _ in model.base_model.model.named_modules() if m in order]
            draws = {m: rng_of(model, m) for m in order}
            masks = {m: [rng.random(shape) for shape in draws[m]] for m in order}
            queue = [mask for m in modules for mask in masks[m]]

            def bernoulli(chances):
                mask = queue.pop(0)
                mask = mask if mask.shape == tuple(chances.shape) else mask.T
                return net.torch.from_numpy((mask < density).astype(np.float32)) * net.torch.ones_like(chances)

            monkeypatch.setattr(net.torch, "bernoulli", bernoulli)
        model.add_weighted_adapter(["one", "two"], weights, name, combination_type=method, density=density)
        model.set_adapter(name)
        expected = net.of_peft(model)
        assert np.abs(expected - net.of_peft(net.Net().eval())).max() > 0.01
        for merge in (False, True):
            found = net.scores(load_adapter(place / "net.onnx", tmp_path / "c", merge=merge))
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
        again = net.peft.PeftModel.from_pretrained(net.Net().eval(), str(tmp_path / "c")).eval()
        np.testing.assert_allclose(net.of_peft(again), expected, rtol=0, atol=2e-5)

    @staticmethod
    def record(folder):
        import safetensors

        with safetensors.safe_open(folder / "adapter_model.safetensors", "np") as opened:
            return json.loads(opened.metadata()["onnxgrad.adapter"])


def rng_of(model, module):
    """The shapes of the masks that are drawn for a module: of A, then of B, of each adapter that it has."""
    layer = model.base_model.model.get_submodule(module)
    sides = (layer.lora_A, layer.lora_B) if len(layer.lora_A) else (layer.lora_embedding_A, layer.lora_embedding_B)
    shapes = []
    for side in sides:
        for name in ("one", "two"):
            if name in side:
                shape = tuple(getattr(side[name], "weight", side[name]).shape)
                shapes.append(shape if len(shape) > 2 else shape[::-1])
    return shapes
