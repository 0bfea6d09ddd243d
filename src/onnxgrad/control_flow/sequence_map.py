"""SequenceMap: the derivative of a map over sequences is a map over them and their cotangents or tangents."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.engine import forward, reverse
from onnxgrad.engine.reverse import add_cotangents
from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var, containers
from onnxgrad.ir.graph import values_read
from onnxgrad.ir.subgraphs import copy_of, formal, give
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import rule


def _map(op: Op, b: Builder, columns: Sequence[tuple[ir.Value, ir.Value]]) -> list[Var]:
    """Append a SequenceMap of the graph of `b`, which reads each of `columns`: (inside, outside)."""
    graph = b.graph
    used = values_read(graph)
    kept = [c for c in columns if c[0] in used] or list(columns[-1:])
    kept.sort(key=lambda c: not isinstance(c[1].type, ir.SequenceType))  # the first must be a sequence
    if not isinstance(kept[0][1].type, ir.SequenceType):
        kept.insert(0, next(c for c in columns if isinstance(c[1].type, ir.SequenceType)))
    graph.inputs[:] = [inside for inside, _ in kept]
    node = ir.Node(
        "", "SequenceMap", [o for _, o in kept], [ir.AttrGraph("body", graph)], num_outputs=len(graph.outputs)
    )
    for out, each in zip(node.outputs, graph.outputs):
        out.type = ir.SequenceType(each.type)  # type: ignore[arg-type]
    return list(op.builder.append(node))


def _push(op: Op, tangents: object) -> list[Var | None]:
    b, graph = copy_of(op.builder, op.node.attributes["body"].as_graph())
    columns = list(zip(graph.inputs, (v for v in op.node.inputs if v is not None)))
    seeds = {c.value: Var(b, op.tangents[c.value].value) for c in op.captures if c.value in op.tangents}
    for inside, outside in list(columns):
        if outside in op.tangents:
            seeds[inside] = formal(b, inside, "tangent")
            columns.append((seeds[inside].value, op.tangents[outside].value))
    outs = list(graph.outputs)
    pushed = forward(b, list(graph), seeds, list(dict.fromkeys(outs)))
    moved = [i for i, v in enumerate(outs) if v in pushed]
    if not moved:
        return [None] * len(outs)
    give(b, [pushed[outs[i]] for i in moved])
    result: list[Var | None] = [None] * len(outs)
    for i, t in zip(moved, _map(op, b, columns)):
        result[i] = t
    return result


@rule("SequenceMap", jvp=_push)
def sequence_map(op: Op, g: object) -> dict[ir.Value, Var]:
    """yᵢ = f(xᵢ, c): x̄ᵢ, c̄ᵢ = (∂f)ᵀ(gᵢ), a map over x and g; c̄ = Σ c̄ᵢ"""
    of = {i: u for i, u in enumerate(g if isinstance(g, tuple) else (g,)) if u is not None}
    b, graph = copy_of(op.builder, op.node.attributes["body"].as_graph())
    columns = list(zip(graph.inputs, (v for v in op.node.inputs if v is not None)))
    wrt = [(inside, outside) for inside, outside in columns if outside in op.active]
    wrt += [(c.value, c.value) for c in op.captures if c.value in op.active]
    seeds = {i: formal(b, graph.outputs[i], "cotangent") for i in of}
    columns += [(seeds[i].value, u.value) for i, u in of.items()]
    cotangents = reverse(
        b, list(graph), add_cotangents((graph.outputs[i], s) for i, s in seeds.items()), [v for v, _ in wrt]
    )
    wrt = [(inside, outside) for inside, outside in wrt if inside in cotangents]
    if not wrt:
        return {}
    give(b, [cotangents[inside] for inside, _ in wrt])
    pulled = []
    for (inside, outside), each in zip(wrt, _map(op, b, columns)):
        whole = inside is outside or not isinstance(outside.type, ir.SequenceType)
        if whole and not isinstance(outside.type, ir.TensorType):
            raise NotDifferentiable(f"its body reads {outside.name!r}, which is a sequence, as a whole")
        total = containers.add_sequences(op.builder, each, Var(op.builder, outside)) if whole else each
        pulled.append((outside, total))
    return add_cotangents(pulled)
