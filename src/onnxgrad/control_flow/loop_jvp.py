"""Forward mode of Scan and Loop: the same iteration with tangents as further states."""

from __future__ import annotations

from onnxgrad.control_flow.iteration import Iteration, loop, scan
from onnxgrad.engine import forward
from onnxgrad.ir import Var
from onnxgrad.ir.graph import values_read
from onnxgrad.ir.stops import explain_stop
from onnxgrad.ir.subgraphs import formal, give
from onnxgrad.rules.op import Op


def push(op: Op) -> list[Var | None]:
    """The tangents of the outputs of a Scan or Loop, from a second one that recomputes the states."""
    tangents = op.tangents
    b, it = Iteration.of(op.node).copy(op.builder)
    body = it.body
    moved = it.moved_by(tangents, b).active
    states, slices = it.states, it.slices
    carried = [i for i, s in enumerate(states) if s in moved]
    read = [j for j, (s, x) in enumerate(zip(slices, it.scanned)) if x in tangents and s in moved]
    outs = [k for k, v in enumerate(it.slice_results) if v in moved]

    t_states = {i: formal(b, states[i], "tangent") for i in carried}
    t_slices = {j: formal(b, slices[j], "tangent") for j in read}
    seeds = {c.value: Var(b, tangents[c.value].value) for c in op.captures if c.value in tangents}
    seeds |= {states[i]: t for i, t in t_states.items()} | {slices[j]: t for j, t in t_slices.items()}
    following = [it.following[i] for i in carried]
    stacked = [it.slice_results[k] for k in outs]
    pushed = forward(b, list(body), seeds, list(dict.fromkeys([*following, *stacked])))
    ends = [pushed[v] if v in pushed else b.zeros_like(b.var(b.now(v))) for v in [*following, *stacked]]
    if not ends:
        return [None] * len(op.node.outputs)

    head = list(body.outputs[: it.head])
    kept = it.states_for([*head, *(t.value for t in ends)])
    nexts = [it.following[i] for i in kept]
    likes = [it.next_like(i) for i in carried]
    give(b, [*head, *nexts, *ends])
    for end, like in zip(body.outputs[it.head + len(kept) :], likes):
        end.shape = like.shape
    for end, like in zip(body.outputs[len(body.outputs) - len(outs) :], stacked):
        end.shape = end.shape if end.shape is not None else like.shape
    used = values_read(body)
    reads = [j for j, s in enumerate(slices) if s in used]
    reads = reads or [0][: len(slices)]  # a Scan takes its number of steps from its inputs
    lead = list(body.inputs[: it.lead])
    body.inputs[:] = [*lead, *(states[i] for i in kept), *(t.value for t in t_states.values())]
    body.inputs.extend([*(slices[j] for j in reads), *(t.value for t in t_slices.values())])

    o = op.builder
    first = [Var(o, it.initial[i]) for i in kept]
    first += [
        Var(o, tangents[x].value) if (x := it.initial[i]) in tangents else o.zeros_like(Var(o, x)) for i in carried
    ]
    if it.lead:
        results = loop(o, body, op.node.inputs[0], op.node.inputs[1], first)
    else:
        pieces = [(Var(o, it.scanned[j]), it.ins[j]) for j in reads]
        pieces += [(Var(o, tangents[it.scanned[j]].value), it.ins[j]) for j in read]
        with o.record() as nodes:
            results = scan(o, body, first, pieces, [it.outs[k] for k in outs])
        if op.node.name and explain_stop(op.node.name):  # fails like the primal, with the same message
            next(n for n in nodes if n.op_type == "Scan").name = o.names.exactly(f"d_{op.node.name}")
    tangent: list[Var | None] = [None] * len(op.node.outputs)
    for place, t in zip([*carried, *(it.count + k for k in outs)], results[len(kept) :]):
        tangent[place] = t
    return tangent
