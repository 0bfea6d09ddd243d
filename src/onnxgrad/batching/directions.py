"""Batch a derivative over many directions: the primal is computed once, seed-dependent nodes for all seeds.

A derivative is written for one seed, into the graph itself. Then the nodes that depend on the seed are removed again.
If each of them has a stacked form (see `operator_rules`), they are written for a stack of all seeds, so that a Jacobian
takes a few matrix products. Otherwise they become the body of a Scan over the seeds. It carries no state, and its own
derivative is a Scan again. The other nodes (slopes, masks, transposed weights) stay outside and run once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.batching.batched_node import Unstackable
from onnxgrad.batching.vmap import stack
from onnxgrad.control_flow.iteration import ScanAxis, scan
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import ancestors, dependents
from onnxgrad.ir.match import Dim, not_none
from onnxgrad.ir.shapes import move_axis
from onnxgrad.ir.subgraphs import cond, empty, give

#: No stack may have more elements than this (a Scan holds only one direction at a time).
MOST_ELEMENTS = 2**26


@dataclass
class Batched:
    """A result batched over directions.

    Attributes:
        like: for one direction, it has this type and shape.
        axis: the batch axis.
        sizes: the shape for one direction, if `like` is not there to be asked when there is no direction.
    """

    like: Var
    axis: int = 0
    sizes: Var | None = None


def vmapped(
    builder: Builder,
    seeds: Sequence[Var],
    write: Callable[[list[Var]], list[Var]],
    results: Sequence[Batched],
    guarded: bool = True,
) -> list[Var]:
    """Apply `write` to every slice of the seeds along their first axis, and stack the results.

    Without directions, the results are empty; a single known direction needs no Scan. Unless `guarded`, nodes that need
    no Scan over the directions get no If for the case of no direction.
    """
    count = not_none(seeds[0].shape)[0]
    if count == 0:
        return [_none(builder, r) for r in results]
    if count == 1:
        written = write([builder.Squeeze(s, [0]) for s in seeds])
        return [builder.Unsqueeze(_set_rank(y, r), [r.axis]) for y, r in zip(written, results)]
    b, body = empty(builder, "directions")
    slices = [_slice(builder, s) for s in seeds]
    written = [_set_rank(y, r) for y, r in zip(write(slices), results)]
    depends = dependents(builder.graph, [s.value for s in slices])
    moved = [node for node in builder.graph if any(v in depends for v in node.outputs)]
    builder.move(moved, b)
    if not written:
        return []
    needed = ancestors(moved, [y.value for y in written])

    def emit(w: Builder, scans: bool = True) -> list[Var]:
        pieces = [Var(w, s.value) for s in seeds]
        try:
            if not _fits(needed, count):
                raise Unstackable
            number = [count] if isinstance(count, int) else w.Shape(pieces[0], start=0, end=1)
            inside = {s.value: x for s, x in zip(slices, pieces)}
            stacks = stack(w, needed, inside, [y.value for y in written], number, scans)
        except Unstackable:
            if not scans:
                raise
            give(b, [Var(b, y.value) for y in written])
            body.inputs.extend(s.value for s in slices)
            for end, r in zip(body.outputs, results):
                end.shape = end.shape if end.shape is not None else r.like.value.shape
            stacks = scan(w, body, [], [(x, ScanAxis()) for x in pieces], [ScanAxis()] * len(results))
        # a Scan can stack along any axis, but ONNX Runtime dies if another is empty
        return [move_axis(y, 0, r.axis) if r.axis else y for y, r in zip(stacks, results)]

    if isinstance(count, int):
        return emit(builder)
    if not guarded:
        with suppress(Unstackable):
            return emit(builder, scans=False)
    return _unless_none(builder, seeds[0], emit, results)


def identity(builder: Builder, count: int | Var, dtype: ir.DataType) -> Var:
    """The unit vectors of `count` dimensions, as the rows of a matrix."""
    if isinstance(count, int):
        numbers = builder.const(np.arange(count))
    else:
        numbers = builder.Range(0, count, 1)
    return builder.Cast(builder.Equal(builder.Unsqueeze(numbers, [1]), numbers), to=int(dtype))


def _fits(nodes: Sequence[ir.Node], count: Dim) -> bool:
    """True unless a stacked value is known to be too large; unknown sizes count as one."""
    sizes = [math.prod(d for d in v.shape or () if isinstance(d, int)) for node in nodes for v in node.outputs]
    return max(sizes, default=0) * (count if isinstance(count, int) else 1) <= MOST_ELEMENTS


def _slice(builder: Builder, seeds: Var) -> Var:
    dims = (seeds.shape or ())[1:]
    return builder.var(
        ir.Value(name=builder.names.fresh("seed"), type=ir.TensorType(seeds.dtype), shape=ir.Shape(dims))  # type: ignore[arg-type]
    )


def _set_rank(y: Var, result: Batched) -> Var:
    """`y`, of known rank: a derivative has the shape of its value."""
    if y.value.shape is None and y.value.producer() is not None:
        y.value.shape = result.like.value.shape
    return y


def _none(b: Builder, result: Batched) -> Var:
    """The result for zero directions."""
    like, at = Var(b, result.like.value), result.axis
    if result.sizes is None:
        parts: list[Any] = [b.shape_of(like, 0, at) if at else [], b.shape_of(like, at)]
    else:
        sizes = Var(b, result.sizes.value)
        parts = [b.Slice(sizes, [0], [at], [0]) if at else [], b.Slice(sizes, [at], [2**31 - 1], [0])]
    return b.Expand(b.const(0, like.dtype), b.join(parts[0], [0], parts[1]))


def _unless_none(o: Builder, seeds: Var, emit: Callable[[Builder], list[Var]], results: Sequence[Batched]) -> list[Var]:
    """Guard `emit` by an If for zero seeds: ONNX Runtime fails on a Scan of zero steps."""
    likes = []
    for r in results:
        dims = list(r.like.shape or ())
        shape = ir.Shape([*dims[: r.axis], (seeds.shape or (None,))[0], *dims[r.axis :]])
        likes.append(ir.Value(name="", type=r.like.value.type, shape=shape))
    steps = o.Squeeze(o.Shape(seeds, start=0, end=1), [0])
    return cond(o, steps > 0, emit, lambda w: [_none(w, r) for r in results], likes)
