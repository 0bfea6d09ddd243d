"""``onnxgrad train --lora``: a merged model, the adapter in a folder, and one error for whatever can be wrong."""

import json
import os

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import load_adapter
from tests.commands import command
from tests.training.models import blobs, classifier

TRAIN = ("train", "m.onnx", "--data", "train.npz", "--loss", "cross_entropy", "--optimizer", "adam")


@pytest.fixture
def place(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "train.npz", **blobs())
    return tmp_path


def run(place, *args):
    return command(*TRAIN, "-o", "merged.onnx", *args, cwd=place, env=dict(os.environ))


def scores(model, x):
    return onnxruntime.InferenceSession(model).run(None, {"x": x})[0]


def test_the_main_path(place):
    asked = ("--lora", 2, "--lora-alpha", 8, "--lora-targets", "w1", "--lora-targets", "w[2]", "--train", "b1")
    found = run(place, *asked, "--lr", 0.02, "--epochs", 3, "--save-adapter", "a", "--validation", "train.npz")
    assert found.returncode == 0, found.stderr
    assert "adapts 2 weights" in found.stderr
    assert "adapter        a" in found.stdout
    files = {"adapter.onnx_adapter", "adapter_model.safetensors", "adapter_config.json"}  # no copy of the model
    assert {p.name for p in (place / "a").iterdir()} == files
    settings = json.loads((place / "a" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"].endswith("m.onnx")
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (2, 8, ["w1", "w2"])
    merged = onnx.load(place / "merged.onnx")
    assert {t.name for t in merged.graph.initializer} == {"w1", "b1", "w2"}
    x = blobs()["x"]
    after = scores(place / "merged.onnx", x)
    assert np.abs(after - scores(place / "m.onnx", x)).max() > 0.1
    loaded = load_adapter(place / "m.onnx", place / "a", merge=True)
    np.testing.assert_allclose(scores(loaded.SerializeToString(), x), after, rtol=0, atol=1e-5)
    again = run(
        place, *asked, "--lr", 0.02, "--epochs", 4, "--save-adapter", "a", "--validation", "train.npz", "--resume"
    )
    assert again.returncode == 0, again.stderr


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--lora", "2", "--lora-targets", "W1"), "did you mean 'w1'?"),
        (("--lora", "4", "--lora-targets", "all"), "rank 4 is larger than that of 'w2', which is 8 × 3"),
        (("--lora", "0"), "a whole number from 1 on"),
        (("--dora",), "dora says more about adapters"),
        (("--loha", "2", "--ia3"), "loha and ia3 are two kinds of adapters"),
        (("--ia3", "--lora-alpha", "2"), "lora_alpha says more about adapters"),
        (("--ia3-feedforward", "w1"), "ia3_feedforward says more about adapters, which ia3=True (--ia3) asks for"),
        (("--lora", "2", "--lora-init", "pisa", "--lora-targets", "w1"), "did you mean 'pissa'?"),
        (("--vera", "4", "--rslora"), "rslora says more about adapters"),
        (("--vera", "0", "--lora-targets", "all"), "a whole number from 1 on"),
        (("--save-adapter", "a"), "no adapter to save"),
        (("--lora", "2", "--lora-targets", "w1", "--save-adapter", "train.npz"), "train.npz"),
    ],
)
def test_bad_input(place, args, message):
    before = {p: p.stat().st_mtime_ns for p in place.rglob("*")}
    found = run(place, *args)
    assert found.returncode == 2, found.stderr
    assert found.stdout == ""
    lines = found.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0], found.stderr
    assert all(line.startswith("  hint: ") for line in lines[1:])
    assert {p: p.stat().st_mtime_ns for p in place.rglob("*")} == before, "nothing is written"


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("args", "kind", "trained"),
    [
        (("--lora", 2, "--lora-init", "pissa", "--lora-targets", "all"), "LORA", "w1.lora_A"),
        (("--loha", 2, "--lora-alpha", 4, "--lora-targets", "all"), "LOHA", "w1.hada_w1_a"),
        (("--lokr", 1, "--lora-targets", "all"), "LOKR", "w1.lokr_w1"),
        (("--ia3", "--lora-targets", "w1", "--ia3-feedforward", "w2"), "IA3", "w1.ia3_l"),
    ],
)
def test_further_forms(place, args, kind, trained):
    found = run(place, *args, "--epochs", 2, "--lr", 0.05, "--save-adapter", "a", "--save-training", "going.onnx")
    assert found.returncode == 0, found.stderr
    assert "adapts 2 weights" in found.stderr
    assert json.loads((place / "a" / "adapter_config.json").read_text())["peft_type"] == kind
    assert trained in {t.name for t in onnx.load(place / "going.onnx").graph.initializer}
    x = blobs()["x"]
    after = scores(place / "merged.onnx", x)
    assert np.abs(after - scores(place / "m.onnx", x)).max() > 0.01
    loaded = load_adapter(place / "m.onnx", place / "a", merge=True)
    np.testing.assert_allclose(scores(loaded.SerializeToString(), x), after, rtol=0, atol=1e-5)


def test_combined(place):
    for seed, name in enumerate("ab"):
        done = run(place, "--lora", 2, "--lora-targets", "all", "--seed", seed, "--epochs", 1, "--save-adapter", name)
        assert done.returncode == 0, done.stderr
    asked = ("combine", "a", "b", "-o", "c", "--weight", 0.5, "--weight", 0.25, "--method", "ties", "--density", 0.5)
    found = command(*asked, cwd=place, env=dict(os.environ))
    assert found.returncode == 0, found.stderr
    assert found.stdout == "adapter        c\n"
    load_adapter(place / "m.onnx", place / "c")
    for args, said in (
        (("-o", "a"), "would write over ADAPTERS 1"),
        (("-o", "c", "--method", "dare_ties"), "dare_ties needs a density"),
        (("-o", "d", "--weight", 1), "2 adapters and 1 weights"),
    ):
        refused = command("combine", "a", "b", *args, cwd=place, env=dict(os.environ))
        assert refused.returncode == 2
        assert said in refused.stderr
