"""The shared library, made from its sources by the C compiler of the machine when it is first asked for, and kept.

Its name in the cache is made of the sources, the flags and what the compiler says of itself and the processor, so
that another compiler, another machine with the same home, or another version of this package has its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from onnxgrad.door.places import cache, replacing
from onnxgrad.errors import BadInput

SOURCES = Path(__file__).parent / "source"

#: NaN and infinities mean what they mean in the graph, so not -ffast-math; sqrt sets no errno, or it is no instruction.
_FLAGS = (
    *("-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-fvisibility=hidden"),
)
#: What the compiler is asked to do for this processor, the first that it understands.
_PROCESSOR = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())


def library() -> Path:
    """The shared library for this machine, built if it is not in the cache yet (one or two seconds).

    ``CC`` names the compiler (default: cc, gcc or clang, whichever is there), ``ONNXGRAD_CACHE`` the cache.

    Raises:
        BadInput: there is no C compiler, it fails, or this is a system that the library is not made for.
    """
    return _library(os.environ.get("CC", ""), cache())


@functools.cache
def _library(asked: str, kept: Path) -> Path:
    compiler = _compiler(asked)
    processor, known = _ask(compiler)
    contract = "fast-honor-pragmas" if "__clang__" in known else "fast"  # a kernel may forbid a·b + c in one rounding
    flags = [*_FLAGS, f"-ffp-contract={contract}", *processor]
    files = sorted(p for p in SOURCES.iterdir() if p.suffix in (".c", ".h"))
    digest = hashlib.sha256("\0".join((*compiler, *flags, known)).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    place = kept / "native" / f"onnxgrad-{digest.hexdigest()[:24]}.{suffix}"
    if place.exists():
        return place
    with replacing(place) as file:  # a temporary file: whoever else builds at this moment makes the same
        sources = [str(p) for p in files if p.suffix == ".c"]
        done = _run([*compiler, *flags, *sources, "-lm", "-o", str(file)])
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise BadInput(f"{shlex.join(compiler)} cannot build the kernels of target 'native': {lines[0]}\n{_HINT}")
    return place


_HINT = "  hint: target 'portable' needs no compiler; the environment variable CC names another one"


def _compiler(asked: str) -> list[str]:
    """The command of the compiler."""
    if sys.platform not in ("linux", "darwin"):
        raise BadInput(f"target 'native' is for Linux and macOS, not {sys.platform}; use target 'portable'")
    for words in (shlex.split(asked),) if asked.strip() else (["cc"], ["gcc"], ["clang"]):
        if shutil.which(words[0]):
            return words
    missing = f"CC is {asked!r}, which is not there" if asked.strip() else "there is none (cc, gcc, clang)"
    raise BadInput(
        f"target 'native' needs a C compiler, and {missing}\n"
        "  hint: install one (Debian, Ubuntu: apt install gcc; macOS: xcode-select --install; anywhere: "
        "pip install ziglang, then CC='python -m ziglang cc'), or use target 'portable'"
    )


def _ask(compiler: list[str]) -> tuple[tuple[str, ...], str]:
    """The flags for this processor, and all that the compiler defines with them: its version, and what it may use."""
    for processor in _PROCESSOR:
        done = _run([*compiler, *processor, "-x", "c", "-dM", "-E", os.devnull])
        if done.returncode == 0:
            return processor, done.stdout
    raise BadInput(f"{shlex.join(compiler)} is no C compiler: {(done.stderr.splitlines() or ['?'])[0]}\n{_HINT}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BadInput(f"{command[0]} cannot be run: {error.strerror or error}\n{_HINT}") from error
