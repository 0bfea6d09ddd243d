"""Groups of elementwise operators, and sums of them, as programs for the kernel of ``source/elementwise.c``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.runtime.kernels.elementwise_steps import Steps, Unfit, letter, real_of, write_steps
from onnxgrad.runtime.kernels.programs import Entry, KernelProgram

#: The kernel of each floating-point type, and the letters of its operands and results.
KERNELS = {
    np.float32: ("Elementwise", "F" * 16 + "I" * 4 + "U" * 4 + "B" * 4, "F" * 8 + "I" * 2 + "U" * 4 + "B" * 2),
    np.float64: ("ElementwiseDouble", "D" * 20 + "L" * 4 + "B" * 4, "D" * 14 + "B" * 2),
}
_REGISTERS = 64


@dataclass(frozen=True)
class Reduction:
    """A sum, at the end of a program.

    Attributes:
        result: the sum.
        source: its operand, the result of a step.
        code: its operation in programs.
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
        kernel: its name.
        attributes: the program.
        operands: by place, None for one that is left out.
        results: the same.
    """

    kernel: str
    attributes: Mapping[str, Sequence[int]]
    operands: tuple[ir.Value | None, ...]
    results: tuple[ir.Value | None, ...]


def compile_program(
    nodes: Sequence[ir.Node], targets: Sequence[ir.Value], sums: Sequence[Reduction] = (), small: bool = False
) -> TileProgram:
    """Compile a program for `targets`, the results of `nodes` (in topological order, of one shape), and `sums`.

    Args:
        nodes, targets, sums: the program.
        small: allow more registers than tensors of more than some thousand elements should share the cache with.

    Raises:
        Unfit: it needs more steps, registers, operands or results than there are.
    """
    b = Steps(real=real_of(nodes))
    kernel, given, made = KERNELS[b.real]
    results = _by_letter([*targets, *(s.result for s in sums)], made)
    for node in nodes:
        write_steps(b, node)
    operands = _by_letter(list(b.loads), given)
    of = {s.result: s for s in sums}
    stores: dict[int, list[Entry]] = {}  # results that are a step's own, by the step
    totals: dict[int, list[tuple[Entry, Reduction]]] = {}  # and sums of it
    for place, value in enumerate(results):
        entry = "RESULT", place, 1, 0
        if value in of:
            totals.setdefault(b.known[of[value].source], []).append((entry, of[value]))
        elif value is not None:
            stores.setdefault(b.known[value], []).append(entry)
    last = dict.fromkeys(range(len(b.made)), -1)
    for i, (code, reads) in enumerate(b.made):
        if code not in ("LOAD", "CONSTANT"):
            last.update(dict.fromkeys(reads, i))
    last.update({i: max(last[i], i) for i in (*stores, *totals)})
    loaded = {place: value for value, place in b.loads.items()}
    slots = {value: slot for slot, value in enumerate(operands) if value is not None}
    program = KernelProgram()
    entries: dict[int, Entry] = {}
    free: list[int] = []
    count = 0
    for i, (code, reads) in enumerate(b.made):
        if last[i] < 0:
            continue
        own = stores.get(i, [])
        if code == "LOAD":
            entries[i] = "FIXED", slots[loaded[i]], 1, 0
        elif code == "CONSTANT":
            entries[i] = "CONSTANT", reads[0] & 0xFFFFFFFF, 1, reads[0] >> 32 & 0xFFFFFFFF
        else:
            done = {entries[p] for p in reads if last[p] == i}
            free += sorted(place for kind, place, *_ in done if kind == "REGISTER")
            if own:
                entries[i], *own = own
            else:
                entries[i] = "REGISTER", free.pop() if free else count, 1, 0
                count = max(count, entries[i][1] + 1)
            program.add(code, 1, *((entry, 0) for entry in (entries[i], *(entries[p] for p in reads))))
        for entry in own:
            program.add("COPY", 1, (entry, 0), (entries[i], 0))
        for entry, total in totals.get(i, ()):
            program.add(total.code, 1, (entry, 0), (entries[i], 0), (total.axes, 0), (total.becomes, 0))
        if last[i] == i and entries[i][0] == "REGISTER":
            free.append(entries[i][1])
    if count > _REGISTERS and not small:
        raise Unfit
    return TileProgram(kernel, program.attributes(), operands, results)


def _by_letter(values: Sequence[ir.Value], letters: str) -> tuple[ir.Value | None, ...]:
    """`values` at the first places of their letters."""
    placed: list[ir.Value | None] = [None] * len(letters)
    for value in values:
        wanted = letter(value)
        free = (k for k, each in enumerate(letters) if each == wanted and placed[k] is None)
        place = next(free, None)
        if place is None:
            raise Unfit
        placed[place] = value
    while placed and placed[-1] is None:
        placed.pop()
    return tuple(placed)
