"""vmap: nodes that depend on a direction, rewritten for all directions at once; the first axis is the batch axis.

A matrix that meets a vector in every step of a Scan meets a matrix here, which is many times faster. Each operator
has its own stacked form (see `operator_rules`); If, Scan and Loop keep theirs, around stacked bodies, as long as the
way they take does not depend on the direction (where it does, see `masks`). Nodes that have no stacked form become a
Scan over the directions of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnxgrad.batching.batched_node import BatchedNode, Unstackable, repeat_rows
from onnxgrad.batching.masks import any_of, is_total, mask_of, select
from onnxgrad.batching.operator_rules import SIZES, batching_rule
from onnxgrad.control_flow.iteration import Iteration, ScanAxis, loop, scan
from onnxgrad.engine.resolve import CONSTANT, is_constant
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import dependents, reads, subgraphs
from onnxgrad.ir.match import Dim
from onnxgrad.ir.notes import properties
from onnxgrad.ir.shapes import move_axis
from onnxgrad.ir.subgraphs import cond, empty, formal, give


def stack(
    builder: Builder,
    nodes: Sequence[ir.Node],
    seeds: Mapping[ir.Value, Var],
    wanted: Sequence[ir.Value],
    count: Var | list[int],
    scans: bool = True,
) -> list[Var]:
    """The stacks of `wanted`, from those of other values (`seeds`), as `nodes` compute them.

    Raises:
        Unstackable: it takes values of unknown rank, or sequences, or (unless it `scans`) a loop over the directions;
            what was written so far is left to be pruned.
    """
    first = next(iter(seeds.values())).value.shape[0]  # type: ignore[index]
    own = {v for node in nodes for v in node.outputs}
    s = Stacking(builder, dict(seeds), {}, count, first, scans)
    s.sizes = _names([*seeds, *(v for node in nodes for v in reads(node) if v not in own)]) - {None}
    s.write(nodes, wanted)
    return [s.stack_of(v) for v in wanted]


class Stacking:
    """The batching of the nodes of one graph.

    Attributes:
        stacks: what differs between directions, for all of them.
        plain: what does not, but had to be written again; other values are there as they are.
        sizes: names of dimensions that are the same in all directions.
        scans: True if nodes without a stacked form may run in a Scan over the directions.
    """

    def __init__(
        self,
        builder: Builder,
        stacks: dict[ir.Value, Var],
        plain: dict[ir.Value, Var],
        count: Var | list[int],
        first: Dim,
        scans: bool,
    ) -> None:
        self.b, self.stacks, self.plain, self.count, self.first = builder, stacks, plain, count, first
        self.scans = scans
        self.sizes: set[str | None] = set()

    def inside(self, builder: Builder) -> Stacking:
        """The same for a graph inside a node."""
        stacks, plain = ({v: builder.var(x.value) for v, x in held.items()} for held in (self.stacks, self.plain))
        inner = Stacking(builder, stacks, plain, self.count, self.first, self.scans)
        inner.sizes = self.sizes
        return inner

    def plain_of(self, value: ir.Value) -> Var:
        """`value`, which does not depend on the direction."""
        if value in self.stacks:
            raise Unstackable
        return self.plain.get(value, self.b.var(value))

    def stack_of(self, value: ir.Value) -> Var:
        """`value` for all directions."""
        return self.stacks[value] if value in self.stacks else self._repeated(value)

    def _repeated(self, value: ir.Value) -> Var:
        if not isinstance(value.type, ir.TensorType):
            raise Unstackable
        return repeat_rows(self.b, self.plain_of(value), self.count)

    def write(self, nodes: Sequence[ir.Node], wanted: Sequence[ir.Value]) -> None:
        """Write `nodes`, which lead to `wanted`."""
        readers: dict[ir.Value, list[ir.Node]] = {}
        for node in nodes:
            for v in reads(node):
                readers.setdefault(v, []).append(node)
        ends, waiting = set(wanted), _Waiting()

        def loops() -> None:
            self._scan(waiting.nodes, [v for v in waiting.given if v in ends or waiting.is_read_by(readers.get(v, ()))])
            waiting.clear()

        for node in nodes:
            operands = reads(node)
            is_waiting = any(v in waiting.given for v in operands)
            if not is_waiting and not any(v in self.stacks for v in operands):
                self._copy_node(node)
            elif is_waiting and node.op_type not in (*SIZES, "If", "Scan", "Loop") and batching_rule(node) is None:
                waiting.add(node)
            else:
                if is_waiting:
                    loops()
                try:
                    self._write(node)
                except Unstackable:
                    waiting.add(node)
        if waiting.nodes:
            loops()

    def _write(self, node: ir.Node) -> None:
        of = "" if node.domain else node.op_type
        if of == "If":
            self._branch(node)
        elif of in ("Scan", "Loop"):
            self._iterate(node)
        elif of in SIZES:
            step = BatchedNode(self.b, node, self.stacks, self.plain, self.count)
            self.plain[node.outputs[0]] = SIZES[of](step)
        else:
            write = batching_rule(node)
            if write is None:
                raise Unstackable
            results = write(BatchedNode(self.b, node, self.stacks, self.plain, self.count))
            results = [results] if isinstance(results, Var) else results
            self._keep(node.outputs, [self._stopped(y) for y in results] if is_constant(node) else results)

    def _stopped(self, y: Var) -> Var:
        """`y`, through which no derivative passes."""
        stopped = ir.Node("", "Identity", [y.value])
        stopped.metadata_props[CONSTANT] = "no derivative passes the node that is batched"
        return self.b.append(stopped)[0]

    def _keep(self, values: Iterable[ir.Value], found: Iterable[Var]) -> None:
        """Note the stacks of `values`, and their shapes."""
        for value, y in zip(values, found):
            self.stacks[value] = y
            if y.value.producer() is not None and value.shape is not None:
                assert y.shape is None or y.rank == len(value.shape) + 1, f"{value.name}: a stack of shape {y.shape}"
                y.value.shape = ir.Shape([self.first, *value.shape])

    # --- nodes that are the same in all directions --------------------------------------------------------

    def _copy_node(self, node: ir.Node) -> None:
        """The same node once more."""
        inputs = [None if v is None else self.plain_of(v).value for v in node.inputs]
        copies = Copies(
            {v: x.value for v, x in self.plain.items()} if subgraphs(node) else {}, self.b.names, self.b.noting
        )
        attributes = [copies.attribute(a) for a in node.attributes.values()]
        new = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs))
        for value, old in zip(new.outputs, node.outputs):
            value.type, value.shape = old.type, old.shape
        if metadata := properties(node):
            new.metadata_props.update(metadata)
        self.plain |= zip(node.outputs, self.b.append(new))

    # --- a loop over the directions ----------------------------------------------------------------

    def _scan(self, nodes: Sequence[ir.Node], given: Sequence[ir.Value]) -> None:
        """Run `nodes` in a Scan over the directions; only the values `given` are results."""
        if not given:
            return
        if not self.scans:
            raise Unstackable
        own = {v for node in nodes for v in node.outputs}
        read = dict.fromkeys(v for node in nodes for v in reads(node) if v not in own and v in self.stacks)
        if any(not isinstance(v.type, ir.TensorType) or v.shape is None for v in (*given, *read)):
            raise Unstackable
        if not _names(given) <= self.sizes:  # a Loop may run longer for one than for another
            raise Unstackable
        inner, body = empty(self.b, "directions")
        inside = self.inside(inner)
        inside.stacks.clear()
        for v in read:
            inside.plain[v] = formal(inner, v, v.name or "direction")
            body.inputs.append(inside.plain[v].value)
        for node in nodes:
            inside._copy_node(node)
        give(inner, [inside.plain[v] for v in given])
        pieces = [(self.stack_of(v), ScanAxis()) for v in read]
        self._keep(given, scan(self.b, body, [], pieces, [ScanAxis()] * len(given)))

    # --- control flow ------------------------------------------------------------------------------

    def _branch(self, node: ir.Node) -> None:
        if node.inputs[0] in self.stacks:
            return self._select(node)
        condition = self.plain_of(node.inputs[0])  # type: ignore[arg-type]

        def write(b: Builder, branch: ir.Graph) -> list[Var]:
            inside = self.inside(b)
            inside._fill(branch)
            return [inside.stack_of(v) for v in branch.outputs]

        then, other = (node.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
        likes = [ir.Value(name="") for _ in node.outputs]
        self._set_shapes(likes, node.outputs)
        self._keep(node.outputs, cond(self.b, condition, lambda b: write(b, then), lambda b: write(b, other), likes))

    def _select(self, node: ir.Node) -> None:
        """Batch an If whose condition differs between directions: run both branches, and select per direction."""
        condition, sides = self.stacks[node.inputs[0]], []  # type: ignore[index]
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        for branch in branches:
            if not is_total(branch):
                raise Unstackable
            inside = self.inside(self.b)
            inside._fill(branch)
            sides.append([inside.stack_of(v) for v in branch.outputs])
        for value, a, b, *both in zip(node.outputs, *(g.outputs for g in branches), *sides):
            if a.shape is None or a.shape != b.shape:
                raise Unstackable
            self._keep([value], [select(condition, *both)])

    def _fill(self, graph: ir.Graph) -> None:
        """Write all nodes of `graph`."""
        for value in graph.initializers.values():
            if value.const_value is None:
                raise Unstackable
            self.plain[value] = self.b.const(value.const_value.numpy())
        self.write(list(graph), list(graph.outputs))

    def _iterate(self, node: ir.Node) -> None:
        """Batch a Scan or Loop: states and slices that differ between directions become stacks."""
        it = Iteration.of(node)
        moved = self._varying_values(it)
        if it.lead and (any(v in self.stacks for v in node.inputs[:2]) or it.body.outputs[0] in moved):
            return self._mask(node, it)
        lead = [None if v is None else self.plain_of(v).value for v in node.inputs[: it.lead]]
        inner, body = empty(self.b, "body")
        inside = self.inside(inner)
        for value in it.body.inputs:
            new = formal(inner, value, value.name or "state")
            if value in moved:
                if value.shape is None:
                    raise Unstackable
                new.value.shape = ir.Shape([self.first, *value.shape])
                inside.stacks[value] = new
            else:
                inside.plain[value] = new
            body.inputs.append(new.value)
        inside._fill(it.body)
        is_state = [False] * it.head + [True] * it.count + [False] * len(it.outs)
        states = dict(zip(it.following, it.states))
        stacked = [states[v] in moved if s else v in moved for v, s in zip(it.body.outputs, is_state)]
        give(inner, [inside.stack_of(v) if s else inside.plain_of(v) for v, s in zip(it.body.outputs, stacked)])
        initial = [self.stack_of(o) if s in moved else self.plain_of(o) for s, o in zip(it.states, it.initial)]
        if it.lead:
            results = loop(self.b, body, lead[0], lead[1], initial)
        else:
            pieces = [self._piece(o, slot, s in moved) for s, o, slot in zip(it.slices, it.scanned, it.ins)]
            outs = [ScanAxis(0, slot.backwards) for slot in it.outs]
            results = scan(self.b, body, initial, pieces, outs)
        for i, (value, y, is_stack) in enumerate(zip(node.outputs, results, stacked[it.head :])):
            if i >= it.count:
                y = self._collected(y, it.outs[i - it.count], is_stack, value)
            if is_stack:
                self._keep([value], [y])
            else:
                self.plain[value] = y

    def _mask(self, node: ir.Node, it: Iteration) -> None:
        """A Loop that is longer for some directions: it runs to the longest; the others keep their last states."""
        if it.outs or not is_total(it.body) or any(v.shape is None for v in it.states):
            raise Unstackable  # slices of different numbers have no stack
        b = self.b
        trips, start = node.inputs[:2]
        active = repeat_rows(b, b.const(True), self.count) if start is None else mask_of(self.stack_of(start))
        limit = None if trips not in self.stacks else mask_of(self.stacks[trips])
        if limit is not None:
            active = b.And(active, limit > 0)
        inner, body = empty(b, "body")
        inside = self.inside(inner)
        number, _, *states = it.body.inputs
        inside.plain[number] = formal(inner, number, "iteration")
        ongoing = formal(inner, it.body.inputs[1], "ongoing")
        inside.plain[it.body.inputs[1]] = inner.const(True)
        for value in states:
            inside.stacks[value] = new = formal(inner, value, value.name or "state")
            new.value.shape = ir.Shape([self.first, *value.shape])  # type: ignore[misc]
        active_inside = formal(inner, active.value, "active")
        active_inside.value.shape = ir.Shape([self.first])
        inside._fill(it.body)
        following = []
        for value, after in zip(it.states, it.following):
            if after.shape != value.shape:
                raise Unstackable
            following.append(select(active_inside, inside.stack_of(after), inside.stacks[value]))
        more = inner.And(active_inside, mask_of(inside.stack_of(it.body.outputs[0])))
        if limit is not None:
            more = inner.And(more, inner.Add(inside.plain[number], 1) < Var(inner, limit.value))
        body.inputs.extend([inside.plain[number].value, ongoing.value])
        body.inputs.extend(inside.stacks[v].value for v in states)
        body.inputs.append(active_inside.value)
        give(inner, [any_of(more), *following, more])
        counted = None if limit is not None or trips is None else self.plain_of(trips).value
        results = loop(b, body, counted, any_of(active).value, [*map(self.stack_of, it.initial), active])
        self._keep(node.outputs, results[:-1])

    def _varying_values(self, it: Iteration) -> set[ir.Value]:
        """The values of the body that differ between directions at some step."""
        start = {i for i, o in it.formals() if o in self.stacks}
        while True:
            moved = dependents((n for n in it.body if n.op_type not in SIZES), start | set(self.stacks))
            more = {s for s, after in zip(it.states, it.following) if after in moved}
            if more <= start:
                return moved
            start |= more

    def _piece(self, value: ir.Value, slot: ScanAxis, is_stack: bool) -> tuple[Var, ScanAxis]:
        """A scan input, with its slices along the first axis."""
        if not is_stack:
            return self.plain_of(value), slot
        x = self.stack_of(value)
        return move_axis(x, slot.axis % (x.rank - 1) + 1, 0), ScanAxis(0, slot.backwards)

    def _collected(self, y: Var, slot: ScanAxis, is_stack: bool, like: ir.Value) -> Var:
        """Move the slices of a scan output from the first axis to their axis.

        A Scan can stack along any axis, but ONNX Runtime crashes if another axis is empty.
        """
        if like.shape is None and (is_stack or slot.axis):
            raise Unstackable
        rank, at = len(like.shape or ()), 0 if like.shape is None else slot.axis % max(len(like.shape), 1)
        perm = list(range(1, rank + is_stack))  # the direction, if any, and the axes of a slice
        perm.insert(at + is_stack, 0)
        return self.b.Transpose(y, perm=perm) if perm != list(range(len(perm))) else y

    def _set_shapes(self, values: Iterable[ir.Value], likes: Iterable[ir.Value]) -> None:
        for value, like in zip(values, likes):
            value.type = like.type
            value.shape = None if like.shape is None else ir.Shape([self.first, *like.shape])


class _Waiting:
    """Nodes without a stacked form, which will share a Scan."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.nodes: list[ir.Node] = []
        self.given: dict[ir.Value, None] = {}

    def add(self, node: ir.Node) -> None:
        self.nodes.append(node)
        self.given |= dict.fromkeys(node.outputs)

    def is_read_by(self, nodes: Sequence[ir.Node]) -> bool:
        """True if a node of `nodes` that is not waiting itself reads a waiting node."""
        return any(n not in self.nodes for n in nodes)


def _names(values: Iterable[ir.Value]) -> set[str | None]:
    """The names of the dimensions of `values`; None stands for those that have none."""
    return {d.value for v in values for d in v.shape or () if not isinstance(d, int)}
