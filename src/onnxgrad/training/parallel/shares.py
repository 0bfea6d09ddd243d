"""Division of the optimizer's state among ranks (ZeRO-1): the part that each rank updates.

Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1. Groups are derived from the update graph, not from the name of
an optimizer: a `Unit` is a gradient with all state that is computed from it. If every unit is updated elementwise,
ranks have equal slices of the flat bucket, which may cut tensors. Else (LAMB, Adafactor, Muon) they have whole tensors:
the largest remaining one goes to the rank with the least (Graham 1969).

Values that updates have in common (the norm of all gradients, whether all are finite) are computed from one sum over
the elements of each gradient, such as that of squares, and ranks can add these up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import onnx_ir as ir

from onnxgrad.distributed import blocks
from onnxgrad.errors import BadInput
from onnxgrad.ir.graph import named_values, reads
from onnxgrad.ir.match import is_standard, sizes
from onnxgrad.ir.operators import traits_of
from onnxgrad.training.step.accumulate import SplitStep


@dataclass
class Unit:
    """Gradients, and the state that is computed from them and from itself alone.

    Attributes:
        pieces: the gradients, by name; mostly one.
        states: the tensors of state.
        values: what of the graph has the shape of the gradient, if all of the update is element by element; else None.
    """

    pieces: list[str]
    states: list[str]
    values: list[str] | None


class Units:
    """The units of the update of `split`.

    Attributes:
        units: in the order of the bucket.
        sums: the scalars that are sums over the elements of a gradient, by name: of which gradient.

    Raises:
        BadInput: the update takes the gradients of all weights together, in another way than by such sums.
    """

    def __init__(self, split: SplitStep) -> None:
        graph, state = split.update.model.graph, split.update.state
        bits = {name: 1 << k for k, name in enumerate([*split.pieces, *state])}
        gradients = {bits[name]: name for name in split.pieces}
        inputs = {t.input: bits[name] for name, t in state.items()}
        of = {v: inputs[v.name] for v in graph.inputs if v.name is not None and v.name in inputs}
        self.sums: dict[str, str] = {}
        anything, beside = sum(gradients), 0
        numbers = sum(bits[name] for name, t in state.items() if not len(t.initial.shape))  # as a loss scale
        for node in graph:
            found = 0
            for value in reads(node):
                found |= of.get(value, 0)
            own = found & anything
            if own in gradients and not found & ~anything & ~numbers and _is_sum(node):
                self.sums[node.outputs[0].name or ""] = gradients[own]
                beside |= found & numbers
                found = 0
            for value in node.outputs:
                of[value] = bits[value.name] if value.name and value.name in split.pieces else found
        values = named_values(graph)
        ends = {name: of.get(values[t.output], 0) for name, t in state.items()}
        owned = _dependent(anything, [(bits[name], end) for name, end in ends.items()])
        for name in [name for name in state if beside & bits[name] & owned]:
            raise _inseparable(name)
        for name in split.update.results:
            if of.get(values[name], 0) & owned:
                raise _inseparable(name)
        groups = _merge_overlapping(
            [*gradients, *((bits[n] | end) & owned for n, end in ends.items() if bits[n] & owned)]
        )
        self.units = [
            Unit([n for n in split.pieces if bits[n] & group], [n for n in state if bits[n] & group], [])
            for group in sorted(groups, key=_low)
        ]
        if len(split.pieces) > 1 and len(self.units) == 1:
            raise _inseparable(self.units[0].states[0])
        places = {bits[n]: k for k, unit in enumerate(self.units) for n in (*unit.pieces, *unit.states)}
        self._look({v: places[_low(found & owned)] for v, found in of.items() if found & owned}, split)

    def _look(self, of: Mapping[ir.Value, int], split: SplitStep) -> None:
        """Find the units that are updated elementwise; `of` maps each value to its unit."""
        shapes = [split.pieces[unit.pieces[0]] for unit in self.units]
        others = {k for k, unit in enumerate(self.units) if len(unit.pieces) > 1}
        others |= {k for value, k in of.items() if sizes(value) != shapes[k]}
        for node in split.update.model.graph:
            inside = [of[v] for v in reads(node) if v in of]
            if not inside or node.outputs[0].name in self.sums:
                continue
            beside = [sizes(v) for v in node.inputs if v is not None and v not in of]
            if not traits_of(node).is_elementwise or any(shape not in ((), (1,)) for shape in beside):
                others.add(inside[0])
        for value, k in of.items():
            if k not in others and (names := self.units[k].values) is not None:
                names.append(value.name or "")
        for k in others:
            self.units[k].values = None


class Shares:
    """The parts of `size` ranks in the update of `split`.

    Attributes:
        order: the gradients, in the order in which the bucket has to have them.
        bounds: where in the bucket the block of each rank begins and ends (see `distributed.blocks`).
        gathered: state that all ranks have whole, for the gradients of the next step: the weights. In the order of
            the bucket.
        kept: state of which each rank has only a part.
        sums: see `Units`.
    """

    def __init__(self, split: SplitStep, size: int) -> None:
        found = Units(split)
        self.size, self.units, self.sums = size, found.units, found.sums
        self._sizes = {name: prod(shape) for name, shape in split.pieces.items()}
        self._lengths = {n: t.initial.size for n, t in split.update.state.items()}
        self._bytes = {n: t.initial.nbytes for n, t in split.update.state.items()}
        self._owners: list[int] | None = None
        if any(unit.values is None for unit in self.units):
            self._assign()
        self.order = [name for unit in self.units for name in unit.pieces]
        whole = {n for n, t in split.update.state.items() if t.kind in ("parameter", "statistic")}
        whole |= split.gradient.reads.keys()
        self.gathered = [n for unit in self.units for n in unit.states if n in whole]
        self.kept = [n for unit in self.units for n in unit.states if n not in whole]
        total = sum(self._sizes.values())
        if self._owners is None:
            self.bounds = blocks(total, size)
        else:
            loads = [0] * size
            for unit, owner in zip(self.units, self._owners):
                loads[owner] += self._size(unit)
            self.bounds = [sum(loads[:rank]) for rank in range(size + 1)]

    def _size(self, unit: Unit) -> int:
        return sum(self._sizes[name] for name in unit.pieces)

    def _assign(self) -> None:
        """Whole units to ranks, the largest first; then in the order of the ranks."""
        loads, owners = [0] * self.size, dict[str, int]()
        for unit in sorted(self.units, key=lambda u: (-self._size(u), u.pieces[0])):
            rank = loads.index(min(loads))
            loads[rank] += self._size(unit)
            owners[unit.pieces[0]] = rank
        self.units = sorted(self.units, key=lambda u: owners[u.pieces[0]])
        self._owners = [owners[unit.pieces[0]] for unit in self.units]

    @cached_property
    def ends(self) -> dict[str, list[int]]:
        """The start and the end of the rank's flat part in each gradient and each sharded tensor of state."""
        found, start = dict[str, list[int]](), 0
        for k, unit in enumerate(self.units):
            lengths = {n: self._sizes[n] for n in unit.pieces} | {n: self._lengths[n] for n in unit.states}
            for name, length in lengths.items():
                if self._owners is None:
                    found[name] = [min(max(bound - start, 0), length) for bound in self.bounds]
                else:
                    found[name] = [0] * (self._owners[k] + 1) + [length] * (self.size - self._owners[k])
            start += self._size(unit)
        return found

    def part(self, name: str, rank: int) -> tuple[int, int]:
        """Begin and end of the part of a rank in a flat gradient or tensor of state."""
        low, high = self.ends[name][rank : rank + 2]
        return low, high

    def shapes(self, pieces: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a rank's part of `pieces`, in the order of the bucket; vectors where they are split."""
        found = dict[str, tuple[int, ...]]()
        for name in self.order:
            low, high = self.part(name, rank)
            if high > low:
                found[name] = pieces[name] if high - low == self._sizes[name] else (high - low,)
        return found

    def bytes(self, rank: int) -> int:
        """The bytes of sharded state that the rank stores, without weights."""
        found = 0
        for name in self.kept:
            low, high = self.part(name, rank)
            found += self._bytes[name] * (high - low) // max(self._lengths[name], 1)
        return found

    @property
    def places(self) -> tuple[dict[str, int], list[int]]:
        """Begin of each of `gathered` in an array of bytes, on a cache line; bounds of the ranks in that array."""
        starts, end = dict[str, int](), 0
        for name in self.gathered:
            starts[name] = end
            end += -(-self._bytes[name] // 64) * 64
        bounds = [0]
        for rank in range(1, self.size):
            inside = [n for n in self.gathered if self.ends[n][rank] < self._lengths[n]]
            first = inside[0] if inside else None
            item = 0 if first is None else self._bytes[first] // self._lengths[first]
            bounds.append(end if first is None else starts[first] + self.ends[first][rank] * item)
        return starts, [*bounds, end]


def arrangement(size: int, split: SplitStep) -> Sequence[str]:
    """The order in which `size` ranks need the bucket (see `split_step`)."""
    return Shares(split, size).order


def _dependent(found: int, ends: Sequence[tuple[int, int]]) -> int:
    """`found`, and the state that depends on it; the rest (a count of steps) is the same on all ranks.

    Args:
        found: sets of bits, as all of these.
        ends: of each tensor of state, and of what its next value is computed from.
    """
    before = 0
    while found != before:
        before = found
        for own, end in ends:
            found |= own if end & found else 0
    return found


def _is_sum(node: ir.Node) -> bool:
    """True if the output is a scalar, the sum over all elements of the operand."""
    return (
        is_standard(node)
        and node.op_type in ("ReduceSum", "ReduceSumSquare")
        and len([v for v in node.inputs if v is not None]) == 1
        and not node.attributes.get_int("keepdims", 1)
        and not node.attributes.get("axes")
    )


def _low(bits: int) -> int:
    return bits & -bits


def _merge_overlapping(groups: Iterable[int]) -> list[int]:
    """Merge sets of bits that overlap."""
    found: list[int] = []
    for group in groups:
        apart = []
        for other in found:
            if other & group:
                group |= other
            else:
                apart.append(other)
        found = [*apart, group]
    return found


def _inseparable(name: str) -> BadInput:
    return BadInput(
        f"the state of this optimizer cannot be shared out: {name!r} is computed from several gradients together\n"
        "  hint: leave shard_optimizer out"
    )
