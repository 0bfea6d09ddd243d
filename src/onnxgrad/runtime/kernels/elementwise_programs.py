"""Groups of elementwise operators, and sums of them, as programs for the kernel of ``source/elementwise.c``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.runtime.kernels.elementwise_steps import dims, real_of, write_steps
from onnxgrad.runtime.kernels.programs import Entry, KernelProgram
from onnxgrad.runtime.kernels.steps import Steps, Unfit, letter

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
    of = {s.result: s for s in sums}
    roots = {v: b.known[of[v].source if v in of else v] for v in results if v is not None}
    last = {i: i for i in roots.values()}  # the last step that reads each that is needed
    for i in range(len(b.made) - 1, -1, -1):
        code, reads = b.made[i]
        for p in reads if i in last and code not in ("LOAD", "CONSTANT") else ():
            last[p] = max(last.get(p, i), i)
    ends = {v: len(b.made) if v in of else i for v, i in roots.items()}
    gone = {v: last.get(p, -1) for v, p in b.loads.items()}
    operands, results = _share_first(_by_letter(list(b.loads), given), results, gone, ends, nodes, given)
    stores: dict[int, list[Entry]] = {}  # results that are a step's own, by the step
    totals: dict[int, list[tuple[Entry, Reduction]]] = {}  # and sums of it
    for place, value in enumerate(results):
        entry = "RESULT", place, 1, 0
        if value in of:
            totals.setdefault(b.known[of[value].source], []).append((entry, of[value]))
        elif value is not None:
            stores.setdefault(b.known[value], []).append(entry)
    loaded = {place: value for value, place in b.loads.items()}
    slots = {value: slot for slot, value in enumerate(operands) if value is not None}
    program = KernelProgram()
    entries: dict[int, Entry] = {}
    free: list[int] = []
    count = 0
    for i, (code, reads) in enumerate(b.made):
        if i not in last:
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


def _share_first(
    operands: tuple[ir.Value | None, ...],
    results: tuple[ir.Value | None, ...],
    gone: Mapping[ir.Value, int],
    ends: Mapping[ir.Value, int],
    nodes: Sequence[ir.Node],
    letters: str,
) -> tuple[tuple[ir.Value | None, ...], tuple[ir.Value | None, ...]]:
    """`operands` and `results` with first ones that may share memory; without such two, no first operand.

    Args:
        operands, results: by place.
        gone: the last step that reads each operand.
        ends: the step that writes each result.
        nodes: the operators of the program.
        letters: those of the places of operands.
    """
    if not operands or not results or operands[0] is None or results[0] is None:
        return operands, results
    inside, kind = set(nodes), letters[0]

    def gain(pair: tuple[ir.Value, ir.Value]) -> bool:
        """True if ONNX Runtime can give the result the memory of the operand."""
        own, made = pair
        is_last = own.producer() is not None and not own.is_graph_output() and all(n in inside for n, _ in own.uses())
        return is_last and dims(own) is not None and dims(own) == dims(made)

    floats = [v for v in operands if letter(v) == kind]
    pairs = [(v, r) for r in results if letter(r) == kind for v in floats if gone[v] <= ends[r]]  # type: ignore[index]
    placed, given = list(operands), list(results)
    if pairs:
        for values, first in zip((placed, given), max(pairs, key=gain)):  # type: ignore[arg-type]
            at = values.index(first)
            values[0], values[at] = values[at], values[0]
    elif len(floats) == letters.count(kind):
        raise Unfit
    else:
        placed += [None] * (len(floats) + 1 - len(placed))
        placed[0], placed[len(floats)] = None, placed[0]
    return tuple(placed), tuple(given)


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
