"""Programs for the kernel of ``source/elementwise.c``, which defines the format: steps as numbers, in registers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.runtime.kernels.elementwise_steps import OPERATIONS, Dims, Steps, Unfit, dims, letter, write_steps

#: Operations of a step, in the order of the kernel's own list.
CODES = (*OPERATIONS, "LOAD", "CONSTANT", "STORE", "SUM", "MEAN")
_NUMBER = {name: i for i, name in enumerate(CODES)}

#: Operands and results of the kernel, by letter.
OPERANDS, RESULTS = "F" * 16 + "I" * 4 + "U" * 4 + "B" * 4, "F" * 8 + "I" * 2 + "U" * 4 + "B" * 2
_STEPS, _REGISTERS = 192, 64


@dataclass(frozen=True)
class Reduction:
    """A sum, at the end of a program.

    Attributes:
        result: what it is.
        source: of what, which a step gives.
        code: what programs call it.
        axes: of `source`, as bits from the last one on.
        becomes: what becomes of them.
    """

    result: ir.Value
    source: ir.Value
    code: str
    axes: int
    becomes: int


@dataclass(frozen=True)
class TileProgram:
    """The arguments of a call of the kernel.

    Attributes:
        steps: five numbers each.
        operands: by place, None for one that is left out.
        results: the same.
    """

    steps: tuple[int, ...]
    operands: tuple[ir.Value | None, ...]
    results: tuple[ir.Value | None, ...]


def compile_program(
    nodes: Iterable[ir.Node], targets: Sequence[ir.Value], shape: Dims, sums: Sequence[Reduction] = ()
) -> TileProgram:
    """Compile a program for `targets`, the results of `nodes` (in topological order, of one shape), and `sums`.

    Raises:
        Unfit: it needs more steps, registers, operands or results than there are.
    """
    b = Steps()
    for node in nodes:
        write_steps(b, node)
    operands = _by_letter(list(b.loads), OPERANDS)
    results = _by_letter([*targets, *(s.result for s in sums)], RESULTS)
    of = {s.result: s for s in sums}
    stores: dict[int, list[list[int]]] = {}  # uses of a step's result: code, result, register, mode
    for place, value in enumerate(results):
        if value is None:
            continue
        total = of.get(value)
        if total is None:
            stores.setdefault(b.known[value], []).append([_NUMBER["STORE"], place, 0, 0, 0])
        else:
            how = [_NUMBER[total.code], place, 0, total.axes, total.becomes]
            stores.setdefault(b.known[total.source], []).append(how)
    last = dict.fromkeys(range(len(b.made)), -1)
    for i, (code, reads) in enumerate(b.made):
        if code not in ("LOAD", "CONSTANT"):
            last.update(dict.fromkeys(reads, i))
    last.update({i: max(last[i], i) for i in stores})
    loaded = {place: value for value, place in b.loads.items()}
    slots = {value: slot for slot, value in enumerate(operands) if value is not None}
    kept = {i for i, (code, _) in enumerate(b.made) if code == "CONSTANT"}  # filled once for all tiles
    kept |= {place for place, value in loaded.items() if dims(value) != shape}
    steps: list[int] = []
    register: dict[int, int] = {}
    free: list[int] = []
    count = 0
    for i, (code, reads) in enumerate(b.made):
        if last[i] < 0:
            continue
        if code == "LOAD":
            sources = [slots[loaded[i]]]
        elif code == "CONSTANT":
            sources = [reads[0]]
        else:
            sources = [register[p] for p in reads]
            free += sorted({register[p] for p in reads if last[p] == i and p not in kept})
        register[i] = count if i in kept or not free else free.pop()
        count = max(count, register[i] + 1)
        steps += [_NUMBER[code], register[i], *sources, *[0] * (3 - len(sources))]
        for store, place, _, *how in stores.get(i, ()):
            steps += [store, place, register[i], *how]
        if last[i] == i and i not in kept:
            free.append(register[i])
    if count > _REGISTERS or len(steps) > 5 * _STEPS:
        raise Unfit
    return TileProgram(tuple(steps), operands, results)


def _by_letter(values: Sequence[ir.Value], letters: str) -> tuple[ir.Value | None, ...]:
    """`values` at the first places of their letters."""
    placed: list[ir.Value | None] = [None] * len(letters)
    for value in values:
        free = (k for k, each in enumerate(letters) if each == letter(value) and placed[k] is None)
        place = next(free, None)
        if place is None:
            raise Unfit
        placed[place] = value
    while placed and placed[-1] is None:
        placed.pop()
    return tuple(placed)
