"""Give any ONNX model a backward pass, as plain ONNX."""

from onnxgrad.api import grad, jvp, value_and_grad, vjp
from onnxgrad.door import Signature, signature
from onnxgrad.errors import BadInput, NoDerivative, NoRule, NotDifferentiable, OnnxGradError, UnknownName
from onnxgrad.rules.registry import straight_through
from onnxgrad.transforms import (
    Split,
    gauss_newton_vp,
    hessian,
    hvp,
    jacobian,
    linearize,
    per_example_grad,
    split_vjp,
    transpose,
)

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "NoDerivative",
    "NoRule",
    "NotDifferentiable",
    "OnnxGradError",
    "Signature",
    "Split",
    "UnknownName",
    "gauss_newton_vp",
    "grad",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "linearize",
    "per_example_grad",
    "signature",
    "split_vjp",
    "straight_through",
    "transpose",
    "value_and_grad",
    "vjp",
]
