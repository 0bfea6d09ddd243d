"""Steps of programs under construction."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import single_constant

_LETTERS = {
    ir.DataType.FLOAT: "F", ir.DataType.INT32: "I", ir.DataType.UINT32: "U", ir.DataType.BOOL: "B",
    ir.DataType.DOUBLE: "D", ir.DataType.INT64: "L",
}  # fmt: skip
Real = type[np.float32 | np.float64]


def letter(value: ir.Value | None) -> str:
    """F, I, U, B, D or L for float32, int32, uint32, bool, float64 and int64; empty for a type without registers."""
    return "" if value is None else _LETTERS.get(value.dtype, "")  # type: ignore[arg-type]


class Unfit(Exception):
    """Raised for an operator that programs do not have, or a program that exceeds a limit."""


@dataclass
class Steps:
    """Steps of a program under construction; the result of a step is referred to by its index.

    Attributes:
        made: (code, places that it reads) or, of loads and constants, (code, what).
        known: places of values.
        loads: operands, in order of first use.
        real: the type of floating-point numbers.
    """

    made: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    known: dict[ir.Value, int] = field(default_factory=dict)
    loads: dict[ir.Value, int] = field(default_factory=dict)
    real: Real = np.float32
    _place: dict[tuple[str, tuple[Any, ...], int], int] = field(default_factory=dict)

    def __call__(self, code: str, *places: int) -> int:
        """A step that reads others, or an earlier one that is the same number; its place."""
        if code in ("MUL", "DIV") and self._number(places[1]) == 1:
            return places[0]
        if code == "MUL" and self._number(places[0]) == 1:
            return places[1]
        if code == "NEG" and self.made[places[0]][0] == "MUL":  # rounding is symmetric
            factors = self.made[places[0]][1]
            for factor, other in (factors, factors[::-1]):
                if (number := self._number(factor)) is not None:
                    return self("MUL", other, self.float(-number))
        return self._gaussian(code, places) or self.once(code, places)

    def _gaussian(self, code: str, places: tuple[int, ...]) -> int | None:
        """The step of a product with ½·(erf(x·√½) + 1) = Φ(x), or of e^(log φ(0) - x²/2) = φ(x); None for others."""
        if code == "EXP" and self.made[places[0]][0] == "SUB":
            peak, square = self.made[places[0]][1]
            if self._number(peak) == self.real(-0.5 * math.log(2 * math.pi)) and self.made[square][0] == "MUL":
                u, again = self.made[square][1]
                x = self._root_of_half(u) if u == again else None
                return None if x is None else self.once("BELL", (x,))
        parts = [self.made[p][1] if self.made[p][0] == "MUL" else (p,) for p in places] if code == "MUL" else []
        factors = [f for part in parts for f in part]
        half = next((f for f in factors if self._number(f) == 0.5), None)
        for above in factors if half is not None and len(factors) < 4 else ():
            erf = self._beside("ADD", above, 1)
            if erf is not None and self.made[erf][0] == "ERF":
                x = self._root_of_half(self.made[erf][1][0])
                if x is not None:
                    normal, rest = self.once("NORMAL", (x,)), [f for f in factors if f not in (above, half)]
                    return self("MUL", rest[0], normal) if rest else normal
        return None

    def _root_of_half(self, place: int) -> int | None:
        """x, if a step is x·√½ or x/√2."""
        x = self._beside("MUL", place, math.sqrt(0.5))
        return self._beside("DIV", place, math.sqrt(2)) if x is None else x

    def _beside(self, code: str, place: int, number: float) -> int | None:
        """The operand of a step beside a constant `number`, the second one of a quotient; None for others."""
        if self.made[place][0] != code:
            return None
        one, other = self.made[place][1]
        if self._number(other) == self.real(number):
            return int(one)
        return int(other) if code != "DIV" and self._number(one) == self.real(number) else None

    def _number(self, place: int) -> float | None:
        """The number of a constant of the floating-point type; None for another step."""
        code, about = self.made[place]
        if code != "CONSTANT":
            return None
        whole = np.int64 if self.real is np.float64 else np.int32
        return float(whole(about[0]).view(self.real))

    def once(self, code: str, about: tuple[Any, ...], width: int = 1) -> int:
        """The index of a step with rows of `width` numbers; an equal step is reused."""
        key = code, about, width
        if key not in self._place:
            self._place[key] = len(self.made)
            self.made.append((code, about))
        return self._place[key]

    def bits(self, bits: int) -> int:
        """A constant of as many bits as a number has."""
        return self("CONSTANT", bits)

    def float(self, number: float) -> int:
        """A constant of the floating-point type."""
        return self.bits(_bits(self.real(number)))

    def read(self, value: ir.Value | None, beside: Collection[ir.Value | None] = ()) -> int:
        """The index of a value: of a step, of a constant that broadcasts `beside` others, or of an operand."""
        if value is None:
            raise Unfit
        if value in self.known:
            return self.known[value]
        kind, number = letter(value), single_constant(value)
        if not kind:
            raise Unfit
        rank = max(
            (len(v.shape) for v in beside if v is not None and v is not value and v.shape is not None), default=0
        )
        if number is not None and number.ndim <= rank:
            flat = number.reshape(())
            return self.bits(-int(flat) if kind == "B" else _bits(flat))
        if value not in self.loads:
            self.loads[value] = self("LOAD", len(self.loads))
        return self.loads[value]


def _bits(number: Any) -> int:
    return int(number.view(f"i{number.itemsize}"))
