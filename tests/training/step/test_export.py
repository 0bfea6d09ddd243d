"""The files for a host on a device: it trains like the trainer, bit for bit, with onnxruntime and numpy alone."""

import json
import re
import runpy
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, attach, export_step
from onnxgrad.training.export.host import Host
from tests.commands import command
from tests.training.loop.test_trainer import NORMED
from tests.training.models import blobs, classifier

ONE = Options(threads=1)


def model(optimizer="adam", **options):
    return attach(classifier(), optimizer=optimizer, learning_rate=0.02, accumulate=True, **options)


def trained(source, batch=32, epochs=2):
    """Losses and state of the trainer's own machine, rows in order."""
    trainer, data, losses = Trainer(source, options=ONE), blobs(), []
    for _ in range(epochs):
        for low in range(0, 90, batch):
            part = {n: a[low : low + batch] for n, a in data.items()}
            losses.append(float(trainer.machine.step(part)[trainer.step.loss]))
    return losses, trainer.state()


def test_every_model_is_sound(tmp_path):
    contract = export_step(model(), tmp_path)
    assert contract == json.loads((tmp_path / "contract.json").read_text())
    assert set(contract["models"]) == {"train", "gradient", "update", "evaluate", "infer"}
    for about in contract["models"].values():
        found = onnx.load(tmp_path / about["file"])
        onnx.checker.check_model(found, full_check=True)
        names = {v.name for v in found.graph.input}
        assert names == {
            *about["batch"],
            *about["reads"],
            *about["rates"],
            *(e["input"] for e in about["state"].values()),
        }
        outputs = {v.name for v in found.graph.output}
        assert {*about["results"], *(e["output"] for e in about["state"].values())} <= outputs
        assert not found.training_info
    with np.load(tmp_path / "state.npz") as state:
        assert {n: (str(a.dtype), list(a.shape)) for n, a in state.items()} == {
            n: (t["dtype"], t["shape"]) for n, t in contract["state"].items()
        }


@pytest.mark.sweep(3)
@pytest.mark.target("portable")  # as in the host, to the last bit
@pytest.mark.parametrize("optimizer", ["adam", "momentum", "lion"])
def test_the_example_host_takes_the_steps_of_the_trainer(tmp_path, optimizer):
    source = model(optimizer)
    export_step(source, tmp_path)
    np.savez(tmp_path / "data.npz", **blobs())
    command = [sys.executable, "-I", str(tmp_path / "host.py"), str(tmp_path / "data.npz"), "--epochs", "2"]
    found = subprocess.run(
        [*command, "--threads", "1", "--save", str(tmp_path / "end.npz")], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    losses, state = trained(source)
    assert [float(line.split()[-1]) for line in found.stdout.splitlines()] == losses
    with np.load(tmp_path / "end.npz") as end:
        for name, array in state.items():
            assert end[name].tobytes() == array.tobytes(), name


def test_the_host_imports_nothing_else(tmp_path):
    export_step(model(), tmp_path)
    code = "import sys; sys.modules['onnxgrad'] = sys.modules['onnx'] = None; import runpy; runpy.run_path(sys.argv[1])"
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path / "host.py")], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": np.full(90, 9)}, "train.onnx does not run: "),
        ({"x": np.zeros((90, 99), np.float32)}, "train.onnx does not run: "),
        ({"labels": np.zeros(89, np.int64)}, "need the same number of rows"),
    ],
    ids=["labels", "columns", "rows"],
)
def test_the_host_says_one_line_of_what_fails(tmp_path, change, says):
    """ONNX Runtime writes no log of its own beside it."""
    export_step(model(), tmp_path)
    np.savez(tmp_path / "data.npz", **{**blobs(), **change})
    line = [sys.executable, "-I", str(tmp_path / "host.py"), str(tmp_path / "data.npz")]
    found = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout) == (2, "")
    (said,) = found.stderr.splitlines()
    assert said.startswith("error: ")
    assert says in said


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_parts_of_a_batch_add_up(tmp_path, reduction):
    export_step(model("sgd", loss=f"cross_entropy:ignore_index=-100,reduction={reduction}"), tmp_path)
    whole, parts, data = Host(tmp_path, 1), Host(tmp_path, 1), blobs()
    data["labels"][:30] = -100  # a part without labels that count, and one with few
    for _ in range(3):
        one, other = whole.step(data), parts.step_in_parts(data, 5)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    for name in ("w1", "w2"):
        np.testing.assert_allclose(parts.state[name], whole.state[name], rtol=1e-5, atol=1e-6)


def test_evaluation_and_inference_read_the_state(tmp_path):
    source = attach(onnx.parser.parse_model(NORMED), optimizer="sgd", learning_rate=0.1)
    contract = export_step(source, tmp_path)
    assert "gradient" not in contract["models"], "it does not say over how much the loss is averaged"
    host, trainer = Host(tmp_path, 1), Trainer(source, options=ONE)
    host.step(blobs())
    trainer.machine.load_state(host.state)
    test = blobs(seed=1)
    found = host.run("evaluate", test)
    assert float(found["loss"]) == pytest.approx(trainer.evaluate(test)["loss"], rel=1e-6)
    inference = trainer.inference_model().SerializeToString()
    (y,) = onnxruntime.InferenceSession(inference).run(None, {"x": test["x"]})
    np.testing.assert_allclose(host.run("infer", test)["y"], y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["y"], y, rtol=1e-6, atol=1e-6)


def test_the_command(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    asked = ["export-step", "m.onnx", "-o", "out", "--loss", "cross_entropy"]
    found = command(*asked, "--optimizer", "adam", "--schedule", "cosine:total=20", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    said = dict(line.split() for line in found.stdout.splitlines())
    models = {"train", "gradient", "update", "evaluate", "infer"}
    assert set(said) == models | {"state", "contract", "host", "required_operators"}
    assert all((tmp_path / path).exists() for path in said.values())
    host = Host(tmp_path / "out", 1)
    losses = [float(host.step(blobs())["loss"]) for _ in range(20)]
    assert losses[-1] < losses[0]
    before = {n: a.copy() for n, a in host.state.items()}
    host.step(blobs())
    assert (host.state["w1"] == before["w1"]).all(), "the schedule has come to its end"
    found = command(*asked[:-2], cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert "say which loss" in found.stderr


def test_further_results(tmp_path):
    source = model(metrics=["accuracy"])
    contract = export_step(source, tmp_path, outputs=["accuracy", "y", "w2_grad"])
    assert contract["models"]["train"]["results"] == ["loss", "accuracy", "y", "w2_grad"]
    assert {"loss", "accuracy", "y"} <= set(contract["models"]["gradient"]["results"])
    host, data = Host(tmp_path, threads=1), blobs(30)
    before = host.state["w2"]
    found = host.step(data)
    assert found["accuracy"] == (found["y"].argmax(1) == data["labels"]).mean()
    assert found["w2_grad"].shape == before.shape
    host.step_in_parts(data, 3)
    with pytest.raises(BadInput, match="nothing"):
        export_step(source, tmp_path, outputs=["nothing"])


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda place: (place / "data.npz").unlink(), "cannot read .*data.npz as .npz"),
        (lambda place: (place / "data.npz").write_bytes(b"PK no archive"), "cannot read .*data.npz as .npz"),
        (lambda place: np.savez(place / "data.npz", x=np.array([{}])), "cannot read .*data.npz as .npz"),
        (lambda place: np.savez(place / "data.npz", x=blobs()["x"]), "train.onnx takes labels, which the batch"),
        (lambda place: np.savez(place / "data.npz", x=blobs()["x"], labels=[1]), "the same number of rows"),
        (lambda place: np.savez(place / "data.npz", x=blobs()["x"][:0], labels=blobs()["labels"][:0]), "one at least"),
        (lambda place: np.savez(place / "data.npz", x=blobs()["x"][:, :1], labels=blobs()["labels"]), "does not run: "),
        (lambda place: (place / "contract.json").write_text("{"), "cannot read .*contract.json"),
        (lambda place: (place / "contract.json").write_text('{"version": 2}'), "not a contract of version 1"),
        (lambda place: (place / "train.onnx").write_bytes(b"no model"), "cannot load .*train.onnx"),
        (lambda place: (place / "state.npz").unlink(), "cannot read .*state.npz"),
    ],
)
def test_what_a_user_of_the_example_host_can_mend(tmp_path, spoil, says, monkeypatch, capsys):
    export_step(model(), tmp_path)
    np.savez(tmp_path / "data.npz", **blobs())
    spoil(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "host.py"), str(tmp_path / "data.npz")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "host.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert re.search(says, err)
    assert len(err.splitlines()) == 1
