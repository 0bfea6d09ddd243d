"""Taylor mode over a list of nodes: one walk forward, pushing derivatives along a path through the rules of the engine.

Where no recurrence is known for an operator, its derivatives are taken one after the other, each as the tangent of the
one before, along a path whose own derivatives are given.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxgrad.engine import forward
from onnxgrad.engine.activity import is_differentiable, prepare
from onnxgrad.engine.resolve import rule_of
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.copies import Copies
from onnxgrad.ir.graph import captured
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import Linear, Rule, Zero
from onnxgrad.transforms.taylor.operators import by_equation, multilinear, term_by_term
from onnxgrad.transforms.taylor.series import Series, Term, plus


def propagate(
    builder: Builder, nodes: Sequence[ir.Node], seeds: Mapping[ir.Value, Series], of: Sequence[ir.Value], order: int
) -> dict[ir.Value, Series]:
    """Emit the derivatives of `of` up to `order`, given those of some values (`seeds`).

    The first entry of a series is the value itself. Values of `of` that no seed moves are absent.
    """
    path = prepare(nodes, list(seeds), of, builder)
    seeded = {builder.now(v): s for v, s in seeds.items()}
    moved = dict(seeded)
    for node in path:
        for value, s in push(builder, node, moved, order).items():
            moved[value] = [s[0], *map(plus, s[1:], seeded[value][1:])] if value in seeded else s
    return {v: moved[builder.now(v)] for v in of if builder.now(v) in moved}


def push(builder: Builder, node: ir.Node, found: Mapping[ir.Value, Series], order: int) -> dict[ir.Value, Series]:
    """The series of the outputs of `node`, given those of its operands."""
    rule = rule_of(node, builder)
    assert rule is not None  # `prepare` has seen to it
    xs = [None if v is None or not rule.carries(i) else found.get(v) for i, v in enumerate(node.inputs)]
    inner = any(v in found for v in captured(node))
    if isinstance(rule, Zero) or (all(x is None for x in xs) and not inner):
        return {}
    op = Op(builder, node, [x is not None for x in xs])
    xs += [None] * (len(op.inputs) - len(xs))
    outcome = None if inner else _by_rule(op, rule, xs, order)
    if outcome is None:
        return one_after_the_other(builder, node, found, order)
    return {v: s for v, s in zip(node.outputs, outcome) if is_differentiable(v) and any(c is not None for c in s[1:])}


def _by_rule(op: Op, rule: Rule, xs: list[Series | None], order: int) -> list[Series] | None:
    if isinstance(rule, Linear):
        if rule.joint or sum(x is not None and i != rule.bias for i, x in enumerate(xs)) < 2:
            return term_by_term(op, rule, xs, order)
        return multilinear(op, rule, xs, order)
    if rule.piecewise_linear:
        return term_by_term(op, rule, xs, order)
    return by_equation(op, rule, xs)


def one_after_the_other(
    builder: Builder, node: ir.Node, found: Mapping[ir.Value, Series], order: int
) -> dict[ir.Value, Series]:
    """The tangent of `node`, the tangent of that, and so on: exact for any operator, for a price that grows fast."""
    moved = [v for v in dict.fromkeys([*node.inputs, *captured(node)]) if v is not None and v in found]
    alone = {v: builder.copy(v).value for v in moved}
    levels: list[dict[ir.Value, Var]] = []
    for k in range(1, order + 1):
        moving = {v: d for v in moved if (d := found[v][k]) is not None}
        levels.append({v: builder.copy(d) for v, d in moving.items()})
    copy = Copies(alone, builder.names).unnamed(node)
    outcome: dict[ir.Value, Series] = {v: [builder.var(v)] for v in node.outputs if v.name and is_differentiable(v)}
    with builder.record() as emitted:
        builder.append(copy)
        current: dict[ir.Value, Term] = {v: Var(builder, y) for v, y in zip(node.outputs, copy.outputs) if v in outcome}
        seeds: dict[ir.Value, Var] = {}
        for k, level in enumerate(levels, start=1):
            seeds = _moving(alone, levels[: k - 1], level)
            ends = [y.value for y in current.values() if y is not None]
            tangents = forward(builder, list(emitted), seeds, ends) if ends and seeds else {}
            current = {v: None if y is None else tangents.get(y.value) for v, y in current.items()}
            for v, y in current.items():
                outcome[v].append(y)
    return {v: s for v, s in outcome.items() if any(c is not None for c in s[1:])}


def _moving(
    alone: Mapping[ir.Value, ir.Value], before: Sequence[Mapping[ir.Value, Var]], last: Mapping[ir.Value, Var]
) -> dict[ir.Value, Var]:
    """Each derivative of the path moves by the next one."""
    steps = [*before, last]
    seeds = {alone[v]: d for v, d in steps[0].items()}
    for now, after in itertools.pairwise(steps):
        seeds |= {now[v].value: after[v] for v in now if v in after}
    return seeds
