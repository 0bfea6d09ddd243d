"""Processes that share out the state of the optimizer, that are many, or of which a node goes: torchrun, mpiexec."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad.runtime import Options
from onnxgrad.training import Trainer, consolidate
from onnxgrad.training.loop.checkpoint import FILE, Checkpoint, named_parts
from tests.distributed.launching import environment, mpiexec, torchrun
from tests.distributed.simulated import World
from tests.distributed.test_training import KILLED, command, history
from tests.training.models import blobs, classifier

WORKER = str(Path(__file__).with_name("replicas_worker.py"))
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def replicated(place):
    """The weights that two simulated ranks have that share nothing out: a sum of two is the same in either order."""

    def work(collective):
        how = {"loss": "cross_entropy", "optimizer": "adam", "learning_rate": 0.02}
        trainer = Trainer(classifier(), options=Options(threads=1, target="portable"), distributed=collective, **how)
        trainer.fit(blobs(90), epochs=3, batch_size=16, progress=False)
        return trainer.state()

    return World(2).run(work)[0]


def check(place, name, state):
    """The trained model, and the checkpoint put together, hold these bits."""
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(place / f"{name}.onnx").graph.initializer}
    folder = place / f"{name}.checkpoint"
    assert len(named_parts(folder / FILE)) == 2
    whole = Checkpoint.load(consolidate(folder, place / f"{name}.safetensors")).state
    for tensor, array in state.items():
        np.testing.assert_array_equal(whole[tensor], array, err_msg=tensor)
        np.testing.assert_array_equal(weights.get(tensor, array), array, err_msg=tensor)


@pytest.mark.complete
def test_mpiexec_shares_out_the_state(place, replicated):
    done = mpiexec(2, "-m", "onnxgrad", *command(place, "mpi", "--shard-optimizer"))
    assert done.returncode == 0, done.stderr
    check(place, "mpi", replicated)


@pytest.mark.complete
def test_after_a_kill_it_goes_on_with_the_same_bits(place, replicated):
    how = command(place, "killed", "--shard-optimizer", "--checkpoint-seconds", "0")
    done = torchrun(2, KILLED, *how, options=("--max-restarts", "1"))
    assert done.returncode == 0, done.stderr
    check(place, "killed", replicated)


@pytest.mark.complete
@pytest.mark.parametrize("how", ["replicated", "shard"])
def test_eight_processes_hold_the_same_bits_after_a_hundred_steps(how):
    done = torchrun(8, WORKER, how, PYTHONPATH=f"{ROOT}/src{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    said = re.findall(r"after (\d+) steps (\w+) (\S+)", done.stdout)
    assert len(said) == 8
    assert len(set(said)) == 1
    assert int(said[0][0]) == 102
    how = {"loss": "cross_entropy", "optimizer": "adam", "learning_rate": 0.02, "clip_norm": 1.0}
    alone = Trainer(classifier(), options=Options(threads=1, target="portable"), **how)
    alone.fit(blobs(90), epochs=17, batch_size=16, seed=3, progress=False)
    assert float(said[0][2]) == pytest.approx(alone.history.epochs[-1]["loss"], rel=1e-4)


def _wait(is_so):
    for _ in range(1200):
        if is_so():
            return
        time.sleep(0.1)
    raise AssertionError("it has not come to that")


class Nodes:
    """Launchers, as on several machines, of one run that shares out its optimizer; the ranks meet at the first one."""

    def __init__(self, place, last_call: int, epochs: int, **variables: str) -> None:
        pytest.importorskip("torch", reason="PyTorch is not installed")
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.how = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "a job"]
        self.how += ["--rdzv-endpoint", f"localhost:{port}", "--max-restarts", "3"]
        self.run = command(place, "nodes", "-q", "--epochs", str(epochs), "--shard-optimizer")
        self.last_call, self.variables = last_call, variables
        self.started: list[subprocess.Popen] = []

    def start(self):
        conf = f"last_call_timeout={self.last_call},is_host={'false' if self.started else 'true'}"
        line = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *self.how, "--rdzv-conf", conf]
        self.started.append(
            subprocess.Popen(
                [*line, "-m", "onnxgrad", *self.run], env=environment() | self.variables, stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL, text=True, start_new_session=True,
            )
        )  # fmt: skip
        return self.started[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self.started:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
            if node.stderr is not None:
                node.stderr.close()


@pytest.mark.complete
def test_a_node_goes(place):
    """The second launcher is killed with its rank, and the first goes on alone."""
    file = place / "nodes.checkpoint" / FILE
    with Nodes(place, 30, 60) as nodes:
        first, second = nodes.start(), nodes.start()
        _wait(lambda: file.exists() and Checkpoint.load(file).run["step"] > 5)
        assert len(named_parts(file)) == 2
        (rank,) = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
        os.killpg(second.pid, signal.SIGKILL)
        os.kill(int(rank), signal.SIGKILL)  # a machine takes both with it
        _, said = first.communicate(timeout=240)
        assert first.returncode == 0, said
    assert named_parts(file) == []  # one rank shares nothing out
    _assert_trained(place, 60)


@pytest.mark.complete
def test_a_node_comes(place):
    """A second launcher joins a run that has begun."""
    file = place / "nodes.checkpoint" / FILE
    with Nodes(place, 1, 200, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as nodes:
        first = nodes.start()
        _wait(lambda: file.exists() and Checkpoint.load(file).run["step"] > 5)
        assert named_parts(file) == []
        nodes.start()
        _wait(lambda: len(named_parts(file)) == 2)
        _, said = first.communicate(timeout=240)
        assert first.returncode == 0, said
    assert len(named_parts(file)) == 2
    _assert_trained(place, 200)


def _assert_trained(place, count):
    epochs = history(place, "nodes")
    assert [e["epoch"] for e in epochs] == list(range(1, count + 1))
    assert epochs[-1]["loss"] < epochs[0]["loss"]
