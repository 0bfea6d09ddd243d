"""``onnxgrad transplant``: what it prints, and one error for whatever does not fit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad.training import Trainer
from tests.commands import command
from tests.transplants.nets import VOCABULARY, decoder, trained, weights


@pytest.fixture
def place(tmp_path):
    before = weights()
    onnx.save(decoder(before), tmp_path / "base.onnx")
    onnx.save(decoder(trained(before)), tmp_path / "trained.onnx")
    onnx.save(decoder(before, named=False, fused=True, cache=True), tmp_path / "cache.onnx")
    onnx.save(decoder(weights(seed=3)), tmp_path / "other.onnx")
    (tmp_path / "text.npz").write_bytes(b"no arrays")
    return tmp_path


def test_transplant(place):
    arguments = ("trained.onnx", "--base", "base.onnx", "--into", "cache.onnx", "-o", "out.onnx")
    found = command("transplant", *arguments, cwd=place)
    assert found.returncode == 0, found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()] == ["transplanted", "outputs", "written"]
    assert onnx.load(place / "out.onnx").graph.input[-1].name == "past_key_values.1.value"
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (3, 4))
    np.savez(place / "ids.npz", input_ids=ids)
    again = command("transplant", *arguments[:-1], "again.onnx", "--probes", "ids.npz", cwd=place)
    assert again.returncode == 0, again.stderr
    assert (place / "again.onnx").read_bytes() == (place / "out.onnx").read_bytes()


def test_adapter(place):
    """The folder of an adapter goes into a file with a cache as the merged model does."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (8, 6))
    trainer = Trainer(place / "base.onnx", loss="cross_entropy", learning_rate=0.01, lora=2, lora_targets="all")
    trainer.fit({"input_ids": ids, "labels": np.roll(ids, -1, 1)}, epochs=2, progress=False)
    trainer.save(place / "merged.onnx")
    trainer.save_adapter(place / "adapter")
    for source in ("merged.onnx", "adapter"):
        arguments = (source, "--base", "base.onnx", "--into", "cache.onnx", "-o", f"{source}.out.onnx")
        found = command("transplant", *arguments, cwd=place)
        assert found.returncode == 0, found.stderr
    assert (place / "merged.onnx.out.onnx").read_bytes() == (place / "adapter.out.onnx").read_bytes()
    wrong = command(
        *("transplant", "adapter", "--base", "other.onnx", "--into", "cache.onnx", "-o", "out.onnx"), cwd=place
    )
    assert wrong.returncode == 2
    assert "is that of another model" in wrong.stderr
    assert not (place / "out.onnx").exists()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trained.onnx",), "say which file gets the weights"),
        (("trained.onnx", "--into", "cache.onnx", "-o", "cache.onnx"), "would write over --into"),
        (("trained.onnx", "--into", "none.onnx", "-o", "out.onnx"), "none.onnx"),
        (("trained.onnx", "--base", "base.onnx", "--into", "other.onnx", "-o", "out.onnx"), "does not compute"),
        (("base.onnx", "--base", "base.onnx", "--into", "cache.onnx", "-o", "out.onnx"), "training has changed no"),
        (("trained.onnx", "--into", "cache.onnx", "-o", "out.onnx", "--probes", "text.npz"), "as an .npz file"),
        (("trained.onnx", "--into", "cache.onnx", "-o", "none/out.onnx"), "none"),
        (("trained.onnx", "--to", "out.safetensors", "-o", "out.onnx"), "in place of"),
        (("trained.onnx", "--to", "out.safetensors", "--like", "text.npz"), "text.npz"),
        ((".", "--base", "base.onnx", "--into", "cache.onnx", "-o", "out.onnx"), "neither a model nor an adapter"),
    ],
)
def test_bad_input(place, arguments, words):
    before = sorted(p.name for p in place.iterdir())
    found = command("transplant", *arguments, cwd=place)
    assert found.returncode == 2, found.stdout
    assert found.stderr.startswith("error: ")
    assert words in found.stderr
    assert "Traceback" not in found.stderr
    assert not found.stdout
    assert sorted(p.name for p in place.iterdir()) == before
