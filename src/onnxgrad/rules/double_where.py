"""What a Where behind an operator may discard, and what that asks of the operator's rule.

Where(x > 0, log x, 0) has the derivative 0 at x = 0, and the Where gives log the cotangent 0 there; but 0/x is NaN.
So where a Where reads a result, the rule of a singular operator has 0·∞ and 0·NaN come to 0. Elsewhere the rules
spare themselves the nodes: who reads a result is known while the graph is written.
"""

from __future__ import annotations

from typing import Any

from onnxgrad.ir import Var
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import Elementwise

_FAR = 6  # operators; a Where that is farther away is not looked for


def may_be_discarded(op: Op, value: Any) -> bool:
    """Whether a Where picks from `value`, perhaps after elementwise operators or a change of type."""
    near, seen = [value], {value}
    for _ in range(_FAR + 1):
        found = []
        for use in (use for v in near for use in v.uses()):
            node = use.node
            if node.op_type == "Where":
                if use.idx > 0:
                    return True
                continue
            rule = registry.get(node.domain, node.op_type, op.opset)
            passed = rule is not None and (
                isinstance(rule, Elementwise) or node.op_type in ("Cast", "CastLike", "Identity")
            )
            if passed and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                found.append(node.outputs[0])
        near = found
    return False


def settled(op: Op, g: Var, factor: Var) -> Var:
    """`factor`, by which `g` is multiplied; with 0 where it is not finite and `g` is 0, if a Where may discard the
    output of `op`. (Not wherever `g` is 0: the second derivative asks for the factor there.)
    """
    if not may_be_discarded(op, op.node.outputs[0]):
        return factor
    return op.Where(op.And(op.Equal(g, 0.0), op.IsNaN(factor - factor)), 0.0, factor)
