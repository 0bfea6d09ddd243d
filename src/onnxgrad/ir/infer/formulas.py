"""Formulas of sizes without sympy: products, rounded quotients, and sums of these.

The library takes each size for a formula of sympy, whose import takes longer than a derivation, and 34 MB. Most sizes
are a number times symbols: a batch that is flattened, heads that are split. All are written as sympy writes them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from onnxgrad.ir.match import Dim

#: A rounded quotient, and the factors of a formula.
_QUOTIENT = re.compile(r"floor\([\w*]+/\d+\)")
_FACTOR = re.compile(rf"(?:{_QUOTIENT.pattern}|[^*])+")


def product(dims: Iterable[Dim], by: Iterable[Dim] = ()) -> Dim | None:
    """The product of `dims`, divided by the sizes `by` and rounded down; None if it is a formula of another form."""
    above, below = factors(dims), factors(by)
    if above is None or below is None or not below[0]:
        return None
    (number, names), (divisor, cancelled) = above, below
    for name in cancelled:
        if name not in names:
            return None
        names.remove(name)
    common = math.gcd(number, divisor)
    number, divisor = number // common, divisor // common
    if not names:
        return number if divisor == 1 else None
    if not number or len(set(names)) < len(names) or (divisor > 1 and not all(map(str.isidentifier, names))):
        return None
    ordered = sorted(names, key=_place)
    text = "*".join([*([str(number)] if number > 1 else []), *ordered])
    return ir.SymbolicDim(text if divisor == 1 else f"floor({text}/{divisor})")


def factors(dims: Iterable[Dim]) -> tuple[int, list[str]] | None:
    """The number, and the symbols and rounded quotients, whose product the sizes are; None for other formulas."""
    number, names = 1, []
    for d in dims:
        if isinstance(d, int):
            number *= d
            continue
        first, *others = _FACTOR.findall(d.value or "?")
        if first.isdigit():
            number *= int(first)
        else:
            others.append(first)
        if not all(name.isidentifier() or _QUOTIENT.fullmatch(name) for name in others):
            return None
        names += others
    return (number, names) if number >= 0 else None


def sum_of(dims: Iterable[Dim], less: Iterable[Dim] = ()) -> Dim | None:
    """The sum of `dims`, less the sizes `less`; None if one of them is a formula of another form."""
    total: Counter[tuple[str, ...]] = Counter()
    for sign, sizes in ((1, dims), (-1, less)):
        for d in sizes:
            if (found := _terms(d)) is None:
                return None
            for names, number in found.items():
                total[names] += sign * number
    symbols = sorted({name for names in total for name in names}, key=_place)
    # in the order of their symbols, as sympy writes them; the number comes last
    ordered = sorted((names for names, n in total.items() if n), key=lambda names: [s not in names for s in symbols])
    if ordered in ([], [()]):
        return total[()]
    if len(ordered) == 2 and len(ordered[0]) == 1 and total[ordered[0]] < 0 < total[()]:
        ordered.reverse()  # 4 - N
    text = ""
    for names in ordered:
        number = total[names]
        factors = [*([str(abs(number))] if abs(number) > 1 or not names else []), *names]
        text += (" - " if number < 0 else " + ") + "*".join(factors)
    return ir.SymbolicDim(text[3:] if text.startswith(" + ") else f"-{text[3:]}")


def _terms(size: Dim) -> dict[tuple[str, ...], int] | None:
    """The number by the symbols of each term of a sum; None for other formulas."""
    if isinstance(size, int):
        return {(): size}
    terms: dict[tuple[str, ...], int] = {}
    for text in (size.value or "?").replace(" - ", " + -").split(" + "):
        found = factors([ir.SymbolicDim(text.removeprefix("-"))])
        if found is None or len(set(found[1])) < len(found[1]):
            return None
        terms[tuple(sorted(found[1], key=_place))] = -found[0] if text.startswith("-") else found[0]
    return terms


def _place(name: str) -> tuple[bool, str]:
    """The place of a factor, as sympy orders them."""
    return (not name.isidentifier(), name)


def part_up_to(size: Dim, end: Dim) -> Dim | None:
    """The size of a slice up to `end` of an axis that is certainly as long; None if that is not certain."""
    terms, beyond = _terms(end), sum_of([size], [end])
    rest = None if beyond is None else _terms(beyond)
    if terms is None or rest is None or min(rest.values()) < 0:
        return None
    return end if min(terms.values()) >= 0 else ir.SymbolicDim(f"Max(0, {end})")
