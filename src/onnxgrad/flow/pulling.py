"""Reverse mode of Scan and Loop: an iteration over the steps, last one first.

Its states are the cotangents of the states and, added up, those of the captured values (so that these
take the memory of one, whatever the number of steps). It reads the states that the primal iteration had
at the start of each step, and computes a step anew before it pulls cotangents through it.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.engine import reverse
from onnxgrad.flow.backwards import Backwards, Column
from onnxgrad.flow.bodies import formal, give, values_read
from onnxgrad.flow.iteration import Iteration, Slot
from onnxgrad.flow.tapes import tape
from onnxgrad.ir import Var, same_shape
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import add


def pull(op: Op, cotangents: object) -> dict[ir.Value, Var]:
    """The cotangents of initial states, scan inputs and captured values of a Scan or Loop."""
    of = dict(enumerate(cotangents if isinstance(cotangents, tuple) else (cotangents,)))
    of = {i: g for i, g in of.items() if g is not None}
    o = op.builder
    b, it = Iteration.of(op.node).copy(o)
    body, states, slices = it.body, it.states, it.slices
    moved = it.moved_by(op.active, b)
    ends = [*it.following, *it.given]
    reached = it.leading_to((ends[i] for i in of), moved, b)
    carried = [i for i in range(it.count) if _is_carried(op, it, i, i in of, reached)]
    read = [k for k, v in enumerate(it.given) if it.count + k in of and v in moved]
    captures = [c.value for c in op.captures if c.value in op.active and c.value in reached]

    g_states = {i: formal(b, it.next_like(i), "cotangent") for i in carried}
    g_slices = {k: formal(b, it.given[k], "cotangent") for k in read}
    seeds: dict[ir.Value, Var] = {}
    pairs = [(it.following[i], g_states[i]) for i in carried] + [(it.given[k], g_slices[k]) for k in read]
    for v, g in pairs:
        seeds[v] = add([seeds[v], g]) if v in seeds else g
    wrt = [*(states[i] for i in carried), *(s for s in slices if s in reached), *captures]
    found = reverse(b, list(body), seeds, wrt)
    if not found and not carried:
        return {}

    summed = [c for c in captures if c in found]
    pieces = [j for j, s in enumerate(slices) if s in found]
    sums = [formal(b, c, "sum") for c in summed]
    backs = [found.get(states[i]) or _nothing(b.var(states[i]), g_states[i]) for i in carried]
    totals = [add([s, Var(b, found[c].value)]) for s, c in zip(sums, summed)]
    give(b, [*backs, *totals, *(found[slices[j]] for j in pieces)])
    likes = [*(states[i] for i in carried), *summed, *(slices[j] for j in pieces)]
    for end, like in zip(body.outputs, likes):
        end.type, end.shape = like.type, like.shape
    if it.lead and body.inputs[1] in values_read(body):  # a step was made because the condition held
        body.inputs[1].replace_all_uses_with(b.const(True).value)

    used = values_read(body)
    columns = [tape(op, i, states[i]) for i in range(it.count) if states[i] in used]
    for s, x, slot in zip(slices, it.scanned, it.ins):
        if s in used:
            columns.append(Column(s, x, slot.turned()))
    columns += [Column(g_slices[k].value, of[it.count + k].value, it.outs[k].turned()) for k in read]
    if it.lead and body.inputs[0] in used:
        columns.append(Column(body.inputs[0], None, Slot(0, backwards=True)))
    first = [Var(o, of[i].value) if i in of else _zeros(op, it, i) for i in carried]
    zeros = [o.zeros_like(Var(o, c)) for c in summed]
    back = Backwards(
        op, b, columns, [*g_states.values(), *sums], [*first, *zeros], [it.ins[j].turned() for j in pieces]
    )
    results = back.emit()
    pulled: dict[ir.Value, list[Var]] = {}
    for value, g in zip([*(it.initial[i] for i in carried), *summed, *(it.scanned[j] for j in pieces)], results):
        pulled.setdefault(value, []).append(g)
    return {value: add(gs) for value, gs in pulled.items()}


def _is_carried(op: Op, it: Iteration, i: int, asked: bool, reached: set[ir.Value]) -> bool:
    """Whether a step back has the cotangent of state `i` to hand on.

    It has where the step made the next state of something, or read this one: a state that a step resets
    still carries what the first step read. A Loop of no steps gives its first states back as they are.
    """
    if it.following[i] in reached or it.states[i] in reached:
        return True
    return bool(it.lead) and asked and it.initial[i] in op.active


def _nothing(state: Var, g: Var) -> Var:
    """Zeros like `state`; like its next cotangent if that shape is the same, since that needs no tape."""
    return state.builder.zeros_like(g if same_shape(state, g) else state)


def _zeros(op: Op, it: Iteration, i: int) -> Var:
    """The cotangent of a last state that nothing reads."""
    final = op.node.outputs[i]
    return op.zeros_like(Var(op.builder, final if final.name else it.initial[i]))
