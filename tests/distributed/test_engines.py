"""Both engines as their launchers start them, on one worker that says what all collectives must do."""

import os
import re
import socket
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxgrad.distributed import Launch, join, launched, torch_engine
from onnxgrad.errors import BadInput, UnknownName
from tests.commands import command
from tests.distributed.launching import mpiexec, torchrun
from tests.training.models import blobs, classifier

WORKER = str(Path(__file__).with_name("engine_worker.py"))


def test_torch_sums_and_names_the_rank_that_was_killed():
    done = torchrun(3, WORKER, "kill")
    assert sorted(re.findall(r"rank (\d) is done", done.stdout)) == ["0", "1", "2"], done.stderr
    assert "speaker 0: rank 2 is gone or does not answer; the others cannot go on\n" in done.stdout
    assert "other 1: rank 2 is gone or does not answer; the others cannot go on\n" in done.stdout
    assert done.returncode


@pytest.mark.complete
def test_torch_goes_beside_a_group_of_the_program_itself():
    done = torchrun(2, WORKER, "own group")
    assert sorted(re.findall(r"rank (\d) is done", done.stdout)) == ["0", "1"], done.stderr
    assert not done.returncode


@pytest.mark.complete
def test_torch_says_why_a_rank_has_stopped():
    done = torchrun(2, WORKER, "stop")
    assert "speaker 0: rank 1 has stopped: its disk is full\n" in done.stdout, done.stderr
    assert done.returncode


def test_torch_ends_well_where_nobody_leaves(tmp_path):
    """A program of few lines does not close what it has joined."""
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\nfrom onnxgrad.distributed import join\njoin().all_reduce(np.ones(3, np.float32))\n"
    )
    done = torchrun(4, str(program))
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("how", ["close", "kill", "stop"])
def test_mpi_sums_and_ends_when_a_rank_does(how):
    done = mpiexec(3, WORKER, how)
    assert sorted(re.findall(r"rank (\d) is done", done.stdout)) == ["0", "1", "2"], done.stderr
    assert bool(done.returncode) == (how != "close")


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch()),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
            | {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_RUN_ID": "a job"},
            Launch("torch", 4, 2, 3, "a job"),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, Launch(restarts=1)),
        ({"WORLD_SIZE": "1"}, Launch()),
        ({"RANK": "0"}, Launch()),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Launch("mpi", 8, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, Launch("mpi", 3, 3)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch()),
        ({"PMIX_RANK": "5", "SLURM_NTASKS": "16"}, Launch("mpi", 16)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16"}, Launch()),  # srun without MPI starts copies
    ],
)
def test_the_environment_tells_who_has_started_a_process(environment, launch):
    assert launched(environment) == launch


TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment, which is no number"),
        ({"WORLD_SIZE": "2.0", "RANK": "0"}, "WORLD_SIZE is '2.0'"),
        ({"WORLD_SIZE": "-2", "RANK": "0"}, "WORLD_SIZE is '-2'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '999"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0' in the environment, which is no number"),
        (TORCH | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        (TORCH | {"MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
        ({"OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4 in the environment, and RANK is missing"),
        ({"WORLD_SIZE": "4", "RANK": "1"}, "MASTER_ADDR is missing"),
        ({k: v for k, v in TORCH.items() if k != "MASTER_PORT"}, "MASTER_PORT is missing"),
        (TORCH | {"RANK": "5"}, "RANK is 5 in the environment, and WORLD_SIZE is 2: ranks count from 0"),
        (TORCH | {"RANK": "one"}, "RANK is 'one'"),
        ({"RANK": "5"}, "RANK is 5 in the environment, and WORLD_SIZE is missing"),
        (TORCH | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is 3 .*LOCAL_WORLD_SIZE is 2"),
        (TORCH | {"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        (TORCH | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        (TORCH | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000 .*end at 65535"),
        (TORCH | {"TORCHELASTIC_RESTART_COUNT": "no"}, "TORCHELASTIC_RESTART_COUNT is 'no'"),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE is 'many'"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK is 2 .*WORLD_SIZE is 2"),
        ({"PMI_RANK": "3", "PMI_SIZE": "2"}, "PMI_RANK is 3 .*PMI_SIZE is 2"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK is 'x'"),
        ({"PMIX_RANK": "0", "SLURM_NTASKS": "x"}, "SLURM_NTASKS is 'x'"),
    ],
)
def test_variables_that_no_launcher_sets_are_refused(environment, says):
    with pytest.raises(BadInput, match=f"(?s){says}.*hint: |{says}"):
        launched(environment)


def test_the_command_refuses_a_broken_environment(tmp_path):
    onnx.save(classifier(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **blobs())
    line = ("train", "m.onnx", "--data", "d.npz", "--loss", "cross_entropy", "--optimizer", "sgd", "-o", "o.onnx")
    for broken in ({"WORLD_SIZE": "two"}, TORCH | {"RANK": "5", "MASTER_ADDR": "127.0.0.1"}):
        done = command(*line, cwd=tmp_path, env={**os.environ, **broken})
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 2
        assert not (tmp_path / "o.onnx").exists()


def test_engines_that_cannot_be_joined_are_refused(monkeypatch):
    with pytest.raises(UnknownName, match="torhc"):
        join("torhc")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BadInput, match="started by torchrun"):
        join("torch")


@pytest.mark.parametrize(
    ("rank", "words"), [("0", "the others: 1 of 2 ranks are there"), ("1", "rank 0, which does not")]
)
def test_a_rank_alone_says_what_it_waits_for_and_gives_up(monkeypatch, rank, words):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = TORCH | {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(torch_engine, "QUIET", 0.2)
    where = f"rank {rank} of 2 waits at 127.0.0.1:{port} .*for {words}"
    with pytest.warns(UserWarning, match=where), pytest.raises(BadInput, match=f"has waited 1 s at .*{words}"):
        torch_engine.TorchEngine(joining=0.6)
