"""What is said where: tables on stdout, errors and warnings on stderr, each on a line of its own."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from rich.console import Console


def console(stream: TextIO | None = None) -> Console:
    """A console that writes plain, wide text where no terminal reads it."""
    stream = stream or sys.stdout
    if stream.isatty():
        return Console(file=stream)
    return Console(file=stream, width=200, no_color=True, force_terminal=False, highlight=False)


def error(problem: object) -> None:
    """``error: …`` on stderr."""
    _say("error", problem)


def warn(message: Any, *_: Any) -> None:
    """In place of ``warnings.showwarning``: one line, no source code."""
    _say("warning", message)


def _say(kind: str, what: object) -> None:
    print(f"{kind}: {what}", file=sys.stderr)
