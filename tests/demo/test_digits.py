"""``onnxgrad demo``: the main job of the README, as a user runs it."""

import json
import os
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from tools.demo_model import make_model

from onnxgrad.demo import MODEL, digits, shifted
from onnxgrad.training.loop.checkpoint import Checkpoint
from tests.commands import command


def demo(*args, **env):
    return command("demo", *args, env=os.environ | env)


def accuracy(path, data):
    (scores,) = onnxruntime.InferenceSession(path).run(None, {"images": data["images"]})
    return (scores.argmax(1) == data["labels"]).mean()


def test_no_epochs_are_refused(tmp_path):
    found = demo("-o", tmp_path, "--epochs", 0)
    assert found.returncode == 2
    assert found.stderr.startswith("error: epochs must be at least 1, not 0")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo(tmp_path, seed):
    out = tmp_path / "out" / "digits"
    found = demo("-o", out, "--seed", seed)
    assert found.returncode == 0, found.stderr
    names = ["checkpoint", "curves.png", "digits-before.onnx", "digits-trained.onnx", "metrics.json", "report.html"]
    assert sorted(p.name for p in out.iterdir()) == names
    _, test = digits()
    said = dict(re.findall(r"^(before|after) +accuracy +([\d.]+)%", found.stdout, re.MULTILINE))
    for when, name in (("before", "digits-before.onnx"), ("after", "digits-trained.onnx")):
        onnx.checker.check_model(out / name, full_check=True)
        assert float(said[when]) == pytest.approx(100 * accuracy(out / name, test), abs=0.01)
    assert float(said["after"]) >= 98
    assert float(said["before"]) < 30
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["finished"]
    assert sum(e["seconds"] for e in metrics["epochs"]) < 60
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    state = Checkpoint.load(out / "checkpoint" / "checkpoint.safetensors").state
    for tensor in onnx.load(out / "digits-trained.onnx").graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), state[tensor.name])


@pytest.mark.complete
def test_it_may_be_repeated_and_is_the_same_again(tmp_path):
    for _ in range(2):
        found = demo("-o", tmp_path, "--epochs", 1, "--threads", 1)
        assert found.returncode == 0, found.stderr
        (tmp_path / "digits-trained.onnx").rename(tmp_path / f"again{_}.onnx")
    assert (tmp_path / "again0.onnx").read_bytes() == (tmp_path / "again1.onnx").read_bytes()
    found = demo("-o", tmp_path, "--epochs", 2, "--threads", 1, "--resume")
    assert found.returncode == 0, found.stderr
    assert re.findall(r"^epoch \d+/\d+", found.stderr, re.MULTILINE) == ["epoch 2/2"]


def test_the_packaged_model_is_what_its_script_writes():
    model = make_model()
    assert onnx.load(MODEL) == model
    assert MODEL.stat().st_size < 200_000
    assert {n.domain for n in model.graph.node} == {""}
    assert not model.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value"), "dynamic batch"


def test_the_split_never_changes_and_shares_nothing():
    train, test = digits()
    assert (len(train["labels"]), len(test["labels"])) == (1438, 359)
    assert np.bincount(test["labels"]).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert train["images"].dtype == np.float32
    assert 0 == train["images"].min() < train["images"].max() == 1
    again = digits()[1]
    assert (again["images"] == test["images"]).all()
    seen = {a.tobytes() for a in shifted(train)["images"]}
    assert not any(a.tobytes() in seen for a in test["images"])


def test_shifted_images():
    train, _ = digits()
    more = shifted(train)
    n = len(train["labels"])
    assert len(more["images"]) == len(more["labels"]) == 5 * n
    np.testing.assert_array_equal(more["images"][:n], train["images"])
    np.testing.assert_array_equal(more["images"][n : 2 * n, 0, 1:], train["images"][:, 0, :-1])
    assert not more["images"][n : 2 * n, 0, 0].any()
    assert (more["labels"].reshape(5, n) == train["labels"]).all()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    found = demo("-o", tmp_path / "file" / "out")
    assert (found.returncode, found.stdout) == (2, "")
    assert re.fullmatch(r"error: cannot write to .*\n", found.stderr)


def test_a_demo_that_there_is_not():
    found = demo("digit")
    assert (found.returncode, found.stdout) == (2, "")
    assert "did you mean 'digits'" in found.stderr


def test_missing_packages(tmp_path):
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sklearn.py").write_text("raise ImportError('hidden')")
    found = demo("-o", tmp_path / "out", PYTHONPATH=str(hide))
    assert found.returncode == 2
    expected = "error: the demo needs the digits of scikit-learn: pip install 'onnxgrad[demo]'\n"
    assert found.stderr == expected
    assert not (tmp_path / "out").exists()
