"""Provenance of a run: the command, versions, and the machine."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import numpy
import onnx
import onnxruntime

#: Packages that decide numbers; each tells its version itself, since ONNX Runtime is installed by several names.
PACKAGES = (onnxruntime, onnx, numpy)


def provenance(target: str) -> dict[str, str]:
    """The facts besides the settings that are needed to repeat a run, as plain text by name.

    Args:
        target: what the step runs on, "portable" or "native" (see `onnxgrad.runtime.Options`).
    """
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return {
        "command": shlex.join([program, *sys.argv[1:]]),
        "target": target,
        "onnxgrad": version("onnxgrad"),
        **{package.__name__: package.__version__ for package in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "processor": processor(),
    }


def processor() -> str:
    """The operating system's name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()
