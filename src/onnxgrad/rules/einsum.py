"""Einsum: the transpose of a sum of products is a sum of products with the cotangent in one place.

Three things need more than another Einsum: labels that only this operand has (the cotangent is the same
along them), axes of size 1 that were broadcast (summed), and labels that it repeats (a diagonal).
"""

from __future__ import annotations

import functools

from onnxgrad.ir import Var, expand_to, sum_to
from onnxgrad.ir.einsum_labels import einsum_labels
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import linear
from onnxgrad.rules.rule import Result


def _on_diagonal(op: Op, r: Var, x: Var, term: str) -> Var:
    """`r`, whose axes are the distinct labels of `term`, on the diagonal of zeros in the shape of `x`."""
    repeats = [p for p, c in enumerate(term) if c in term[:p]]

    def counted(axis: int) -> Var:
        size = op.size_of(x, axis)
        return op.Unsqueeze(op.Range(op.const(0), size, op.const(1)), [k for k in range(len(term)) if k != axis])

    same = [op.Equal(counted(term.index(term[p])), counted(p)) for p in repeats]
    return op.Where(functools.reduce(op.And, same), op.Unsqueeze(r, repeats), 0.0)


@linear("Einsum", wrt=None)
def einsum(op: Op, g: Var, *_: Var) -> Result:
    """y = Σ ∏ᵢ xᵢ: for xₖ, Σ g·∏ of the other xᵢ, with the labels of xₖ as the output"""
    terms, out = einsum_labels(op.attr("equation"), [x.rank for x in op.operands])
    if any(0 in (x.shape or ()) for x in op.operands):  # sums of nothing, over which ONNX Runtime may end the process
        return [op.zeros_like(x) if need else None for x, need in zip(op.operands, op.needs)]
    grads: list[Var | None] = []
    for k, (x, term) in enumerate(zip(op.operands, terms)):
        if not op.needs[k]:
            grads.append(None)
            continue
        others = [(g, out), *((y, t) for i, (y, t) in enumerate(zip(op.operands, terms)) if i != k)]
        own = "".join(dict.fromkeys(term))
        kept = "".join(c for c in own if x.dims[term.index(c)] != 1 and any(c in t for _, t in others))
        equation = f"{','.join(t for _, t in others)}->{kept}"
        r = g if equation == f"{kept}->{kept}" else op.Einsum(*[y for y, _ in others], equation=equation)
        r = sum_to(r, x if kept == term else op.Einsum(x, equation=f"{term}->{kept}"))
        lost = [i for i, c in enumerate(own) if c not in kept]
        r = op.Unsqueeze(r, lost) if lost else r
        r = expand_to(r, x if own == term else op.Einsum(x, equation=f"{term}->{own}"))
        grads.append(r if own == term else _on_diagonal(op, r, x, term))
    return grads
