"""Reverse mode of Scan and Loop: an iteration over the steps, last one first.

It carries the cotangents of the states and accumulates those of the captured values, whose memory therefore does not
depend on the number of steps. It reads the state at the start of each primal step; the other residuals are saved or
recomputed (see `checkpointing`).
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from onnxgrad.control_flow.checkpointing import SavePolicy, save_policy
from onnxgrad.control_flow.deferred_products import Product, RowSum, products
from onnxgrad.control_flow.deferred_products import sum_products as sums_of
from onnxgrad.control_flow.hoisting import hoist_elementwise, hoist_transposes
from onnxgrad.control_flow.indexed_slices import step_slices
from onnxgrad.control_flow.iteration import Iteration, ScanAxis
from onnxgrad.control_flow.reverse_iteration import Backwards, StepInput
from onnxgrad.control_flow.saved_states import saved_state
from onnxgrad.control_flow.saved_values import stack_saved
from onnxgrad.engine import reverse
from onnxgrad.engine.reverse import add_cotangents
from onnxgrad.ir import Builder, Var, same_shape
from onnxgrad.ir.graph import values_read
from onnxgrad.ir.subgraphs import formal, give
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import add


def pull(op: Op, cotangents: object) -> dict[ir.Value, Var]:
    """The cotangents of initial states, scan inputs and captured values of a Scan or Loop."""
    of = dict(enumerate(cotangents if isinstance(cotangents, tuple) else (cotangents,)))
    of = {i: g for i, g in of.items() if g is not None}
    o = op.builder
    b, it = Iteration.of(op.node).copy(o)
    body, states, slices = it.body, it.states, it.slices
    moved = it.moved_by(op.active, b)
    ends = [*it.following, *it.slice_results]
    reached = it.leading_to((ends[i] for i in of), moved, b)
    carried = [i for i in range(it.count) if _is_carried(op, it, i, i in of, reached)]
    read = [k for k, v in enumerate(it.slice_results) if it.count + k in of and v in moved]
    captures = [c.value for c in op.captures if c.value in op.active and c.value in reached]

    g_states = {i: formal(b, it.next_like(i), "cotangent") for i in carried}
    g_slices = {k: formal(b, it.slice_results[k], "cotangent") for k in read}
    seeds = add_cotangents(
        [(it.following[i], g_states[i]) for i in carried] + [(it.slice_results[k], g_slices[k]) for k in read]
    )
    picked = [p for p in step_slices(op, body) if p.out in reached] if _is_stackable(op, it) else []
    wrt = [*(states[i] for i in carried), *(s for s in slices if s in reached), *captures, *(p.out for p in picked)]
    nodes = [n for n in body if n not in {p.node for p in picked}]
    border = b.append(ir.Node("", "Constant", [], [ir.AttrInt64("value_int", 0)]))[0].value.producer()
    found = reverse(b, nodes, seeds, wrt)
    if not found and not carried:
        return {}

    pieces = [j for j, s in enumerate(slices) if s in found]
    picked = [p for p in picked if p.out in found]
    backs = [found.get(states[i]) or _zero_state(b.var(states[i]), g_states[i]) for i in carried]
    steps = [*backs, *(found[c] for c in captures if c in found), *(found[slices[j]] for j in pieces)]
    steps += [found[p.out] for p in picked]
    at_hand: dict[ir.Value, StepInput] = {}
    if save_policy(op.node) is SavePolicy.RESIDUALS:
        primal = list(itertools.takewhile(lambda n: n is not border, body))
        columns = stack_saved(op, b, it.originals, primal, list(body.outputs), [s.value for s in steps])
        instead = {v: c.inner for v, c in columns.items()}
        backs = [Var(b, instead.get(g.value, g.value)) for g in backs]
        found = {v: Var(b, instead.get(g.value, g.value)) for v, g in found.items()}
        at_hand = {c.inner: c for c in columns.values()}
    for s, x, slot in zip(slices, it.scanned, it.ins):
        at_hand[s] = StepInput(s, x, slot.reverse())
    for k in read:
        at_hand[g_slices[k].value] = StepInput(g_slices[k].value, of[it.count + k].value, it.outs[k].reverse())

    gives = [(found[slices[j]].value, it.ins[j].reverse()) for j in pieces]
    gives += [(found[p.out].value, p.slot) for p in picked]
    later = _products(op, it, found, captures, at_hand, gives)
    for parts in later.values():
        gives += [(p.b, p.slot) for p in parts if (p.b, p.slot) not in gives]
    added = [c for c in captures if c in found and c not in later]
    sums = [formal(b, c, "sum") for c in added]
    totals = [add([s, Var(b, found[c].value)]) for s, c in zip(sums, added)]
    give(b, [*backs, *totals, *(v for v, _ in gives)])
    likes = [*(states[i] for i in carried), *added, *(slices[j] for j in pieces), *(p.out for p in picked)]
    for end, like in zip(body.outputs, likes):
        end.type, end.shape = like.type, like.shape
    if it.lead and body.inputs[1] in values_read(body):  # a step was made because the condition held
        body.inputs[1].replace_all_uses_with(b.const(True).value)

    used = values_read(body)
    reads = [at_hand[v] for v in at_hand if v in used]
    reads += [saved_state(op, i, states[i]) for i in range(it.count) if states[i] in used]
    if it.lead and body.inputs[0] in used:
        reads.append(StepInput(body.inputs[0], None, ScanAxis(0, backwards=True)))
    if save_policy(op.node) is SavePolicy.RESIDUALS:
        own = [*g_states.values(), *sums]
        reads = hoist_elementwise(b, o, reads, own)
        hoist_transposes(b, o, reads, own)
    first = [Var(o, of[i].value) if i in of else _zeros(op, it, i) for i in carried]
    zeros = [o.zeros_like(Var(o, c)) for c in added]

    def closing(w: Builder, stacks: list[Var]) -> list[Var]:
        """The cotangents that are computed after the iteration from its stacked outputs."""
        places = {g: stacks[i] for i, g in reversed(list(enumerate(gives)))}
        wholes = [p.assemble(w, stacks[len(pieces) + i]) for i, p in enumerate(picked)]
        rest = [sums_of(w, parts, [places[p.b, p.slot] for p in parts], Var(w, c)) for c, parts in later.items()]
        return [*stacks[: len(pieces)], *wholes, *rest]

    back = Backwards(op, b, reads, [*g_states.values(), *sums], [*first, *zeros], [slot for _, slot in gives], closing)
    back.instead = [*(p.x for p in picked), *later]
    results = back.emit()
    places = [*(it.initial[i] for i in carried), *added, *(it.scanned[j] for j in pieces)]
    places += [*(p.x for p in picked), *later]
    return add_cotangents(zip(places, results))


def _products(
    op: Op,
    it: Iteration,
    found: dict[ir.Value, Var],
    captures: list[ir.Value],
    at_hand: dict[ir.Value, StepInput],
    gives: list[tuple[ir.Value, ScanAxis]],
) -> dict[ir.Value, list[Product | RowSum]]:
    """The captured values whose cotangents are products or sums of stacked values, where all residuals are stacked."""
    if save_policy(op.node) is not SavePolicy.RESIDUALS or not _is_stackable(op, it):
        return {}
    columns = {v: c for v, c in at_hand.items() if c.slot.axis == 0 and c.outer is not None}
    taped = {s: None for s in it.states if s.shape is not None}
    later = {}
    for c in captures:
        if c not in found:
            continue
        asked = {**columns, **{s: StepInput(s, None, ScanAxis(0, backwards=True)) for s in taped}}
        parts = products(found[c].value, c, asked, dict(gives))
        for p in parts:
            if isinstance(p, Product) and p.a.outer is None:
                p.a = saved_state(op, it.states.index(p.a.inner), p.a.inner)
        if parts:
            later[c] = parts
    return later


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
