"""What is made of gradients: Jacobians, Hessians, their products with vectors, linear maps as models of their own."""

from onnxgrad.transforms.examples import per_example_grad
from onnxgrad.transforms.jacobians import Mode, hessian, jacobian
from onnxgrad.transforms.memory import Rematerialized, rematerialize
from onnxgrad.transforms.products import gauss_newton_vp, hvp
from onnxgrad.transforms.split import Split, linearize, split_vjp, transpose

__all__ = [
    "Mode",
    "Rematerialized",
    "Split",
    "gauss_newton_vp",
    "hessian",
    "hvp",
    "jacobian",
    "linearize",
    "per_example_grad",
    "rematerialize",
    "split_vjp",
    "transpose",
]
