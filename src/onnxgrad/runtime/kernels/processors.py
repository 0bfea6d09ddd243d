"""Kinds of processors that kernels are built for, and the name of the library of each.

Only the standard library is imported: the build of the package reads this file before anything is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from collections.abc import Collection
from pathlib import Path

_V3 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
#: Kinds of x86-64 processors, the best first, and Linux's names of their instruction sets (System V ABI, AMD64, 3.1.1).
_X86 = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
    "x86-64": set(),
}
_SUFFIXES = {"darwin": "dylib", "win32": "dll"}
_WINDOWS_HAS_AVX2 = 40  # PF_AVX2_INSTRUCTIONS_AVAILABLE


def architecture_kinds(machine: str = "") -> list[str]:
    """The kinds of processors of an architecture, the best first; empty for an architecture without kernels.

    Args:
        machine: the architecture, as `platform.machine` calls it. Empty: that of this machine.
    """
    machine = (machine or platform.machine()).lower()
    if machine in ("aarch64", "arm64"):
        return ["aarch64"]
    return [*_X86] if machine in ("x86_64", "amd64") else []


def supported_kinds() -> list[str]:
    """The kinds of processors whose instructions this processor has, the best first."""
    kinds = architecture_kinds()
    if kinds == ["aarch64"]:
        return kinds
    instructions = set(_instruction_sets())
    return [kind for kind in kinds if _X86[kind] <= instructions]


def name_library(sources: Path, kind: str, suffix: str = "") -> str:
    """The file name of the library for a kind of processor.

    The name contains a digest of the sources, so that a library that was built from other sources is never loaded.

    Args:
        sources: the folder of the C files.
        kind: one of `architecture_kinds`.
        suffix: the ending of shared libraries. Empty: that of this system.
    """
    digest = hashlib.sha256()
    for file in sorted(p for p in sources.iterdir() if p.suffix in (".c", ".h")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return f"onnxgrad-{digest.hexdigest()[:24]}-{kind}.{suffix or _SUFFIXES.get(sys.platform, 'so')}"


def _instruction_sets() -> Collection[str]:
    """The instruction sets of this processor and system, as Linux calls them."""
    if sys.platform == "win32":
        return _V3 if ctypes.windll.kernel32.IsProcessorFeaturePresent(_WINDOWS_HAS_AVX2) else ()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
