"""Integers that learn: after every step a weight is rounded to a neighbouring integer times its scale, by chance.

x/s is rounded up with the probability of its fraction, so the mean of roundings is x/s, and changes far smaller than s
are not lost (Gupta et al. 2015, arXiv:1502.02551). Between steps, a weight holds nothing beyond its integer. The draws
are a function of the number of the step and of the place, as those of dropout are, so a run can be repeated.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import is_op
from onnxgrad.training.graph.dropout_masks import SPAN, draw_numbers

#: Name of the state that counts steps.
COUNT = "rounding_step"


def round_by_chance(b: Builder, new: Var, held: ir.Value, count: Var, number: int) -> Var:
    """`new`, the next value of the weight `held`, as an integer times its scale.

    Args:
        b: writes the nodes.
        new: the value to round.
        held: the weight, which a QuantizeLinear reads.
        count: the number of the step, int64.
        number: of the weight among those that are rounded.
    """
    node = next(n for n, at in held.uses() if at == 0 and is_op(n, "QuantizeLinear"))
    attributes = {key: a for key, a in node.attributes.items() if key in ("axis", "block_size")}
    one = b.Expand(b.const(np.int8(1)), b.shape_of(new))
    float32 = int(ir.DataType.FLOAT)
    steps = b.Cast(b.DequantizeLinear(one, node.inputs[1], **attributes), to=float32)
    chance = b.Cast(draw_numbers(b, count, number, new), to=float32) / float(SPAN)
    return b.cast_like(b.Floor(b.Cast(new, to=float32) / steps + chance) * steps, new)
