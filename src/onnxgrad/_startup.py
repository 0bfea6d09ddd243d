"""Ctrl-C while the command is still being imported, which takes a second: one line, and exit code 130.

Nothing has been begun then, so nothing has to be put in order. Where onnxgrad is imported as a library, it leaves
signals alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import PurePath
from typing import Any


def _stop(*_: Any) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def is_command() -> bool:
    """True if this process is ``onnxgrad …`` or ``python -m onnxgrad …``."""
    arguments = sys.orig_argv
    called = "-m" in arguments[:-1] and arguments[arguments.index("-m") + 1] == "onnxgrad"
    return called or PurePath(sys.argv[0] if sys.argv else "").stem == "onnxgrad"


def begin() -> None:
    """Have Ctrl-C end the process at once, if it is the command and SIGINT has its default handler."""
    ours = threading.current_thread() is threading.main_thread() and is_command()
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def end() -> None:
    """Restore Python's own handler of Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def answered() -> None:
    """Clear Python's record of an interrupt that was handled, so that the exit code is the command's own.

    CPython records an interrupt that ends code given as text (imported modules run such code), and exits by it in the
    end even if the program has caught it. Running another piece of code given as text clears that record.
    """
    exec("")
