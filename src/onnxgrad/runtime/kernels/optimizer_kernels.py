"""Kernels of ``source/optimizers.c``: updates of one tensor in float32, the same to the last bit.

Operands of all of them: X, G and the states; scalars, left out where they are 1; a vector of the constants; an index.
Products of X or G with a scalar (decay of weights, clipping of gradients) are taken into the kernel. So is the
cotangent of picking rows of X: G is that of the rows then, and a gradient as large as X is not there at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.match import is_op
from onnxgrad.runtime.kernels.substitute import Fits, KernelCall, Occurrence, kernel, preceding_call

#: How many states a kernel has; they are its operands after X and G, and its results after X'.
STATES: dict[str, int] = {}


def _optimizer(name: str, states: int, scalars: int, constants: Sequence[str]) -> Fits:
    """The kernel `name` for parts [X, G, states, rate, further scalars] → [X', states'] with these attributes."""

    STATES[name] = states

    @kernel(name)
    def fits(site: Occurrence) -> KernelCall | None:
        tensors = [v for v in site.inputs[: 2 + states] if v is not None]
        rates = site.inputs[2 + states :]
        numbers = [site.attributes.get(c) for c in constants]
        if len(tensors) != 2 + states or len(rates) != scalars or len(site.outputs) != 1 + states:
            return None
        x = tensors[0]
        if not site.all_float32 or None in site.outputs:
            return None
        if not all(_same_shape(v, x) for v in tensors) or not all(v is None or _is_scalar(v) for v in rates):
            return None
        if not all(isinstance(n, (int, float)) for n in numbers):
            return None
        (x, shrink), (g, clip) = map(_split_scale, tensors[:2])
        vector = site.constant(np.array(numbers, np.float32))
        operands = [x, g, *tensors[2:], rates[0], shrink, clip, *rates[1:], vector, None, None, None]
        if (picking := preceding_call(site, 1, "GatherGrad")) is not None and _same_shape(x, picking.outputs[0]):
            _, operands[1], _, operands[-3] = picking.inputs
        return KernelCall(name, operands)

    return fits


def _is_scalar(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 0


def _same_shape(value: ir.Value, like: ir.Value) -> bool:
    """True if two values provably have one shape, all of it known."""
    shapes = (value.shape, like.shape)
    return all(s is not None and s.is_static() for s in shapes) and shapes[0] == shapes[1]


def _split_scale(value: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """`value` as the product of a tensor and a scalar; None for no scalar."""
    node = value.producer()
    if is_op(node, "Mul") and value.dtype is not None:
        for tensor, scalar in (node.inputs, node.inputs[::-1]):
            if scalar is not None and tensor is not None and _is_scalar(scalar) and _same_shape(tensor, value):
                return tensor, scalar
    return value, None


_MOMENTS = ("alpha", "alpha_rest", "beta", "beta_rest", "epsilon")

_optimizer("Sgd", 0, 1, ("norm",))
_optimizer("Momentum", 1, 2, ("norm", "alpha", "nesterov"))
_optimizer("Adam", 2, 2, ("norm", *_MOMENTS, "post"))
_optimizer("NAdam", 2, 3, ("norm", *_MOMENTS))
_optimizer("Adagrad", 1, 1, ("norm", "epsilon"))
for name, states in {"RMSProp": 1, "RMSPropMoving": 2, "RMSPropCentered": 2, "RMSPropCenteredMoving": 3}.items():
    _optimizer(name, states, 1, ("norm", "alpha", "alpha_rest", "epsilon", "momentum"))
_optimizer("Lion", 1, 1, ("norm", "now", "now_rest", "later", "later_rest"))
