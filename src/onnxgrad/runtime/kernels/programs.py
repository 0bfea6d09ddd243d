"""Programs of kernels, in the numbers of ``source/program.h``, which defines the format."""

from __future__ import annotations

from collections.abc import Sequence

from onnxgrad.runtime.kernels.elementwise_steps import OPERATIONS
from onnxgrad.runtime.kernels.steps import Unfit

#: Kinds of values and operations of steps, in the order of the kernels' own lists.
KINDS = ("REGISTER", "CONSTANT", "FIXED", "RESULT", "STATE", "SCANNED", "SHARED", "MATRIX")
CODES = (*OPERATIONS, "COPY", "SUM", "MEAN", "PRODUCT")
_CODE = {name: i for i, name in enumerate(CODES)}
_KIND = {name: i for i, name in enumerate(KINDS)}
_MOST_STEPS, _MOST_VALUES = 2048, 512

#: The kind, place, width and flag of a value of a program; a value and its first column.
Entry = tuple[str, int, int, int]
Spot = tuple[Entry, int]


class KernelProgram:
    """A program under construction.

    Attributes:
        entries: its values, in order.
    """

    def __init__(self) -> None:
        self.entries: dict[Entry, int] = {}
        self._steps: list[int] = []

    def number(self, entry: Entry) -> int:
        """The number of a value, which is added if it is new."""
        return self.entries.setdefault(entry, len(self.entries))

    def add(self, code: str, width: int, *spots: Spot | tuple[int, int]) -> None:
        """Add a step, given the place that it writes and those that it reads, or other numbers in their stead."""
        pairs = [(e if isinstance(e, int) else self.number(e), first) for e, first in spots]
        pairs += [(-1, 0)] * (4 - len(pairs))
        self._steps += [_CODE[code], width, *(n for n, _ in pairs), *(first for _, first in pairs)]

    def attributes(self) -> dict[str, Sequence[int]]:
        """The attributes of a call.

        Raises:
            Unfit: there are more steps or values than kernels support.
        """
        if len(self._steps) > 10 * _MOST_STEPS or len(self.entries) > _MOST_VALUES:
            raise Unfit
        values = [n for kind, place, width, flag in self.entries for n in (_KIND[kind], width, place, flag)]
        return {"values": values, "steps": self._steps}
