"""Positions that go together where elements move: parts, slices, reshapes, and sizes that are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import constant, is_op, not_none, permutation
from onnxgrad.training.pruning.channels import Coupling, rank_of, size_of
from onnxgrad.training.pruning.known_sizes import numbers_of
from onnxgrad.training.pruning.operators import broadcast, follows

#: Operators with an operand that is a shape: its sizes are set anew in the smaller graph.
SHAPED = ("Reshape", "Expand", "ConstantOfShape", "Resize")


@follows("Concat", "Split")
def _parts(j: Coupling, node: ir.Node) -> None:
    whole, parts = (node.outputs[0], node.inputs) if node.op_type == "Concat" else (node.inputs[0], node.outputs)
    assert whole is not None
    if not rank_of(whole):
        return
    along = node.attributes.get_int("axis", 0) % rank_of(whole)
    ids, start = j.positions(whole, along), 0
    for part in parts:
        assert part is not None
        for axis in range(rank_of(whole)):
            if axis != along:
                j.join(part, axis, whole, axis)
        own = j.positions(part, along)
        if ids is None or own is None:
            j.lock(part, along, "sizes that are not known")
            j.lock(whole, along, "sizes that are not known")
            continue
        j.tie(own, ids[start : start + len(own)])
        j.touch((part, along), (whole, along))
        start += len(own)


@follows("Slice")
def _slice(j: Coupling, node: ir.Node) -> None:
    x, out = not_none(node.inputs[0]), node.outputs[0]
    numbers = [constant(v) for v in (*node.inputs[1:], None, None)[:4]]
    if numbers[0] is None or numbers[1] is None or not rank_of(x):
        return
    axes = range(len(numbers[0])) if numbers[2] is None else [int(a) % rank_of(x) for a in numbers[2]]
    steps = np.ones(len(numbers[0]), int) if numbers[3] is None else numbers[3]
    cuts = {a: slice(int(s), int(e), int(k)) for a, s, e, k in zip(axes, numbers[0], numbers[1], steps)}
    for axis in range(rank_of(x)):
        if axis not in cuts:
            j.join(x, axis, out, axis)
            continue
        ids, own = j.positions(x, axis), j.positions(out, axis)
        if cuts[axis].step == 1 and ids is not None and own is not None and len(ids[cuts[axis]]) == len(own):
            j.tie(own, ids[cuts[axis]])
            j.touch((x, axis), (out, axis))


@follows("Gather")
def _gather(j: Coupling, node: ir.Node) -> None:
    x, indices = node.inputs
    out = node.outputs[0]
    assert x is not None
    if not rank_of(x) or indices is None or indices.shape is None:
        return
    along, further = node.attributes.get_int("axis", 0) % rank_of(x), rank_of(indices)
    for axis in range(rank_of(x)):
        if axis != along:
            j.join(x, axis, out, axis if axis < along else axis - 1 + further)
            if x in j.parameters and indices not in j.parameters:  # of a table
                j.made[x, axis] = node
    for axis in range(further):
        j.lock(indices, axis, "indices")
        j.touch((out, along + axis))
    chosen, ids = constant(indices), j.positions(x, along)
    own = j.positions(out, along) if further == 1 else None
    if chosen is not None and ids is not None and own is not None and is_selection(chosen, len(ids)):
        j.tie(own, ids[chosen])
        j.touch((x, along))


def is_selection(indices: np.ndarray, size: int) -> bool:
    """True for a permutation of the positions along an axis."""
    return indices.ndim == 1 and sorted(indices.tolist()) == list(range(size))


@follows("Transpose")
def _transpose(j: Coupling, node: ir.Node) -> None:
    for at, axis in enumerate(permutation(node) or ()):
        j.join(node.inputs[0], axis, node.outputs[0], at)


@follows("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(j: Coupling, node: ir.Node) -> None:
    """Runs of axes with the same number of elements go together; of several axes in a run, one may shrink."""
    x, out = not_none(node.inputs[0]), node.outputs[0]
    if x.shape is None or out.shape is None:
        return
    for mine, theirs in _runs(x, out):
        for single, several in ((mine, theirs), (theirs, mine)):
            (one, one_axes), (many, many_axes) = single, several
            wide = [a for a in many_axes if size_of(many, a) != 1]
            if len(one_axes) != 1 or not wide:
                continue
            if len(wide) == 1:
                j.join(one, one_axes[0], many, wide[0])
                break
            _divide(j, node, one, one_axes[0], many, wide, splits=many is out)
            break
    if node.op_type != "Flatten":
        for value in node.inputs[1:]:
            if value is not None:
                j.touch(*((value, a) for a in range(rank_of(value))))


def _divide(
    j: Coupling, node: ir.Node, one: ir.Value, axis: int, many: ir.Value, axes: Sequence[int], splits: bool
) -> None:
    """An axis that a reshape makes of several ones, or divides into them."""
    ids = j.positions(one, axis)
    if size_of(many, axes[0]) is None and size_of(one, axis) is None:  # rows, which `positions` leaves out
        j.touch((many, axes[0]))
        axes = axes[1:]
    shape = [size_of(many, a) for a in axes]
    if ids is None or None in shape or len(ids) != math.prod(n or 0 for n in shape):
        return
    at = j.choose(node, [(many, a) for a in axes])
    own = not_none(j.positions(many, axes[at]))
    shaped = ids.reshape([n or 0 for n in shape])
    j.tie(shaped, own.reshape([-1 if k == at else 1 for k in range(len(axes))]))
    j.touch((one, axis), (many, axes[at]))
    if splits:
        j.split.add((one, axis))
    for k, other in enumerate(axes):
        if k != at:
            j.lock(many, other, "the size of a head, or of a map" if splits else "flattened with channels")


Piece = tuple[ir.Value, list[int]]
Run = tuple[Piece, Piece]


def _runs(x: ir.Value, out: ir.Value) -> list[Run]:
    """The axes of two shapes with the same elements, in the shortest runs that have as many."""
    sides = [list(v.shape or ()) for v in (x, out)]
    found: list[Run] = []
    start, behind = 0, 0
    while start < min(map(len, sides)) and _is_same(*(s[start] for s in sides)):
        found.append(((x, [start]), (out, [start])))
        start += 1
    while behind < min(map(len, sides)) - start and _is_same(*(s[-1 - behind] for s in sides)):
        behind += 1
        found.append(((x, [len(sides[0]) - behind]), (out, [len(sides[1]) - behind])))
    middle = [list(range(start, len(side) - behind)) for side in sides]
    known = [[numbers_of(side[a]) for a in axes] for side, axes in zip(sides, middle)]
    open_axes = [[a for a, n in zip(axes, numbers) if n is None] for axes, numbers in zip(middle, known)]
    if len(open_axes[0]) == len(open_axes[1]) == 1:  # the rest decides that they are equal
        known = [[n or (1_000_003, 1_000_003) for n in side] for side in known]
    elif open_axes[0] or open_axes[1]:
        return found
    return found + _runs_of(known, (x, middle[0]), (out, middle[1]))  # type: ignore[arg-type]


def _is_same(left: int | ir.SymbolicDim, right: int | ir.SymbolicDim) -> bool:
    names = [d.value if isinstance(d, ir.SymbolicDim) else d for d in (left, right)]
    return names[0] is not None and names[0] == names[1]


def _runs_of(numbers: Sequence[Sequence[tuple[int, int]]], mine: Piece, theirs: Piece) -> list[Run]:
    """The runs of the axes `mine` and `theirs`, whose sizes are `numbers`; none where they do not agree."""
    found: list[Run] = []
    i = k = 0
    while i < len(numbers[0]) or k < len(numbers[1]):
        ends = [min(i + 1, len(numbers[0])), min(k + 1, len(numbers[1]))]
        while (counts := [_count(n[a:e]) for n, a, e in zip(numbers, (i, k), ends)])[0] != counts[1]:
            side = 0 if counts[0] < counts[1] else 1
            if ends[side] == len(numbers[side]):
                return []
            ends[side] += 1
        found.append(((mine[0], mine[1][i : ends[0]]), (theirs[0], theirs[1][k : ends[1]])))
        i, k = ends
    return found


def _count(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return math.prod(n[0] for n in sizes), math.prod(n[1] for n in sizes)


@follows("Expand", "Tile")
def _repeat(j: Coupling, node: ir.Node) -> None:
    x, out = node.inputs[0], node.outputs[0]
    if node.op_type == "Expand":
        broadcast(j, [x], out)
        j.touch(*((out, axis) for axis in range(rank_of(out) - rank_of(x))))
        given = node.inputs[1]
        if given is not None:
            j.touch((given, 0))
        return
    counts = constant(node.inputs[1]) if node.inputs[1] is not None else None
    for axis in range(0 if counts is None else rank_of(x)):
        if counts is not None and int(counts[axis]) == 1:
            j.join(x, axis, out, axis)


@follows("ConstantOfShape")
def _filled(j: Coupling, node: ir.Node) -> None:
    j.touch(*((node.outputs[0], a) for a in range(rank_of(node.outputs[0]))))
    if node.inputs[0] is not None:
        j.touch((node.inputs[0], 0))


@follows("Constant")
def _constant(j: Coupling, node: ir.Node) -> None:
    j.touch(*((node.outputs[0], a) for a in range(rank_of(node.outputs[0]))))


@follows("Shape")
def _shape(j: Coupling, node: ir.Node) -> None:
    """Sizes that are read: those that make nothing but other shapes are set anew there, others stay."""
    x, out = not_none(node.inputs[0]), node.outputs[0]
    start, rank = node.attributes.get_int("start", 0), max(rank_of(x), 1)
    j.touch((out, 0), *((x, a) for a in range(rank_of(x))))
    for reader, at in out.uses():
        if _makes_shapes(reader, at):
            continue
        indices = _sizes_read(reader, rank - start)
        if indices is None:
            j.lock_all(x, f"its shape is read by {reader.name or out.name!r}")
            return
        for index in indices.ravel().tolist():
            j.lock(x, (int(index) + start) % rank, f"its size is read by {reader.name or out.name!r}")


def _sizes_read(reader: ir.Node, count: int) -> np.ndarray | None:
    """The places of the sizes that `reader` takes of `count` of them; None if they are unknown."""
    known = [array for v in reader.inputs[1:] if v is not None and (array := constant(v)) is not None]
    if not known or len(known) < len(reader.inputs) - 1:
        return None
    if is_op(reader, "Gather"):
        return known[0]
    if not is_op(reader, "Slice"):
        return None
    first, last, _, step = [int(array.ravel()[0]) for array in known] + [0, 1][len(known) - 2 :]
    return np.arange(count)[first:last:step]


#: Operators that only choose and compute sizes.
_OF_SIZES = ("Gather", "Slice", "Concat", "Cast", "Squeeze", "Unsqueeze", "Mul", "Div", "Add", "Sub", "Where", "Equal")


def _makes_shapes(node: ir.Node, at: int) -> bool:
    """True if a size that `node` reads as operand `at` ends in nothing but operands that are shapes."""
    if is_op(node, SHAPED):
        return at == {"ConstantOfShape": 0, "Resize": 3}.get(node.op_type, 1)
    out = node.outputs[0]
    if not is_op(node, _OF_SIZES) or out.is_graph_output():
        return False
    return all(_makes_shapes(reader, place) for reader, place in out.uses())
