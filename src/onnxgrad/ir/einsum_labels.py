"""Parse the equation of an Einsum: one letter per axis of each operand and of the output."""

from __future__ import annotations

import string
from collections.abc import Sequence

import onnx_ir as ir


def einsum_labels(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The labels of operands with these ranks and of the output; the axes of an ellipsis get free letters."""
    text = equation.replace(" ", "")
    left, arrow, out = text.partition("->")
    if not arrow:
        once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        out = "".join(["..." if "..." in left else "", *once])
    terms = left.split(",")
    free = [c for c in string.ascii_letters if c not in text]
    widths = [rank - len(t) + 3 if "..." in t else 0 for rank, t in zip(ranks, terms)]
    dots = "".join(free[: max(widths)])
    terms = [t.replace("...", dots[len(dots) - width :]) for t, width in zip(terms, widths)]
    return terms, out.replace("...", dots)


def einsum_axes(node: ir.Node) -> list[list[tuple[ir.Value, int]]]:
    """The axes of each letter of an Einsum with known ranks; that of the result comes last."""
    operands = [x for x in node.inputs if x is not None]
    terms, out = einsum_labels(node.attributes["equation"].as_string(), [len(x.shape or ()) for x in operands])
    found: dict[str, list[tuple[ir.Value, int]]] = {}
    for value, term in (*zip(operands, terms), (node.outputs[0], out)):
        for axis, letter in enumerate(term):
            found.setdefault(letter, []).append((value, axis))
    return list(found.values())
