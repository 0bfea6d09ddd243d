"""Safe derivatives behind an operator, such as Where, that may discard the result of another.

Where(x > 0, log x, 0) has the derivative 0 at x = 0, and the Where gives log the cotangent 0 there; but 0/x is NaN. So
if a Where reads a result, the rule of a singular operator replaces 0·∞ and 0·NaN by 0. Otherwise the rules omit these
nodes: the readers of a result are known while the graph is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.graph import dependents, scopes
from onnxgrad.ir.match import is_op, not_none, pattern
from onnxgrad.ir.notes import SETTLED, notes
from onnxgrad.ir.operators import traits_of
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import Elementwise, Linear

_FAR = 6  # operators; a Where that is farther away is not looked for


def may_be_discarded(op: Op, value: Any) -> bool:
    """True if an operator discards elements of `value`, perhaps after elementwise operators (see `Traits.discards`)."""
    near, seen = [value], {value}
    for _ in range(_FAR + 1):
        results = []
        for use in (use for v in near for use in v.uses()):
            node, traits = use.node, traits_of(use.node)
            if traits.discards:
                if use.idx in traits.discards:
                    return True
                continue
            rule = registry.get(node.domain, node.op_type, op.opset)
            passes = isinstance(rule, Elementwise) or (isinstance(rule, Linear) and traits.is_elementwise)
            if passes and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                results.append(node.outputs[0])
        near = results
    return False


def guard_factor(op: Op, g: Var, factor: Var) -> Var:
    """`factor` for a product with `g`; 0 where it is not finite and `g` is 0, if a Where may discard the output.

    Not wherever `g` is 0: the second derivative needs the factor there.
    """
    if not may_be_discarded(op, op.node.outputs[0]):
        return factor
    return _guard(op, g, factor, op.IsNaN(factor - factor))


def _guard(op: Any, g: Var, factor: Var, unfit: Var) -> Var:
    return op.Where(op.And(op.Equal(g, 0.0), unfit), 0.0, factor)


class SettledFactor(NamedTuple):
    """The result of `guard_factor`: `factor`, or 0 where `g` is 0 and the factor is `unfit`."""

    g: ir.Value
    factor: ir.Value
    unfit: ir.Value


def take_settled_factors(graph: ir.Graph, start: Iterable[ir.Value]) -> list[SettledFactor]:
    """Replace the results of `guard_factor`, for a `g` that depends on `start`, by the factor itself.

    A product g·factor is linear in `g`, and its transpose settles the factor by another cotangent
    (`settle_products`). Inside of loops and branches all are replaced, and marked; those of `graph` are returned.
    """
    moving, factors = dependents(graph, start), []
    for scope in scopes(graph):
        for node in scope:
            match = _match(node)
            if match is None or (scope is graph and (match.g not in moving or {*match[1:]} & moving)):
                continue
            node.outputs[0].replace_all_uses_with(match.factor, replace_graph_outputs=True)
            if scope is graph:
                factors.append(match)
            else:
                match.factor.meta[SETTLED] = True
    return factors


_SETTLED_FACTOR = pattern("Where", pattern("And", pattern("Equal", "g", 0), "unfit"), 0, "factor")


def _match(node: ir.Node) -> SettledFactor | None:
    parts = _SETTLED_FACTOR.match(node.outputs[0]) if is_op(node, "Where") else None
    return None if parts is None else SettledFactor(**parts)


def settle_products(graph: ir.Graph, factors: Iterable[SettledFactor], builder: Builder) -> None:
    """Settle each product with one of `factors`, or with a value that is marked, by its other operand."""
    for _, factor, unfit in dict.fromkeys(factors):
        _settle_uses(graph, factor, builder, builder.var(unfit))
    for scope in scopes(graph)[1:]:
        for factor in [*scope.inputs, *(v for node in scope for v in node.outputs)]:
            if SETTLED in (notes(factor) or ()):
                _settle_uses(scope, factor, builder.nested(scope))
        scope.sort()
    graph.sort()


def _settle_uses(graph: ir.Graph, factor: ir.Value, b: Builder, unfit: Var | None = None) -> None:
    for use in [u for u in factor.uses() if is_op(u.node, "Mul") and u.node.graph is graph]:
        other = not_none(use.node.inputs[1 - use.idx])
        place = _guard(b, b.var(other), b.var(factor), unfit or b.IsNaN(b.var(factor) - b.var(factor)))
        use.node.replace_input_with(use.idx, place.value)
