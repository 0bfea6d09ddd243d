"""The shared library: the one that came with the wheel, or made by the machine's C compiler when first asked for.

Its name in the cache is made of the sources, the flags and what the compiler says of itself and the processor, so
that another compiler, another machine with the same home, or another version of this package has its own. What is
loaded runs as part of this process, so a file is only loaded if no other user can have written it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput
from onnxgrad.files import cache, flush, scratch
from onnxgrad.runtime.kernels import prebuilt

SOURCES = Path(__file__).parent / "source"

#: NaN and infinities mean what they mean in the graph, so not -ffast-math; sqrt sets no errno, or it is no instruction.
FLAGS = (
    *("-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-fvisibility=hidden"),
)
#: What the compiler is asked to do for this processor, the first that it understands.
_PROCESSOR = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def library(seconds: float | None = None) -> Path:
    """The shared library for this machine: that of the wheel, or built if it is not in the cache yet (a few seconds).

    ``CC`` names the compiler (default: cc, gcc or clang, whichever is there), ``ONNXGRAD_CACHE`` the cache.

    Args:
        seconds: how long the compiler may take.

    Raises:
        BadInput: there is no C compiler, it fails, this is a system that the library is not made for, or what is in
            the cache is not this user's alone.
    """
    if (found := prebuilt.library()) is not None:
        return found
    order = order_library()
    if not order.is_there():
        order.build(seconds)
    check_own(order.place)
    return order.place


def overwrites() -> ctypes.c_int64:
    """The number of updates by kernels, in this process so far, that have overwritten their operands."""
    return ctypes.c_int64.in_dll(ctypes.CDLL(str(library())), "onnxgrad_overwrites")


def order_library() -> Order:
    """The recipe of `library` for this machine. Raises BadInput as it does, except for errors of the compiler."""
    recipe = _recipe(os.environ.get("CC", ""))
    return Order(cache() / "native" / recipe.name, SOURCES, recipe.command)


def check_own(place: Path) -> None:
    """Check that only this user and root can have written a file, or can replace it."""
    try:
        handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            file = os.fstat(handle)
        finally:
            os.close(handle)
        folder = place.parent.stat()
    except OSError as error:
        raise _refused(place, f"it cannot be opened as a file ({error.strerror or error})") from error
    if not stat.S_ISREG(file.st_mode):
        raise _refused(place, "it is no ordinary file")
    for status, what in ((file, "it"), (folder, "its folder")):
        if status.st_uid not in (os.geteuid(), 0):
            raise _refused(place, f"{what} belongs to another user ({status.st_uid})")
        if status.st_mode & _OTHERS_WRITE:
            raise _refused(place, f"other users may write {what}")


def _refused(place: Path, why: str) -> BadInput:
    return BadInput(
        f"the kernels of target 'native' in {str(place)!r} are not taken: {why}\n"
        "  hint: remove it, or have ONNXGRAD_CACHE name a folder of your own"
    )


@dataclass(frozen=True)
class Order:
    """A library that is to be at `place`, made of the files in `sources` by the words of `command`."""

    place: Path
    sources: Path
    command: tuple[str, ...]

    def is_there(self) -> bool:
        """True if the library is at its place and is the one that was built, by its digest.

        Raises:
            BadInput: what is at its place is not this user's alone.
        """
        if not os.path.lexists(self.place):
            return False
        check_own(self.place)
        found = self.place.stat()
        return _is_whole(self.place, (found.st_ino, found.st_mtime_ns, found.st_size))

    def build(self, seconds: float | None = None) -> None:
        """Build it, all or nothing, where no other user can write. Processes that build it at one moment make the same.

        Raises:
            BadInput: the compiler fails, or takes more than so many `seconds`, or the place cannot be written.
        """
        with self.writing(), scratch(self.place) as folder:
            made = folder / self.place.name
            self._compile(made, seconds)
            made.chmod(0o600)
            flush(made)
            digest = _digest_file(made)
            digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
            digest.replace(_digest_file(self.place))
            made.replace(self.place)
            flush(self.place.parent)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """With the folder of the library there, and this user's own. Raises BadInput where it cannot be written."""
        folder = self.place.parent
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            if (found := folder.stat()).st_uid == os.geteuid():
                folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
            yield
        except OSError as error:
            raise BadInput(f"cannot write {str(self.place)!r}: {error.strerror or error}") from error

    def _compile(self, file: Path, seconds: float | None) -> None:
        sources = [str(p) for p in _files(self.sources) if p.suffix == ".c"]
        done = _run([*self.command, *sources, "-lm", "-o", str(file)], seconds)
        if done.returncode:
            said = done.stderr.splitlines() or ["it does not say why"]
            reason = next((line for line in said if "error" in line), said[0])
            compiler = Path(self.command[0]).name
            raise BadInput(f"{compiler} cannot build the kernels of target 'native': {reason}\n{_HINT}")


def _digest_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


@functools.cache
def _is_whole(library: Path, identity: tuple[int, ...]) -> bool:
    """True if the library has the digest that was written with it; `identity` changes with the file."""
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == _digest_file(library).read_text()
    except (OSError, ValueError):
        return False


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix in (".c", ".h"))


@dataclass(frozen=True)
class _Recipe:
    """The command that builds the library, and the name of its file."""

    command: tuple[str, ...]
    name: str


@functools.cache
def _recipe(asked: str) -> _Recipe:
    compiler = _compiler(asked)
    processor, known = _ask(compiler)
    contract = "fast-honor-pragmas" if "__clang__" in known else "fast"  # a kernel may forbid a·b + c in one rounding
    flags = [*FLAGS, f"-ffp-contract={contract}", *processor]
    digest = hashlib.sha256("\0".join((*compiler, *flags, known)).encode())
    for file in _files(SOURCES):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return _Recipe((*compiler, *flags), f"onnxgrad-{digest.hexdigest()[:24]}.{suffix}")


_HINT = "  hint: target 'portable' needs no compiler; the environment variable CC names another one"


def _compiler(asked: str) -> list[str]:
    """The command of the compiler."""
    if sys.platform not in ("linux", "darwin"):
        raise BadInput(f"target 'native' is for Linux and macOS, not {sys.platform}; use target 'portable'")
    try:
        given = shlex.split(asked)
    except ValueError as error:
        raise BadInput(f"CC is {asked!r}, which is no command: {error}\n{_HINT}") from error
    for words in (given,) if given else (["cc"], ["gcc"], ["clang"]):
        if subprocesses.which(words[0]):
            return words
    missing = f"CC is {asked!r}, which is not there" if given else "there is none (cc, gcc, clang)"
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


def _run(command: list[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocesses.run(command, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise BadInput(f"{command[0]} takes more than {seconds:.0f} seconds\n{_HINT}") from error
    except OSError as error:
        raise BadInput(f"{command[0]} cannot be run: {error.strerror or error}\n{_HINT}") from error
