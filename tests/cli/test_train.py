"""``onnxgrad train`` as a user runs it: what it leaves, and one clear error for whatever can be wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad.training import attach
from tests import commands as forked
from tests.training.models import blobs, classifier

LOSS = ("--loss", "cross_entropy", "--optimizer", "adam")


def command(*args, cwd, **env):
    return forked.command(*args, cwd=cwd, env=os.environ | env)


@pytest.fixture
def place(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "train.npz", **blobs())
    np.savez(tmp_path / "test.npz", **blobs(seed=1))
    return tmp_path


def refused(place, *args, **env):
    """Run ``train`` on something bad; its error, after checking that it is one error and left nothing."""
    before = {p: p.stat().st_mtime_ns for p in place.rglob("*")}
    found = command("train", *args, "-o", "out.onnx", cwd=place, **env)
    assert found.returncode == 2, found.stderr
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    lines = found.stderr.splitlines()
    assert lines[0].startswith("error: "), found.stderr
    assert all(line.startswith("  ") for line in lines[1:]), found.stderr
    assert {p: p.stat().st_mtime_ns for p in place.rglob("*")} == before, "nothing is written or left behind"
    return found.stderr


def test_the_main_path(place):
    args = (
        "train",
        "m.onnx",
        "--data",
        "train.npz",
        "--validation",
        "test.npz",
        *LOSS,
        "--lr",
        0.02,
        "--epochs",
        6,
    )
    found = command(*args, "-o", "out.onnx", "--history", "m.json", "--plot", "p.png", cwd=place)
    assert found.returncode == 0, found.stderr
    assert {p.name for p in place.iterdir()} == {
        *("m.onnx", "train.npz", "test.npz"),
        *("out.onnx", "out.checkpoint", "m.json", "p.png"),
    }
    model = onnx.load(place / "out.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert not model.training_info
    assert [o.domain for o in model.opset_import] == [""]
    said = dict(re.findall(r"^(before|after) +accuracy +([\d.]+)%", found.stdout, re.MULTILINE))
    data = blobs(seed=1)
    for when, name in (("before", "m.onnx"), ("after", "out.onnx")):
        (y,) = onnxruntime.InferenceSession(place / name).run(None, {"x": data["x"]})
        assert float(said[when]) == pytest.approx(100 * (y.argmax(1) == data["labels"]).mean(), abs=0.01)
    assert float(said["after"]) > 90 > float(said["before"])
    metrics = json.loads((place / "m.json").read_text())
    assert 100 * metrics["after"]["accuracy"] == pytest.approx(float(said["after"]), abs=0.01)
    assert len(metrics["epochs"]) == 6
    what, *lines = found.stderr.splitlines()
    assert what == "trains 3 tensors, 80 numbers"
    assert [x.split()[0] for x in lines[:5]] == ["data", "classes", "rates", "run", "on"]
    assert len(lines[5:]) == 6, "a line per epoch where no terminal is"


def test_help_lists_the_flags_under_headings(tmp_path):
    text = command("train", "--help", cwd=tmp_path).stdout
    flags, heading = {}, ""
    for line in text.splitlines():
        if found := re.match(r"(\w+):$", line):
            heading = found[1]
        elif found := re.match(r"  (?:-\w, )?(--[\w-]+)", line):
            flags[found[1]] = heading
    expected = {
        "--data": "Data",
        "--freeze": "Model",
        "--loss": "Loss",
        "--learning-rate": "Optimizer",
        "--epochs": "Run",
    }
    assert expected.items() <= flags.items()
    assert flags["--output"] == flags["--log"] == "Output"


def test_it_says_where_the_head_went_and_what_the_loss_is_taken_of(place):
    """The head takes the place of the layer before the probabilities; the loss, without it, is that of their logits."""
    onnx.save(classifier(softmax=True), place / "s.onnx")
    args = ("train", "s.onnx", "--data", "train.npz", *LOSS, "--epochs", "1")
    plain = command(*args, "-o", "plain.onnx", cwd=place)
    assert plain.returncode == 0, plain.stderr
    assert "cross_entropy is taken of the logits 'z' of the probabilities 'y'" in plain.stderr
    headed = command(*args, "--head", "3", "-o", "headed.onnx", cwd=place)
    assert headed.returncode == 0, headed.stderr
    assert "the head reads " in headed.stderr
    assert "in the place of the last linear layer" in headed.stderr
    assert "Softmax" not in {n.op_type for n in onnx.load(place / "headed.onnx").graph.node}


def test_training_information_in_the_model_is_used(place):
    onnx.save(attach(classifier(), loss="cross_entropy", optimizer="sgd", learning_rate=0.3), place / "t.onnx")
    found = command("train", "t.onnx", "--data", "train.npz", "--validation", "test.npz", "-o", "out.onnx", cwd=place)
    assert found.returncode == 0, found.stderr
    assert "after" in found.stdout
    assert not onnx.load(place / "out.onnx").training_info
    said = refused(place, "t.onnx", "--data", "train.npz", "--loss", "mse", "--lr", "1")
    assert "t.onnx carries training information, which is used as it is; drop --loss, --learning-rate" in said


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("n.onnx", "--data", "train.npz", *LOSS), "there is no file 'n.onnx'"),
        (("m.onnx", "--data", "no.npz", *LOSS), "there is no file 'no.npz'"),
        (("m.onnx", "--data", "m.onnx", *LOSS), "cannot read 'm.onnx' as an .npz file"),
        (("m.onnx", "--data", "train.npz"), "carries no training information; say which loss"),
        (("m.onnx", "--data", "train.npz", *LOSS, "--prediction", "yy"), "did you mean 'y'"),
        (("m.onnx", "--data", "train.npz", *LOSS, "--trainable", "w3"), "did you mean 'w"),
        (("m.onnx", "--data", "train.npz", *LOSS, "--epochs", "0"), "epochs must be at least 1"),
        (("m.onnx", "--data", "train.npz", *LOSS, "--seed", "-1"), "seed must be at least 0"),
        (("m.onnx", "--data", "train.npz", *LOSS, "--labels", "label"), "did you mean 'labels'"),
        (("m.onnx", "--data", "train.npz", *LOSS, "--lr", "nan"), "learning_rate"),
        (("m.onnx", "--data", "train.npz", *LOSS, "--checkpoint", "m.onnx"), "m.onnx is not a directory"),
        (("m.onnx", "--data", "train.npz", *LOSS, "--resume"), "there is no checkpoint"),
        (("m.onnx", "--data", "train.npz", *LOSS, "--plot", "no/p.png"), "no directory no"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_asked_for_wrongly(place, args, words):
    assert words in refused(place, *args)


def test_truncated_files(place):
    for name in ("m.onnx", "train.npz"):
        whole = (place / name).read_bytes()
        (place / name).write_bytes(whole[: len(whole) * 2 // 3])
        assert name in refused(place, "m.onnx", "--data", "train.npz", *LOSS)
        (place / name).write_bytes(whole)


def test_an_operator_without_a_rule(place):
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
        net (float[N, 6] x) => (float[N, 3] y) { z = own.Strange (x, w)  y = Identity (z) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 3), np.float32), "w"))
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("z", 1, ["N", 3]))
    onnx.save(model, place / "m.onnx")
    assert "Strange node 'z' (own, opset 1)" in refused(place, "m.onnx", "--data", "train.npz", *LOSS)


@pytest.mark.target("portable")  # the step that overflows depends on how sums are taken
def test_a_loss_that_is_not_a_number(place):
    args = (
        "train",
        "m.onnx",
        "--data",
        "train.npz",
        "--loss",
        "cross_entropy",
        "--optimizer",
        "sgd",
        "--lr",
        1e38,
    )
    found = command(*args, "-o", "out.onnx", cwd=place)
    assert found.returncode == 2
    (line,) = (
        x
        for x in found.stderr.splitlines()
        if not x.startswith(("trains", "epoch", "data", "classes", "rates", "run", "on "))
    )
    assert re.match(r"error: .*(step \d+).*the last good checkpoint is 'out.checkpoint/checkpoint", line)
    assert not (place / "out.onnx").exists()
    again = command(*args, "-o", "out.onnx", "--checkpoint-seconds", 0, cwd=place)
    assert again.returncode == 2, "of the run before there is no step to lose"
    assert "the loss is inf at step 2" in again.stderr
    assert "holds an unfinished run, at step 1" in refused(place, *args[1:])


def test_an_output_that_cannot_be_written(place):
    out = place / "locked"
    out.mkdir()
    (out / "file").write_text("")
    for target, words in (("locked/file/out.onnx", "cannot write"), ("locked", "is a directory")):
        found = command("train", "m.onnx", "--data", "train.npz", *LOSS, "-o", target, cwd=place)
        assert (found.returncode, found.stdout) == (2, "")
        assert re.fullmatch(rf"error: .*{words}.*\n|error: .*directory.*\n", found.stderr), found.stderr
    folder = out
    if os.geteuid() == 0:  # who may write everywhere, but not there
        folder = Path("/proc/self")
        if not folder.exists():
            pytest.skip("needs a place where root cannot write")
    else:
        out.chmod(0o500)
    found = command("train", "m.onnx", "--data", "train.npz", *LOSS, "-o", folder / "out.onnx", cwd=place)
    assert (found.returncode, found.stdout) == (2, "")
    assert re.fullmatch(r"error: cannot write .*\n", found.stderr), found.stderr


def test_data_are_not_written_over(place):
    for flag, what in (("--log", "train.npz"), ("--history", "test.npz")):
        args = ("m.onnx", "--data", "train.npz", "--validation", "test.npz", *LOSS, flag, what)
        assert f"{flag} {what} would write over" in refused(place, *args)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("missing", "flags"),
    [("safetensors", ()), ("matplotlib", ("--plot", "p.png"))],
    ids=lambda x: str(x)[:12],
)
def test_a_package_that_is_missing(place, tmp_path_factory, missing, flags):
    hide = tmp_path_factory.mktemp("hide")
    (hide / f"{missing}.py").write_text("raise ImportError('hidden')")
    path = os.pathsep.join([str(hide), os.environ.get("PYTHONPATH", "")])
    said = refused(place, "m.onnx", "--data", "train.npz", *LOSS, *flags, PYTHONPATH=path)
    assert f"need the package {missing}: pip install 'onnxgrad[train]'" in said


def test_damaged_and_foreign_checkpoints_are_refused_by_name(place):
    args = ("m.onnx", "--data", "train.npz", *LOSS, "--epochs", "1")
    assert command("train", *args, "-o", "out.onnx", cwd=place).returncode == 0
    path = place / "out.checkpoint" / "checkpoint.safetensors"
    whole = path.read_bytes()
    other = ("m.onnx", "--data", "train.npz", "--loss", "cross_entropy", "--optimizer", "sgd", "--resume")
    assert "checkpoint.safetensors' belongs to another model or optimizer" in refused(place, *other)
    path.write_bytes(whole[:-10])
    for flags in (("--resume",), ()):
        assert "checkpoint.safetensors' is damaged" in refused(place, *args, *flags)
    path.write_text("hello")
    assert "checkpoint.safetensors' is damaged" in refused(place, *args, "--resume")


def test_ctrl_c_keeps_the_checkpoint_and_the_run_goes_on_exactly(place):
    np.savez(place / "train.npz", **blobs(1000))
    args = ("train", "m.onnx", "--data", "train.npz", *LOSS, "--batch-size", "8", "--threads", "1")
    whole = command(*args, "--epochs", "8", "-o", "whole.onnx", cwd=place)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(
        [sys.executable, "-m", "onnxgrad", *args, "--epochs", "100000", "-o", "out.onnx"],
        cwd=place,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:  # after a first epoch, so that it is in the loop
        if line.startswith("epoch 1/"):
            break
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert out == ""
    lines = [x for x in said.splitlines() if not x.startswith("epoch")]
    assert re.match(r"error: interrupted after step \d+; the checkpoint is 'out.checkpoint/", lines[0]), said
    assert len(lines) == 2
    assert lines[1].startswith("  hint: ")
    assert sorted(p.name for p in place.iterdir()) == [
        *("m.onnx", "out.checkpoint", "test.npz", "train.npz", "whole.checkpoint", "whole.onnx")
    ]
    step = int(re.search(r"step (\d+)", lines[0])[1])
    if step < 8 * 125:
        again = command(*args, "--epochs", "8", "--resume", "-o", "out.onnx", cwd=place)
        assert again.returncode == 0, again.stderr
        assert (place / "out.onnx").read_bytes() == (place / "whole.onnx").read_bytes()
