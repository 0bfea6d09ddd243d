"""Combine both cotangents of x in y = x·σ(x), g·σ and g·x·σ·(1 - σ), into g·(σ + y·(1 - σ)).

SiLU is written as two nodes, each with a rule of its own. The sum of their cotangents has two products more over the
whole tensor than the derivative of the pair. The combined form cancels no more digits: σ and 1 - σ are at most 1.
Reverse mode asks for it where the cotangents from all readers of a value meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrad.ir import Var
from onnxgrad.ir.lowerings import lowering
from onnxgrad.ir.match import is_op, pattern, producer

_JOINED = lowering("joined_gates", "SiLU as Mul and Sigmoid", "one product for both", "the sum of two")
Factors = tuple[ir.Value | None, ir.Value | None]


def combine_terms(terms: Sequence[Var]) -> list[Var]:
    """The terms of a cotangent, with each pair from one SiLU combined."""
    kept: dict[int, Var] = dict(enumerate(terms))
    places: dict[Factors, int] = {}
    for i, term in enumerate(terms):
        gate = _gate(term.value) if len(terms) > 1 and _JOINED.is_enabled else None
        if gate is None:
            continue
        g, sigma, y, rest = gate
        places = places or {_factors(t.value): k for k, t in enumerate(terms)}
        k = places.get((g, sigma))
        if k in kept and k != i:
            b = term.builder
            kept[k] = Var(b, g) * (Var(b, sigma) + Var(b, y) * Var(b, rest))
            del kept[i]
    return list(kept.values())


#: (g·x)·(σ·(1 - σ)) with σ = σ(x).
_GATE = pattern(
    "Mul",
    pattern("Mul", "g", "x"),
    pattern("Mul", pattern("Sigmoid", "x", name="sigma"), pattern("Sub", 1, "sigma", name="rest")),
)


def _gate(value: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value] | None:
    """g, σ = σ(x), y = x·σ and 1 - σ, where `value` is (g·x)·(σ·(1 - σ)) and y is in the graph; else None."""
    parts = _GATE.match(value)
    node = None if parts is None else parts["sigma"].producer()
    if parts is None or node is None:
        return None
    sigma = parts["sigma"]
    products = [u.node for u in sigma.uses() if is_op(u.node, "Mul")]
    y = next((n.outputs[0] for n in products if set(n.inputs) == {parts["x"], sigma} and n.graph is node.graph), None)
    return None if y is None else (parts["g"], sigma, y, parts["rest"])


def _factors(value: ir.Value) -> Factors:
    """The factors of a product."""
    node = producer(value, "Mul")
    if node is None:
        return None, None
    return node.inputs[0], node.inputs[1]
