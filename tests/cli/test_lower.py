"""``onnxgrad lower``."""

from __future__ import annotations

import onnx
import pytest

from onnxgrad.training import attach, compile_step
from tests.commands import command
from tests.training.nets import mlp


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("optimizer", "words"), [("adam:convention=onnx", "2 operators of"), ("sgd", "1 operator of")])
def test_lower(tmp_path, optimizer, words):
    onnx.save(attach(mlp(), loss="mse", optimizer=optimizer), tmp_path / "m.onnx")
    done = command("lower", tmp_path / "m.onnx", "-o", tmp_path / "out.onnx")
    assert done.returncode == 0, done.stderr
    assert f"{words} ai.onnx.preview.training written out" in done.stdout
    assert "in 1 training entry;" in done.stdout
    lowered = onnx.load(tmp_path / "out.onnx")
    assert {n.domain for n in lowered.training_info[0].algorithm.node} == {""}
    assert compile_step(lowered).state
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "out.onnx"]


@pytest.mark.parametrize("bad", ["missing.onnx", "cut.onnx", "late.onnx"])
def test_bad_input(tmp_path, bad):
    (tmp_path / "cut.onnx").write_bytes(attach(mlp(), loss="mse").SerializeToString()[:-40])
    model = attach(mlp(), loss="mse")
    gradient = next(n for n in model.training_info[0].algorithm.node if n.op_type == "Gradient")
    next(a for a in gradient.attribute if a.name == "y").s = b"nothing"
    onnx.save(model, tmp_path / "late.onnx")
    (tmp_path / "out.onnx").write_bytes(b"precious")
    done = command("lower", tmp_path / bad, "-o", tmp_path / "out.onnx")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert (tmp_path / "out.onnx").read_bytes() == b"precious"
    done = command("lower", tmp_path / "late.onnx", "-o", tmp_path / "none" / "out.onnx")
    assert done.returncode == 2
    assert "there is no directory" in done.stderr
