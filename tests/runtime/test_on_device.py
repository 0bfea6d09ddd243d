"""State on a device, exercised with the host as the device: the same steps as `StepRunner`, by the same interface."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from onnxgrad import Trainer
from onnxgrad.errors import BadInput
from onnxgrad.runtime import Options, StepRunner
from onnxgrad.runtime.on_device import OnDevice, runner
from onnxgrad.training.build.attach import attach
from onnxgrad.training.step.compile import compile_step
from tests.training.nets import mlp

OPTIONS = Options(threads=1, target="portable", denormals=True)


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
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("there is one")
    with pytest.raises(BadInput, match=r"no room for \d+ bytes on cuda:0"):
        OnDevice(step, options=OPTIONS, device=("cuda", 0))


def test_the_provider_chooses_the_machine(step):
    assert isinstance(runner(step, OPTIONS), StepRunner)


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
