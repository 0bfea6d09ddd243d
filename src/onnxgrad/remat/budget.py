"""Amounts of memory, as people write them."""

from __future__ import annotations

import math
import re

from onnxgrad.errors import BadInput

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class OverBudget(BadInput):
    """A budget that no plan meets; `least` is the smallest that one does."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


def amount(memory: int | str) -> int:
    """Bytes of an amount such as ``"200MB"``, ``"1.5 GiB"`` or a number of bytes.

    Raises:
        BadInput: it is none, or not positive.
    """
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]i?)?B?\s*", memory, re.IGNORECASE)
        if match is not None:
            number, unit = match.groups(default="")
            memory = int(float(number) * {k.lower(): v for k, v in _UNITS.items()}[unit.lower()])
    if isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0:
        raise BadInput(f"an amount of memory is written as '200MB', '1.5GiB' or a number of bytes, not {memory!r}")
    return memory


def megabytes(count: float) -> str:
    """Bytes for people, rounded up, so that the printed amount suffices."""
    unit, size = next(((u, n) for u, n in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)) if count >= n), ("B", 1))
    digits = 0 if count >= 100 * size or size == 1 else 1
    up = math.ceil(count / size * 10**digits) / 10**digits
    return f"{up:.{digits}f} {unit}"
