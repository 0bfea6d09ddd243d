"""Segments of steps: an iteration over segments, each an iteration itself, with the same values and fewer residuals.

Reverse mode saves the state at the start of each segment. A step of the backward pass recomputes one segment, with its
residuals, and then differentiates through it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.control_flow.checkpointing import SavePolicy, segment_length, set_save_policy
from onnxgrad.control_flow.iteration import Iteration, ScanAxis, loop, scan
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.infer.loops import always_goes_on
from onnxgrad.ir.match import constant_tensor, not_none
from onnxgrad.ir.subgraphs import cond, copy_of, empty, formal, give, loop_lead
from onnxgrad.lower.registry import replace

#: with fewer steps than this, nothing is gained
FEWEST = 4


def in_segments(builder: Builder, node: ir.Node, of: Sequence[ir.Value]) -> list[ir.Node] | None:
    """Replace `node` by an iteration over segments if `checkpointing` asks for it; the new nodes, or None.

    Unread stacks that are not among `of` are omitted.
    """
    every = segment_length(node)
    if every is None:
        return None
    steps = _steps(node)
    fewest = FEWEST if isinstance(every, str) else every + 1
    if steps is not None and steps < fewest:
        set_save_policy(node, SavePolicy.RESIDUALS)
        return None
    length = math.isqrt(steps - 1) + 1 if every == "sqrt" and steps is not None else every
    outs = node.outputs[Iteration.of(node).count :]
    used = [k for k, v in enumerate(outs) if v.uses() or v.is_graph_output() or v in of]
    if node.op_type == "Loop":
        return replace(builder, node, lambda b, n: _Segments(b, n, length, used).write())
    return replace(builder, node, lambda b, n: _scan(b, n, used, steps, length))


def _steps(node: ir.Node) -> int | None:
    """The number of steps of `node`, if the model fixes it."""
    if node.op_type == "Loop":
        trips = node.inputs[0]
        tensor = constant_tensor(trips)
        return None if tensor is None or not always_goes_on(node) else max(0, int(tensor.numpy().item()))
    it = Iteration.of(node)
    sizes = [x.shape[s.axis] for x, s in zip(it.scanned, it.ins) if x.shape is not None]
    return next((d for d in sizes if isinstance(d, int)), None)


def _root(b: Builder, n: Var) -> Var:
    """⌈√n⌉ for a positive `n`."""
    return b.Cast(b.Ceil(b.Sqrt(b.Cast(n, to=int(ir.DataType.DOUBLE)))), to=int(ir.DataType.INT64))


def _of_all(it: Iteration, used: Sequence[int], results: Sequence[Var]) -> list[Var | None]:
    """All outputs of an iteration, given its states and those of its stacks that are `used`."""
    stacks = dict(zip(used, results[it.count :]))
    return [*results[: it.count], *(stacks.get(k) for k in range(len(it.node.outputs) - it.count))]


# --- Loop ------------------------------------------------------------------------------------------


class _Segments:
    """A Loop over segments of `length` steps; for "sqrt" and an unknown number of steps, of 1, 2, 3 … steps.

    The stacks of segments go into a sequence, since the last segment may be shorter than the others.
    """

    def __init__(self, b: Builder, node: ir.Node, length: int | str, used: Sequence[int]) -> None:
        self.b, self.node, self.it, self.used = b, node, Iteration.of(node), used
        self.counted = node.inputs[0] is not None and always_goes_on(node)
        self.trips: Var | None = None
        if node.inputs[0] is not None:
            trips = b.var(node.inputs[0])
            self.trips = b.Max(trips if trips.shape == () else b.reshape(trips, []), 0)
            self.trips.value.shape = ir.Shape([])
        self.length: Var | None = None
        if length != "sqrt":
            self.length = b.const(np.array(length, np.int64))
        elif self.counted:
            self.length = _root(b, b.Max(not_none(self.trips), 1))

    def write(self) -> list[Var | None]:
        """The whole iteration."""
        b, it = self.b, self.it
        seg, graph = empty(b, "segments")
        number, goes_on = loop_lead(seg)
        states = [formal(seg, v, "state") for v in it.states]
        nexts, stacks, go = self._segment(seg, number, states)
        parts, longer = [], []
        for stack in stacks:
            so_far = formal(seg, ir.Value(name="", type=ir.SequenceType(stack.value.type)), "parts")  # type: ignore[arg-type]
            parts.append(so_far)
            longer.append(seg.SequenceInsert(so_far, stack))
        give(seg, [go or seg.Identity(goes_on), *nexts, *longer])
        graph.inputs.extend(v.value for v in [number, goes_on, *states, *parts])
        empties = [b.SequenceEmpty(dtype=int(s.dtype or 0)) for s in stacks]
        first = [b.var(v) for v in it.initial]
        results = loop(b, graph, *self._how_often(), [*first, *empties])
        set_save_policy(results[0].value.producer(), SavePolicy.STATES)
        return _of_all(it, self.used, [*results[: it.count], *self._concat_segments(results[it.count :])])

    def _segment(self, seg: Builder, number: Var, states: Sequence[Var]) -> tuple[list[Var], list[Var], Var | None]:
        """The states after one segment, the stacks of its steps, and the condition to go on, if it is not known."""
        it = self.it
        outer = [None if v is None else Var(seg, v.value) for v in (self.trips, self.length)]
        trips, length = outer
        if length is None:
            start, length = seg.Div(number * (number + 1), 2), number + 1
        else:
            start = number * length
        count = length if trips is None else seg.Min(length, trips - start)
        count.value.shape = ir.Shape([])
        inner, inside = it.copy(seg)
        body = inside.body
        at = body.inputs[0]
        if at.uses() or at.is_graph_output():
            local = formal(inner, at, "step")
            global_ = inner.Add(Var(inner, start.value), local)
            at.replace_all_uses_with(global_.value, replace_graph_outputs=True)
            global_.value.producer().replace_input_with(1, local.value)
            body.sort()
            body.inputs[0] = local.value
        first = list(states)
        goes = body.outputs[0]
        ends = [*inside.following, *([] if self.counted else [goes]), *(inside.slice_results[k] for k in self.used)]
        shapes = [v.shape for v in ends]
        give(inner, [inner.Identity(inner.var(goes)), *ends])
        for end, shape in zip(body.outputs[1:], shapes):
            end.shape = shape if end.shape is None else end.shape
        if not self.counted:
            body.inputs.append(formal(inner, body.inputs[1], "went_on").value)
            first.append(seg.const(True))
        results = loop(seg, body, count.value, None, first)
        set_save_policy(results[0].value.producer(), SavePolicy.RESIDUALS)
        after, stacks = results[: it.count], results[it.count + (not self.counted) :]
        if self.counted:
            return after, stacks, None
        go = results[it.count]
        if trips is not None:
            go = seg.And(go, (start + count) < trips)
        go.value.shape = ir.Shape([])
        return after, stacks, go

    def _how_often(self) -> tuple[ir.Value | None, ir.Value | None]:
        """Trip count and condition of the iteration over segments."""
        b = self.b
        if self.counted:
            assert self.trips is not None
            assert self.length is not None
            known, length = self.trips.const, self.length.const
            if known is not None and length is not None:
                return b.const(np.array(-(-int(known) // int(length)), np.int64)).value, None
            return (b.Div(self.trips, self.length) + b.Min(b.Mod(self.trips, self.length), 1)).value, None
        condition = self.node.inputs[1]
        if self.trips is not None:
            some = self.trips > 0
            condition = some.value if condition is None else b.And(some, b.reshape(b.var(condition), [])).value
        return None, condition

    def _concat_segments(self, sequences: Sequence[Var]) -> list[Var]:
        """Concatenate the stacks of all segments; for no segment, the Loop's own result of zero steps."""
        b = self.b
        if not sequences:
            return []
        if self.counted and (known := self.trips.const) is not None and int(known) > 0:  # type: ignore[union-attr]
            return [b.ConcatFromSequence(q, axis=0) for q in sequences]

        def concat_all(w: Builder) -> list[Var]:
            return [w.ConcatFromSequence(Var(w, q.value), axis=0) for q in sequences]

        def none(w: Builder) -> list[Var]:
            _, body = copy_of(w, self.it.body)
            first = [Var(w, v) for v in self.it.initial]
            results = loop(w, body, w.const(np.array(0, np.int64)).value, None, first)
            set_save_policy(results[0].value.producer(), SavePolicy.RESIDUALS)
            return [results[self.it.count + k] for k in self.used]

        return cond(b, b.SequenceLength(sequences[0]) > 0, concat_all, none)


# --- Scan ------------------------------------------------------------------------------------------


def _scan(b: Builder, node: ir.Node, used: Sequence[int], steps: int | None, length: int | str) -> list[Var | None]:
    """A Scan over whole segments, then one over the steps that are left.

    A Scan of no steps fails in ONNX Runtime: for an unknown number of steps, some are always left over, and without a
    whole segment, the Scan is unchanged.
    """
    it = Iteration.of(node)
    if steps is not None:
        assert isinstance(length, int)
        whole, left = divmod(steps, length)
        results = _split(b, it, used, whole * length, length, steps if left else None)
        return _of_all(it, used, results)
    size = b.size_of(b.var(it.scanned[0]), it.ins[0].axis)
    each: Var | int = _root(b, size) if length == "sqrt" else int(length)
    cut = b.Div(size - 1, each) * each

    def split_evenly(w: Builder) -> list[Var]:
        return _split(w, it, used, Var(w, cut.value), each, Var(w, size.value))

    def none(w: Builder) -> list[Var]:
        pieces = [(Var(w, x), slot) for x, slot in zip(it.scanned, it.ins)]
        return _plain(w, it, used, [Var(w, v) for v in it.initial], pieces)

    likes = [*node.outputs[: it.count], *(node.outputs[it.count + k] for k in used)]
    return _of_all(it, used, cond(b, cut > 0, split_evenly, none, likes))


def _plain(
    b: Builder, it: Iteration, used: Sequence[int], first: Sequence[Var], pieces: Sequence[tuple[Var, ScanAxis]]
) -> list[Var]:
    """The Scan of other slices; its last states and those stacks that are `used`."""
    inner, inside = it.copy(b)
    ends = [*inside.following, *(inside.slice_results[k] for k in used)]
    shapes = [v.shape for v in ends]
    give(inner, ends)
    for end, shape in zip(inside.body.outputs, shapes):
        end.shape = shape if end.shape is None else end.shape
    axes = [ScanAxis(_axis(it.outs[k], it.slice_results[k]), it.outs[k].backwards) for k in used]
    results = scan(b, inside.body, first, pieces, axes)
    set_save_policy(_maker(results[0]), SavePolicy.RESIDUALS)
    return results


def _maker(x: Var) -> ir.Node | None:
    """The Scan that made `x`, perhaps moved since."""
    node = x.value.producer()
    return node.inputs[0].producer() if node is not None and node.op_type == "Transpose" and node.inputs[0] else node


def _split(
    b: Builder, it: Iteration, used: Sequence[int], cut: Var | int, length: Var | int, steps: Var | int | None
) -> list[Var]:
    """Run `cut` steps in segments of `length`, then the rest of `steps`, if any."""
    here = [length if isinstance(length, int) else Var(b, length.value)]
    outer, graph = empty(b, "segments")
    states = [formal(outer, v, "state") for v in it.states]
    columns: list[tuple[Var, ScanAxis]] = []
    pieces: list[tuple[Var, ScanAxis]] = []
    for x, slice_, slot in zip(it.scanned, it.slices, it.ins):
        whole, axis = b.var(x), _axis(slot, slice_)
        first: Var | int = 0
        if steps is not None:
            first, last = (steps - cut, steps) if slot.backwards else (0, cut)
            whole = _cut(b, whole, first, last, axis)
        shape = b.join(b.shape_of(whole, 0, axis), [-1], *map(_vector, here), b.shape_of(whole, axis + 1))
        columns.append((b.Reshape(whole, shape), ScanAxis(axis, slot.backwards)))
        dims = list(slice_.shape or ())
        size = length if isinstance(length, int) else None
        like = ir.Value(name="", type=slice_.type, shape=ir.Shape([*dims[:axis], size, *dims[axis:]]))
        pieces.append((formal(outer, like, "segment"), ScanAxis(axis, slot.backwards)))
    outs = [ScanAxis(_axis(it.outs[k], it.slice_results[k]), it.outs[k].backwards) for k in used]
    give(outer, _plain(outer, it, used, states, pieces))
    graph.inputs.extend(v.value for v in [*states, *(p for p, _ in pieces)])
    results = scan(b, graph, [b.var(v) for v in it.initial], columns, outs)
    set_save_policy(_maker(results[0]), SavePolicy.STATES)
    ends, stacks = results[: it.count], []
    for stack, slot in zip(results[it.count :], outs):
        shape = b.join(b.shape_of(stack, 0, slot.axis), [-1], b.shape_of(stack, slot.axis + 2))
        stacks.append(b.Reshape(stack, shape))
    if steps is None:
        return [*ends, *stacks]
    rest = []
    for x, slice_, slot in zip(it.scanned, it.slices, it.ins):
        first, last = (0, steps - cut) if slot.backwards else (cut, steps)
        rest.append((_cut(b, b.var(x), first, last, _axis(slot, slice_)), slot))
    results = _plain(b, it, used, ends, rest)
    ends = results[: it.count]
    for i, (last, slot) in enumerate(zip(results[it.count :], outs)):
        both = (last, stacks[i]) if slot.backwards else (stacks[i], last)
        stacks[i] = b.Concat(*both, axis=slot.axis)
    return [*ends, *stacks]


def _axis(slot: ScanAxis, piece: ir.Value) -> int:
    """The axis of `slot`, counted from the front, in a stack of slices like `piece`."""
    if slot.axis >= 0:
        return slot.axis
    return slot.axis + Var(None, piece).rank + 1  # type: ignore[arg-type]


def _vector(n: Var | int) -> Var | list[int]:
    return [n] if isinstance(n, int) else n.builder.Unsqueeze(n, [0])


def _cut(b: Builder, x: Var, first: Var | int, last: Var | int, axis: int) -> Var:
    """The slices of `x` from `first` to before `last`."""
    return b.Slice(x, _vector(first), _vector(last), [axis])
