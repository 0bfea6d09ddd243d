"""The softmax family along one axis.

A row of -∞ only has no softmax: the operators give NaN there, and so do the rules. Where a Where behind
the softmax may put something in place of such a row, as attention does with a row that is masked wholly,
the row gets 0. An entry of -∞ beside finite ones has probability 0 and gets exactly 0.
"""

from __future__ import annotations

import math
from typing import Any

from onnxgrad.ir import Var
from onnxgrad.ir.operators import Kind
from onnxgrad.rules.double_where import may_be_discarded
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import rule, symmetric
from onnxgrad.rules.rule import Result, Tangents
from onnxgrad.rules.step_functions import lowest


def _replace_nan(op: Op, y: Var, otherwise: Any) -> Var:
    """`y`, with `otherwise` in place of NaN if a Where may discard it."""
    return op.Where(op.IsNaN(y), otherwise, y) if may_be_discarded(op, y.value) else y


@symmetric("Softmax", kind=Kind.ALONG_AXIS, total=True, interval=(0, 1))
def softmax(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = softmax x along one axis: y·(g - Σ g·y), J = diag(y) - y·yᵀ"""
    known, axis = _replace_nan(op, y, 0.0), op.attr("axis")
    dx = known * (g - op.ReduceSum(g * known, [axis], keepdims=1))
    op.named("SoftmaxGrad", [dx], of=[g, y], axis=axis % x.rank, guarded=int(known is not y))
    return dx


def _softmax(op: Op, y: Var) -> Var:
    return op.Exp(_replace_nan(op, y, lowest(y.dtype)))


def log_softmax_jvp(op: Op, tangents: Tangents, x: Var, y: Var) -> Result:
    """t - Σ exp(y)·t"""
    (t,) = tangents
    return t - op.ReduceSum(_softmax(op, y) * t, [op.attr("axis")], keepdims=1)


@rule("LogSoftmax", jvp=log_softmax_jvp, kind=Kind.ALONG_AXIS, total=True, interval=(-math.inf, 0))
def log_softmax(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = x - log Σ exp x along one axis: g - exp(y)·Σ g"""
    axis = op.attr("axis")
    return g - _softmax(op, y) * op.ReduceSum(g, [axis], keepdims=1)
