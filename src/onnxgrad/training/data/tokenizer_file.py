"""Tokenizers in files ``tokenizer.json`` and in metadata of models, which run in processes of their own.

The package tokenizers is not hardened against untrusted files: some make it allocate without bound, some end the
process, and its panics are no exceptions of Python. So a child process with limits on memory and time parses the text
and encodes a line. A file that it survives is parsed here. The texts of the data are encoded by such a process, too:
the behaviour of a tokenizer may depend on the text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad import subprocesses
from onnxgrad.errors import BadInput, needs_package, reason_of
from onnxgrad.files import open_ordinary

#: Bytes of a file, seconds to parse it, and bytes of address space beside some for each byte of the file.
LARGEST, PATIENCE, MEMORY, MEMORY_PER_BYTE = 1 << 28, 60, 1 << 30, 24
#: Of texts: bytes that are encoded in a second at least, and bytes of address space for each byte of the longest one.
_SLOWEST, _PER_BYTE_OF_A_ROW = 20_000, 512
#: Characters that are encoded at once, at least one text, and threads that encode, with the address space of each.
_CHUNK, _THREADS, _PER_THREAD = 1 << 20, min(os.cpu_count() or 1, 4), 1 << 27
_NO_PACKAGE, _REFUSED = 3, 4
#: Bytes before the reason for a failure, which may follow results.
_REASON = b"\n!"
#: The beginning of a script for `run_bounded`, behind its imports in a function of this name.
_PRELUDE = f"""
import sys
try:
    bring()
except ImportError:
    sys.exit({_NO_PACKAGE})
text = sys.stdin.buffer.read()
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass

def refuse(error):
    sys.stdout.buffer.write({_REASON!r} + " ".join(str(error).split())[:200].encode(errors="replace"))
    sys.exit({_REFUSED})
"""


def with_prelude(imports: str, script: str) -> str:
    """A script for `run_bounded`: its input is ``text``, and ``refuse(error)`` ends it with a reason.

    Args:
        imports: a line that binds ``global`` names; a missing package ends the script.
        script: the lines after it.
    """
    return f"def bring():\n    {imports}\n{_PRELUDE}\n{script}"


_IMPORTS = "global Tokenizer; from tokenizers import Tokenizer"
_TRIAL = with_prelude(
    _IMPORTS,
    """
try:
    tokenizer = Tokenizer.from_str(text.decode())
    tokenizer.no_padding()
    tokenizer.encode_batch(["".join(map(chr, range(32, 127))), "ü 漢"])
    Tokenizer.from_str(tokenizer.to_str())
except BaseException as error:
    refuse(error)
""",
)
_ENCODE = with_prelude(
    _IMPORTS,
    f"""
import json
from array import array
try:
    described, longest, special, texts = json.loads(text)
    tokenizer = Tokenizer.from_str(described)
    tokenizer.no_padding()
    if longest is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(longest)
    begin = 0
    while begin < len(texts):
        end, size = begin + 1, len(texts[begin])
        while end < len(texts) and (size := size + len(texts[end])) <= {_CHUNK}:
            end += 1
        made = array("q")
        for row in tokenizer.encode_batch(texts[begin:end], add_special_tokens=special):
            made.append(len(row.ids))
            starts = [start if start < stop else -1 for start, stop in row.offsets]
            for numbers in (row.ids, row.attention_mask, row.type_ids, starts):
                made.extend(numbers)
        sys.stdout.buffer.write(made.tobytes())
        begin = end
except BaseException as error:
    refuse(error)
""",
)


def open_tokenizer(path: Path) -> Any:
    """The ``tokenizers.Tokenizer`` in the file at `path`.

    Raises:
        BadInput: there is no such file, or it cannot be read, or reading it needs too much memory or time.
    """
    with open_ordinary(path) as file:
        text = file.read(LARGEST + 1)
    return parse_tokenizer(text, f"{str(path)!r} as a tokenizer.json")


def parse_tokenizer(text: bytes, where: str) -> Any:
    """The ``tokenizers.Tokenizer`` of the JSON `text`, which messages call `where`.

    Raises:
        BadInput: it cannot be read, or reading it needs too much memory or time, or the package is missing.
    """
    with needs_package("to turn text into tokens, install tokenizers", "train"):
        from tokenizers import Tokenizer
    if len(text) > LARGEST:
        raise _refused(where, f"it has more than {LARGEST >> 20} MiB")
    _try(where, text)
    try:
        return Tokenizer.from_str(text.decode())
    except Exception as error:  # the library raises Exception itself
        raise _refused(where, reason_of(error)) from error


def encode(
    tokenizer: Any, texts: Sequence[str], longest: int | None, special: bool = True
) -> Iterator[tuple[np.ndarray, ...]]:
    """Tokens, attention mask, segments and first characters of each text, without padding, by a child process.

    The first character of a token that stands for no text, such as the begin of a sequence, is -1.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        texts: one for each row.
        longest: the most tokens of a row; None: all.
        special: add the special tokens of the tokenizer's template.

    Raises:
        BadInput: the tokenizer fails, or ends its process, or needs too much memory or time; says only why.
    """
    given = json.dumps([tokenizer.to_str(), longest, special, texts]).encode()
    row = max((len(text.encode(errors="replace")) for text in texts), default=0)
    memory = _bound(len(given)) + _PER_BYTE_OF_A_ROW * row
    output = run_bounded(_ENCODE, given, memory, PATIENCE + len(given) // _SLOWEST, _THREADS)
    if output is None:
        yield from _encode_here(tokenizer, texts, longest, special)
        return
    made, at = np.frombuffer(output, np.int64), 0
    for _ in texts:
        size = int(made[at])
        yield tuple(made[at + 1 : at + 1 + 4 * size].reshape(4, size))
        at += 1 + 4 * size


def _encode_here(
    tokenizer: Any, texts: Sequence[str], longest: int | None, special: bool
) -> Iterator[tuple[np.ndarray, ...]]:
    """The same in this process, where no other one has the package."""
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())  # the caller's object is unchanged
    tokenizer.no_padding()
    if longest is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(longest)
    try:
        encoded = tokenizer.encode_batch(texts, add_special_tokens=special)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise BadInput(reason_of(error)) from error
    for e in encoded:
        starts = [start if start < stop else -1 for start, stop in e.offsets]
        yield tuple(np.array(numbers, np.int64) for numbers in (e.ids, e.attention_mask, e.type_ids, starts))


def _try(where: str, text: bytes) -> None:
    """Parse `text` in a child process. Raises BadInput if that fails, ends the process, or exceeds the bounds."""
    try:
        run_bounded(_TRIAL, text, _bound(len(text)), PATIENCE, 1)
    except BadInput as error:
        raise _refused(where, str(error)) from error


def _bound(size: int) -> int:
    return MEMORY + MEMORY_PER_BYTE * size


def run_bounded(script: str, given: bytes, memory: int, seconds: float, threads: int = 1) -> bytes | None:
    """The output of a child process that runs `script` on `given`; None if a child process lacks the package.

    Args:
        script: of `with_prelude`.
        given: its input.
        memory: bytes of address space.
        seconds: the longest it may take.
        threads: of the tokenizer.

    Raises:
        BadInput: the script fails, or exceeds the bounds; says only why.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        return None
    memory += _PER_THREAD * (threads - 1)
    try:
        done = subprocesses.run(
            [*subprocesses.PYTHON, "-c", script, str(memory)],
            input=given,
            timeout=seconds,
            env={"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"},
        )
    except subprocess.TimeoutExpired as error:
        raise BadInput(f"it takes more than {seconds} seconds") from error
    except OSError as error:
        raise BadInput(f"the process that reads it cannot be started: {error.strerror or error}") from error
    if done.returncode == _REFUSED:
        reason = done.stdout.rpartition(_REASON)[2]
        raise BadInput(reason.decode(errors="replace") or "its content is none")
    if done.returncode == _NO_PACKAGE:
        return None
    if done.returncode:
        raise BadInput(f"reading it ends the process, or needs more than {memory >> 20} MiB")
    output: bytes = done.stdout
    return output


def _refused(where: str, why: str) -> BadInput:
    return BadInput(f"cannot read {where}: {why}")
