"""Rows added to a table at places that are known: gathered by place, and added up as products with ones.

ScatterElements looks up the index of each number. For constant indices (the edges of a graph, the pairs of an
interaction) that are equal along a row, the number of rows per place is known. Rows are gathered so that those of all
places with equally many are adjacent, [count, places · width]: a row of ones times that is their sum. The sums, and a
row of zeros for empty places, are then gathered in the order of the table. That takes an eighth of the time. Products
are with ones only, so that infinities stay in their rows. Places beyond those that are named, of a table whose size
is known only in a run, are empty as well.

The greatest or least row of a place is found in the same way, by a reduction of the first axis in place of the product.
Without a reduction (PyTorch's older exporter writes ``index_add`` so) the last row of a place stays. It is known too:
ScatterND copies it, and no other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import constant, is_op, is_zero
from onnxgrad.runtime.rewrites.rewrite import NodeRule, constant_ids, match_repeated, rewrite_results, same_but

#: Fewer rows are added up soon enough.
FEWEST = 64
#: Rows with fewer numbers are not worth being picked one by one.
_NARROWEST = 8
#: Different numbers of rows that meet at a place; each takes a product of its own.
_MOST_COUNTS = 24
#: Reductions, and what they make of no row at all.
_EMPTY = {"add": 0.0, "max": -np.inf, "min": np.inf}
_DTYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class _Known:
    table: ir.Value
    rows: ir.Value
    ids: np.ndarray
    axis: int
    dims: list[int]  #: of the table; at most one is not known, which is -1
    reduction: str

    @classmethod
    def ending_in(cls, node: ir.Node) -> _Known | None:
        """ScatterElements of numbers at constant ids, the same for a whole row; None for anything else."""
        reduction = node.attributes.get_string("reduction", "none") if is_op(node, "ScatterElements") else ""
        if reduction not in ("none", *_EMPTY):
            return None
        table, indices, rows = node.inputs
        if table is None or rows is None or rows.shape is None or rows.dtype not in _DTYPES:
            return None
        shape = table.shape if node.outputs[0].shape is None else node.outputs[0].shape
        if shape is None or len(shape) < 2 or len(rows.shape) != len(shape):
            return None
        axis = node.attributes.get_int("axis", 0) % len(shape)
        ids = _repeated_ids(indices, len(shape), axis)
        size = shape[axis]
        others = same_but(axis, shape, rows.shape)
        if ids is None or others is None or not FEWEST <= len(ids) == rows.shape[axis]:
            return None
        if not isinstance(size, int):
            size = -1
        low, high = (0, ids.max() + 1) if size < 0 else (-size, size)
        dims = [*others[:axis], size, *others[axis:]]
        if ids.min() < low or ids.max() >= high or dims.count(-1) > 1 or 0 <= np.prod(others) < _NARROWEST:
            return None
        found = cls(table, rows, ids % high, axis, dims, reduction)
        fits = axis == 0 if reduction == "none" else len(set(np.bincount(found.ids))) <= _MOST_COUNTS
        return found if fits else None


def _repeated_ids(indices: ir.Value | None, rank: int, axis: int) -> np.ndarray | None:
    """The constant ids that `indices`, of `rank` axes, repeats along all axes but `axis`; None if it does not."""
    ids = constant_ids(match_repeated(indices, rank, axis))
    whole = constant(indices) if ids is None else None
    if whole is None or whole.ndim != rank or whole.dtype.kind != "i" or not whole.size:
        return ids
    first = np.moveaxis(whole, axis, 0).reshape(whole.shape[axis], -1)
    return first[:, 0].astype(np.int64) if (first == first[:, :1]).all() else None


def _write(b: Builder, found: _Known) -> Var:
    """The table of `found` with its rows."""
    if found.reduction == "none":
        ids, last = np.unique(found.ids[::-1], return_index=True)
        return b.ScatterND(found.table, ids[:, None], b.Gather(found.rows, len(found.ids) - 1 - last, axis=0))
    perm = list(range(len(found.dims)))
    perm[0], perm[found.axis] = found.axis, 0
    rows = b.Transpose(b.var(found.rows), perm=perm) if found.axis else b.var(found.rows)
    joined, place = _by_place(b, rows if len(perm) == 2 else b.reshape(rows, [len(found.ids), -1]), found)
    y = b.reshape(b.Gather(joined, place, axis=0), [found.dims[a] for a in perm])
    y = b.Transpose(y, perm=perm) if found.axis else y
    if found.reduction == "add":
        return y if is_zero(found.table) else b.Add(found.table, y)
    return b.emit(found.reduction.capitalize(), found.table, y)


def _by_place(b: Builder, rows: Var, found: _Known) -> tuple[Var, Var]:
    """Rows that are one for all of `rows`, [number, width], with the same id; and the place of that row for each id."""
    size, dtype = found.dims[found.axis], found.rows.dtype
    is_open = size < 0
    size = int(found.ids.max()) + 1 if is_open else size
    counts = np.bincount(found.ids, minlength=size)
    by_id, first = np.argsort(found.ids, kind="stable"), np.cumsum(counts) - counts
    groups = [(int(c), np.flatnonzero(counts == c)) for c in np.unique(counts[counts > 0])]
    order = np.concatenate([by_id[first[same] + k] for c, same in groups for k in range(c)])
    if counts.max() == 1:  # nothing meets: the rows as they are
        sums, used, place = rows, len(order), np.full(size, len(order))
        place[groups[0][1]] = order
    else:
        used = int(np.count_nonzero(counts))
        place = np.full(size, used)
        place[np.concatenate([same for _, same in groups])] = np.arange(used)
        picked = b.Gather(rows, order, axis=0)
        cuts = [c * len(same) for c, same in groups]
        pieces = [picked] if len(groups) == 1 else b.Split(picked, cuts, outputs=len(groups), axis=0)
        parts = [b.reshape(piece, [c, -1]) for piece, (c, _) in zip(pieces, groups)]
        for i, (c, _) in enumerate(groups):
            if c > 1 and found.reduction != "add":
                parts[i] = b.emit(f"Reduce{found.reduction.capitalize()}", parts[i], [0], keepdims=1)
            elif c > 1:
                parts[i] = b.MatMul(b.const(np.ones((1, c)), dtype), parts[i])
        sums = b.reshape(parts[0] if len(parts) == 1 else b.Concat(*parts, axis=1), [used, -1])
    if is_open or not counts.all():
        empty = b.const(np.full((1, 1), _EMPTY[found.reduction]), dtype)
        sums = b.Concat(sums, b.Expand(empty, b.join([1], b.shape_of(rows, 1))), axis=0)
    if not is_open:
        return sums, b.const(place)
    beyond = b.Sub(b.shape_of(b.var(found.table), found.axis, found.axis + 1), [size])
    return sums, b.Concat(b.const(place), b.ConstantOfShape(beyond, value=ir.tensor([used])), axis=0)


KNOWN_ROWS = rewrite_results(
    "known_rows",
    "rows are gathered by place and added up as products with ones; those that are not the last are left out",
    "ScatterElements, without reduction, add, max or min, with constant indices, the same along a row",
    NodeRule(_Known.ending_in, _write),
)
