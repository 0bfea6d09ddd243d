"""Compile the kernels in C: one shared library for each kind of processor of an architecture.

``setup.py`` calls this module when the package is installed or built; ``python tools/build_kernels.py`` builds the
libraries of a clone again after a change of the C sources. Only the standard library is imported.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "src" / "onnxgrad" / "runtime" / "kernels"
SOURCES = KERNELS / "source"
FOLDER = KERNELS / "prebuilt"

_spec = importlib.util.spec_from_file_location("processors", KERNELS / "processors.py")
assert _spec is not None
assert _spec.loader is not None
processors = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(processors)

#: NaN and infinities keep their meaning, so not -ffast-math. Without errno, a square root is an instruction.
FLAGS = (
    *("-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-fvisibility=hidden"),
)
#: The flags of GCC and Clang for a kind of processor. AVX-512 is slower in the vectors of 256 bits that GCC prefers.
ARCHITECTURE = {
    "x86-64": ("-march=x86-64",),
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "aarch64": (),
}


class NoCompiler(Exception):
    """There is no C compiler, or it cannot build the kernels; the message is one line."""


def find_compiler() -> list[str]:
    """The command of the C compiler: the one that ``CC`` names, or else cc, gcc or clang.

    Raises:
        NoCompiler: there is none, or this is Windows.
    """
    if sys.platform == "win32":
        raise NoCompiler("kernels are not compiled on Windows")
    named = shlex.split(os.environ.get("CC", ""))
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(words[0]):
            return words
    raise NoCompiler(f"there is no C compiler ({named[0] if named else 'cc, gcc, clang'})")


def contraction(compiler: Sequence[str]) -> str:
    """The flag that lets a compiler round a·b + c once, except where a kernel forbids it."""
    asked = [*compiler, "-x", "c", "-dM", "-E", os.devnull]
    defined = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return "-ffp-contract=" + ("fast-honor-pragmas" if "__clang__" in defined else "fast")


def build_library(compiler: Sequence[str], flags: Sequence[str], place: Path) -> None:
    """Compile and link the sources to the shared library `place`, which appears only when it is complete.

    Raises:
        NoCompiler: the compiler fails.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    made = place.with_name(f"{place.name}.{os.getpid()}")
    command = [*compiler, *FLAGS, *flags, *map(str, sorted(SOURCES.glob("*.c"))), "-lm", "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        made.unlink(missing_ok=True)
        lines = done.stderr.splitlines() or ["without a message"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise NoCompiler(f"{Path(compiler[0]).name} cannot build the kernels: {reason}")
    made.replace(place)


def build_kinds(folder: Path) -> list[Path]:
    """Build the libraries for all kinds of processors of this machine's architecture, and remove older ones.

    Raises:
        NoCompiler: there is no compiler, it fails, or the architecture has no kernels.
    """
    compiler = find_compiler()
    contract = contraction(compiler)
    kinds = processors.architecture_kinds()
    if not kinds:
        raise NoCompiler("there are no kernels for this architecture")
    places = {kind: folder / processors.name_library(SOURCES, kind) for kind in kinds}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(build_library, compiler, [contract, *ARCHITECTURE[k]], p) for k, p in places.items()]
    for job in jobs:
        job.result()
    for old in set(folder.iterdir()) - set(places.values()):
        old.unlink()
    return list(places.values())


if __name__ == "__main__":
    try:
        print(*build_kinds(FOLDER), sep="\n")
    except NoCompiler as error:
        sys.exit(f"error: {error}")
