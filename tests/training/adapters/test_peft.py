"""Adapters of PEFT in exported models, and adapters trained here in PEFT: the same outputs, in both directions."""

import copy
import json
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.numpy

from onnxgrad import IA3, BadInput, LoHa, LoKr, LoRA, Trainer, VeRA, load_adapter

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from tests.zoo.architectures import stub_torchvision  # noqa: E402

stub_torchvision()  # transformers imports it, and PEFT transformers
peft = pytest.importorskip("peft", reason="PEFT is not installed, or not whole", exc_type=ImportError)
from transformers.pytorch_utils import Conv1D  # noqa: E402

from tests.training.adapters.test_lora import session  # noqa: E402

pytestmark = pytest.mark.torch

IDS = np.random.default_rng(0).integers(0, 20, (4, 9))
MODULES = ["block.query", "block.output", "embed", "convolution", "head"]
LINEAR = ["block.query", "block.output", "head"]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(12, 12, bias=False)
        self.output = torch.nn.Linear(12, 12)

    def forward(self, x):
        q = self.query(x)
        return x + self.output(torch.softmax(q @ q.transpose(1, 2), -1) @ q)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(20, 12)
        self.block = Block()
        self.convolution = torch.nn.Conv1d(12, 10, 3, stride=2, padding=1)
        self.head = torch.nn.Linear(10, 4)

    def forward(self, ids):
        x = self.block(self.embed(ids))
        return self.head(torch.relu(self.convolution(x.transpose(1, 2))).mean(-1))


@pytest.fixture(scope="module", params=[False, True], ids=["torchscript", "dynamo"])
def exported(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters
        torch.onnx.export(Net().eval(), (torch.from_numpy(IDS),), path, input_names=["ids"], output_names=["scores"],
                          dynamo=request.param, opset_version=18)  # fmt: skip
    return path


def scores(model):
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    proto = proto if isinstance(proto, onnx.ModelProto) else onnx.load(proto)
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"ids": IDS})[0]


def of_peft(model):
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).numpy()


#: Adapters, the modules that they fit, and what PEFT calls them.
ASKED = {
    "lora": (LoRA(rank=3, targets=MODULES, train_also=["head.bias"]), MODULES, {}),
    "dora": (LoRA(rank=3, targets=MODULES, dora=True, train_also=["head.bias"]), MODULES, {"use_dora": True}),
    "vera": (VeRA(rank=16, targets=LINEAR, train_also=["head.bias"]), LINEAR, {"peft_type": "VERA"}),
    "loha": (LoHa(rank=3, alpha=6, targets=[*LINEAR, "convolution"]), [*LINEAR, "convolution"], {"peft_type": "LOHA"}),
    "lokr": (LoKr(rank=4, targets=[*LINEAR, "convolution"]), [*LINEAR, "convolution"], {"peft_type": "LOKR"}),
    "lokr, both": (
        LoKr(rank=1, targets=LINEAR, decompose_both=True, decompose_factor=2), LINEAR,
        {"decompose_both": True, "decompose_factor": 2},
    ),
    "ia3": (
        IA3(targets=["block.query", "block.output"], feedforward="head", train_also=["head.bias"]), LINEAR,
        {"peft_type": "IA3", "feedforward_modules": ["head"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ASKED)
def test_trained_here_it_is_the_same_in_peft(exported, tmp_path, form):
    asked, modules, said = ASKED[form]
    trainer = Trainer(exported, loss="cross_entropy", adapter=asked, learning_rate=0.05)
    np.testing.assert_allclose(scores(trainer.adapted_model()), scores(exported), rtol=0, atol=1e-6)
    trainer.fit({"ids": IDS, "labels": np.arange(4)}, epochs=5, batch_size=4)
    trainer.save_adapter(tmp_path / "a")
    trainer.save(tmp_path / "merged.onnx")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["target_modules"] == sorted(modules)
    assert said.items() <= settings.items()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = peft.PeftModel.from_pretrained(Net().eval(), str(tmp_path / "a"))
    if "head.bias" in trainer.state():
        model.base_model.model.head.base_layer.bias.data = torch.from_numpy(trainer.state()["head.bias"])
    assert np.abs(of_peft(model) - of_peft(Net().eval())).max() > 0.05
    np.testing.assert_allclose(scores(tmp_path / "merged.onnx"), of_peft(model), rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores(trainer.adapted_model()), of_peft(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "asked",
    [{}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "use_rslora": True}],
    ids=["lora", "rslora", "dora", "dora, rslora"],
)
def test_trained_in_peft_it_is_the_same_here(exported, tmp_path, asked):
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=MODULES, init_lora_weights=False, alpha_pattern={"head": 2}, **asked
    )
    model = peft.get_peft_model(Net().eval(), settings).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "magnitude" in name:
                tensor.mul_(torch.rand_like(tensor) + 0.5)
    check_loaded(exported, model, tmp_path / "a")


@pytest.mark.parametrize("save", [True, False], ids=["with projections", "by seed"])
@pytest.mark.filterwarnings("ignore:Specified to not")
def test_vera_of_peft_is_the_same_here(exported, tmp_path, save):
    settings = peft.VeraConfig(r=10, target_modules=LINEAR, projection_prng_key=7, save_projection=save)
    model = peft.get_peft_model(Net().eval(), settings).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "vera_lambda" in name:
                tensor.copy_(torch.randn_like(tensor))
    check_loaded(exported, model, tmp_path / "a")


def moved(model):
    """`model` with other values of all tensors that train."""
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model


@pytest.mark.parametrize(
    "settings",
    [
        peft.LoHaConfig(r=3, alpha=5, target_modules=LINEAR, alpha_pattern={"head": 2}, rank_pattern={"query": 2}),
        peft.LoHaConfig(r=2, target_modules=["convolution", "head"]),
        peft.LoHaConfig(r=2, target_modules=["convolution", "head"], use_effective_conv2d=True),
        peft.LoKrConfig(r=2, alpha=5, target_modules=LINEAR, rank_pattern={"head": 1}),
        peft.LoKrConfig(r=2, target_modules=LINEAR, decompose_both=True, decompose_factor=6),
        peft.LoKrConfig(r=8, target_modules=["convolution"]),
        peft.LoKrConfig(r=1, target_modules=["convolution", "head"]),
        peft.IA3Config(target_modules=LINEAR, feedforward_modules=["block.output"]),
        peft.IA3Config(target_modules=LINEAR, feedforward_modules=r".*(query|head)"),
    ],
    ids=lambda s: f"{s.peft_type.value}",
)
def test_further_forms_survive_a_round_trip(exported, tmp_path, settings):
    """Read from PEFT, and written here for PEFT, which gives the same scores."""
    model = moved(peft.get_peft_model(Net().eval(), copy.deepcopy(settings)).eval())
    check_loaded(exported, model, tmp_path / "a")
    Trainer(load_adapter(exported, tmp_path / "a"), loss="cross_entropy").save_adapter(tmp_path / "b")
    again = peft.PeftModel.from_pretrained(Net().eval(), str(tmp_path / "b")).eval()
    np.testing.assert_allclose(of_peft(again), of_peft(model), rtol=0, atol=1e-5)


class Pictures(torch.nn.Module):
    """Convolutions of two dimensions, one of them with groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Conv2d(4, 6, 3, padding=1)
        self.grouped = torch.nn.Conv2d(6, 8, (3, 2), groups=2, bias=False)
        self.last = torch.nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.grouped(torch.tanh(self.first(x))))).mean((-1, -2))


@pytest.mark.parametrize(
    "settings",
    [
        lambda names: peft.LoHaConfig(r=2, target_modules=names),
        lambda names: peft.LoHaConfig(r=2, target_modules=names, use_effective_conv2d=True),
        lambda names: peft.LoKrConfig(r=2, target_modules=names),
        lambda names: peft.LoKrConfig(r=1, target_modules=names, use_effective_conv2d=True, decompose_both=True),
        lambda names: peft.IA3Config(target_modules=names, feedforward_modules=[]),
        lambda names: peft.IA3Config(target_modules=names, feedforward_modules=["grouped", "last"]),
    ],
    ids=["loha", "loha, apart", "lokr", "lokr, apart", "ia3", "ia3, inputs"],
)
def test_further_forms_of_kernels(tmp_path, settings):
    x = torch.randn(5, 4, 7, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(Pictures().eval(), (x,), tmp_path / "p.onnx", input_names=["x"], dynamo=False)
    model = moved(peft.get_peft_model(Pictures().eval(), settings(["first", "grouped", "last"])).eval())
    with torch.no_grad():
        expected = model(x).numpy()
        assert np.abs(expected - Pictures().eval()(x).numpy()).max() > 0.02
    model.save_pretrained(tmp_path / "a")
    for merge in (False, True):
        run = session(load_adapter(tmp_path / "p.onnx", tmp_path / "a", merge=merge))
        np.testing.assert_allclose(run.run(None, {"x": x.numpy()})[0], expected, rtol=0, atol=1e-5)
    Trainer(load_adapter(tmp_path / "p.onnx", tmp_path / "a"), loss="mse").save_adapter(tmp_path / "b")
    again = peft.PeftModel.from_pretrained(Pictures().eval(), str(tmp_path / "b")).eval()
    with torch.no_grad():
        np.testing.assert_allclose(again(x).numpy(), expected, rtol=0, atol=1e-5)


def check_loaded(exported, model, place):
    """An adapter that PEFT saves for `model` gives the same here, unmerged and merged."""
    model.save_pretrained(place)
    expected = of_peft(model)
    assert np.abs(expected - scores(exported)).max() > 0.05
    for merge in (False, True):
        np.testing.assert_allclose(scores(load_adapter(exported, place, merge=merge)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["dora", "vera", "loha", "lokr", "ia3"])
def test_a_step_is_that_of_peft(exported, tmp_path, form):
    """Plain gradient descent, from the same factors: the norm of DoRA is a constant of the gradient."""
    asked = {
        "dora": peft.LoraConfig(r=3, lora_alpha=6, target_modules=MODULES, init_lora_weights=False, use_dora=True),
        "vera": peft.VeraConfig(r=10, target_modules=LINEAR, d_initial=1.0),
        "loha": peft.LoHaConfig(r=3, alpha=6, target_modules=LINEAR, init_weights=False),
        "lokr": peft.LoKrConfig(r=1, alpha=2, target_modules=LINEAR, init_weights=False, decompose_both=True),
        "ia3": peft.IA3Config(target_modules=LINEAR, feedforward_modules=["head"]),
    }
    model = peft.get_peft_model(Net().eval(), asked[form])
    if form == "vera":
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if "vera_lambda_b" in name:
                    tensor.copy_(torch.randn_like(tensor))
    model.save_pretrained(tmp_path / "before")
    labels = np.arange(4)
    loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(IDS)), torch.from_numpy(labels))
    loss.backward()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.grad is not None:
                tensor -= 0.5 * tensor.grad
    model.save_pretrained(tmp_path / "after")
    trainer = Trainer(load_adapter(exported, tmp_path / "before"), loss="cross_entropy", optimizer="sgd",
                      learning_rate=0.5)  # fmt: skip
    trainer.fit({"ids": IDS, "labels": labels}, epochs=1, batch_size=4)
    trainer.save_adapter(tmp_path / "mine")
    theirs, mine, before = (
        safetensors.numpy.load_file(tmp_path / n / "adapter_model.safetensors") for n in ("after", "mine", "before")
    )
    assert theirs.keys() == mine.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(mine[name], array, rtol=0, atol=1e-5, err_msg=name)
        assert (array != before[name]).any() == ("vera_A" not in name and "vera_B" not in name), name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "no tensor head.lora_magnitude_vector"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"peft_type": "VERA"}, "a tensor of another kind head.lora_A.weight"),
        ({"peft_type": "ADALORA"}, "only 'LORA', 'VERA', 'LOHA', 'LOKR', 'IA3' can"),
        ({"r": "eight"}, "r='eight'"),
        ({"r": 2.5}, r"r=2\.5"),
        ({"r": float("nan")}, "r=nan"),
        ({"r": 10**8}, "rank 100000000 for 'head' in its settings, 2 in its file"),
        ({"rank_pattern": {"head": 10**8}}, "rank 100000000 for 'head'"),
        ({"rank_pattern": [2]}, "no table"),
        ({"alpha_pattern": {"head": float("inf")}}, "head=inf"),
        ({"alpha_pattern": {"head": "2"}}, "head='2'"),
        ({"alpha_pattern": {"(h*)*d": 2}}, "that is not matched"),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf"),
        ({"lora_alpha": 10**400}, "lora_alpha=1000"),
        ({"lora_dropout": 5}, "lora_dropout=5"),
        ({"lora_dropout": -0.5}, "lora_dropout=-0.5"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "corda"}, "init_lora_weights='corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
    ],
)
def test_other_kinds_are_refused(exported, tmp_path, settings, said):
    model = peft.get_peft_model(Net().eval(), peft.LoraConfig(r=2, target_modules=["head"]))
    model.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(BadInput, match=said):
        load_adapter(exported, tmp_path / "a")


def test_ranks_of_vera_are_checked_before_anything_is_drawn(exported, tmp_path):
    model = peft.get_peft_model(Net().eval(), peft.VeraConfig(r=4, target_modules=LINEAR, save_projection=False))
    model.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 10**8}))
    with pytest.raises(BadInput, match="r=100000000 and"):
        load_adapter(exported, tmp_path / "a")


@pytest.mark.parametrize(
    "change", [{"dropout": 5}, {"rank": float("nan")}, {"rank": 0}, {"alpha": float("inf")}, {"dropout": float("nan")}]
)
def test_a_record_with_numbers_out_of_range_is_refused(exported, tmp_path, change):
    trainer = Trainer(exported, loss="cross_entropy", adapter=LoRA(rank=2, targets=["head"]))
    trainer.save_adapter(tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    with safetensors.safe_open(file, "np") as opened:
        header = dict(opened.metadata())
    record = json.loads(header["onnxgrad.adapter"]) | change
    safetensors.numpy.save_file(
        safetensors.numpy.load_file(file), file, header | {"onnxgrad.adapter": json.dumps(record)}
    )
    with pytest.raises(BadInput, match="are damaged"):
        load_adapter(exported, tmp_path / "a")


@pytest.mark.parametrize("initial", ["pissa", "olora", "eva", "orthogonal", "gaussian"])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.filterwarnings("ignore:lora with eva")
def test_first_factors_of_other_forms(exported, tmp_path, initial, rslora):
    """Those that PEFT takes out of the weights are computed again from the weights; its plain form is loaded, too."""
    settings = peft.LoraConfig(r=2, lora_alpha=5, target_modules=LINEAR, init_lora_weights=initial, use_rslora=rslora)
    model = peft.get_peft_model(Net().eval(), settings).eval()
    changes = initial in ("pissa", "olora")
    if changes:
        model.save_pretrained(tmp_path / "first")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
    check_loaded(exported, model, tmp_path / "a")
    if changes:
        expected = of_peft(model)
        model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
        np.testing.assert_allclose(scores(load_adapter(exported, tmp_path / "plain")), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [{"init": "pissa"}, {"init": "pissa", "rslora": True}, {"init": "olora", "alpha": 3}])
def test_initial_forms_train_as_in_peft(exported, tmp_path, form):
    """The same steps; saved as plain LoRA of twice the rank, which PEFT loads beside the weights before training."""
    settings = peft.LoraConfig(
        r=2, lora_alpha=form.get("alpha", 4), target_modules=LINEAR, init_lora_weights=form["init"],
        use_rslora=form.get("rslora", False),
    )  # fmt: skip
    model = peft.get_peft_model(Net().eval(), settings).eval()
    own = LoRA(rank=2, targets=LINEAR, **form)
    trainer = Trainer(exported, loss="cross_entropy", adapter=own, optimizer="sgd", learning_rate=0.5)
    np.testing.assert_allclose(scores(trainer.adapted_model()), of_peft(Net().eval()), rtol=0, atol=1e-5)
    descent = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(IDS)), torch.arange(4))
        descent.zero_grad()
        loss.backward()
        descent.step()
    trainer.fit({"ids": IDS, "labels": np.arange(4)}, epochs=5, batch_size=4, shuffle=False)
    assert np.abs(of_peft(model) - of_peft(Net().eval())).max() > 0.05
    np.testing.assert_allclose(scores(trainer.adapted_model()), of_peft(model), rtol=0, atol=2e-5)
    trainer.save_adapter(tmp_path / "a")
    again = peft.PeftModel.from_pretrained(Net().eval(), str(tmp_path / "a")).eval()
    np.testing.assert_allclose(of_peft(again), of_peft(model), rtol=0, atol=2e-5)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    ("ranks", "alphas"),
    [
        ({"head": 2}, {}),
        ({}, {"head": 2}),
        ({"block.query": 1, "head": 2}, {"output": 7, r"block\.q.*": 3}),
    ],
)
def test_ranks_and_alphas_of_modules_survive_a_round_trip(exported, tmp_path, ranks, alphas, rslora):
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=MODULES, init_lora_weights=False, rank_pattern=ranks, alpha_pattern=alphas,
        use_rslora=rslora,
    )  # fmt: skip
    model = peft.get_peft_model(Net().eval(), settings).eval()
    check_loaded(exported, model, tmp_path / "a")
    trainer = Trainer(load_adapter(exported, tmp_path / "a"), loss="cross_entropy")
    trainer.save_adapter(tmp_path / "b")
    again = peft.PeftModel.from_pretrained(Net().eval(), str(tmp_path / "b")).eval()
    np.testing.assert_allclose(of_peft(again), of_peft(model), rtol=0, atol=1e-5)


def test_a_name_that_ends_another_is_no_pattern_of_it(tmp_path):
    """PEFT takes the pattern "head" for the module "side.head" too."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.head = torch.nn.Linear(6, 6)
            self.side = torch.nn.ModuleDict({"head": torch.nn.Linear(6, 6)})

        def forward(self, x):
            return self.head(torch.tanh(self.side["head"](x)))

    x = torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(Two().eval(), (x,), tmp_path / "two.onnx", input_names=["x"], dynamo=False, opset_version=18)
    settings = peft.LoraConfig(
        r=3, target_modules=["head"], init_lora_weights=False, rank_pattern={"^head": 2}, alpha_pattern={"^head": 9}
    )
    model = peft.get_peft_model(Two().eval(), settings).eval()
    model.save_pretrained(tmp_path / "a")
    Trainer(load_adapter(tmp_path / "two.onnx", tmp_path / "a"), loss="mse").save_adapter(tmp_path / "b")
    again = peft.PeftModel.from_pretrained(Two().eval(), str(tmp_path / "b")).eval()
    with torch.no_grad():
        np.testing.assert_allclose(again(x).numpy(), model(x).numpy(), rtol=0, atol=1e-5)


def test_modules_that_are_saved_whole_have_their_weights(exported, tmp_path):
    """The exporter has transposed them and given them other names."""
    settings = peft.LoraConfig(r=2, target_modules=["block.query"], modules_to_save=["head", "block.output"])
    model = peft.get_peft_model(Net().eval(), settings).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.add_(0.1 * torch.randn_like(tensor))
    check_loaded(exported, model, tmp_path / "a")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_of_adapted_modules_survive_a_round_trip(exported, tmp_path, bias):
    settings = peft.LoraConfig(r=2, target_modules=["block.output", "head"], bias=bias)
    model = peft.get_peft_model(Net().eval(), settings).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.requires_grad:
                tensor.add_(0.3 * torch.randn_like(tensor))
    check_loaded(exported, model, tmp_path / "a")
    trainer = Trainer(load_adapter(exported, tmp_path / "a"), loss="cross_entropy", learning_rate=0.05)
    trainer.save_adapter(tmp_path / "b")
    again = peft.PeftModel.from_pretrained(Net().eval(), str(tmp_path / "b")).eval()
    np.testing.assert_allclose(of_peft(again), of_peft(model), rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores(load_adapter(exported, tmp_path / "b")), of_peft(model), rtol=0, atol=1e-5)


def test_a_setting_that_is_not_known_is_warned_of(exported, tmp_path):
    peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["head"])).save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_new_form": True, "other": None}))
    with pytest.warns(UserWarning, match="use_new_form=True, a setting of PEFT that is not known here"):
        load_adapter(exported, tmp_path)


def test_what_trained_as_a_whole_is_found_again_by_peft(exported, tmp_path):
    """By the name of its module and in PyTorch's layout, whatever the exporter has made of it."""
    whole = [t.name for t in onnx.load(exported).graph.initializer if sorted(t.dims) == [4, 10]]
    asked = LoRA(rank=3, targets=["block.query"], train_also=[*whole, "head.bias", "block.output.bias"])
    trainer = Trainer(exported, loss="cross_entropy", adapter=asked, learning_rate=0.05)
    trainer.fit({"ids": IDS, "labels": np.arange(4)}, epochs=5, batch_size=4)
    trainer.save_adapter(tmp_path / "a")
    model = peft.PeftModel.from_pretrained(Net().eval(), str(tmp_path / "a")).eval()
    assert np.abs(of_peft(model) - of_peft(Net().eval())).max() > 0.05
    np.testing.assert_allclose(scores(trainer.adapted_model()), of_peft(model), rtol=0, atol=1e-5)
    again = load_adapter(exported, tmp_path / "a")
    np.testing.assert_allclose(scores(again), of_peft(model), rtol=0, atol=1e-5)


def test_a_matrix_of_no_module_is_named_in_a_warning(tmp_path):
    text = """<ir_version: 10, opset_import: ["" : 18]> m (float[N,3] x) => (float[N,2] y)
        <float[3,4] w = {1,2,3,4,5,6,7,8,9,0,1,2}, float[4,2] "onnx::MatMul_7" = {1,2,3,4,5,6,7,8}> {
        h = MatMul(x, w) y = MatMul(h, "onnx::MatMul_7") }"""
    model = onnx.parser.parse_model(text.replace('"onnx::MatMul_7"', "v"))
    model.graph.initializer[1].name = model.graph.node[1].input[1] = "onnx::MatMul_7"
    trainer = Trainer(model, loss="mse", adapter=LoRA(rank=1, targets=["w"], train_also=["onnx::MatMul_7"]))
    with pytest.warns(UserWarning, match=r"PEFT will not find 'onnx::MatMul_7'"):
        trainer.save_adapter(tmp_path / "a")
    load_adapter(model, tmp_path / "a")


def test_modules_that_the_model_does_not_have(tmp_path, exported):
    net = torch.nn.Sequential()
    net.add_module("heads", torch.nn.Linear(10, 4))
    model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["heads"]))
    model.save_pretrained(tmp_path / "a")
    with pytest.raises(BadInput, match="that of another model: no module named 'heads'; did you mean 'head'"):
        load_adapter(exported, tmp_path / "a")


class Fused(torch.nn.Module):
    """Queries, keys and values of one weight, by a Linear and as GPT-2 has them, and a convolution with groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(20, 12)
        self.qkv = torch.nn.Linear(12, 36)
        self.c_attn = Conv1D(36, 12)
        self.grouped = torch.nn.Conv1d(12, 6, 3, groups=3)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        x = x + (torch.softmax(q @ k.transpose(-2, -1), -1) @ v).transpose(1, 2).flatten(2)
        q, k, v = self.c_attn(x).split(12, -1)
        x = x + torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        return self.grouped(x.transpose(1, 2)).mean(-1)


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")  # which is not merged there
@pytest.mark.parametrize(
    ("dynamo", "form"),
    [(False, {}), (True, {"rslora": True}), (False, {"dora": True})],
    ids=["torchscript, lora", "dynamo, rslora", "dora"],
)
def test_parts_are_blocks_of_one_pair_of_factors_in_peft(tmp_path, dynamo, form):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Fused().eval(), (torch.from_numpy(IDS),), tmp_path / "fused.onnx", input_names=["ids"],
                          output_names=["scores"], dynamo=dynamo, opset_version=18)  # fmt: skip
    targets = ["qkv[q,v]", "c_attn[v]"] + ["grouped"] * ("dora" not in form)  # which PEFT has no DoRA for
    trainer = Trainer(tmp_path / "fused.onnx", loss="cross_entropy", learning_rate=0.05,
                      adapter=LoRA(rank=2, targets=targets, **form))  # fmt: skip
    trainer.fit({"ids": IDS, "labels": np.arange(4)}, epochs=5, batch_size=4)
    trainer.save_adapter(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # PEFT finds it out by itself
        model = peft.PeftModel.from_pretrained(Fused().eval(), str(tmp_path / "a"))
    assert np.abs(of_peft(model) - of_peft(Fused().eval())).max() > 0.05
    np.testing.assert_allclose(scores(trainer.inference_model()), of_peft(model), rtol=0, atol=1e-5)
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["rank_pattern"] == {"qkv": 4} | ({"grouped": 6} if "grouped" in targets else {})
    model.save_pretrained(tmp_path / "b")  # without what onnxgrad knows: the whole weight is adapted there
    back = load_adapter(tmp_path / "fused.onnx", tmp_path / "b", merge=True)
    np.testing.assert_allclose(scores(back), of_peft(model), rtol=0, atol=1e-5)


def test_what_reads_the_channels_of_other_groups_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Fused().eval(), (torch.from_numpy(IDS),), tmp_path / "fused.onnx", dynamo=False)
        settings = peft.LoraConfig(r=3, target_modules=["grouped"], init_lora_weights=False)
        peft.get_peft_model(Fused().eval(), settings).save_pretrained(tmp_path / "a")
    with pytest.raises(BadInput, match="a convolution with 3 groups, where an adapter reads those of its group"):
        load_adapter(tmp_path / "fused.onnx", tmp_path / "a")


class Tied(torch.nn.Module):
    """Scores of words by the matrix that embeds them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words = torch.nn.Embedding(20, 12)
        self.head = torch.nn.Linear(12, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids))).mean(1)


def test_a_tied_matrix_of_which_the_exporter_makes_two_has_two_modules(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Tied().eval(), (torch.from_numpy(IDS),), tmp_path / "tied.onnx", input_names=["ids"],
                          output_names=["scores"], dynamo=True, opset_version=18)  # fmt: skip
    asked = LoRA(rank=2, targets="all")
    trainer = Trainer(tmp_path / "tied.onnx", loss="cross_entropy", learning_rate=0.05, adapter=asked)
    trainer.fit({"ids": IDS, "labels": np.arange(4)}, epochs=5, batch_size=4)
    trainer.save_adapter(tmp_path / "a")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["head", "words"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(Tied().eval(), str(tmp_path / "a"))
    np.testing.assert_allclose(scores(trainer.inference_model()), of_peft(model), rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "b")
    back = load_adapter(tmp_path / "tied.onnx", tmp_path / "b", merge=True)
    np.testing.assert_allclose(scores(back), of_peft(model), rtol=0, atol=1e-5)
