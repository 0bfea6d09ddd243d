"""Numbers picked by index, where the index is the same along a row: rows are copied instead.

GatherElements looks up the index of each number; with a vector of indices repeated along all other axes, it is a Gather
of rows (a fifth of the time). Gather along the last axis copies number by number; between two Transposes it copies rows
(a quarter of the time). Windows of that axis, as PyTorch exports `unfold`, are slices (a ninth). A Slice of the whole
tensor and an Expand to its own shape, as exporters write before a scatter, are removed. Rows picked at constant places
from rows picked at constant places are picked once. GatherND of whole rows, as PyTorch's exporter writes an index, is a
Gather (two thirds of the time), and along an inner axis it needs no Transposes around it (a third). Where a mask is the
same along a row (tokens in place of images, ragged sequences), exporters write the places of all numbers; those of the
rows do (a fourth of the time).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.constants import window_slices
from onnxgrad.ir.match import constant, is_op, not_none, permutation, producer, rank, sizes
from onnxgrad.ir.shapes import same_dims
from onnxgrad.runtime.rewrites.rewrite import constant_ids, match_repeated, replace_value, rewrite, same_but

#: Fewer numbers of each row are picked soon enough.
_FEWEST = 16


def _repeated_index(node: ir.Node) -> tuple[ir.Value, int] | None:
    """The index vector and axis of a GatherElements of whole rows; None for other nodes."""
    if not is_op(node, "GatherElements"):
        return None
    x, indices = node.inputs
    if x is None or indices is None or x.shape is None or indices.shape is None or len(x.shape) < 2:
        return None
    axis = node.attributes.get_int("axis", 0) % len(x.shape)
    column = match_repeated(indices, len(x.shape), axis)
    whole = axis != len(x.shape) - 1 and same_but(axis, x.shape, indices.shape) is not None
    return (column, axis) if column is not None and whole else None


def _places(node: ir.Node | None) -> np.ndarray | None:
    """The constant vector of the rows that a Gather picks; None for other nodes."""
    if not is_op(node, "Gather") or node.attributes.get_int("axis", 0) != 0 or rank(node.inputs[1]) != 1:
        return None
    return constant_ids(node.inputs[1])


def _picked_twice(node: ir.Node) -> tuple[ir.Value, np.ndarray] | None:
    """The table and the places of rows that one Gather picks from the result of another."""
    places, inner = _places(node), producer(node.inputs[0], "Gather") if is_op(node, "Gather") else None
    earlier = None if inner is None or places is None else _places(inner)
    if inner is None or places is None or earlier is None or inner.inputs[0] is None or not places.size:
        return None
    within = places.min() >= -len(earlier) and places.max() < len(earlier)
    return (inner.inputs[0], earlier[places]) if within else None


def _picks_rows(node: ir.Node) -> bool:
    """True if a GatherND has one index for each row of a tensor."""
    if not is_op(node, "GatherND") or node.attributes.get_int("batch_dims", 0) != 0 or rank(node.inputs[0]) is None:
        return False
    index = not_none(node.inputs[1])
    return index.shape is not None and index.shape[-1] == 1


class _Mask(NamedTuple):
    """A mask of rows of the sizes `row`; a GatherND, a ScatterND or a Shape reads the places of all numbers."""

    of_rows: ir.Value
    row: list[int]


def _masked(node: ir.Node) -> _Mask | None:
    reads = is_op(node, ("GatherND", "ScatterND")) and not node.attributes.get_int("batch_dims", 0)
    places = node.inputs[1] if reads else node.inputs[0] if is_op(node, "Shape") else None
    turned = producer(places, "Transpose")
    found = None if turned is None else producer(turned.inputs[0], "NonZero")
    whole = mask = None if found is None else found.inputs[0]
    while (spread := producer(mask, "Expand")) is not None:
        mask = spread.inputs[0]
    if whole is None or mask is None or mask.shape is None or whole.shape is None or not len(mask.shape):
        return None
    dims = mask.shape.dims
    ahead = len(dims)
    while ahead and dims[ahead - 1] == 1:
        ahead -= 1
    row = [d for d in whole.shape[ahead:] if isinstance(d, int)]
    fits = len(dims) == len(whole.shape) == ahead + len(row) and same_dims(dims[:ahead], whole.shape.dims[:ahead])
    if reads:  # as wide as the mask, or the numbers beyond would belong to the rows
        x = not_none(node.inputs[0]).shape
        fits = fits and x is not None and len(x) == len(dims) and same_dims(row, x.dims[ahead:])
    return _Mask(mask, row) if fits and ahead and math.prod(row) > 1 else None


def _write_masked(b: Builder, node: ir.Node, mask: _Mask) -> Var:
    ahead = len(not_none(mask.of_rows.shape)) - len(mask.row)
    rows = b.Squeeze(mask.of_rows, list(range(ahead, ahead + len(mask.row))))
    places = b.Transpose(b.NonZero(rows), perm=[1, 0])
    if node.op_type == "GatherND":
        return b.reshape(b.GatherND(node.inputs[0], places), [-1])
    if node.op_type == "ScatterND":
        updates = b.reshape(not_none(node.inputs[2]), [-1, *mask.row])
        return b.ScatterND(node.inputs[0], places, updates, reduction=node.attributes.get_string("reduction", "none"))
    size = [b.shape_of(places, 0, 1) * [math.prod(mask.row)], b.const([ahead + len(mask.row)])]
    kept = size[node.attributes.get_int("start", 0) : node.attributes.get_int("end", 2)]
    return b.join(*kept) if kept else b.const(np.zeros(0, np.int64))


def _inner_axis(node: ir.Node) -> tuple[ir.Value, ir.Value, int] | None:
    """The tensor, the index and the axis of a Gather of rows between Transposes that move an inner axis."""
    gather = producer(node.inputs[0], "Gather") if is_op(node, "Transpose") else None
    moved = None if gather is None else producer(gather.inputs[0], "Transpose")
    if gather is None or moved is None or gather.attributes.get_int("axis", 0) != 0 or rank(gather.inputs[1]) != 1:
        return None
    ahead, back, (x, *_) = permutation(moved), permutation(node), moved.inputs
    is_read_once = len(gather.outputs[0].uses()) == 1 and not gather.outputs[0].is_graph_output()
    if x is None or ahead is None or back is None or not is_read_once or ahead[0] == len(ahead) - 1:
        return None
    return (x, not_none(gather.inputs[1]), ahead[0]) if all(ahead[a] == i for i, a in enumerate(back)) else None


def _is_of_columns(node: ir.Node) -> bool:
    """True if a Gather picks numbers of each row of floats."""
    if not is_op(node, "Gather") or node.inputs[0] is None or node.inputs[0].shape is None:
        return False
    x, rank, picked = node.inputs[0], len(node.inputs[0].shape), sizes(node.inputs[1])
    if rank < 2 or node.attributes.get_int("axis", 0) % rank != rank - 1 or picked is None:
        return False
    return x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) and len(picked) == 1 and picked[0] >= _FEWEST


def _windows(node: ir.Node) -> list[tuple[int, int, int]]:
    """The slices of the last axis that a Gather puts side by side; empty for other nodes."""
    x = node.inputs[0] if is_op(node, "Gather") else None
    places = None if x is None or not rank(x) else constant(node.inputs[1])
    if (
        x is None
        or x.shape is None
        or places is None
        or node.attributes.get_int("axis", 0) % len(x.shape) != len(x.shape) - 1
    ):
        return []
    along, slices = window_slices(x.shape[-1], places) or (1, [])
    return slices if along == 0 and places.shape[1] >= _FEWEST else []


def _takes_all(node: ir.Node) -> bool:
    """True if a Slice from 0 on, or an Expand, returns its operand."""
    if not is_op(node, ("Slice", "Expand")) or node.outputs[0].is_graph_output():
        return False
    x, starts = node.inputs[:2]
    if node.op_type == "Expand":  # of sizes by name, it may be there to check a batch
        size = sizes(x)
        return size is not None and size == sizes(node.outputs[0])
    first, steps = constant(starts), constant(node.inputs[4]) if len(node.inputs) > 4 else None
    if x is None or x.shape is None or first is None or (steps is None and len(node.inputs) > 4 and node.inputs[4]):
        return False
    y = node.outputs[0].shape
    return (
        not first.any() and (steps is None or (steps == 1).all()) and y is not None and same_dims(x.shape.dims, y.dims)
    )


def _applies(node: ir.Node) -> bool:
    found = _windows(node) or _takes_all(node) or _is_of_columns(node) or _picks_rows(node)
    return bool(found) or any(find(node) is not None for find in (_repeated_index, _picked_twice, _inner_axis, _masked))


def _write(b: Builder) -> int:
    places = 0
    for node in list(b.graph):
        b.before = node
        index = _repeated_index(node)
        twice = _picked_twice(node)
        windows = _windows(node)
        inner = _inner_axis(node)
        mask = _masked(node)
        places += _applies(node)
        if _picks_rows(node):
            replace_value(b.Gather(node.inputs[0], b.Squeeze(node.inputs[1], [-1]), axis=0), node.outputs[0])
        elif mask is not None:
            replace_value(_write_masked(b, node, mask), node.outputs[0])
        elif inner is not None:
            replace_value(b.Gather(*inner[:2], axis=inner[2]), node.outputs[0])
        elif twice is not None:
            replace_value(b.Gather(*twice, axis=0), node.outputs[0])
        elif _takes_all(node):
            assert node.inputs[0] is not None
            node.outputs[0].replace_all_uses_with(node.inputs[0])
        elif windows:
            slices = [b.Slice(node.inputs[0], [start], [end], [-1], [step]) for start, end, step in windows]
            replace_value(b.Concat(*[b.Unsqueeze(y, [-2]) for y in slices], axis=-2), node.outputs[0])
        elif index is not None:
            column, axis = index
            replace_value(b.Gather(node.inputs[0], b.reshape(column, [-1]), axis=axis), node.outputs[0])
        elif _is_of_columns(node):
            x, indices = node.inputs
            assert x is not None
            last = len(not_none(x.shape)) - 1
            ahead, back = [last, *range(last)], [*range(1, last + 1), 0]
            picked = b.Gather(b.Transpose(b.var(x), perm=ahead), indices, axis=0)
            replace_value(b.Transpose(picked, perm=back), node.outputs[0])
    return places


WHOLE_ROWS = rewrite(
    "whole_rows",
    "rows are copied, not numbers",
    "indices or masks that are the same along a row, Gather along the last axis, of a Gather or between Transposes, "
    "GatherND of rows, a Slice or an Expand to itself",
    lambda graph: any(map(_applies, graph)),
    _write,
)
