"""``onnxgrad quantize``: what it writes, what it says, and one error for whatever can be wrong."""

import os

import numpy as np
import onnx
import pytest

from tests.cli.said import said
from tests.commands import command
from tests.training.models import blobs, classifier

QAT = ("--qat", "--loss", "cross_entropy", "--optimizer", "adam")


@pytest.fixture
def place(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs())
    return tmp_path


def run(place, *args):
    return command("quantize", "m.onnx", "--data", "d.npz", "-o", "q.onnx", *args, cwd=place, env=dict(os.environ))


def types(path):
    return {t.name: t.data_type for t in onnx.load(path).graph.initializer}


def test_by_calibration_alone(place):
    found = run(place)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("quantized      q.onnx  ")
    assert found.stderr == ""
    assert types(place / "q.onnx")["w1_quantized"] == onnx.TensorProto.INT8
    assert {p.name for p in place.iterdir()} == {"m.onnx", "d.npz", "q.onnx"}


def test_with_training(place):
    asked = (*QAT, "--lr", 0.01, "--weights", "int4", "--per-tensor", "--epochs", 2, "--validation", "d.npz")
    found = run(place, *asked)
    assert found.returncode == 0, found.stderr
    lines = [line.split()[0] for line in found.stdout.splitlines()]
    assert lines[:3] == ["before", "quantized", "after"]
    assert "before the first step" in found.stdout
    assert types(place / "q.onnx")["w1_quantized"] == onnx.TensorProto.INT4
    kept = (place / "q.checkpoint" / "checkpoint.safetensors").stat().st_size
    assert kept
    again = run(place, *asked[:-4], "--epochs", 3, "--validation", "d.npz", "--resume")
    assert again.returncode == 0, again.stderr
    evaluated = command("evaluate", "q.onnx", "--data", "d.npz", cwd=place, env=dict(os.environ))
    assert evaluated.returncode == 0, evaluated.stderr


def test_what_is_quantized_goes_on_training(place):
    assert run(place).returncode == 0
    more = ("--loss", "cross_entropy", "--optimizer", "adam", "--epochs", 1)
    found = command("train", "q.onnx", "--data", "d.npz", "-o", "t.onnx", *more, cwd=place, env=dict(os.environ))
    assert found.returncode == 0, found.stderr
    assert types(place / "t.onnx") == types(place / "q.onnx")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--weights", "int3"), "there is no type of weights 'int3'; there are: int8, uint8, int4, uint4"),
        (("--calibration", "mean"), "there is no calibration 'mean'"),
        (("--block-size", "16"), "weights in blocks are int4 or uint4"),
        (("--operator", "Conv"), "'Conv'"),
        (("--exclude", "nobody"), "no node named 'nobody'"),
        (("--epochs", "3"), "--epochs says how to train, which --qat asks for"),
        (("--loss", "mse"), "--loss says how to train, which --qat asks for"),
        (("--qat",), "--qat trains the quantized model; say which loss to use with --loss"),
        ((*QAT, "--train", "w9"), "did you mean"),
        (("-o", "m.onnx"), "would write over MODEL"),
        (("--data", "nothing.npz"), "nothing.npz"),
        (("--data", "m.onnx"), "m.onnx"),
        (("--input", "x=y"), "'y'"),
        ((*QAT, "--labels", "target"), "no array in d.npz named 'target'"),
        ((*QAT, "--labels", "t1..t5"), "--inputs labels=t1..t5 joins columns"),
    ],
)
def test_bad_input(place, args, message):
    before = {p: p.stat().st_mtime_ns for p in place.rglob("*")}
    found = run(place, *args)
    assert found.returncode == 2, found.stderr
    assert found.stdout == ""
    lines = found.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert message in found.stderr, found.stderr
    assert all(line.startswith("  ") for line in lines[1:])
    assert {p: p.stat().st_mtime_ns for p in place.rglob("*")} == before, "nothing is written"


def test_other_shapes_and_quantized_models(place):
    assert run(place).returncode == 0
    twice = command("quantize", "q.onnx", "--data", "d.npz", "-o", "r.onnx", cwd=place, env=dict(os.environ))
    assert twice.returncode == 2
    assert "quantized already" in twice.stderr
    np.savez(place / "d.npz", x=np.zeros((4, 5), np.float32))
    other = run(place, "--force")
    assert other.returncode == 2
    assert "float32[N, 6]" in other.stderr


@pytest.mark.parametrize("rows", [3, 8, 20])
def test_a_fixed_batch_is_filled_up_for_calibration(tmp_path, rows):
    ends = "(float[8, 3] x) => (float[8, 3] y)"
    weight = "<float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}>"
    text = f'<ir_version: 10, opset_import: ["": 21]> g {ends} {weight} {{ y = MatMul (x, w) }}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).random((rows, 3), np.float32))
    said(tmp_path, "quantize PLACE/m.onnx --data PLACE/d.npz -o PLACE/q.onnx")
    assert any(n.op_type == "QuantizeLinear" for n in onnx.load(tmp_path / "q.onnx").graph.node)
