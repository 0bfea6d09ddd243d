"""Provenance is stored with the numbers: in the history, in the report and in TensorBoard's files."""

import json
import shlex
import sys

import numpy as np
import onnxruntime
import pytest

import onnxgrad
from onnxgrad.training import Trainer
from tests.training.models import blobs, classifier


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    how = {"tensorboard": folder / "tb"} if _has_tensorboard() else {}
    Trainer(classifier(), loss="cross_entropy", optimizer="sgd", learning_rate=0.5).fit(
        blobs(), epochs=12, batch_size=30, schedule="cosine", history=folder / "h.json", report=folder / "r.html",
        progress=False, **how,
    )  # fmt: skip
    return folder


def _has_tensorboard():
    try:
        import tensorboardX  # noqa: F401
    except ImportError:
        return False
    return True


def test_versions_command_and_machine(trained):
    made = json.loads((trained / "h.json").read_text())["provenance"]
    assert made["onnxgrad"] == onnxgrad.__version__
    assert made["onnxruntime"] == onnxruntime.__version__
    assert shlex.split(made["command"])[1:] == sys.argv[1:]
    assert made["target"] in ("native", "portable")
    assert made["processor"]
    page = (trained / "r.html").read_text()
    assert "<h2>Made with</h2>" in page
    assert f"<td>onnxruntime</td><td>{onnxruntime.__version__}</td>" in page


def test_the_rate_of_each_epoch(trained):
    epochs = json.loads((trained / "h.json").read_text())["epochs"]
    steps = 12 * -(-len(blobs()["x"]) // 30)
    last = [0.5 * (1 + np.cos(np.pi * k / steps)) / 2 for k in range(steps // 12 - 1, steps, steps // 12)]
    np.testing.assert_allclose([record["learning_rate"] for record in epochs], last, rtol=1e-5)


@pytest.mark.skipif(not _has_tensorboard(), reason="tensorboardX is not installed")
def test_tensorboard_has_settings_and_rates(trained):
    (file,) = (trained / "tb").iterdir()
    events = file.read_bytes()
    for text in (b"step/learning_rate", b"epoch/learning_rate", b"provenance", b"settings", b"| batch_size | 30 |"):
        assert text in events, text
