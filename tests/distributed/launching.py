"""Launching ranks in tests: torchrun and mpiexec, each process with one thread."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def torchrun(ranks: int, *command: str, options: tuple[str, ...] = (), timeout: float = 300, **variables: str):
    """The finished process of ``torchrun … command``, a script or ``-m module`` with its arguments."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    how = ("--standalone", "--nproc-per-node", str(ranks), *options)
    return _run([sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *how, *command], timeout, variables)


def mpiexec(ranks: int, *command: str, timeout: float = 300, **variables: str):
    """The finished process of ``mpiexec … python command``."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    beside = Path(sys.executable).with_name("mpiexec")
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        pytest.skip("there is no mpiexec")
    return _run([program, "-n", str(ranks), sys.executable, *command], timeout, variables)


def _run(command: list[str], timeout: float, variables: dict[str, str]):
    return subprocess.run(
        command, env=environment() | variables, capture_output=True, text=True, timeout=timeout, start_new_session=True
    )


def environment() -> dict[str, str]:
    """Variables for a launcher that is itself started by nobody's."""
    found = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "TORCHELASTIC"))}
    return found | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
