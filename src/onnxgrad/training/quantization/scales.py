"""Learned step size quantization (Esser et al. 2020, arXiv:1902.08153): scales train with the weights.

The gradient of a scale, by the estimator of QuantizeLinear (equation 3), is the sum of q - z - x/s inside the range and
of q - z outside. It grows with the N elements that share the scale, so it is multiplied by 1/√(N·Qp), where Qp is the
largest quantized number (section 2.2). For a weight, N counts its elements; for an activation, those of one row.

Optimizers whose steps do not follow the size of the gradient (Adam and its kin) undo any such factor. They take the
scale in units of its first value: a step of 0.001 changes it by a thousandth. No scale falls below a thousandth of its
first value, so it keeps its sign (blocks of 4 bits have scales of either).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.builder import FLOATS
from onnxgrad.ir.match import constant, not_none
from onnxgrad.training.graph.rounding import is_rounding

_LEAST = 1e-3
#: Optimizers whose steps are proportional to the gradient.
_PROPORTIONAL = ("sgd", "momentum", "nesterov")


@dataclass(frozen=True)
class LearnedScale:
    """A scale that trains.

    Attributes:
        value: the initializer.
        rounds: the value that is rounded to its multiples.
        largest: Qp, the largest quantized number, counted from the zero point.
    """

    value: ir.Value
    rounds: ir.Value
    largest: float

    def gradient(self, b: Builder, g: Var) -> Var:
        """g/√(N·Qp)."""
        shape = self.rounds.shape
        dims = None if shape is None else [d if isinstance(d, int) else None for d in shape]
        if dims is not None and not self.rounds.is_initializer():
            dims = dims[1:]
        if dims is not None and None not in dims:
            count = math.prod(d for d in dims if d is not None) / self._parts()
            return g * (1 / math.sqrt(max(count, 1.0) * self.largest))
        x = b.var(self.rounds)
        size, rows = b.Size(x), b.Squeeze(b.Shape(x, start=0, end=1), [0])
        count = b.Cast(b.Max(size / b.Max(rows, np.int64(1)), np.int64(1)), to=int(ir.DataType.FLOAT))
        return g * b.cast_like(1.0 / b.Sqrt(count * (self.largest / self._parts())), g)

    def following(self, b: Builder, new: Var, optimizer: str) -> Var:
        """The next scale, where the optimizer would have `new`."""
        first, old = not_none(self.value.const_value).numpy(), b.var(self.value)
        if optimizer not in _PROPORTIONAL:
            new = old + (new - old) * np.abs(first)
        least = np.abs(first) * first.dtype.type(_LEAST)
        if (first > 0).all():
            return b.Max(new, least)
        sign = np.sign(first)
        return b.Max(new * sign, least) * sign

    def _parts(self) -> int:
        """The number of scales among which the elements are divided."""
        return math.prod(d for d in self.value.shape or () if isinstance(d, int)) or 1


def learned_scales(nodes: Sequence[ir.Node]) -> dict[str, LearnedScale]:
    """The scales of the QuantizeLinears among `nodes` that can train, by name."""
    found: dict[str, LearnedScale] = {}
    for node in nodes:
        if not is_rounding(node) or node.op_type != "QuantizeLinear":
            continue
        x, scale = node.inputs[:2]
        if x is None or scale is None or not scale.is_initializer() or scale.is_graph_input():
            continue
        held = constant(scale)
        if scale.dtype in FLOATS and held is not None and held.all() and np.isfinite(held.astype(np.float32)).all():
            found.setdefault(scale.name or "", LearnedScale(scale, x, _largest(node)))
    return found


def _largest(node: ir.Node) -> float:
    """Qp of `node`: the largest number of its type less the zero point."""
    point = (*node.inputs, None)[2]
    dtype = node.outputs[0].dtype if point is None else point.dtype
    if dtype is None or dtype.is_floating_point():
        return float(ml_dtypes.finfo((dtype or ir.DataType.FLOAT8E4M3FN).numpy()).max)
    known = ml_dtypes.iinfo(dtype.numpy())
    zero = constant(point)
    middle = 0.0 if zero is None else float(zero.astype(np.float64).mean())
    above = float(known.max) - middle
    return above if above >= 1 else middle - float(known.min)
