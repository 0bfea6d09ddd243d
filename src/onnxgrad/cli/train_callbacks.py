"""Lines that ``onnxgrad train`` prints before its first step."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from onnxgrad.cli.console import console
from onnxgrad.training.loop.callbacks import Callback
from onnxgrad.training.loop.run import Run


class Notes(Callback):
    """Prints `lines` on stderr when the run begins: nothing precedes the error of a run that cannot."""

    is_told_once = True

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def start(self, run: Run) -> None:
        """Print them."""
        for line in self.lines:
            console(sys.stderr).print(line, markup=False, highlight=False, soft_wrap=True)
