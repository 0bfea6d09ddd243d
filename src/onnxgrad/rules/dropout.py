"""Dropout: a product with a random mask. Its mask output is the residual; the node is never replayed."""

from __future__ import annotations

from typing import Any

from onnxgrad.ir import Var
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import elementwise
from onnxgrad.rules.rule import Result


@elementwise("Dropout", wrt=(0,), kind=None, piecewise_linear=True)  # a stack has its own random numbers
def dropout(op: Op, g: Var, x: Var, ratio: Var | None, training: Var | None) -> Result:
    """y = x·m/(1 - r) with a random mask m in training mode, else x: g·m/(1 - r), else g; 0 for r"""
    if training is None or (training.const is not None and not training.const.item()):
        return g
    scale = 2.0 if ratio is None else _scale(op, ratio, g)
    if training.const is None:
        scale = op.Where(training, scale, op.const(1, g.dtype))
    mask = op.output(1)
    kept = scale if not isinstance(scale, float) else op.const(scale, g.dtype)
    return g * op.Where(mask, kept, 0.0)


def _scale(op: Op, ratio: Any, g: Var) -> Any:
    """1/(1 - r): a number if the graph fixes r; 0 for r = 1, which keeps nothing."""
    if ratio.const is None:
        return op.Reciprocal(1 - op.cast_like(ratio, g))
    r = float(ratio.const.item())
    return 0.0 if r == 1 else 1 / (1 - r)
