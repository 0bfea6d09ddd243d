"""Softplus, Mish, Elu, PRelu and x² by operators that ONNX Runtime computes on vectors; these go number by number.

The formulas are those of its kernels: softplus(x) = max(x, 0) + log(1 + exp(-|x|)), mish(x) = x·tanh(softplus(x)),
elu(x) = max(x, 0) + α·(exp(min(x, 0)) - 1). On one thread, .2 of the time of a Softplus, a Mish or a PRelu and .4 of an
Elu of ten thousand numbers; from a thousand on, all of them gain. A Pow with the constant 2 takes two to three times as
long as a product, and runs on one thread.
"""

from __future__ import annotations

import math
from dataclasses import replace

import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_number, is_op, rank
from onnxgrad.runtime.rewrites.rewrite import NodeRule, rewrite_results
from onnxgrad.runtime.setting import Setting

_SHORT = 1024  #: numbers: of fewer, the calls take longer


def _match(node: ir.Node) -> ir.Node | None:
    if not is_op(node, ("Softplus", "Mish", "Elu", "PRelu", "Pow")):
        return None
    if node.op_type == "Pow" and not (is_number(node.inputs[1], 2) and rank(node.inputs[1]) == 0):
        return None
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.FLOAT:
        return None
    known = [] if x.shape is None else [n for n in x.shape if isinstance(n, int)]
    is_short = x.shape is not None and len(known) == len(x.shape) and math.prod(known) < _SHORT
    return None if is_short else node


def _write(b: Builder, node: ir.Node) -> Var:
    x = b.var(node.inputs[0])  # type: ignore[arg-type]
    if node.op_type == "Pow":
        return x * x
    if node.op_type == "PRelu":
        return b.Where(b.Less(x, 0.0), x * b.var(node.inputs[1]), x)  # type: ignore[arg-type]
    if node.op_type == "Elu":
        return b.Relu(x) + (b.Exp(b.Min(x, 0.0)) - 1.0) * node.attributes.get_float("alpha", 1.0)
    softplus = b.Relu(x) + b.Log(b.Exp(-b.Abs(x)) + 1.0)
    return softplus if node.op_type == "Softplus" else x * b.Tanh(softplus)


SLOW_FUNCTIONS = replace(
    rewrite_results(
        "slow_functions",
        "operators that run on vectors",
        "Softplus, Mish, Elu, PRelu and squares of float32, 1024 numbers or more, where no kernel has them",
        NodeRule(_match, _write),
    ),
    unless=Setting.keeps_functions,
)
