"""Differentiate ordinary Python functions of arrays, define-by-run.

::

    import onnxgrad.eager as og
    import onnxgrad.eager.numpy as np

    def loss(weights, x): return np.mean((np.tanh(x @ weights["a"]) @ weights["b"]) ** 2)

    og.grad(loss)(weights, x)  # a dict like weights

Operations run eagerly, so Python's own ``if``, ``for`` and recursion work. A tape records them as ONNX operators, and
the rules that differentiate models differentiate the tape. See docs/eager.md.
"""

from onnxgrad.eager import numpy, op
from onnxgrad.eager.checking import GradientMismatch, check_grads
from onnxgrad.eager.compiled import jit, vmap
from onnxgrad.eager.control_flow import cond, fori_loop, map, scan, while_loop
from onnxgrad.eager.core.array import Array
from onnxgrad.eager.core.custom_derivatives import custom_vjp
from onnxgrad.eager.core.recording import stop_gradient
from onnxgrad.eager.exporting import export
from onnxgrad.eager.models import EagerModel, from_onnx
from onnxgrad.eager.transforms import (
    checkpoint,
    elementwise_grad,
    grad,
    hessian,
    holomorphic_grad,
    hvp,
    jacobian,
    jvp,
    value_and_grad,
    vjp,
)

__all__ = [
    "Array",
    "EagerModel",
    "GradientMismatch",
    "check_grads",
    "checkpoint",
    "cond",
    "custom_vjp",
    "elementwise_grad",
    "export",
    "fori_loop",
    "from_onnx",
    "grad",
    "hessian",
    "holomorphic_grad",
    "hvp",
    "jacobian",
    "jit",
    "jvp",
    "map",
    "numpy",
    "op",
    "scan",
    "stop_gradient",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
