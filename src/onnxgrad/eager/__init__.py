"""Differentiate ordinary Python functions of arrays, define-by-run.

::

    import onnxgrad.eager as og
    import onnxgrad.eager.numpy as np

    def loss(weights, x): return np.mean((np.tanh(x @ weights["a"]) @ weights["b"]) ** 2)

    og.grad(loss)(weights, x)  # a dict like weights

Operations run at once, so Python's own ``if``, ``for`` and recursion work; a tape notes them as operators of ONNX, and
the same rules that differentiate models differentiate the tape. docs/eager.md tells the whole story.
"""

from onnxgrad.eager.array import Array, stop_gradient
from onnxgrad.eager.custom import checkpoint, custom_vjp
from onnxgrad.eager.transforms import elementwise_grad, grad, hessian, hvp, jacobian, jvp, value_and_grad, vjp

__all__ = [
    "Array",
    "checkpoint",
    "custom_vjp",
    "elementwise_grad",
    "grad",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "stop_gradient",
    "value_and_grad",
    "vjp",
]
