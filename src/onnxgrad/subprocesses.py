"""Programs that are run beside this one: Python, pip, compilers. None of them meets what lies in the working directory.

A Python that is started with ``-c`` or ``-m`` looks for modules in the directory in which it stands, before all others:
an ``onnx.py`` beside a model of a stranger would be executed. So each program stands in an empty folder of its own, and
a Python is told to leave even that out (``-P``). ``PYTHONPATH``, which is the user's choice, holds as it does here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from typing import Any

#: Python as it is started: the words before ``-c`` or ``-m``.
PYTHON = (sys.executable, "-P")


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`command`, run in an empty folder with its output captured; `options` as of ``subprocess.run``.

    Paths among its words must be absolute; a program that is itself given as a relative path is found from here.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be run, or takes longer than ``timeout``.
    """
    program, *words = command
    if os.path.dirname(program):
        program = os.path.abspath(program)
    with tempfile.TemporaryDirectory(prefix="onnxgrad-", ignore_cleanup_errors=True) as folder:
        return subprocess.run(
            [program, *words], cwd=folder, env=_environment(), capture_output=True, check=False, **options
        )


def start(words: list[str]) -> None:
    """Have Python run `words` beside this process, and after it if need be; nobody hears what becomes of it.

    It stands in the root folder, where only the system's own files are.

    Raises:
        OSError: it cannot be run.
    """
    silent = subprocess.DEVNULL
    process = subprocess.Popen(
        [*PYTHON, *words],
        cwd=os.path.abspath(os.sep),
        env=_environment(),
        stdin=silent,
        stdout=silent,
        stderr=silent,
        start_new_session=True,  # Ctrl-C is for those who wait
    )
    threading.Thread(target=process.wait, daemon=True).start()  # or it would stay as a zombie


def _environment() -> dict[str, str]:
    """That of this process, with the places in ``PYTHONPATH`` as they are from here; an empty one is no place."""
    found = dict(os.environ)
    places = [os.path.abspath(p) for p in found.pop("PYTHONPATH", "").split(os.pathsep) if p]
    return {**found, "PYTHONPATH": os.pathsep.join(places)} if places else found
