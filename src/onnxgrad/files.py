"""Atomic writes of files and folders, with clean-up after killed processes.

The content goes to a temporary file (or folder) beside its place, is flushed to the disk, and renamed. The writer
locks the temporary file; the system releases the lock when the process ends, even if it is killed. The next writer of
the same place removes temporary files without a lock. On systems or disks without such locks, they stay.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from onnxgrad.errors import BadInput

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".partial"
#: Byte order marks, longer ones first, and the encodings that they stand for; without one, text is UTF-8.
_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
#: Bytes of a text that are decoded at once.
_BLOCK = 1 << 18


def cache() -> Path:
    """The folder of files that can be made or fetched again: ``ONNXGRAD_CACHE``, or the user's cache folder."""
    given = os.environ.get("ONNXGRAD_CACHE")
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(base).absolute() / "onnxgrad"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`; it replaces `path` at the end of the ``with`` block.

    `path` has either all of the new content or the old content, also after a crash.

    Raises:
        BadInput: the place cannot be written.
    """
    check_ordinary(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(path, folder=False) as temporary:
            mode = stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            flush(temporary)
            temporary.chmod(mode)  # a writer may have put a file of its own there
            temporary.replace(path)
            flush(path.parent)


@contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Raise BadInput in place of an OSError of the ``with`` block, which writes `path`."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"cannot write {os.fspath(path)!r}: {error.strerror or error}") from error


@contextmanager
def reading(path: str | os.PathLike) -> Iterator[None]:
    """Raise BadInput in place of an OSError of the ``with`` block, which reads `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise BadInput(f"there is no file {os.fspath(path)!r}") from error
    except OSError as error:
        raise BadInput(f"cannot read {os.fspath(path)!r}: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Make the folder `path`, and those above it. Raises BadInput if that cannot be done."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def check_ordinary(path: Path) -> None:
    """Raise BadInput if `path` is a folder or a device, which a file cannot replace."""
    if path.is_dir():
        raise BadInput(f"cannot write {str(path)!r}: it is a directory")
    if path.exists() and not path.is_file():
        raise BadInput(f"cannot write {str(path)!r}: it is no ordinary file")


def open_ordinary(path: str | os.PathLike) -> BinaryIO:
    """Open `path` for reading. Refuses special files, whose opening may block or have side effects.

    Raises:
        BadInput: it is not there, cannot be read, or is a folder, a device, a pipe or a socket.
    """

    def opener(name: str, flags: int) -> int:
        check_readable(name)
        handle = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # should it become a pipe at this moment
        try:
            _check_mode(name, os.fstat(handle))
        except BadInput:
            os.close(handle)
            raise
        return handle

    with reading(path):
        return open(path, "rb", opener=opener)


def open_text(path: str | os.PathLike) -> BinaryIO:
    """Open a text for reading as UTF-8 without a byte order mark; the mark of UTF-16 or UTF-32 says how it is decoded.

    Raises:
        BadInput: as `open_ordinary`; and when read, the text is not in this encoding.
    """
    file = open_ordinary(path)
    begin = file.read(4)
    encoding = next((encoding for mark, encoding in _MARKS.items() if begin.startswith(mark)), "utf-8-sig")
    return io.BufferedReader(_Decoded(file, repr(os.fspath(path)), encoding), _BLOCK)


class _Decoded(io.RawIOBase):
    """A text in any encoding, as bytes of UTF-8; it goes back to its beginning only."""

    def __init__(self, file: BinaryIO, name: str, encoding: str) -> None:
        self.file, self.name, self.encoding = file, name, encoding
        self.seek(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        if offset or whence:
            raise io.UnsupportedOperation("a decoded text goes back to its beginning only")
        self.file.seek(0)
        self.decoder = codecs.getincrementaldecoder(self.encoding)()
        self.waiting, self.position, self.line = b"", 0, 1
        return 0

    def readinto(self, buffer: Any) -> int:
        content = b" "
        while content and not self.waiting:
            content = self.file.read(_BLOCK)
            self.waiting = self._decode(content).encode()
            self.line += self.waiting.count(b"\n")
        count = min(len(buffer), len(self.waiting))
        buffer[:count], self.waiting = self.waiting[:count], self.waiting[count:]
        self.position += count
        return count

    def _decode(self, content: bytes) -> str:
        known = self.encoding.upper().removesuffix("-SIG")
        if known == "UTF-8" and b"\0" in content:
            raise BadInput(
                f"{self.name} is no text in UTF-8, but may be UTF-16 without a byte order mark\n"
                "  hint: save it as UTF-8"
            )
        try:
            return self.decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            line = self.line + error.object[: error.start].count(b"\n")
            raise BadInput(
                f"{self.name} is no text in {known}: {error.object[error.start : error.start + 1]!r} in line {line}\n"
                "  hint: save it as UTF-8 (in Excel: CSV UTF-8), or convert it: "
                "iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW, with the encoding that it has"
            ) from error

    def close(self) -> None:
        self.file.close()
        super().close()


def read_text(path: str | os.PathLike, most: int) -> str:
    """The text of an ordinary file of at most `most` bytes, without a byte order mark.

    Raises:
        BadInput: the file does not exist, cannot be read, is larger, or is no text in UTF-8.
    """
    with open_text(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise BadInput(f"{str(path)!r} has more than {most:,} bytes")
    return content.decode()


def check_readable(path: str | os.PathLike) -> None:
    """Raise BadInput if `path` is no ordinary file."""
    with reading(path):
        _check_mode(path, os.stat(path))


def _check_mode(path: str | os.PathLike, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a device, a pipe or a socket"
        raise BadInput(f"cannot read {os.fspath(path)!r}: it is {what}, no ordinary file")


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, removed at the end of the ``with`` block. Raises OSError on failure."""
    with _temporary(path, folder=True) as temporary:
        yield temporary


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Be the only one in `folder`, which must be there, until the ``with`` block ends.

    The file or folder itself is locked; nothing is written into it. Without locks (Windows, some network disks) nothing
    is checked.

    Raises:
        BadInput: another one is there, in this process or another.
    """
    handle = _lock_path(folder.resolve())
    if handle is None:
        raise BadInput(f"another run is at work in {str(folder)!r}\n  hint: wait for its end, or choose another folder")
    try:
        yield
    finally:
        if handle >= 0:
            os.close(handle)


def flush(path: Path) -> None:
    """Flush the content of a file, or a rename in a folder, to the disk.

    Where the system lets folders be opened for that.
    """
    if path.is_dir():
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        return
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def _temporary(path: Path, *, folder: bool) -> Iterator[Path]:
    sweep(path.parent, re.escape(path.name))
    while True:
        prefix = f".{path.name}."
        if folder:
            made = Path(tempfile.mkdtemp(_SUFFIX, prefix, path.parent))
        else:
            made = _create_temporary(prefix, path.parent)
        handle = _lock_path(made)
        if handle is not None and (handle < 0 or _is(handle, made)):
            break
        if handle is not None:  # another process removed it first
            os.close(handle)
    try:
        yield made
    finally:
        _remove(made)
        if handle >= 0:
            os.close(handle)


def _create_temporary(prefix: str, folder: Path) -> Path:
    """Create an empty file with the mode of an ordinary file; those of `tempfile` are private."""
    while True:
        path = folder / f"{prefix}{os.urandom(4).hex()}{_SUFFIX}"
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
            return path


def is_left_of(path: Path, place: Path) -> bool:
    """True if `path` is, or is inside, a temporary file that a killed process left beside `place`.

    The next process that writes `place` removes such files.
    """
    folder, pattern = place.parent.resolve(), _left_of(re.escape(place.name))
    return any(
        p.parent == folder and pattern.fullmatch(p.name) for p in (path, *path.resolve().parents, path.resolve())
    )


def _left_of(names: str) -> re.Pattern[str]:
    return re.compile(rf"\.{names}\.[a-z0-9_]{{8}}{re.escape(_SUFFIX)}")


def sweep(folder: Path, names: str) -> None:
    """Remove temporary files of killed processes from `folder`, whose targets match the regular expression `names`."""
    pattern = _left_of(names)
    try:
        with os.scandir(folder) as entries:
            left = [Path(e.path) for e in entries if pattern.fullmatch(e.name)]
    except OSError:
        return
    for old in left:
        handle = _lock_path(old)
        if handle is not None and handle >= 0:
            _remove(old)
            os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _lock_path(path: Path) -> int | None:
    """A handle that locks `path` while it is open; None if another process has the lock, -1 without locks.

    Only files and folders are opened, not links: another user may have put a link there.
    """
    if fcntl is None:
        return -1
    try:
        if not (stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISDIR(mode)):
            return -1
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return -1
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        return -1
    return handle


def _is(handle: int, path: Path) -> bool:
    """True if the open file `handle` is the file at `path` now."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False
