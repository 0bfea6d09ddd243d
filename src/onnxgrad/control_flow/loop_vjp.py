"""Reverse mode of Scan and Loop: an iteration over the steps, last one first.

It carries the cotangents of the states and accumulates those of the captured values, whose memory therefore does not
depend on the number of steps. Its step is the transpose of the primal step, which reads residuals: the state at the
start of the step, and values that the step computes. Policies decide about these: they are stacked by the primal
iteration or computed again (see `checkpointing`); sums over the steps become one product after the iteration
(`deferred_products`); nodes on residuals alone are computed for all steps at once (`hoisting`).
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from onnxgrad.control_flow.checkpointing import SavePolicy, save_policy
from onnxgrad.control_flow.deferred_products import DeferredSum, defer
from onnxgrad.control_flow.hoisting import hoist_elementwise, hoist_transposes
from onnxgrad.control_flow.indexed_slices import StepRows, StepSlice, step_slices
from onnxgrad.control_flow.iteration import Iteration, ScanAxis
from onnxgrad.control_flow.reverse_iteration import Backwards, StepInput
from onnxgrad.control_flow.saved_states import saved_state
from onnxgrad.control_flow.saved_values import stack_saved
from onnxgrad.engine.reverse import add_cotangents, reverse_terms, total
from onnxgrad.ir import Builder, Var, same_shape
from onnxgrad.ir.graph import values_read
from onnxgrad.ir.subgraphs import formal, give
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import Symbolic, Term, add


def pull(op: Op, cotangents: object) -> dict[ir.Value, Term]:
    """The cotangents of initial states, scan inputs and captured values of a Scan or Loop."""
    of = dict(enumerate(cotangents if isinstance(cotangents, tuple) else (cotangents,)))
    step = _TransposedStep(op, {i: g for i, g in of.items() if g is not None})
    if not step.terms and not step.carried:
        return {}
    stacks = save_policy(op.node) is SavePolicy.RESIDUALS
    if stacks:
        step.stack_residuals()
        step.defer_sums()
    iteration = step.iterate()
    if stacks:
        hoist_elementwise(iteration)
        hoist_transposes(iteration)
    return add_cotangents(zip(step.places(), iteration.emit()))


class _TransposedStep:
    """The transpose of a step, written after a copy of the step, and the policies on the residuals that it reads.

    Attributes:
        op: the primal iteration.
        of: the cotangents of its outputs, by number.
        b: writes into the body of `it`, a copy of the iteration.
        carried: the states whose cotangents the backward iteration carries.
        read: the slices that the primal step returns and whose cotangents the backward step reads.
        terms: the terms of cotangents in the body, of what they are; those of captured values are symbolic.
        backs: the cotangents of the carried states.
        captures, pieces: captured values and slices that get a cotangent.
        picked: the terms that are the cotangents of indexed slices.
        saved: values that the primal iteration stacks, and the columns that the backward step reads in their place.
        later: captured values whose cotangents are computed after the iteration.
    """

    def __init__(self, op: Op, of: dict[int, Var]) -> None:
        self.op, self.of, self.o = op, of, op.builder
        self.b, self.it = Iteration.of(op.node).copy(self.o)
        b, it = self.b, self.it
        self.states, self.slices = it.states, it.slices
        path = it.moved_by(op.active, b)
        ends = [*it.following, *it.slice_results]
        reached = it.leading_to((ends[i] for i in of), path)
        self.carried = [i for i in range(it.count) if _is_carried(op, it, i, i in of, reached)]
        self.read = [k for k, v in enumerate(it.slice_results) if it.count + k in of and v in path.active]
        self.g_states = {i: formal(b, it.next_like(i), "cotangent") for i in self.carried}
        self.g_slices = {k: formal(b, it.slice_results[k], "cotangent") for k in self.read}
        seeds = add_cotangents(
            [(it.following[i], g) for i, g in self.g_states.items()]
            + [(it.slice_results[k], g) for k, g in self.g_slices.items()]
        )
        captures = [c.value for c in op.captures if c.value in op.active and c.value in reached]
        wrt = [*(self.states[i] for i in self.carried), *(s for s in self.slices if s in reached), *captures]
        nodes = list(it.body)
        border = b.append(ir.Node("", "Constant", [], [ir.AttrInt64("value_int", 0)]))[0].value.producer()
        self.terms = reverse_terms(b, nodes, seeds, wrt, captures)
        self.primal = list(itertools.takewhile(lambda n: n is not border, it.body))
        self.pieces = [j for j, s in enumerate(self.slices) if s in self.terms]
        self.picked = self._pick(captures) if _is_stackable(op, it) else []
        self.captures = [c for c in captures if self.terms.get(c)]
        self.backs = [
            total(self.terms[s]) if s in self.terms else _zero_state(b.var(s), g)
            for s, g in ((self.states[i], g) for i, g in self.g_states.items())
        ]
        self.saved: dict[ir.Value, StepInput] = {}
        self.later: dict[ir.Value, list[DeferredSum]] = {}

    def _pick(self, captures: list[ir.Value]) -> list[StepSlice | StepRows]:
        """Remove the terms of indexed slices from those of captured values."""
        picked: list[StepSlice | StepRows] = []
        stacks = save_policy(self.op.node) is SavePolicy.RESIDUALS
        for terms in (self.terms[c] for c in captures if c in self.terms):
            slices = step_slices(terms, self.it, stacks)
            picked += slices.values()
            terms[:] = [t for i, t in enumerate(terms) if i not in slices]
        return picked

    # --- policies ------------------------------------------------------------------------------------

    def stack_residuals(self) -> None:
        """Have the primal iteration stack the residuals, in place of computing them again."""
        parts = [t for c in self.captures for t in self.terms[c]]
        results = [*self.backs, *(x for t in parts for x in (t.operands if isinstance(t, Symbolic) else [t]))]
        ends = list(self.it.body.outputs)
        needed = [*(x.value for x in results), *(v for v, _ in self._gives())]
        columns = stack_saved(self.op, self.b, self.it.originals, self.primal, ends, needed)
        instead = {v: c.inner for v, c in columns.items()}

        def now(x: Var) -> Var:
            return Var(self.b, instead.get(x.value, x.value))

        self.backs = [now(g) for g in self.backs]
        for terms in self.terms.values():
            terms[:] = [t.map_operands(now) if isinstance(t, Symbolic) else now(t) for t in terms]
        for p in self.picked:
            p.read_instead(instead)
        self.saved = {c.inner: c for c in columns.values()}

    def defer_sums(self) -> None:
        """Compute cotangents of captured values from stacks after the iteration, where that is possible."""
        if not _is_stackable(self.op, self.it):
            return
        columns = {v: c for v, c in self._columns().items() if c.slot.axis == 0 and c.outer is not None}
        taped = [s for s in self.it.states if s.shape is not None]
        for c in self.captures:
            asked = {**columns, **{s: StepInput(s, None, ScanAxis(0, backwards=True)) for s in taped}}
            sums = defer(self.terms[c], c, asked, dict(self._gives()))
            for s in sums:
                if s.read is not None and s.read.outer is None:
                    s.read = saved_state(self.op, self.it.states.index(s.read.inner), s.read.inner)
            if sums:
                self.later[c] = sums

    # --- the iteration -------------------------------------------------------------------------------

    def iterate(self) -> Backwards:
        """The backward iteration over this step, which becomes its body."""
        op, o, b, it = self.op, self.o, self.b, self.it
        body, columns, gives = it.body, self._columns(), self._gives()
        for parts in self.later.values():
            gives += [(p.given, p.slot) for p in parts if (p.given, p.slot) not in gives]
        added = self._added
        sums = [formal(b, c, "sum") for c in added]
        totals = [add([s, total(self.terms[c])]) for s, c in zip(sums, added)]
        give(b, [*self.backs, *totals, *(v for v, _ in gives)])
        likes = [*(self.states[i] for i in self.carried), *added, *(self.slices[j] for j in self.pieces)]
        for end, like in zip(body.outputs, [*likes, *(v for p in self.picked for v, _ in p.gives)]):
            end.type, end.shape = like.type, like.shape
        if it.lead and body.inputs[1] in values_read(body):  # a step was made because the condition held
            body.inputs[1].replace_all_uses_with(b.const(True).value)
        used = values_read(body)
        reads = [columns[v] for v in columns if v in used]
        reads += [saved_state(op, i, s) for i, s in enumerate(self.states) if s in used]
        if it.lead and body.inputs[0] in used:
            reads.append(StepInput(body.inputs[0], None, ScanAxis(0, backwards=True)))
        first = [Var(o, self.of[i].value) if i in self.of else _zeros(op, it, i) for i in self.carried]
        zeros = [o.zeros_like(Var(o, c)) for c in added]

        def closing(w: Builder, stacks: list[Var]) -> list[Term]:
            """The cotangents that are computed after the iteration from its stacked outputs."""
            places = {g: stacks[i] for i, g in reversed(list(enumerate(gives)))}
            wholes = [p.assemble(w, *(places[g] for g in p.gives)) for p in self.picked]
            rest = [[p.finish(places[p.given, p.slot]) for p in parts] for parts in self.later.values()]
            sums = [add(terms) if len(terms) > 1 else terms[0] for terms in rest]
            return [*stacks[: len(self.pieces)], *wholes, *sums]

        slots, instead = [slot for _, slot in gives], [*(p.x for p in self.picked), *self.later]
        return Backwards(op, b, reads, [*self.g_states.values(), *sums], [*first, *zeros], slots, closing, instead)

    def places(self) -> list[ir.Value]:
        """The values outside that the results of the backward iteration are cotangents of, in order."""
        it = self.it
        ends = [*(it.initial[i] for i in self.carried), *self._added, *(it.scanned[j] for j in self.pieces)]
        return [*ends, *(p.x for p in self.picked), *self.later]

    @property
    def _added(self) -> list[ir.Value]:
        """The captured values whose cotangents are added up from step to step."""
        return [c for c in self.captures if c not in self.later]

    def _gives(self) -> list[tuple[ir.Value, ScanAxis]]:
        """The cotangents of slices, which the backward iteration stacks, and their layouts."""
        gives = [(total(self.terms[self.slices[j]]).value, self.it.ins[j].reverse()) for j in self.pieces]
        return gives + [g for p in self.picked for g in p.gives]

    def _columns(self) -> dict[ir.Value, StepInput]:
        """The values that the backward step may read of its primal step, each with its column."""
        columns, it = dict(self.saved), self.it
        for s, x, slot in zip(self.slices, it.scanned, it.ins):
            columns[s] = StepInput(s, x, slot.reverse())
        for k, g in self.g_slices.items():
            columns[g.value] = StepInput(g.value, self.of[it.count + k].value, it.outs[k].reverse())
        return columns


def _is_stackable(op: Op, it: Iteration) -> bool:
    """True if tensors keep their shapes in all steps, so that the backward iteration can be a Scan."""
    return not it.lead or all(
        isinstance(s.type, ir.TensorType) and same_shape(Var(op.builder, s), Var(op.builder, x))
        for s, x in zip(it.states, it.initial)
    )


def _is_carried(op: Op, it: Iteration, i: int, asked: bool, reached: set[ir.Value]) -> bool:
    """True if the backward iteration carries the cotangent of state `i`.

    It does if a step computes the next value of another state from this one, or reads it: a state that a step resets
    still has the value that the first step read. A Loop of no steps returns its initial states unchanged.
    """
    if it.following[i] in reached or it.states[i] in reached:
        return True
    return bool(it.lead) and asked and it.initial[i] in op.active


def _zero_state(state: Var, g: Var) -> Var:
    """Zeros like `state`; like its next cotangent if the shapes are equal, so that the state need not be saved."""
    return state.builder.zeros_like(g if same_shape(state, g) else state)


def _zeros(op: Op, it: Iteration, i: int) -> Var:
    """The cotangent of a last state that nothing reads."""
    final = op.node.outputs[i]
    return op.zeros_like(Var(op.builder, final if final.name else it.initial[i]))
