"""Figures of matplotlib, which no file in the working directory configures.

On import, matplotlib reads ``matplotlibrc`` in the working directory before every other configuration, including the
file that ``MATPLOTLIBRC`` names. Before version 3.11 that file is code: ``axes.prop_cycle`` is evaluated. In every
version, ``text.usetex`` makes matplotlib start LaTeX on the texts of a figure.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from onnxgrad.errors import BadInput, printable

RC_FILE = "matplotlibrc"


def import_matplotlib() -> None:
    """Import matplotlib without the ``matplotlibrc`` of the working directory, if there is one.

    Raises:
        BadInput: the package matplotlib is missing.
    """
    if "matplotlib" in sys.modules:
        return
    spec = importlib.util.find_spec("matplotlib")
    package = None if spec is None or spec.origin is None else Path(spec.origin).parent
    try:  # the package has no file of this name; the user's own configuration is read as ever
        with chdir(package) if package and os.path.lexists(RC_FILE) else nullcontext():
            import matplotlib  # noqa: F401
    except ImportError as error:
        raise BadInput("plots need the package matplotlib: pip install 'onnxgrad[train]'") from error


@contextmanager
def drawing() -> Iterator[Callable[..., Any]]:
    """A function that makes a figure, to be drawn and saved in the ``with`` block; pyplot's state stays untouched.

    Raises:
        BadInput: the package matplotlib is missing.
    """
    import_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def make(**options: Any) -> Any:
        figure = Figure(**options)
        FigureCanvasAgg(figure)
        return figure

    with matplotlib.rc_context({"text.usetex": False}):
        yield make


def plain(text: str, limit: int = 80) -> str:
    """One line of `text` for a figure, as it is: a name between $ is no formula, and a long name is cut."""
    line = printable(text)
    return (line if len(line) <= limit else f"{line[: limit - 1]}…").replace("$", r"\$")


def png(figure: Any) -> bytes:
    """The bytes of a PNG file of `figure`, inside of its ``with`` block of `drawing`."""
    target = io.BytesIO()
    figure.tight_layout()
    figure.savefig(target, format="png", dpi=90)
    return target.getvalue()
