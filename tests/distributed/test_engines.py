"""Both engines as their launchers start them, on one worker that says what all collectives must do."""

import re
from pathlib import Path

import pytest

from onnxgrad.distributed import Launch, join, launched
from onnxgrad.errors import BadInput, UnknownName
from tests.distributed.launching import mpiexec, torchrun

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
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "LOCAL_WORLD_SIZE": "2"}
            | {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_RUN_ID": "a job"},
            Launch("torch", 4, 2, 3, "a job"),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, Launch(restarts=1)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Launch()),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Launch("mpi", 8, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, Launch("mpi", 3, 3)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch()),
        ({"PMIX_RANK": "5", "SLURM_NTASKS": "16"}, Launch("mpi", 16)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "16"}, Launch()),  # srun without MPI starts copies
    ],
)
def test_the_environment_tells_who_has_started_a_process(environment, launch):
    assert launched(environment) == launch


def test_engines_that_cannot_be_joined_are_refused(monkeypatch):
    with pytest.raises(UnknownName, match="torhc"):
        join("torhc")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BadInput, match="started by torchrun"):
        join("torch")
