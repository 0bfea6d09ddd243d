"""No command destroys what it reads, or one of its results by another: refused before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad import vjp
from onnxgrad.cli.app import build
from onnxgrad.demo.tasks import TASKS
from onnxgrad.model_io import save_model
from tests.models import mlp
from tests.training.models import blobs, classifier

TRAIN = "train m.onnx --data train.npz --validation test.npz --loss cross_entropy --optimizer sgd --epochs 1"
EXPORT = "export-step train.onnx --loss cross_entropy --optimizer sgd"
KL = "kl:teacher=teacher.onnx,temperature=2"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A model, one whose weights are in a file beside it, data, and links to some of them."""
    monkeypatch.chdir(tmp_path)
    for name in ("m.onnx", "train.onnx", "teacher.onnx", ".out.onnx.abcd1234.partial"):
        onnx.save(classifier(), name)
    onnx.save(mlp(), "far.onnx", save_as_external_data=True, location="out.onnx.data", size_threshold=0)
    rule = vjp(mlp(), wrt="x")
    onnx.save(rule, "rule.onnx")
    np.savez("train.npz", **blobs())
    np.savez("test.npz", **blobs(seed=1))
    os.symlink("m.onnx", "link.onnx")
    os.link("m.onnx", "hard.onnx")
    os.symlink(".", "here")
    Path("arrays").mkdir()
    for name, array in blobs().items():
        np.save(f"arrays/{name}.npy", array)
    os.rename("arrays/x.npy", "x.bin")
    os.symlink("../x.bin", "arrays/x.npy")
    Path("done").mkdir()
    os.symlink("done", "c.checkpoint")
    return tmp_path


def contents(folder):
    """Everything in it, links as they are."""
    return {p: os.readlink(p) if p.is_symlink() else p.is_file() and p.read_bytes() for p in folder.rglob("*")}


def run(line: str) -> int:
    with pytest.raises(SystemExit) as done:
        build()(line.split(), prog_name="onnxgrad")
    return done.value.code


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("grad m.onnx --wrt x -o m.onnx", "write over MODEL"),
        ("grad m.onnx --wrt x -o ./here/m.onnx", "write over MODEL"),
        ("grad m.onnx --wrt x -o link.onnx", "write over MODEL"),
        ("grad link.onnx --wrt x -o m.onnx", "write over MODEL"),
        ("grad m.onnx --wrt x -o hard.onnx", "write over MODEL"),
        ("grad far.onnx --wrt x -o out.onnx", "write over MODEL out.onnx.data"),
        ("grad far.onnx --wrt x -o out.onnx.data", "write over MODEL out.onnx.data"),
        ("grad m.onnx --wrt x --rule rule.onnx -o rule.onnx --force", "write over --rule"),
        ("grad .out.onnx.abcd1234.partial --wrt x -o out.onnx", "write over MODEL"),
        ("lower m.onnx -o m.onnx", "or give up the model as it is with --force"),
        ("lower m.onnx -o here/link.onnx", "write over MODEL"),
        (f"{TRAIN} -o m.onnx", "write over MODEL"),
        (f"{TRAIN} -o out.onnx --history m.onnx --force", "--history m.onnx would write over MODEL"),
        (f"{TRAIN} -o out.onnx --report link.onnx", "--report link.onnx would write over MODEL"),
        (f"{TRAIN} -o out.onnx --log hard.onnx", "--log hard.onnx would write over MODEL"),
        (f"{TRAIN} -o out.onnx --plot here/m.onnx", "--plot here/m.onnx would write over MODEL"),
        (f"{TRAIN} -o out.onnx --log train.npz", "write over --data"),
        (f"{TRAIN} -o test.npz", "write over --validation"),
        *((f"{TRAIN} -o out.onnx --{flag} here/out.onnx", f"--output and --{flag}") for flag in ("history", "log")),
        *((f"{TRAIN} -o out.onnx --{flag} ./out.onnx", f"--output and --{flag}") for flag in ("report", "plot")),
        (f"{TRAIN} -o out.onnx --history out.onnx.data", "--output and --history"),
        (f"{TRAIN} -o out.onnx --history a --report a", "--history and --report"),
        (f"{TRAIN} -o out.onnx --log a --plot here/a", "--plot and --log"),
        (f"{TRAIN} -o out.onnx --checkpoint out.onnx", "--checkpoint makes a folder of out.onnx"),
        (f"{TRAIN} -o out.onnx --checkpoint out.onnx/c", "--checkpoint makes a folder of out.onnx/c"),
        (f"{TRAIN} -o out.checkpoint", "--checkpoint makes a folder of out.checkpoint"),
        (f"{TRAIN} -o out.onnx --tensorboard here/out.onnx", "--tensorboard makes a folder"),
        (f"{TRAIN} -o c.onnx --log done/checkpoint.safetensors", "--log and --checkpoint"),
        (f"{TRAIN} -o c.onnx --log c.checkpoint/checkpoint.previous.safetensors", "--log and --checkpoint"),
        (f"{TRAIN.replace('train.npz', 'arrays')} -o x.bin", "-output x.bin would write over --data arrays"),
        (f"{TRAIN.replace('train.npz', 'arrays')} -o arrays/labels.npy", "would write over --data arrays"),
        (f"{TRAIN.replace('cross_entropy', KL)} -o teacher.onnx", "would write over --loss"),
        *((f"evaluate m.onnx --data train.npz --picture {p}", "write over") for p in ("train.npz", "link.onnx")),
        (f"{EXPORT} -o .", "write over MODEL"),
        (f"{EXPORT} -o here", "write over MODEL"),
        (f"{EXPORT} -o m.onnx", "is not a directory"),
    ],
)
def test_it_is_refused(line, says, place, capsys):
    before = contents(place)
    assert run(line) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.startswith("error: ")
    assert contents(place) == before


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "line",
    [
        "grad m.onnx --wrt x -o m.onnx --force",
        "grad far.onnx --wrt x -o out.onnx --force",
        "lower far.onnx -o far.onnx --force",
        "lower m.onnx -o teacher.onnx",
        f"{TRAIN.replace('train.npz', 'arrays')} -o arrays/out.onnx --checkpoint arrays/c --history arrays/m.json",
    ],
)
def test_it_is_not(line, place):
    assert run(line) == 0
    model = onnx.load(line.split()[line.split().index("-o") + 1])
    onnx.checker.check_model(model, full_check=True)


def test_the_demo(place, capsys):
    """Over the model that it begins with; a link in its folder that makes two results one."""
    Path("out").mkdir()
    os.symlink("digits-before.onnx", "out/report.html")
    before = contents(place)
    assert run("demo -o out") == 2
    assert "would both write" in capsys.readouterr().err
    assert contents(place) == before
    assert not isinstance(TASKS["digits"].model(), Path) or TASKS["digits"].model().exists()


def test_what_a_killed_run_left_is_no_place_to_read_from(place):
    """The one that reads it would remove it: it is the leftover of what is written."""
    save_model(mlp(), place / "out.onnx")
    assert not (place / ".out.onnx.abcd1234.partial").exists()
