"""Console output: tables on stdout, errors and warnings on stderr, each on a line of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from onnxgrad.errors import printable


class _Console(Console):
    """A console that neutralizes control characters in printed names; only rich emits them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with control characters of the text made visible."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, keep="\n"), style, control)


def console(stream: TextIO | None = None) -> Console:
    """A console that writes plain, wide text where no terminal reads it."""
    stream = stream or sys.stdout
    if stream.isatty():
        return _Console(file=stream, markup=False, emoji=False)
    return _Console(
        file=stream, width=200, no_color=True, force_terminal=False, highlight=False, markup=False, emoji=False
    )


def print_lines(*lines: str, stream: TextIO | None = None) -> None:
    """Print `lines` as they are, however wide they are; on stdout by default."""
    out = console(stream)
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)


def entry(what: str, text: object) -> str:
    """A line of a summary: `text` in a column behind `what`."""
    return f"{what:<14} {text}"


def cell(text: str, style: str = "") -> Text:
    """`text` for one line of a table: a name in it cannot break it."""
    return Text(printable(text), style)


def error(problem: object) -> None:
    """``error: …`` on stderr."""
    _print_line("error", problem)


def warn_once() -> Callable[..., None]:
    """Return a function in place of ``warnings.showwarning``: one line without source code, each text once."""
    texts: set[str] = set()

    def warn(message: Any, *_: Any) -> None:
        if str(message) not in texts:
            texts.add(str(message))
            _print_line("warning", message)

    return warn


def _print_line(kind: str, what: object) -> None:
    first, *more = printable(str(what), keep="\n").split("\n")
    lines = [f"{kind}: {first}", *(line if line.startswith("  ") else f"  {line}" for line in more)]
    print("\n".join(lines), file=sys.stderr)
