"""Forms in which an operator stays finite, where its own result and derivative would be infinite or NaN.

log σ(x) is -log(1 + exp(-x)), and log(1 - σ(x)) is -log(1 + exp(x)): ±x where σ(x) is 0 or 1. PyTorch's exporters write
logsigmoid and the binary cross entropy of logits with Sigmoid and Log, and ONNX Runtime's Sigmoid is 0 below -17
already, as 1 - σ(x) is above 17.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial

import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import is_op, pattern, rank
from onnxgrad.lower.registry import replace

_SIGMOID = pattern("Sigmoid", "x", name="sigma")
#: Of what the logarithm is taken, and the sign of x in the exponent.
_FORMS = ((_SIGMOID, -1), (pattern("Sub", 1, _SIGMOID, name="rest"), 1))


def write_stable(builder: Builder, node: ir.Node, kept: Set[ir.Value]) -> list[ir.Node] | None:
    """Replace `node` if it has such a form, without values that are `kept`; the new nodes, or None."""
    for form, sign in _FORMS if is_op(node, "Log") else ():
        found = form.match(node.inputs[0])
        if found is None or rank(found["x"]) is None or rank(found["x"]) != rank(node.inputs[0]):
            continue  # a 1 of more axes broadcasts
        if kept.isdisjoint(v for name, v in found.items() if name != "x"):
            return replace(builder, node, partial(_write, found["x"], sign))
    return None


def _write(x: ir.Value, sign: int, b: Builder, node: ir.Node) -> list[Var]:
    return [-b.Softplus(b.var(x) if sign == 1 else -b.var(x))]
