"""Forward mode: one walk forward over the nodes, pushing tangents through the same rules.

If the class of a rule has no form for tangents, the VJP of this one node is pulled back once more: J·t is the transpose
of u ↦ Jᵀu, applied to t, for any u (the trick is from Townsend 2017, "A new trick for calculating Jacobian vector
products"). So both modes have one source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxgrad.engine.activity import is_differentiable, prepare
from onnxgrad.engine.resolve import rule_of
from onnxgrad.engine.reverse import FAILURES, _check, add_cotangents, error_at, pull_back, reverse
from onnxgrad.ir import Builder, Var, containers
from onnxgrad.ir.graph import captured
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import Rule, add, write


def forward(
    builder: Builder, nodes: Sequence[ir.Node], seeds: Mapping[ir.Value, Var], of: Sequence[ir.Value]
) -> dict[ir.Value, Var]:
    """Emit the tangents of `of` given those of some values (`seeds`).

    A seed at an intermediate value is added to the tangent that reaches it, the transpose of what `reverse` does there.
    Values of `of` that depend on no seed are absent from the result.
    """
    path = prepare(nodes, list(seeds), of, builder)
    seeded = {builder.now(v): t for v, t in seeds.items()}
    tangents: dict[ir.Value, Var] = dict(seeded)
    for node in path:
        for value, t in push_forward(builder, node, tangents).items():
            tangents[value] = add([seeded[value], t]) if value in seeded else t
    return {v: tangents[builder.now(v)] for v in of if builder.now(v) in tangents}


def push_forward(builder: Builder, node: ir.Node, tangents: Mapping[ir.Value, Var]) -> dict[ir.Value, Var]:
    """The tangents of the outputs of `node`, given those of its operands."""
    rule = rule_of(node, builder)
    assert rule is not None  # `prepare` has seen to it
    of_operands = [None if v is None or not rule.carries(i) else tangents.get(v) for i, v in enumerate(node.inputs)]
    if all(t is None for t in of_operands) and not any(v in tangents for v in captured(node)):
        return {}  # the path from here has no slope
    op = Op(builder, node, [t is not None for t in of_operands])
    of_operands += [None] * (len(op.inputs) - len(of_operands))
    op.tangents = tangents
    try:
        result = rule.jvp(op, of_operands)
    except FAILURES as e:
        raise error_at(node, e) from e
    if result is None:
        return _transpose_vjp(builder, node, rule, tangents)
    result_tangents = {v: t for v, t in zip(node.outputs, result) if t is not None and is_differentiable(v)}
    for v, t in result_tangents.items():
        _check(node, rule, Var(builder, v), t)
    return result_tangents


def _probe(x: Var) -> Var:
    return x.builder.zeros_like(x) if containers.is_optional(x) else x.builder.full_like(x, 1)


def _transpose_vjp(
    builder: Builder, node: ir.Node, rule: Rule, tangents: Mapping[ir.Value, Var]
) -> dict[ir.Value, Var]:
    """J·t as the derivative of u ↦ ⟨Jᵀu, t⟩.

    The u is 1 if it is computed at all: a rule that iterates until Jᵀu has converged would stop at once for 0.
    """
    outputs = [v for v in node.outputs if v.name and is_differentiable(v)]
    moved = {v for v in [*node.inputs, *captured(node)] if v is not None and v in tangents}
    with builder.record() as emitted:
        probes = {v: builder.copy(_probe(Var(builder, v)).value) for v in outputs}
        pulled = pull_back(builder, node, rule, [probes.get(v) for v in node.outputs], moved)
    probed = [p.value for p in probes.values()]
    given = add_cotangents((write(g).value, tangents[v]) for v, g in pulled.items())
    transposed = reverse(builder, emitted, given, probed)
    return {v: transposed[p.value] for v, p in probes.items() if p.value in transposed}
