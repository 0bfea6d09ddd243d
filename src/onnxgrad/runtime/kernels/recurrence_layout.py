"""The places of values in a recurrence's program, and its steps in the numbers of ``source/recurrence.c``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onnxgrad.runtime.kernels import elementwise_steps
from onnxgrad.runtime.kernels.elementwise_steps import Unfit

#: Kinds of values and operations of steps, in the order of the kernel's own lists.
_KINDS = ("REGISTER", "STATE", "SCANNED", "FIXED", "SHARED", "CONSTANT", "RESULT")
OPERATIONS = (*elementwise_steps.OPERATIONS, "PRODUCT", "SPREAD", "COPY")
_CODE = {name: i for i, name in enumerate(OPERATIONS)}
_MOST_STEPS, _MOST_VALUES = 256, 256
#: Columns of anything, and of all registers.
_WIDEST = 1 << 16

#: Operators that need no step in the kernel.
_GIVEN = frozenset({"GIVEN", "VIEW", "CONSTANT"})

#: The kind, place, width and direction of a value of the program; a value and its first column.
Entry = tuple[str, int, int, int]
Spot = tuple[Entry, int]


@dataclass(frozen=True)
class _Action:
    """A step of the kernel: its code, number of columns, and places (with first columns) to write and to read."""

    code: str
    width: int
    to: tuple[int, int]
    reads: Sequence[tuple[int, int]]
    matrix: int = 0


class RowLayout:
    """The memory of a body's values: in results, in a joined value, or in registers.

    Attributes:
        made: what the body computes, and the width of each.
        results: number, place, width and direction of each.
        states: operand that is the first one, place of the next one, width.
        clock: gives a value that tells how many steps there are, if no step reads one.
    """

    def __init__(
        self,
        made: Sequence[tuple[str, tuple[Any, ...]]],
        widths: Sequence[int],
        results: Sequence[tuple[int, int, int, int]],
        states: Sequence[tuple[int, int, int]],
        clock: Callable[[], Entry],
    ) -> None:
        self.made, self.widths, self.results, self.states, self.clock = made, widths, results, states, clock
        self.entries: dict[Entry, int] = {}
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
                yield _Action("COPY", width, (~k, 0), [(source, 0)])

    def _actions(self) -> Iterator[_Action]:
        for place, (code, about) in enumerate(self.made):
            width = self.widths[place]
            if code == "JOIN":
                first = 0
                for part, size in zip(about[::2], about[1::2]):
                    if self.home.get(part) != (place, first):
                        yield _Action("COPY", size, (place, first), [(part, 0)])
                    first += size
            elif code == "PRODUCT":
                rows, addend, matrix = about
                yield _Action(code, width, (place, 0), [(rows, 0), *([(addend, 0)] if addend >= 0 else [])], matrix)
            elif code not in _GIVEN:
                yield _Action(code, width, (place, 0), [(p, 0) for p in about])
            yield from self._copies(place)
        for k, (_, place, width) in enumerate(self.states):  # another state may be renewed before this one
            kind = self.made[self.root(place)[0]]
            if kind[0] == "GIVEN" and kind[1][0][0] == "STATE" and kind[1][0][1] != k:
                yield _Action("COPY", width, (-1000 - k, 0), [(place, 0)])

    def _registers(self) -> dict[int, int]:
        """The first column of each register; registers that are live at the same time do not overlap."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        end = len(self.actions)
        for i, action in enumerate(self.actions):
            for place, _ in (action.to, *action.reads):
                owner = self.root(place)[0] if place >= 0 else place
                first.setdefault(owner, i)
                last[owner] = i
        for _, place, _ in self.states:
            last[self.root(place)[0]] = end
        last.update({p: end for p in last if p <= -1000})
        taken: list[tuple[int, int, int]] = []
        found = {}
        for owner in sorted(first, key=first.__getitem__):
            if -1000 < owner < 0 or owner in self.result or (owner >= 0 and self.made[owner][0] in _GIVEN):
                continue
            width = self.widths[owner] if owner >= 0 else self.states[-1000 - owner][2]
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

    def spot(self, place: int, first: int = 0) -> Spot:
        """The address of `place`, from the column `first` on."""
        if -1000 < place < 0:
            width, way = next((width, way) for k, _, width, way in self.results if k == ~place)
            return ("RESULT", ~place, width, way), first
        if place <= -1000:
            return ("REGISTER", self.register[place], self.states[-1000 - place][2], 0), first
        owner, column = self.root(place, first)
        code, about = self.made[owner]
        if code == "GIVEN":
            return about[0], column
        if code == "CONSTANT":
            return ("CONSTANT", about[0], 1, 0), 0
        return self.result.get(owner) or ("REGISTER", self.register[owner], self.widths[owner], 0), column

    def number(self, entry: Entry) -> int:
        """The number of a value of the program."""
        return self.entries.setdefault(entry, len(self.entries))

    def attributes(self) -> dict[str, Any]:
        """The program."""
        steps = []
        for action in self.actions:
            ends = [self.spot(*action.to), *(self.spot(*p) for p in action.reads)]
            numbers = [n for entry, column in ends for n in (self.number(entry), column)]
            numbers += [-1, 0] * (4 - len(ends))
            if action.code == "PRODUCT":
                numbers[6] = action.matrix
            steps += [_CODE[action.code], action.width, *numbers]
        states = []
        renewed = {-1000 - a.to[0] for a in self.actions if a.to[0] <= -1000}
        for k, (start, place, width) in enumerate(self.states):
            entry, column = self.spot(-1000 - k if k in renewed else place)
            states += [start, self.number(entry), column, width]
        if all(kind != "SCANNED" for kind, *_ in self.entries):
            self.number(self.clock())
        values = [n for kind, place, width, way in self.entries for n in (_KINDS.index(kind), place, width, way)]
        if len(steps) > 10 * _MOST_STEPS or len(self.entries) > _MOST_VALUES:
            raise Unfit
        if max(self.columns, *self.widths) > _WIDEST:
            raise Unfit
        return {"columns": self.columns, "values": values, "states": states, "steps": steps}

    def operands(self) -> set[int]:
        """The numbers of the operands that states, rows and slices are read from."""
        rows = {place for kind, place, *_ in self.entries if kind in ("SCANNED", "FIXED", "SHARED")}
        return rows | {start for start, *_ in self.states}
