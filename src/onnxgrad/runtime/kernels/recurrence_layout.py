"""The places of values in the program of a recurrence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgrad.runtime.kernels.programs import Entry, KernelProgram, Spot
from onnxgrad.runtime.kernels.steps import Unfit

#: Columns of anything, and of all registers.
_WIDEST = 1 << 16

#: Operators that need no step in the kernel.
_GIVEN = frozenset({"GIVEN", "VIEW", "CONSTANT"})

#: What a step writes or reads: the place of a value of the body, or a value of the program. The kind TEMPORARY is a
#: register for the next value of the state of that number.
_End = int | Entry


@dataclass(frozen=True)
class _Action:
    """A step of the kernel: its code, number of columns, what it writes (from which column on) and reads."""

    code: str
    width: int
    to: tuple[_End, int]
    reads: Sequence[_End]
    matrix: Spot | None = None


class RowLayout:
    """The memory of a body's values: in results, in a joined value, or in registers.

    Attributes:
        made: the values that the body computes, with their widths.
        results: number, place, width and direction of each.
        states: place of the next value, width.
        clock: gives a value that tells how many steps there are, if no step reads one.
    """

    def __init__(
        self,
        made: Sequence[tuple[str, tuple[Any, ...]]],
        widths: Sequence[int],
        results: Sequence[tuple[int, int, int, int]],
        states: Sequence[tuple[int, int]],
        clock: Callable[[], Entry],
    ) -> None:
        self.made, self.widths, self.results, self.states, self.clock = made, widths, results, states, clock
        self.home: dict[int, tuple[int, int]] = {}  #: joined values that parts are written into, and from which column
        self.result: dict[int, Entry] = {}
        self._place_parts()
        self.actions = list(self._actions())
        self.columns = 0
        self.register = self._registers()

    def _place_parts(self) -> None:
        for place in reversed(range(len(self.made))):
            code, about = self.made[place]
            if code != "JOIN":
                continue
            first = 0
            for part, width in zip(about[::2], about[1::2]):
                if self.made[part][0] not in _GIVEN and part not in self.home and part < place:
                    self.home[part] = place, first
                first += width
        for k, place, width, way in self.results:
            if self.made[place][0] not in _GIVEN and place not in self.home and place not in self.result:
                self.result[place] = ("RESULT", k, width, way)

    def root(self, place: int, first: int = 0) -> tuple[int, int]:
        """The place whose memory contains `place`, and the column there."""
        while True:
            if self.made[place][0] == "VIEW":
                place, more = self.made[place][1]
            elif place in self.home:
                place, more = self.home[place]
            else:
                return place, first
            first += more

    def _copies(self, place: int) -> Iterator[_Action]:
        """Copies from the memory of `place` to results."""
        for k, source, width, way in self.results:
            entry = ("RESULT", k, width, way)
            of = source
            while self.made[of][0] == "VIEW":
                of = self.made[of][1][0]
            if of == place and self.result.get(source) != entry:
                yield _Action("COPY", width, (entry, 0), [source])

    def _actions(self) -> Iterator[_Action]:
        for place, (code, about) in enumerate(self.made):
            width = self.widths[place]
            if code == "JOIN":
                first = 0
                for part, size in zip(about[::2], about[1::2]):
                    if self.home.get(part) != (place, first):
                        yield _Action("COPY", size, (place, first), [part])
                    first += size
            elif code == "PRODUCT":
                rows, addend, matrix = about
                yield _Action(code, width, (place, 0), [rows, *([addend] if addend >= 0 else [])], matrix)
            elif code not in _GIVEN:
                yield _Action("COPY" if code == "SPREAD" else code, width, (place, 0), about)
            yield from self._copies(place)
        sources: list[_End] = []
        for k, (place, width) in enumerate(self.states):
            kind, about = self.made[self.root(place)[0]]
            sources.append(place)
            if kind == "GIVEN" and about[0][0] == "STATE" and about[0][1] != k:  # which may be renewed before this one
                sources[k] = "TEMPORARY", k, width, 0
                yield _Action("COPY", width, (sources[k], 0), [place])
        for k, (_, width) in enumerate(self.states):
            yield _Action("COPY", width, (("STATE", k, width, 0), 0), [sources[k]])

    def _registers(self) -> dict[_End, int]:
        """The first column of each register; registers that are live at the same time do not overlap."""
        first: dict[_End, int] = {}
        last: dict[_End, int] = {}
        for i, action in enumerate(self.actions):
            for end in (action.to[0], *action.reads):
                owner: _End = self.root(end)[0] if isinstance(end, int) else end
                first.setdefault(owner, i)
                last[owner] = i
        taken: list[tuple[int, int, int]] = []
        found: dict[_End, int] = {}
        for owner in sorted(first, key=first.__getitem__):
            if isinstance(owner, int):
                if owner in self.result or self.made[owner][0] in _GIVEN:
                    continue
                width = self.widths[owner]
            elif owner[0] == "TEMPORARY":
                width = owner[2]
            else:
                continue
            taken = sorted(t for t in taken if t[2] >= first[owner])
            at = 0
            for start, size, _ in taken:
                if at + width <= start:
                    break
                at = max(at, start + size)
            taken.append((at, width, last[owner]))
            found[owner] = at
            self.columns = max(self.columns, at + width)
        return found

    def spot(self, end: _End, first: int = 0) -> Spot:
        """The value of the program that `end` is, and its column there."""
        if not isinstance(end, int):
            return ("REGISTER", self.register[end], end[2], 0) if end[0] == "TEMPORARY" else end, first
        owner, column = self.root(end, first)
        code, about = self.made[owner]
        if code == "GIVEN":
            return about[0], column
        if code == "CONSTANT":
            return ("CONSTANT", about[0], 1, 0), 0
        return self.result.get(owner) or ("REGISTER", self.register[owner], self.widths[owner], 0), column

    def program(self) -> KernelProgram:
        """The program.

        Raises:
            Unfit: values are too wide.
        """
        program = KernelProgram()
        for action in self.actions:
            ends: list[Spot | tuple[int, int]] = [self.spot(*action.to), *map(self.spot, action.reads)]
            if action.matrix is not None:
                ends += [*[(-1, 0)] * (3 - len(ends)), action.matrix]
            program.add(action.code, action.width, *ends)
        if all(kind != "SCANNED" for kind, *_ in program.entries):
            program.number(self.clock())
        if max(self.columns, *self.widths) > _WIDEST:
            raise Unfit
        return program
