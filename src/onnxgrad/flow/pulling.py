"""Reverse mode of Scan and Loop: a Scan over the steps, last one first.

Its states are the cotangents of the states and, added up, those of the captured values (so that these
take the memory of one, whatever the number of steps). It reads the states that the primal iteration had
at the start of each step, which that one now also writes out, and computes a step anew before it pulls
cotangents through it.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.engine import reverse
from onnxgrad.errors import NotDifferentiable
from onnxgrad.flow.bodies import empty, formal, give, values_read
from onnxgrad.flow.iteration import Iteration, Slot, scan
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.infer_loops import always_goes_on
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import add


def pull(op: Op, cotangents: object) -> dict[ir.Value, Var]:
    """The cotangents of initial states, scan inputs and captured values of a Scan or Loop."""
    of = dict(enumerate(cotangents if isinstance(cotangents, tuple) else (cotangents,)))
    of = {i: g for i, g in of.items() if g is not None}
    o = op.builder
    primal = Iteration.of(op.node)
    b, it = primal.copy(o)
    body = it.body
    moved = it.moved_by(op.active, b)
    ends = [*it.following, *it.given]
    reached = it.leading_to((ends[i] for i in of), moved, b)
    carried = [i for i, v in enumerate(it.following) if v in reached]
    read = [k for k, v in enumerate(it.given) if it.count + k in of and v in moved]
    states, slices = it.states, it.slices
    captures = [c.value for c in op.captures if c.value in op.active and c.value in reached]

    g_states = {i: formal(b, states[i], "cotangent") for i in carried}
    g_slices = {k: formal(b, it.given[k], "cotangent") for k in read}
    seeds: dict[ir.Value, Var] = {}
    for v, g in [
        *((it.following[i], g_states[i]) for i in carried),
        *((it.given[k], g_slices[k]) for k in read),
    ]:
        seeds[v] = seeds[v] + g if v in seeds else g
    wrt = [*(states[i] for i in carried), *(s for s in slices if s in reached), *captures]
    found = reverse(b, list(body), seeds, wrt)

    backs = [found.get(states[i]) or b.zeros_like(g_states[i]) for i in carried]
    summed = [c for c in captures if c in found]
    sums = {c: formal(b, c, "sum") for c in summed}
    pieces = [j for j, s in enumerate(slices) if s in found]
    totals = [sums[c] + Var(b, found[c].value) for c in summed]
    give(b, [*backs, *totals, *(found[slices[j]] for j in pieces)])
    likes = [*(states[i] for i in carried), *summed, *(slices[j] for j in pieces)]
    for end, like in zip(body.outputs, likes):
        end.type, end.shape = like.type, like.shape
    if it.lead and body.inputs[1] in values_read(body):
        body.inputs[1].replace_all_uses_with(b.const(True).value)

    first = {
        i: Var(o, of[i].value) if i in of else _zeros(o, op.node.outputs[i], it.initial[i]) for i in carried
    }
    used = values_read(body)
    tapes = [(states[i], tape(op, primal, i), Slot(0, True)) for i in range(it.count) if states[i] in used]
    scanned = [(s, x, slot.turned()) for s, x, slot in zip(slices, it.scanned, it.ins) if s in used]
    given = [(g_slices[k].value, of[it.count + k].value, it.outs[k].turned()) for k in read]
    number = body.inputs[0] if it.lead and body.inputs[0] in used else None
    zeros = [o.zeros_like(Var(o, c)) for c in summed]
    columns = [*tapes, *scanned, *given]
    if slices and not columns:  # a Scan takes its number of steps from what it reads
        columns = [(slices[0], it.scanned[0], it.ins[0].turned())]
    steps = None
    if it.lead:
        steps = _steps(op, primal, tapes)
        if number is not None or not columns:
            number = number if number is not None else body.inputs[0]
            columns.append((number, o.Range(o.const(0), steps, o.const(1)).value, Slot(0, True)))
    body.inputs.clear()
    body.inputs.extend([*(g.value for g in g_states.values()), *(s.value for s in sums.values())])
    body.inputs.extend([inner for inner, _, _ in columns])

    initial = [*first.values(), *zeros]

    def emit(w: Builder) -> list[Var]:
        return scan(
            w,
            body,
            [Var(w, v.value) for v in initial],
            [(Var(w, x), slot) for _, x, slot in columns],
            [it.ins[j].turned() for j in pieces],
        )

    if steps is None or _at_least_once(op.node):
        results = emit(o)
    else:
        results = _unless_none(o, steps, emit, initial)
    pulled: dict[ir.Value, list[Var]] = {}
    for value, g in zip(
        [*(it.initial[i] for i in carried), *summed, *(it.scanned[j] for j in pieces)], results
    ):
        pulled.setdefault(value, []).append(g)
    return {value: add(gs) for value, gs in pulled.items()}


def _zeros(o: Builder, final: ir.Value, initial: ir.Value) -> Var:
    """The cotangent of a last state that nothing reads."""
    return o.zeros_like(Var(o, final if final.name else initial))


def tape(op: Op, it: Iteration, i: int) -> ir.Value:
    """State `i` at the start of each step of the primal iteration, stacked: a further output of it."""
    state = it.states[i]
    if not isinstance(state.type, ir.TensorType):
        raise NotDifferentiable(f"its state {state.name!r} is no tensor, and only tensors can be stacked")
    for k, (value, slot) in enumerate(zip(it.given, it.outs)):
        maker = value.producer()
        if maker is not None and maker.op_type == "Identity" and maker.inputs[0] is state and slot == Slot():
            return op.node.outputs[it.count + k]
    return _write_out(op, it, state)


def _write_out(op: Op, it: Iteration, value: ir.Value) -> ir.Value:
    """Have the primal iteration also stack `value`, from inside its body."""
    copy = op.builder.nested(it.body).append(ir.Node("", "Identity", [value]))[0].value
    copy.type, copy.shape = value.type, value.shape
    it.body.outputs.append(copy)
    it.outs.append(Slot())
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in op.node.attributes:
            held = op.node.attributes[name].as_ints()
            op.node.attributes[name] = ir.AttrInt64s(name, [*held, 0])
    op.node.resize_outputs(len(op.node.outputs) + 1)
    out = op.node.outputs[-1]
    out.name = op.builder.names.fresh(f"{value.name}_tape")
    out.type = value.type
    if value.shape is not None:
        out.shape = ir.Shape([None, *value.shape])
    return out


def _steps(op: Op, it: Iteration, tapes: list[tuple[ir.Value, ir.Value, Slot]]) -> Var:
    """How many steps a Loop made: the size of anything it stacked."""
    stacked = [x for _, x, _ in tapes] + [v for v in op.node.outputs[it.count :] if v.name]
    found = stacked[0] if stacked else _write_out(op, it, it.body.inputs[0])
    o = op.builder
    return o.Squeeze(o.Shape(Var(o, found), start=0, end=1), [0])


def _at_least_once(node: ir.Node) -> bool:
    """Whether a Loop provably makes a step: a Scan of none fails in ONNX Runtime."""
    trips = node.inputs[0]
    known = None if trips is None or trips.is_graph_input() else ir.convenience.get_const_tensor(trips)
    return known is not None and int(known.numpy().item()) > 0 and always_goes_on(node)


def _unless_none(o: Builder, steps: Var, emit, initial: list[Var]) -> list[Var]:  # type: ignore[no-untyped-def]
    """What `emit` writes if there are any `steps`, else the `initial` states."""
    count = len(initial)
    some, then = empty(o, "some_steps")
    give(some, emit(some)[:count])
    none, other = empty(o, "no_steps")
    give(none, [Var(none, v.value) for v in initial])
    branches = [ir.AttrGraph("then_branch", then), ir.AttrGraph("else_branch", other)]
    node = ir.Node("", "If", [(steps > 0).value], branches, num_outputs=count)
    for value, model in zip(node.outputs, initial):
        value.type, value.shape = model.value.type, model.value.shape
    return list(o.append(node))
