"""Tokenizers in files ``tokenizer.json`` and in metadata of models, parsed first in a process of their own.

The package tokenizers does not expect files of strangers: some make it allocate without bound, some end the process,
and its panics are no exceptions of Python's. So a child process with bounds on memory and time parses the text
and encodes a line. What it survives is parsed here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput
from onnxgrad.files import open_ordinary

#: Bytes of a file, seconds to parse it, and bytes of address space beside some for each byte of the file.
LARGEST, PATIENCE, MEMORY, MEMORY_PER_BYTE = 1 << 28, 60, 1 << 30, 24
_NO_PACKAGE, _REFUSED = 3, 4
_CHILD = f"""
import sys
try:
    from tokenizers import Tokenizer
except ImportError:
    sys.exit({_NO_PACKAGE})
text = sys.stdin.buffer.read()
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass
try:
    tokenizer = Tokenizer.from_str(text.decode())
    tokenizer.no_padding()
    tokenizer.encode_batch(["".join(map(chr, range(32, 127))), "ü 漢"])
    Tokenizer.from_str(tokenizer.to_str())
except BaseException as error:
    sys.stdout.buffer.write(" ".join(str(error).split())[:200].encode(errors="replace"))
    sys.exit({_REFUSED})
"""


def open_tokenizer(path: Path) -> Any:
    """The ``tokenizers.Tokenizer`` in the file at `path`.

    Raises:
        BadInput: there is no such file, or it cannot be read, or reading it needs too much memory or time.
    """
    try:
        with open_ordinary(path) as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError as error:
        raise BadInput(f"there is no file {str(path)!r}") from error
    except OSError as error:
        raise _refused(_named(path), error.strerror or str(error)) from error
    return parse_tokenizer(text, _named(path))


def parse_tokenizer(text: bytes, where: str) -> Any:
    """The ``tokenizers.Tokenizer`` of the JSON `text`, which messages call `where`.

    Raises:
        BadInput: it cannot be read, or reading it needs too much memory or time, or the package is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BadInput("to turn text into tokens, install tokenizers: pip install 'onnxgrad[train]'") from error
    if len(text) > LARGEST:
        raise _refused(where, f"it has more than {LARGEST >> 20} MiB")
    _try(where, text)
    try:
        return Tokenizer.from_str(text.decode())
    except Exception as error:  # the library raises Exception itself
        raise _refused(where, " ".join(str(error).split())) from error


def _try(where: str, text: bytes) -> None:
    """Parse `text` in a child process. Raises BadInput if that fails, ends the process, or exceeds the bounds."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return
    memory = MEMORY + MEMORY_PER_BYTE * len(text)
    try:
        done = subprocesses.run(
            [*subprocesses.PYTHON, "-c", _CHILD, str(memory)],
            input=text,
            timeout=PATIENCE,
            env={"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
    except subprocess.TimeoutExpired as error:
        raise _refused(where, f"it takes more than {PATIENCE} seconds") from error
    except OSError as error:
        raise _refused(where, f"the process that reads it cannot be started: {error.strerror or error}") from error
    if done.returncode == _REFUSED:
        raise _refused(where, done.stdout.decode(errors="replace") or "its content is none")
    if done.returncode not in (0, _NO_PACKAGE):
        raise _refused(where, f"reading it ends the process, or needs more than {memory >> 20} MiB")


def _named(path: Path) -> str:
    return f"{str(path)!r} as a tokenizer.json"


def _refused(where: str, why: str) -> BadInput:
    return BadInput(f"cannot read {where}: {why}")
