"""The backward iteration: a Scan where possible, else a Loop.

A Scan passes each step its slices without copies, and its own derivative stays linear in the number of
steps. It carries tensors of fixed shape only; everything else takes a Loop, which gathers the slices itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.control_flow.iteration import Iteration, ScanAxis, loop, scan, stack_outputs
from onnxgrad.ir import Builder, Var, containers, same_shape
from onnxgrad.ir.aliases import follow, known_as
from onnxgrad.ir.infer.loops import always_goes_on, elements
from onnxgrad.ir.match import constant_tensor, not_none
from onnxgrad.ir.subgraphs import cond, formal, give, loop_lead
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import Term, write


@dataclass
class StepInput:
    """An input `inner` of a step: the slice of `outer`, or the number of the step if that is None.

    `outer` may be a sequence with an element per step. For steps that read sequences or optionals, `lengths` has the
    number of elements of each step.
    """

    inner: ir.Value
    outer: ir.Value | None
    slot: ScanAxis
    in_sequence: bool = False
    lengths: ir.Value | None = None


@dataclass
class Backwards:
    """A body that returns the next `carried` values, then slices, stacked according to `outs`.

    Attributes:
        op: the primal iteration.
        b: writes into the body.
        columns: what a step reads.
        carried: values in the body that its first outputs take the place of.
        initial: what they are at first.
        outs: how the further outputs of the body are put together.
        closing: what becomes of these, once they are: the results after those of `carried`.
        instead: what they are like where no step was made.
    """

    op: Op
    b: Builder
    columns: list[StepInput]
    carried: Sequence[Var]
    initial: Sequence[Var]
    outs: Sequence[ScanAxis]
    closing: Callable[[Builder, list[Var]], list[Term]]
    instead: Sequence[ir.Value] = ()

    def emit(self) -> Sequence[Term]:
        """Append the iteration; the last `carried` values, then what `closing` computes from the stacked outputs."""
        return self._loop() if self._needs_loop() else self._scan()

    def _needs_loop(self) -> bool:
        if any(c.in_sequence for c in self.columns):
            return True
        if any(not isinstance(v.value.type, ir.TensorType) for v in self.initial):
            return True
        if any(v.shape is None for v in self.graph.outputs):  # ONNX Runtime's Scan asks for the rank of each
            return True
        it = Iteration.of(self.op.node)
        return bool(it.lead) and not all(map(same_shape, self.carried, self.initial))

    @property
    def graph(self) -> ir.Graph:
        """The body."""
        return self.b.graph

    def steps(self) -> Var:
        """The number of steps of the primal iteration: the size of any scan input or output."""
        op, o = self.op, self.op.builder
        it = Iteration.of(op.node)
        for column in self.columns:
            if column.lengths is not None:
                return _size(Var(o, column.lengths), 0)
            if column.in_sequence and column.outer is not None:
                return o.SequenceLength(Var(o, column.outer))
        if it.lead:
            made = [v for v in op.node.outputs[it.count :] if v.name]
            if not made:
                made = [stack_outputs(op, it.body.inputs[0])]
            # one that a transpose need not compute, if there is one
            value, axis = next((v for v in made if v not in op.active), made[0]), 0
        else:
            value, axis = it.scanned[0], it.ins[0].axis
        return _size(Var(o, value), axis)

    # --- as a Scan ---------------------------------------------------------------------------------

    def _scan(self) -> Sequence[Term]:
        o = self.op.builder
        it = Iteration.of(self.op.node)
        columns = list(self.columns)
        if not columns:  # a Scan takes its number of steps from its inputs
            unread = formal(self.b, it.body.inputs[0 if it.lead else it.count], "unread").value
            columns = [StepInput(unread, it.scanned[0] if it.scanned else None, (*it.ins, ScanAxis())[0].reverse())]
        certain = not it.lead or _at_least_once(self.op.node)
        steps = None if certain and all(c.outer is not None for c in columns) else self.steps()
        pieces = [(o.Range(0, steps, 1).value if c.outer is None else c.outer, c.slot) for c in columns]
        self.graph.inputs[:] = [*(v.value for v in self.carried), *(c.inner for c in columns)]

        def emit(w: Builder) -> list[Term]:
            first = [Var(w, v.value) for v in self.initial]
            results = scan(w, self.graph, first, [(Var(w, x), slot) for x, slot in pieces], self.outs)
            return [*results[: len(first)], *self.closing(w, results[len(first) :])]

        if certain:
            return emit(o)
        return _unless_none(
            o, not_none(steps), lambda w: [write(t) for t in emit(w)], self.initial, [Var(o, v) for v in self.instead]
        )

    # --- as a Loop ---------------------------------------------------------------------------------

    def _loop(self) -> Sequence[Term]:
        b, o, graph = self.b, self.op.builder, self.graph
        steps = self.steps()
        number, goes_on = loop_lead(b)
        last_first = Var(b, steps.value) - 1 - number
        for c in self.columns:
            at = last_first if c.slot.backwards else number
            if c.outer is None:
                value = at
            elif c.lengths is not None:
                lengths = Var(o, c.lengths)
                starts = o.CumSum(lengths, o.const(0), exclusive=1)
                start, count = b.Gather(Var(b, starts.value), at), b.Gather(Var(b, lengths.value), at)
                value = _elements(b, c, start, count)
            elif c.in_sequence:
                value = b.SequenceAt(Var(b, c.outer), at)
            else:
                value = b.Gather(Var(b, c.outer), at, axis=c.slot.axis)
            value.value.type, value.value.shape = c.inner.type, c.inner.shape
            c.inner.replace_all_uses_with(value.value, replace_graph_outputs=True)
            follow(value.value, known_as(c.inner))
        nexts = [b.var(v) for v in graph.outputs]
        parts = []
        for piece, slot in zip(nexts[len(self.carried) :], self.outs):  # put together outside, from a sequence
            kind = ir.SequenceType(piece.value.type)  # type: ignore[arg-type]
            shape = None if piece.shape is None else elements(piece.shape)
            so_far = formal(b, ir.Value(name="", type=kind, shape=shape), "pieces")
            parts.append((so_far, b.SequenceInsert(so_far, piece, b.const(0) if slot.backwards else None)))
        ends = [*nexts[: len(self.carried)], *(longer for _, longer in parts)]
        kept = [v.value.shape for v in ends]
        goes = b.Identity(goes_on)
        graph.sort()  # the slices are picked first
        give(b, [goes, *ends])
        for v, shape in zip(graph.outputs[1:], kept):
            v.shape = shape if v.shape is None else v.shape
        graph.inputs[:] = [number.value, goes_on.value, *(v.value for v in self.carried)]
        graph.inputs.extend([so_far.value for so_far, _ in parts])
        empties = [o.SequenceEmpty(dtype=int(p.dtype or 0)) for p, _ in parts]
        results = loop(o, graph, steps.value, None, [*self.initial, *empties])
        together = [
            o.ConcatFromSequence(r, axis=slot.axis, new_axis=1)
            for r, slot in zip(results[len(self.carried) :], self.outs)
        ]
        return [*results[: len(self.carried)], *self.closing(o, together)]


def _elements(b: Builder, column: StepInput, start: Var, count: Var) -> Var:
    """The sequence of `count` elements of `column` from `start` on; for an optional, its only element."""
    every = Var(b, not_none(column.outer))
    if isinstance(column.inner.type, ir.OptionalType):
        like = Var(b, column.inner)
        return containers.either(
            b,
            count > 0,
            lambda w: w.Optional(w.SequenceAt(w.var(every.value), w.var(start.value))),
            lambda w: containers.empty_optional(w, like),
        )
    return containers.extend_sequence(b, b.SequenceEmpty(dtype=int(column.inner.dtype or 0)), every, start, count)


def _size(x: Var, axis: int) -> Var:
    """The number of elements of `x` along `axis`."""
    size = x.builder.Squeeze(x.builder.Shape(x, start=axis, end=axis + 1 or None), [0])
    size.value.shape = ir.Shape([])  # also where the rank of x is unknown
    return size


def _at_least_once(node: ir.Node) -> bool:
    """True if a Loop provably makes a step: ONNX Runtime fails on a Scan of zero steps."""
    trips = node.inputs[0]
    known = constant_tensor(trips)
    return known is not None and int(known.numpy().item()) > 0 and always_goes_on(node)


def _unless_none(
    o: Builder, steps: Var, emit: Callable[[Builder], list[Var]], initial: Sequence[Var], zeros: Sequence[Var]
) -> list[Var]:
    """Write `emit` for one step or more, and the `initial` states and zeros for no step."""

    def none(w: Builder) -> list[Var]:
        return [*(Var(w, v.value) for v in initial), *(w.zeros_like(Var(w, v.value)) for v in zeros)]

    return cond(o, steps > 0, emit, none, [v.value for v in (*initial, *zeros)])
