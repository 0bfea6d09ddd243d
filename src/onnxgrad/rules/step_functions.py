"""Step functions as arithmetic: the masks that rules with kinks multiply by.

In float32 a step is one steep HardSigmoid, clip(3e38·x + β, 0, 1), which ONNX Runtime threads, where it
runs a comparison and a Cast, a Where or a Sign on one thread. Its ramp lies among the denormal numbers,
so it *is* a step, and the rule for HardSigmoid gives it no derivative. Other dtypes take Greater and
Cast: 3e38 overflows in float16, and float64 has no HardSigmoid kernel.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxgrad.ir import Var
from onnxgrad.ir.lowerings import lowering
from onnxgrad.ir.operators import traits_of
from onnxgrad.rules.op import Op

STEEP = 3e38
_STEEP = lowering("steep_steps", "Relu and other kinks", "a steep HardSigmoid", "Greater and Cast, or Sign")

#: Smallest positive normal float32: a HardSigmoid that is done rising there has no ramp.
_TINY = 2.0**-126


def is_step(alpha: float) -> bool:
    """True if HardSigmoid with this slope is piecewise constant on normal numbers."""
    return abs(alpha) * _TINY >= 1


def is_nonnegative(x: Var) -> bool:
    """True if `x` is the result of an operator without negative results."""
    node = x.value.producer()
    interval = None if node is None else traits_of(node).interval
    return interval is not None and interval[0] >= 0


def positive(op: Op, x: Var) -> Var:
    """1 where x > 0, else 0."""
    if x.dtype == ir.DataType.FLOAT and _STEEP.is_enabled:
        return op.HardSigmoid(x, alpha=STEEP, beta=0.0)
    return op.Cast(x > 0, to=int(x.dtype or 0))


def heaviside(op: Op, x: Var) -> Var:
    """1 where x > 0, ½ where x = 0, else 0."""
    if x.dtype == ir.DataType.FLOAT and _STEEP.is_enabled:
        return op.HardSigmoid(x, alpha=STEEP, beta=0.5)
    return op.Sign(x) * 0.5 + 0.5


def lowest(dtype: ir.DataType | None) -> float:
    """The most negative finite number of a float type."""
    top = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 3.3895313892515355e38}
    if dtype == ir.DataType.DOUBLE:
        return -math.ldexp(2 - 2**-52, 1023)
    return -top.get(dtype or ir.DataType.FLOAT, math.ldexp(2 - 2**-23, 127))
