"""State on a device: the same steps as `StepRunner`, by the same interface.

The host is the device, and a GPU as well where there is one: ``pytest tests/runtime/test_on_device.py`` with
onnxruntime-gpu, whose numbers are compared with the CPU's.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxgrad import Trainer
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.on_device import OnDevice, runner
from onnxgrad.training.build.attach import attach
from onnxgrad.training.step.compile import compile_step
from tests import large_models
from tests.training.nets import mlp

OPTIONS = Options(threads=1, target="portable", denormals=True)
CUDA = "CUDAExecutionProvider"
#: products as exact as the host's
ON_GPU = Options(threads=1, providers=(f"{CUDA}:device_id=0,use_tf32=0", "CPUExecutionProvider"))


def has_gpu() -> bool:
    """True if there is a GPU that ONNX Runtime can use."""
    if CUDA not in onnxruntime.get_available_providers():
        return False
    try:
        onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", 0)
    except Exception:
        return False
    return True


GPU = pytest.mark.skipif(not has_gpu(), reason="no GPU that ONNX Runtime can use")


@pytest.fixture(scope="module")
def step():
    training = attach(mlp(), loss="cross_entropy", optimizer="adam", learning_rate=0.05, metrics=["accuracy"])
    return compile_step(training, outputs=["accuracy", "y", "w1_mean"])


@pytest.fixture
def machine(step):
    return OnDevice(step, options=OPTIONS, device=("cpu", 0))


def batch(rows=8, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, 4)).astype(np.float32), "labels": rng.integers(0, 3, rows)}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


def test_steps_are_those_of_the_host(step, machine):
    twin = StepRunner(step, options=OPTIONS)
    for k, rows in enumerate((8, 8, 3, 8)):  # also batches of other sizes
        machine.held["learning_rate"][...] = twin.held["learning_rate"][...] = 0.05 / (k + 1)
        feeds = batch(rows, k)
        same(machine.step(feeds), {n: np.array(a) for n, a in twin.step(feeds).items()})
        same(machine.state(), twin.state())


def test_a_batch_that_is_filled_again_is_read_again(step, machine):
    twin = StepRunner(step, options=OPTIONS)
    feeds = batch()
    for k in range(3):
        feeds["x"][...] = batch(seed=k)["x"]
        machine.step(feeds)
        twin.step(feeds)
    same(machine.state(), twin.state())


def test_state_is_copied_in_and_out(machine):
    before = machine.state()
    machine.step(batch())
    after = machine.state()
    assert (after["w1"] != before["w1"]).any()
    machine.load_state(before)
    before["w1"][...] = 7
    assert (machine.state()["w1"] != 7).any()
    machine.step(batch())
    same(machine.state(), after)


def test_the_state_stays_where_it_is(machine):
    """Two sets of tensors in turns: no step makes new ones."""
    places = []
    for _ in range(4):
        places.append({n: t.data_ptr() for n, t in machine.tensors().items()})
        machine.step(batch())
    assert places[0] == places[2]
    assert places[1] == places[3]
    assert all(places[0][n] != places[1][n] for n in places[0])


def test_tensors_come_in_and_go_out_by_dlpack(step, machine):
    twin = StepRunner(step, options=OPTIONS)
    feeds = batch()
    given = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(feeds["x"]), "labels": _Foreign(feeds["labels"])}
    machine.step(given)
    twin.step(feeds)
    same(machine.state(), twin.state())
    for name, array in twin.state().items():
        np.testing.assert_array_equal(np.from_dlpack(machine.tensors()[name]), array)


class _Foreign:
    """A tensor of another library."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **how):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.torch
def test_tensors_of_torch_are_read_where_they_lie(step, machine):
    torch = pytest.importorskip("torch")
    feeds = batch()
    machine.step({n: torch.from_numpy(a.copy()) for n, a in feeds.items()})
    twin = StepRunner(step, options=OPTIONS)
    twin.step(feeds)
    same(machine.state(), twin.state())
    assert torch.equal(torch.from_dlpack(machine.tensors()["w1"]), torch.from_numpy(twin.state()["w1"]))


def test_what_does_not_fit_is_refused_and_changes_nothing(machine):
    before = machine.state()
    with pytest.raises(BadInput, match="ONNX Runtime failed"):
        machine.step({**batch(), "labels": np.full(8, 9)})
    same(machine.state(), before)
    with pytest.raises(BadInput, match="takes arrays, or DLPack"):
        machine.step({**batch(), "x": [[1.0]]})
    with pytest.raises(BadInput, match="state 'w1' is missing"):
        machine.load_state({n: a for n, a in before.items() if n != "w1"})
    machine.step(batch())


def test_a_device_that_is_not_there_is_refused(step):
    if has_gpu():
        pytest.skip("there is one")
    with pytest.raises(BadInput, match=r"no room for \d+ bytes on cuda:0"):
        OnDevice(step, options=OPTIONS, device=("cuda", 0))


def test_the_provider_chooses_the_machine(step):
    assert isinstance(runner(step, OPTIONS), StepRunner)


def test_settings_of_a_provider_stand_behind_its_name(step):
    assert ON_GPU.provider == CUDA
    assert ON_GPU.provider_settings == [{"device_id": "0", "use_tf32": "0"}, {}]
    assert ON_GPU.provider_names == (CUDA, "CPUExecutionProvider")
    with pytest.raises(BadInput, match="setting 'device_id' without a value; write CUDAExecutionProvider:device_id=…"):
        runner(step, Options(providers=(f"{CUDA}:device_id",)))
    with pytest.raises(BadInput, match="device_id is the number of a device, not 'first'"):
        runner(step, Options(providers=(f"{CUDA}:device_id=first",)))
    assert isinstance(runner(step, Options(providers=())), StepRunner)


def close(found, expected, tolerance=2e-4):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        limit = tolerance * max(1e-3, float(np.abs(array).max(initial=0)))
        np.testing.assert_allclose(found[name], array, rtol=0, atol=limit, err_msg=name)


@GPU
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop", "lion", "lamb"])
def test_steps_on_a_gpu_are_those_of_the_host(optimizer):
    training = attach(mlp(), loss="cross_entropy", optimizer=optimizer, learning_rate=0.01)
    compiled = compile_step(training)
    there, here = runner(compiled, ON_GPU), StepRunner(compiled, options=OPTIONS)
    assert isinstance(there, OnDevice)
    for k, rows in enumerate((8, 8, 3, 8)):
        feeds = batch(rows, k)
        close(there.step(feeds), {n: np.array(a) for n, a in here.step(feeds).items()})
        close(there.state(), here.state())


def normalized_network():
    """Two convolutions with batch normalization: deep ones amplify rounding (ResNet-50 from 1e-6 to .3 in a step)."""
    rng = np.random.default_rng(3)
    shapes = {"c1": (8, 3, 3, 3), "c2": (16, 8, 3, 3), "w": (16, 10)}
    weights = {n: (rng.standard_normal(s) / np.sqrt(np.prod(s[1:]))).astype(np.float32) for n, s in shapes.items()}
    for k, width in ((1, 8), (2, 16)):
        weights |= {f"{n}{k}": np.full(width, v, np.float32) for n, v in (("s", 1), ("b", 0), ("m", 0), ("v", 1))}
    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    nodes, x = [], "x"
    for k in (1, 2):
        nodes += [
            node("Conv", [x, f"c{k}"], [f"a{k}"], strides=[2, 2], pads=[1, 1, 1, 1]),
            node("BatchNormalization", [f"a{k}", f"s{k}", f"b{k}", f"m{k}", f"v{k}"], [f"n{k}"]),
            node("Relu", [f"n{k}"], [f"r{k}"]),
        ]
        x = f"r{k}"
    nodes += [
        node("GlobalAveragePool", ["r2"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("MatMul", ["f", "w"], ["y"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "network",
        [info("x", onnx.TensorProto.FLOAT, ["N", 3, 16, 16])],
        [info("y", onnx.TensorProto.FLOAT, ["N", 10])],
        [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)


@GPU
@pytest.mark.parametrize("build", ["normalized", "gpt"])
def test_networks_learn_on_a_gpu_as_on_the_host(build):
    rng = np.random.default_rng(0)
    if build == "gpt":
        model, data = large_models.gpt(), {"ids": rng.integers(0, 50, (4, 8)), "labels": rng.integers(0, 50, (4, 8))}
    else:
        model = normalized_network()
        data = {"x": rng.standard_normal((32, 3, 16, 16)).astype(np.float32), "labels": rng.integers(0, 10, 32)}
    losses = []
    for options in (OPTIONS, ON_GPU):
        trainer = Trainer(model, loss="cross_entropy", optimizer="sgd", learning_rate=0.01, options=options)
        losses.append([float(trainer.machine.step(data)[trainer.step.loss]) for _ in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)
    assert losses[1][-1] < losses[1][0]


@GPU
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_sixteen_bits_learn_on_a_gpu(precision):
    data = batch(256)
    data["labels"] = (data["x"] @ np.random.default_rng(5).standard_normal((4, 3))).argmax(1)
    found = {}
    for name in ("fp32", precision):
        trainer = Trainer(
            mlp(), loss="cross_entropy", optimizer="adam", learning_rate=0.02, options=ON_GPU, precision=name
        )
        found[name] = [float(trainer.machine.step(data)[trainer.step.loss]) for _ in range(60)]
    np.testing.assert_allclose(found[precision], found["fp32"], atol=0.03)
    assert found[precision][-1] < found[precision][0] / 2


def test_a_run_with_checkpoints_is_the_same(tmp_path, monkeypatch):
    """A whole run, with the host for a device that providers have."""
    data = batch(40)
    runs = []
    for there in ({}, {"CPUExecutionProvider": "cpu"}):
        monkeypatch.setattr("onnxgrad.runtime.on_device.DEVICES", there)
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer="adam", options=OPTIONS)
        assert isinstance(trainer.machine, OnDevice) == bool(there)
        folder = tmp_path / str(len(there))
        trainer.fit(data, epochs=2, batch_size=16, validation=data, checkpoint=folder, progress=False)
        again = Trainer(mlp(), loss="cross_entropy", optimizer="adam", options=OPTIONS)
        again.fit(data, epochs=3, batch_size=16, validation=data, checkpoint=folder, resume=True, progress=False)
        runs.append((trainer.state(), again.state(), again.evaluate(data)))
    same(runs[1][0], runs[0][0])
    same(runs[1][1], runs[0][1])
    assert runs[1][2] == runs[0][2]
