"""Settings of ``onnxgrad train``: every flag has its effect, and every bad value is one error."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from onnxgrad.cli.app import build
from onnxgrad.training import Trainer
from tests.training.models import blobs, classifier


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(), "m.onnx")
    np.savez("train.npz", **blobs())
    np.savez("test.npz", **blobs(seed=1))
    return tmp_path


def command(*args):
    return CliRunner().invoke(build(), ["train", "m.onnx", "--data", "train.npz", *map(str, args)])


def train(*args, out="out.onnx", loss="cross_entropy", optimizer="adam", epochs=3):
    found = command("--loss", loss, "--optimizer", optimizer, "--epochs", epochs, "-o", out, "--lr", 0.02, *args)
    assert found.exit_code == 0, found.output
    return weights(out)


def test_the_default_optimizer_is_that_of_python(place):
    found = command("--loss", "cross_entropy", "--epochs", 1, "--no-shuffle", "-o", "out.onnx")
    assert found.exit_code == 0, found.output
    trainer = Trainer("m.onnx", loss="cross_entropy")
    trainer.fit("train.npz", shuffle=False)
    for name, array in weights("out.onnx").items():
        np.testing.assert_array_equal(array, trainer.state()[name])


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--learning_rate", "did you mean --learning-rate?"),
        ("--rate", "did you mean --learning-rate?"),
        ("--wd", "did you mean --weight-decay?"),
        ("--early-stopping", "did you mean --patience?"),
        ("--betas", "--optimizer adam:betas=…"),
        ("--row-weights", "it is an option of the loss: --loss mse:row_weights=…"),
        ("--class-weight", "--loss cross_entropy:weight=…"),
        ("--adapter", "--lora, --vera, --loha or --lokr RANK, or --ia3"),
    ],
)
def test_an_unknown_flag_names_the_right_one(place, flag, hint):
    found = command("--loss", "mse", "-o", "out.onnx", flag, 2)
    assert found.exit_code == 2
    assert hint in found.output


def test_long_and_short_names_are_one_flag(place):
    long = train("--groups", "w*:rate=0.1", "--trainable", "w*", "--inputs", "x=x", "--learning-rate", 0.02)
    short = train("--group", "w*:rate=0.1", "--train", "w*", "--input", "x=x")
    assert all((long[n] == short[n]).all() for n in long)


def weights(path="m.onnx"):
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def changed(after):
    before = weights()
    return {name for name in before if not np.array_equal(before[name], after[name])}


def test_what_trains(place):
    assert changed(train("--train", "last:1")) == {"w2"}
    assert changed(train("--train", "type:MatMul", "--freeze", "w1", out="b.onnx")) == {"w2"}
    assert changed(train("--group", "w*:rate=0", out="c.onnx")) == {"b1"}
    assert changed(train("--group", "b*:frozen=true", out="d.onnx")) == {"w1", "w2"}


def test_losses_are_added_and_take_options(place):
    one = train(loss="cross_entropy:label_smoothing=0.1")
    two = command(
        *("--loss", "0.9*cross_entropy", "--loss", "0.1*cross_entropy:label_smoothing=1"),
        *("--optimizer", "adam", "--epochs", 3, "--lr", 0.02, "-o", "two.onnx"),
    )
    assert two.exit_code == 0, two.output
    for name, array in weights("two.onnx").items():
        np.testing.assert_allclose(array, one[name], rtol=1e-3, atol=1e-5)


def test_parts_train_the_same_weights(place):
    whole = train("--clip-norm", 1, "--clip-value", 0.5)
    parts = train("--clip-norm", 1, "--clip-value", 0.5, "--accumulate", 4, out="parts.onnx")
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-3, atol=1e-5)


def test_a_step_within_memory_trains_the_same_weights(place):
    whole = train()
    found = command("--loss", "cross_entropy", "--optimizer", "adam", "--epochs", 3, "--lr", 0.02, "--memory", "4KB",
                    "--batch-size", 32, "-o", "small.onnx")  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "memory: " in found.output
    for name, array in weights("small.onnx").items():
        np.testing.assert_allclose(array, whole[name], rtol=1e-4, atol=1e-6)
    found = command("--loss", "cross_entropy", "--memory", "10", "-o", "none.onnx")
    assert found.exit_code == 2


def test_a_formula_of_parts_trains_the_same_weights(place):
    """A loss that is no mean over rows: the standard deviation of all scores."""
    formula = "mean(logsumexp(y, axis=1) - take_along_axis(y, labels[:, None], axis=1)[:, 0]) + 0.1*std(y)"
    whole, parts = (train("--accumulate", n, loss=formula, optimizer="sgd", out=f"{n}.onnx") for n in (1, 4))
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-4, atol=1e-6)


def test_averages_are_what_is_saved_and_measured(place):
    """With a share of 0 the average is the last weight; with a large one it stays behind; measured as it is saved."""
    plain, last = train(), train("--ema", 0, out="last.onnx")
    for name in plain:
        np.testing.assert_array_equal(plain[name], last[name])
    found = command(
        *("--loss", "cross_entropy", "--optimizer", "adam", "--epochs", 3, "--lr", 0.02, "--ema", 0.9),
        *("-o", "slow.onnx", "--validation", "test.npz", "--history", "m.json"),
    )
    assert found.exit_code == 0, found.output
    slow = weights("slow.onnx")
    start = weights()
    assert all(np.abs(slow[n] - start[n]).max() < np.abs(plain[n] - start[n]).max() for n in start)

    metrics = json.loads((place / "m.json").read_text())
    assert metrics["after"]["loss"] == pytest.approx(metrics["epochs"][-1]["validation_loss"], rel=1e-4)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("schedule", ["cosine:warmup=2", "one_cycle", "step:size=2,gamma=0", "plateau:patience=1"])
def test_schedules(place, schedule):
    plain, scheduled = train(), train("--schedule", schedule, out="s.onnx")
    assert changed(scheduled) == {"w1", "b1", "w2"}
    same = all(np.array_equal(plain[n], scheduled[n]) for n in plain)
    assert same == schedule.startswith("plateau"), "the loss falls in all three epochs"


def test_a_step_schedule_that_ends_training_ends_it(place):
    """γ = 0 after two steps: nothing moves any more, so one epoch of three steps leaves what three epochs leave."""
    one = train("--schedule", "step:size=2,gamma=0", epochs=1, optimizer="sgd")
    three = train("--schedule", "step:size=2,gamma=0", out="b.onnx", epochs=3, optimizer="sgd")
    first, more = np.abs(one["w1"] - weights()["w1"]).max(), np.abs(three["w1"] - one["w1"]).max()
    assert first > 0
    assert more == 0


def test_samples_and_variants(place):
    assert changed(train("--sample", "balanced")) == {"w1", "b1", "w2"}
    assert any(not np.array_equal(a, b) for a, b in zip(weights().values(), weights("out.onnx").values()))
    for flags, words in (
        (("--sample", "balancd"), "sample is 'each' or 'balanced', not 'balancd'"),
        (("--augment", "flp"), "did you mean 'flip'"),
        (("--augment", "flip"), "augmentation is of pictures"),
    ):
        found = command("--loss", "cross_entropy", "--optimizer", "adam", "-o", "no.onnx", *flags)
        assert found.exit_code == 2
        assert words in found.output


def test_dropout_is_put_back(place):
    plain, dropped = train(), train("--dropout", "Tanh=0.5", out="d.onnx")
    assert any(np.abs(plain[n] - dropped[n]).max() > 1e-3 for n in plain)
    assert "Dropout" not in {n.op_type for n in onnx.load("d.onnx").graph.node}


LOSS = ("--loss", "cross_entropy", "--optimizer", "adam")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--loss", "ce", "--optimizer", "adam"), "there is no loss 'ce'; there are: cross_entropy, nll, focal"),
        (("--loss", "no.onnx", "--optimizer", "adam"), "no.onnx"),
        (("--loss", "mse", "--optimizer", "adamm"), "there is no optimizer 'adamm'; there are: sgd, momentum"),
        (("--loss", "mse", "--optimizer", "adam:betas=1,2"), "betas must be in [0, 1), not 2"),
        ((*LOSS, "--ema", "1"), "ema must be in [0, 1), not 1"),
        ((*LOSS, "--accumulate", "0"), "accumulate must be at least 1, not 0"),
        ((*LOSS, "--outer-rate", "0.5"), "are of the step that ranks take together every sync_every steps"),
        ((*LOSS, "--shard-optimizer", "--compress", "fp16"), "shard_optimizer does not go with compress"),
        ((*LOSS, "--sync-batch-norm", "--sync-every", "2"), "sync_batch_norm does not go with sync_every"),
        ((*LOSS, "--sync-every", "0"), "sync_every must be at least 1, not 0"),
        ((*LOSS, "--compress", "fp17"), "no compression named 'fp17'; did you mean 'fp16'?"),
        ((*LOSS, "--freeze", "w3"), "did you mean 'w"),
        ((*LOSS, "--freeze-bn"), "there is no BatchNormalization to freeze"),
        ((*LOSS, "--dropout", "Tanh"), "--dropout Tanh is not written as Relu=0.1"),
        ((*LOSS, "--dropout", "Tanh=1"), "dropout behind 'Tanh' must be in [0, 1), not 1"),
        ((*LOSS, "--dropout", "Relu=0.1"), "no node with a float output is called 'Relu' or of that type; types: Add"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_values(place, args, words):
    found = command(*args, "-o", "out.onnx")
    assert found.exit_code == 2, found.output
    lines = found.output.splitlines()
    assert lines[0].startswith("error: "), found.output
    assert all(line.startswith("  ") for line in lines[1:]), found.output
    assert words in found.output
    assert not (place / "out.onnx").exists()
