"""16 bits on real processes: products in 16 bits (``precision``), and models of 16 bits, under torchrun with gloo."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad.training import Trainer
from tests.cli.said import ran
from tests.distributed.launching import SOURCE, torchrun
from tests.training.models import blobs, classifier
from tests.training.nets import mlp

WORKER = str(Path(__file__).with_name("half_worker.py"))
PATH = f"{SOURCE}:{SOURCE.parent}"


@pytest.mark.complete
@pytest.mark.parametrize("how", ["replicated", "shard"])
def test_two_processes_skip_the_same_step_and_learn_as_in_float32(tmp_path, how):
    done = torchrun(2, WORKER, str(tmp_path), how, PYTHONPATH=PATH)
    assert done.returncode == 0, done.stderr
    one, other = (dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2))
    names = {n.partition("/")[2] for n in one} - {"loss"}
    for name, array in one.items():
        if not name.endswith("loss"):
            assert array.tobytes() == other[name].tobytes(), name
    for name in names - {"loss_scale", "good_steps"}:
        assert one[f"1/{name}"].tobytes() == one[f"0/{name}"].tobytes(), "the step that is not finite moves nothing"
        assert one[f"2/{name}"].tobytes() != one[f"1/{name}"].tobytes()
    assert one["1/loss_scale"] == one["0/loss_scale"] / 2

    rng = np.random.default_rng(0)
    x, labels = (rng.standard_normal((12, size)).astype(np.float32) for size in (4, 3))
    alone = Trainer(mlp(), loss="mse", optimizer="adam", learning_rate=0.05)
    for step in (0, 2, 3, 4, 5):
        loss = alone.machine.step({"x": x, "labels": labels})["loss"]
        np.testing.assert_allclose(one[f"{step}/loss"], loss, rtol=0.02)


def of_half() -> onnx.ModelProto:
    """`classifier` in float16, but for its input and its scores."""
    model = classifier()
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    first, last = model.graph.node[0], model.graph.node[-1]
    first.input[0], last.output[0] = "x16", "y16"
    model.graph.node.insert(0, onnx.helper.make_node("Cast", ["x"], ["x16"], to=onnx.TensorProto.FLOAT16))
    model.graph.node.append(onnx.helper.make_node("Cast", ["y16"], ["y"], to=onnx.TensorProto.FLOAT))
    return model


@pytest.mark.complete
def test_a_model_of_16_bits_trains_on_two_processes_as_on_one(tmp_path):
    onnx.save(of_half(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs(96))
    curves = []
    for name in ("one", "two"):
        line = ["train", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "--loss", "cross_entropy", "-q",
                "--optimizer", "adam", "--lr", "0.02", "--epochs", "3", "--batch-size", "16", "--target", "portable",
                "-o", str(tmp_path / f"{name}.onnx"), "--history", str(tmp_path / f"{name}.json")]  # fmt: skip
        if name == "one":
            ran(tmp_path, " ".join(line))
        else:
            done = torchrun(2, "-m", "onnxgrad", *line)
            assert done.returncode == 0, done.stderr
        curves.append([epoch["loss"] for epoch in json.loads((tmp_path / f"{name}.json").read_text())["epochs"]])
        kinds = {t.data_type for t in onnx.load(tmp_path / f"{name}.onnx").graph.initializer}
        assert kinds == {onnx.TensorProto.FLOAT16}
    assert curves[0][-1] < 0.7 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=5e-3)
