"""The common form of Scan and Loop: a body maps states and slices to the next ones.

Derivatives also need two analyses of a body: the values that depend on given values through any number of steps,
and the states that given results need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir

from onnxgrad.engine.activity import Path, is_differentiable, moved_nodes
from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import captured, free, reach, reads
from onnxgrad.ir.match import Dim
from onnxgrad.rules.op import Op


class ScanAxis(NamedTuple):
    """The layout of slices in a scan input or output: the axis, and the direction."""

    axis: int = 0
    backwards: bool = False

    def reverse(self) -> ScanAxis:
        """The same slices in the opposite order."""
        return ScanAxis(self.axis, not self.backwards)


@dataclass
class Iteration:
    """A Scan or a Loop. A Loop has two more inputs in front, and its body one more output: the condition."""

    node: ir.Node
    body: ir.Graph
    lead: int
    head: int
    count: int
    ins: list[ScanAxis] = field(default_factory=list)
    outs: list[ScanAxis] = field(default_factory=list)
    #: for a copy: the originals of its values
    originals: dict[ir.Value, ir.Value] = field(default_factory=dict)

    @classmethod
    def of(cls, node: ir.Node) -> Iteration:
        """`node`, seen as an iteration."""
        body = node.attributes["body"].as_graph()
        if node.op_type == "Loop":
            count = len(body.inputs) - 2
            return cls(node, body, 2, 1, count, [], [ScanAxis()] * (len(body.outputs) - 1 - count))
        n = node.attributes["num_scan_inputs"].as_int()
        count = len(body.inputs) - n
        return cls(
            node,
            body,
            0,
            0,
            count,
            _slots(node, "scan_input", n),
            _slots(node, "scan_output", len(body.outputs) - count),
        )

    def copy(self, builder: Builder) -> tuple[Builder, Iteration]:
        """The same iteration with a copy of the body, and a builder for it."""
        copies = Copies({}, builder.names, builder.noting)
        body = copies.graph(self.body)
        copied = Iteration(self.node, body, self.lead, self.head, self.count, list(self.ins), list(self.outs))
        copied.originals = {new: old for old, new in copies.values.items()}
        return builder.nested(body), copied

    @property
    def initial(self) -> list[ir.Value]:
        """The first states, in the outer scope."""
        return list(self.node.inputs[self.lead : self.lead + self.count])  # type: ignore[arg-type]

    @property
    def scanned(self) -> list[ir.Value]:
        """The scan inputs, in the outer scope."""
        return list(self.node.inputs[self.lead + self.count :])  # type: ignore[arg-type]

    @property
    def states(self) -> list[ir.Value]:
        """The states that a step of the body starts from."""
        return list(self.body.inputs[self.lead : self.lead + self.count])

    @property
    def slices(self) -> list[ir.Value]:
        """The slices that a step of the body reads."""
        return list(self.body.inputs[self.lead + self.count :])

    @property
    def following(self) -> list[ir.Value]:
        """The states that a step of the body returns."""
        return list(self.body.outputs[self.head : self.head + self.count])

    @property
    def slice_results(self) -> list[ir.Value]:
        """The slices that a step of the body returns."""
        return list(self.body.outputs[self.head + self.count :])

    @property
    def length(self) -> Dim | None:
        """The number of steps, by the shapes of what is stacked; None if none is known."""
        stacked = [*zip(self.node.outputs[self.count :], self.outs), *zip(self.scanned, self.ins)]
        return next((v.shape[slot.axis] for v, slot in stacked if v.shape is not None), None)

    def next_like(self, i: int) -> ir.Value:
        """A value of the type and shape of the next state `i`; a Scan requires that states keep their shape."""
        return self.following[i] if self.lead else self.states[i]

    def formals(self) -> list[tuple[ir.Value, ir.Value]]:
        """States and slices of the body, each with its value outside."""
        return list(zip(self.states + self.slices, self.initial + self.scanned))

    def moved_by(self, outside: Collection[ir.Value], builder: Builder) -> Path:
        """The nodes of the body that depend, at some step, on values `outside`."""
        start = {i for i, o in self.formals() if o in outside and is_differentiable(i)}
        start |= {v for v in free(self.body) if v in outside}
        while True:
            moved = moved_nodes(list(self.body), start, builder)
            pairs = zip(self.states, self.following)
            more = {s for s, after in pairs if after in moved.active and is_differentiable(s)}
            if more <= start:
                return moved
            start |= more

    def leading_to(self, wanted: Iterable[ir.Value], path: Path) -> set[ir.Value]:
        """Outputs and values of the body through which `wanted` outputs depend on what is moved on `path`."""
        moved = path.active
        ends = {v for v in wanted if v in moved}
        while True:
            reached = set(ends)
            for node, rule in path.leading_to(ends).items():
                reached.update(v for i, v in enumerate(node.inputs) if v in moved and (rule is None or rule.carries(i)))
                reached.update(v for v in captured(node) if v in moved)
            more = {a for s, a in zip(self.states, self.following) if s in reached and a in moved}
            if more <= ends:
                return reached
            ends |= more

    def states_for(self, wanted: Iterable[ir.Value]) -> list[int]:
        """The states that must be carried to compute `wanted` at every step."""
        producers = {v: n for n in self.body for v in n.outputs}
        follows = dict(zip(self.states, self.following))

        def successors(value: ir.Value) -> list[ir.Value]:
            return [follows[value]] if value in follows else reads(producers[value]) if value in producers else []

        needed = set(reach(wanted, successors))
        return [i for i, s in enumerate(self.states) if s in needed]


def _slots(node: ir.Node, kind: str, count: int) -> list[ScanAxis]:
    axes, backwards = (node.attributes.get_ints(f"{kind}_{name}", [0] * count) for name in ("axes", "directions"))
    return [ScanAxis(axis, bool(back)) for axis, back in zip(axes, backwards)]


def scan(
    builder: Builder,
    body: ir.Graph,
    initial: Sequence[Var],
    scanned: Sequence[tuple[Var, ScanAxis]],
    outs: Sequence[ScanAxis],
) -> list[Var]:
    """Append a Scan of `body`; its last states and scan outputs.

    ONNX Runtime dies of a division by zero where it stacks along another axis than the first beside an axis that is
    empty (found in 1.31); where there might be one, slices are stacked along the first axis, which is moved then.

    Raises:
        NotDifferentiable: the rank of an output of the body is not known, which ONNX Runtime must know.
    """
    unknown = next((v.name for v in body.outputs if v.shape is None), None)
    if unknown is not None:
        raise NotDifferentiable(
            f"its derivative is a Scan, whose step gives {unknown!r} of unknown rank\n"
            "  hint: declare the shapes of the body's inputs and outputs (dimensions may stay symbolic)"
        )
    ins = [slot for _, slot in scanned]
    pieces = body.outputs[len(initial) :]
    ranks = [len(v.shape or ()) + 1 for v in pieces]
    filled = [all(isinstance(d, int) and d > 0 for d in v.shape or ()) for v in pieces]
    moved = [0 if full else slot.axis % rank for full, slot, rank in zip(filled, outs, ranks)]
    outs = [ScanAxis(0, slot.backwards) if axis else slot for slot, axis in zip(outs, moved)]
    attrs: list[ir.Attr] = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(ins))]
    for kind, slots in (("input", ins), ("output", outs)):
        if any(s.axis for s in slots):
            attrs.append(ir.AttrInt64s(f"scan_{kind}_axes", [s.axis for s in slots]))
        if any(s.backwards for s in slots):
            attrs.append(ir.AttrInt64s(f"scan_{kind}_directions", [int(s.backwards) for s in slots]))
    operands = [v.value for v in initial] + [v.value for v, _ in scanned]
    node = ir.Node("", "Scan", operands, attrs, num_outputs=len(body.outputs))
    for state, first in zip(node.outputs, initial):
        state.type, state.shape = first.value.type, first.value.shape
    results = list(builder.append(node))
    for i, (axis, rank) in enumerate(zip(moved, ranks), start=len(initial)):
        if axis:
            perm = list(range(1, rank))
            results[i] = builder.Transpose(results[i], perm=[*perm[:axis], 0, *perm[axis:]])
    return results


def loop(
    builder: Builder,
    body: ir.Graph,
    trips: ir.Value | None,
    condition: ir.Value | None,
    initial: Sequence[Var],
) -> list[Var]:
    """Append a Loop of `body`; its last states and scan outputs."""
    operands = [trips, condition, *(v.value for v in initial)]
    node = ir.Node("", "Loop", operands, [ir.AttrGraph("body", body)], num_outputs=len(body.outputs) - 1)
    return list(builder.append(node))


def stack_outputs(op: Op, value: ir.Value) -> ir.Value:
    """Have the primal iteration also stack `value`, from inside its body."""
    it = Iteration.of(op.node)
    length = it.length
    it.body.outputs.append(op.builder.nested(it.body).copy(value).value)
    (out,) = add_outputs(op.node, 1)
    out.name = op.builder.names.fresh(f"{value.name}_tape")
    out.type = value.type
    if value.shape is not None:
        out.shape = ir.Shape([length, *value.shape])
    return out


def add_outputs(node: ir.Node, count: int) -> Sequence[ir.Value]:
    """Add `count` outputs to a Scan or Loop, stacked along the first axis; the new values."""
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].as_ints(), *[0] * count])
    node.resize_outputs(len(node.outputs) + count)
    return node.outputs[len(node.outputs) - count :]
