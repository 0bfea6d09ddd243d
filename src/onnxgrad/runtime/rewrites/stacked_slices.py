"""Slices that are picked one by one, and those that are stacked again, without a node for the axis of each.

A loop that is written out picks x[:, t] for each t, and stacks its results: a Gather, which ONNX Runtime makes a part
of a Split and a Squeeze, and an Unsqueeze before a Concat. With another axis behind that one, the numbers are where
they were: [N, T, C] is [N, T·C], whose parts are [N, C]. So one view of the whole takes the place of one for each step.
Of 930 nodes of an unrolled scan of 64 steps, 700 were such views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.ir.builder import Builder
from onnxgrad.ir.match import constant, is_op, not_none, producer
from onnxgrad.ir.shapes import same_dim
from onnxgrad.runtime.rewrites.rewrite import replace_value, rewrite

#: The fewest slices that are worth a view of the whole.
_FEWEST = 3


@dataclass(frozen=True)
class _Parts:
    """The slices of a value along an axis, in order, and the sizes of a view whose parts they are, cut along `at`."""

    whole: ir.Value
    slices: Sequence[Sequence[ir.Value]]
    view: Sequence[int]
    at: int


def _axes(node: ir.Node | None, rank: int) -> set[int] | None:
    """The axes of a Squeeze or an Unsqueeze, of a tensor of `rank` axes; None if they are not known."""
    axes = None if node is None or len(node.inputs) < 2 else constant(node.inputs[1])
    return None if axes is None else {int(a) % rank for a in axes.reshape(-1)}


def _dims(value: ir.Value | None) -> list[int] | None:
    """The sizes of `value`, of which one may be unknown (-1), and none is 0; else None."""
    if value is None or value.shape is None:
        return None
    found = [d if isinstance(d, int) else -1 for d in value.shape]
    return found if found.count(-1) <= 1 and 0 not in found else None


def _undone(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Each Unsqueeze of the axes that a Squeeze before it took away, and the operand of that."""
    for node in graph:
        puts_in = is_op(node, "Unsqueeze") and not node.outputs[0].is_graph_output()
        before = producer(node.inputs[0], "Squeeze") if puts_in else None
        whole = None if before is None else before.inputs[0]
        if whole is None or whole.shape is None:
            continue
        axes = _axes(before, len(whole.shape))
        if axes is not None and axes == _axes(node, len(whole.shape)):
            yield node, whole


def _picks(graph: ir.Graph) -> Iterator[_Parts]:
    """The places along an axis of a value, each of which a Gather picks, or a Squeeze of a part of a Split."""
    found: dict[tuple[ir.Value, int], list[list[ir.Value]]] = {}
    for node in graph:
        dims = _dims(node.inputs[0]) if is_op(node, ("Gather", "Split")) else None
        if dims is None:
            continue
        axis = node.attributes.get_int("axis", 0) % len(dims)
        for index, value in _slices_of(node, axis, dims):
            places = found.setdefault((not_none(node.inputs[0]), axis), [[] for _ in range(dims[axis])])
            if -len(places) <= index < len(places) and not value.is_graph_output():
                places[index].append(value)
    for (whole, axis), slices in found.items():
        if len(slices) >= _FEWEST and all(slices) and (parts := _parts(whole, axis, slices)) is not None:
            yield parts


def _slices_of(node: ir.Node, axis: int, dims: Sequence[int]) -> Iterator[tuple[int, ir.Value]]:
    """The places along `axis` that a node picks, and the slices there, without that axis."""
    if is_op(node, "Gather"):
        place = constant(node.inputs[1])
        if place is not None and not place.ndim:
            yield int(place), node.outputs[0]
    elif len(node.outputs) == dims[axis] and all(_has_one(part, axis) for part in node.outputs):
        for index, part in enumerate(node.outputs):
            for user in part.consumers():
                if is_op(user, "Squeeze") and user.graph is node.graph and _axes(user, len(dims)) == {axis}:
                    yield index, user.outputs[0]


def _has_one(value: ir.Value, axis: int) -> bool:
    return value.shape is not None and same_dim(value.shape[axis], 1)


def _parts(whole: ir.Value, axis: int, slices: Sequence[Sequence[ir.Value]]) -> _Parts | None:
    """The slices of `whole`, with the axes that all of their readers put in."""
    dims = not_none(_dims(whole))
    del dims[axis]
    readers = [user for values in slices for v in values for user in v.consumers()]
    graph = None if (maker := slices[0][0].producer()) is None else maker.graph
    put_in = {_put_in(user, len(dims)) if user.graph is graph else None for user in readers}
    axes = put_in.pop() if len(put_in) == 1 else None
    if axes:
        slices = [[user.outputs[0] for v in values for user in v.consumers()] for values in slices]
    given = iter(dims)
    view = [1 if i in (axes or ()) else next(given) for i in range(len(dims) + len(axes or ()))]
    own = [i for i in range(len(view)) if i not in (axes or ())]
    at = own[axis - 1] + 1 if axis else 0
    if at == len(view) or view[at] < 0:
        return None
    view[at] *= len(slices)
    return _Parts(whole, slices, view, at)


def _put_in(node: ir.Node, rank: int) -> frozenset[int] | None:
    """The axes that an Unsqueeze of a tensor of `rank` axes puts in; None for another reader."""
    axes = constant(node.inputs[1]) if is_op(node, "Unsqueeze") and len(node.inputs) > 1 else None
    return None if axes is None else frozenset(int(a) % (rank + axes.size) for a in axes.reshape(-1))


def _stacks(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[ir.Value], int]]:
    """Each Concat along an axis that an Unsqueeze puts into all of its operands, which have an axis in this place."""
    for node in graph:
        dims = _dims(node.outputs[0]) if is_op(node, "Concat") else None
        if dims is None or len(node.inputs) < _FEWEST:
            continue
        axis = node.attributes.get_int("axis", 0) % len(dims)
        values = [_stacked(v, axis, len(dims) - 1) for v in node.inputs]
        if all(v is not None for v in values):
            yield node, [v for v in values if v is not None], axis


def _stacked(value: ir.Value | None, axis: int, rank: int) -> ir.Value | None:
    """The tensor of `rank` axes into which an Unsqueeze puts `axis` alone, before another one."""
    maker = producer(value, "Unsqueeze")
    return maker.inputs[0] if maker is not None and axis < rank and _put_in(maker, rank) == {axis} else None


def _write(b: Builder) -> int:
    undone = list(_undone(b.graph))
    for node, whole in undone:
        node.outputs[0].replace_all_uses_with(whole)
    picks = list(_picks(b.graph))
    place = {v: i for i, node in enumerate(b.graph) for v in node.outputs}
    for parts in picks:
        b.before = min((v for values in parts.slices for v in values), key=place.__getitem__).producer()
        count = len(parts.slices)
        each = [parts.view[parts.at] // count] * count
        made = b.Split(b.reshape(parts.whole, list(parts.view)), each, axis=parts.at, outputs=count)
        for part, values in zip(made, parts.slices):
            for old in values:
                replace_value(part, old)
    stacks = list(_stacks(b.graph))
    for node, values, axis in stacks:
        b.before = node
        replace_value(b.reshape(b.Concat(*values, axis=axis), _dims(node.outputs[0])), node.outputs[0])
    return len(undone) + len(picks) + len(stacks)


def _applies(graph: ir.Graph) -> bool:
    return any(next(found(graph), None) is not None for found in (_undone, _picks, _stacks))


STACKED_SLICES = rewrite(
    "stacked_slices",
    "slices are parts of a view",
    "each place of an axis picked by a Gather, or stacked by Unsqueeze and Concat, with another axis behind it",
    _applies,
    _write,
)
