"""What is made of gradients: Jacobians, Hessians, their products with vectors, linear maps as models of their own."""

from onnxgrad.transforms.jacobians import hessian, jacobian
from onnxgrad.transforms.products import gauss_newton_vp, hvp

__all__ = ["gauss_newton_vp", "hessian", "hvp", "jacobian"]
