"""Reverse mode: one walk back over the nodes, adding up cotangents (Griewank & Walther 2008, ch. 3).

It asks the rule of each node for the cotangents of the inputs that need one, checks their dtypes and shapes, and
accumulates them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar, cast

import onnx_ir as ir

from onnxgrad.engine.activity import prepare
from onnxgrad.errors import NotDifferentiable, OperandMisfit, RuleError
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.names import described
from onnxgrad.rules.gates import combine_terms
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import Rule, Symbolic, Term, add, write

T = TypeVar("T", bound=Term)


def reverse(
    builder: Builder, nodes: Sequence[ir.Node], seeds: Mapping[ir.Value, Var], wrt: Sequence[ir.Value]
) -> dict[ir.Value, Var]:
    """Emit the cotangents of `wrt` given those of some values (`seeds`).

    Args:
        builder: of the new nodes; they are appended, so the graph stays sorted.
        nodes: the nodes to differentiate, in topological order.
        seeds: cotangent of each value to start from, with its shape and dtype.
        wrt: values to stop at (inputs, initializers or intermediate values). Where one depends on
            another, each gets its total derivative.

    Returns:
        The cotangent of each of `wrt`; one that `seeds` do not depend on is absent.
    """
    return {v: total(terms) for v, terms in reverse_terms(builder, nodes, seeds, wrt).items()}


def reverse_terms(
    builder: Builder,
    nodes: Sequence[ir.Node],
    seeds: Mapping[ir.Value, Var],
    wrt: Sequence[ir.Value],
    symbolic: Collection[ir.Value] = (),
) -> dict[ir.Value, list[Term]]:
    """The same as `reverse`, but with the terms of each cotangent, which are not written for values `symbolic`."""
    path = prepare(nodes, wrt, list(seeds), builder, reverse=True)
    targets = [builder.now(v) for v in wrt]
    terms: dict[ir.Value, list[Term]] = {builder.now(value): [seed] for value, seed in seeds.items()}
    for node, rule in reversed(path.items()):
        assert rule is not None  # `prepare` has seen to it
        cotangents = [None if v not in terms else total(terms[v]) for v in node.outputs]
        if cotangents.count(None) < len(cotangents):
            for value, term in pull_back(builder, node, rule, cotangents, path.active, symbolic).items():
                terms.setdefault(value, []).append(term)
    return {v: terms[now] for v, now in zip(wrt, targets) if now in terms}


def total(terms: list[Term]) -> Var:
    """The sum of the terms of a cotangent, which replaces them in the list."""
    if len(terms) > 1 or not isinstance(terms[0], Var):
        terms[:] = [add(combine_terms([write(t) for t in terms]))]
    return cast(Var, terms[0])


def pull_back(
    builder: Builder,
    node: ir.Node,
    rule: Rule,
    cotangents: Sequence[Var | None],
    active: set[ir.Value],
    symbolic: Collection[ir.Value] = (),
) -> dict[ir.Value, Term]:
    """The cotangents from `node`, by its `rule`, for those of its operands, captured ones included, that are `active`.

    They are written, but for those of values `symbolic`.
    """
    needs = [v is not None and v in active and rule.carries(i) for i, v in enumerate(node.inputs)]
    op = Op(builder, node, needs)
    op.active = active
    try:
        result = rule.vjp(op, cotangents)
    except FAILURES as e:
        raise error_at(node, e) from e
    named = isinstance(result, dict)
    pairs = list(result.items()) if isinstance(result, dict) else list(zip(node.inputs, result))
    pulled: list[tuple[ir.Value, Term]] = []
    for i, (key, g) in enumerate(pairs):
        value = key.value if isinstance(key, Var) else key
        if g is not None and value is not None and (value in active if named else needs[i]):
            if isinstance(g, Symbolic):
                if value in symbolic:
                    pulled.append((value, g))
                    continue
                try:
                    g = g.write()
                except FAILURES as e:
                    raise error_at(node, e) from e
            if value.shape is not g.value.shape or value.type is not g.value.type:
                _check(node, rule, Var(builder, value), g)
            pulled.append((value, g))
    return add_cotangents(pulled) if len(pulled) != 1 else dict(pulled)


def error_at(node: ir.Node, e: Exception) -> Exception:
    """The error to raise where the rule of `node` has failed with `e`: it names the node."""
    if isinstance(e, NotDifferentiable):
        return type(e)(f"{described(node)}: {e}")
    if isinstance(e, MemoryError):
        return NotDifferentiable(f"{described(node)}: its derivative takes more memory than there is to write down")
    if isinstance(e, OperandMisfit):
        return OperandMisfit(f"{e}, in {described(node)}")
    return RuleError(f"the rule failed on {described(node)}: {type(e).__name__}: {e}")


#: Errors of a rule that fails.
FAILURES = (
    *(NotDifferentiable, MemoryError, OperandMisfit, RuleError),
    *(AssertionError, AttributeError, TypeError, ValueError, IndexError, KeyError),
)


def add_cotangents(cotangents: Iterable[tuple[ir.Value, T]]) -> dict[ir.Value, T]:
    """The cotangent of each value; several of one are added up."""
    terms: dict[ir.Value, list[T]] = {}
    for value, g in cotangents:
        terms.setdefault(value, []).append(g)
    return {value: cast(T, add(gs)) if len(gs) > 1 else gs[0] for value, gs in terms.items()}


def _check(node: ir.Node, rule: Rule, x: Var, g: Var) -> None:
    """Refuse a cotangent whose dtype or shape provably differs from that of its value; else record them on `g`.

    That of a quantized number is a float."""
    wrong = is_other_type = x.dtype != g.dtype and x.dtype in FLOATS and g.dtype is not None
    if not wrong and x.value.shape is g.value.shape:
        return
    want, have = x.shape, g.shape
    if want is not None and have is not None and want != have:
        wrong |= len(want) != len(have) or any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(want, have)
        )
    if wrong:
        if not rule.is_custom and not is_other_type:
            sizes = f"{x.value.name!r} is {x.value.shape}, and its derivative {g.value.shape}"
            raise OperandMisfit(f"operands or attributes of {described(node)} do not fit each other: {sizes}")
        raise RuleError(f"the rule of {described(node)} gave {g} as cotangent of {x}")
    if want is not None and want != have and g.value.producer() is not None and not g.value.is_graph_input():
        known = have or [None] * len(want)
        g.value.shape = ir.Shape([b if isinstance(b, int) else a for a, b in zip(want, known)])
