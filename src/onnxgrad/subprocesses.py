"""Runs of other programs (Python, pip), isolated from the files of the working directory.

A Python process started with ``-c`` or ``-m`` searches its working directory for modules first: an ``onnx.py`` beside
an untrusted model would be executed. So each program runs in an empty folder of its own, and Python excludes even that
(``-P``). Relative folders in ``PATH`` are skipped. ``PYTHONPATH``, which is the user's choice, is kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

#: The Python command: the words before ``-c`` or ``-m``.
PYTHON = (sys.executable, "-P")


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`command`, run in an empty folder with its output captured; `options` as of ``subprocess.run``.

    `env` adds variables to those of this process.


    Paths among its words must be absolute; a program that is itself given as a relative path is found from here.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be run, or takes longer than ``timeout``.
    """
    program, *words = command
    if os.path.dirname(program):
        program = os.path.abspath(program)
    with tempfile.TemporaryDirectory(prefix="onnxgrad-", ignore_cleanup_errors=True) as folder:
        env = _environment() | options.pop("env", {})
        return subprocess.run([program, *words], cwd=folder, env=env, capture_output=True, check=False, **options)


def which(program: str) -> str | None:
    """The path of `program`, which is searched for in the absolute folders of ``PATH`` only."""
    return shutil.which(program, path=absolute_paths(os.environ.get("PATH", os.defpath)))


def absolute_paths(path: str) -> str:
    """`path`, a value of ``PATH``, without its relative and empty folders, which are in the working directory."""
    return os.pathsep.join(p for p in path.split(os.pathsep) if os.path.isabs(p))


def _environment() -> dict[str, str]:
    """This process's variables: ``PATH`` without relative folders, ``PYTHONPATH`` with absolute ones in their place."""
    found = dict(os.environ)
    found["PATH"] = absolute_paths(found.get("PATH", os.defpath))
    places = [os.path.abspath(p) for p in found.pop("PYTHONPATH", "").split(os.pathsep) if p]
    return {**found, "PYTHONPATH": os.pathsep.join(places)} if places else found
