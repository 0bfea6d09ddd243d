"""The shared libraries that a wheel for a platform carries, so that users need no compiler, and the choice among them.

There is one for each kind of processor, and the best that this one can run is taken. Its name tells the sources that
it was made of: where those are others, it is passed over. A pure wheel, and a clone, have none.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Collection
from pathlib import Path

#: Where they lie.
FOLDER = Path(__file__).parent / "prebuilt"

_V3 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
#: Kinds of processors with x86-64, the best first, and what Linux calls what they have (System V ABI, AMD64, 3.1.1).
_X86 = {
    "x86-64-v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": _V3,
    "x86-64": set(),
}
_SUFFIXES = {"darwin": "dylib", "win32": "dll"}
_WINDOWS_HAS_AVX2 = 40  # PF_AVX2_INSTRUCTIONS_AVAILABLE


def library() -> Path | None:
    """The library of this wheel for this processor; None if there is none, or ``CC`` says who is to build one."""
    return None if os.environ.get("CC") else _best(FOLDER)


def is_proven() -> bool:
    """True if libraries of wheels have been run on this system; those for Windows have only been compiled so far."""
    return sys.platform != "win32"


def name_library(sources: Path, kind: str, suffix: str) -> str:
    """The file name of the library for processors of this `kind`, made of the files in `sources`."""
    digest = hashlib.sha256()
    for file in sorted(p for p in sources.iterdir() if p.suffix in (".c", ".h")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return f"onnxgrad-{digest.hexdigest()[:24]}-{kind}.{suffix}"


@functools.cache
def _best(folder: Path) -> Path | None:
    if not folder.is_dir():
        return None
    suffix = _SUFFIXES.get(sys.platform, "so")
    places = (folder / name_library(folder.parent / "source", kind, suffix) for kind in kinds())
    return next((place for place in places if place.is_file()), None)


def kinds() -> list[str]:
    """The kinds of processors whose instructions this one has, the best first."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return ["aarch64"]
    if machine not in ("x86_64", "amd64"):
        return []
    has = _instructions()
    return [kind for kind, needs in _X86.items() if needs <= set(has)]


def _instructions() -> Collection[str]:
    """The instruction sets of this processor, and of the system, beyond the first of its kind."""
    if sys.platform == "win32":
        return _V3 if ctypes.windll.kernel32.IsProcessorFeaturePresent(_WINDOWS_HAS_AVX2) else ()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
