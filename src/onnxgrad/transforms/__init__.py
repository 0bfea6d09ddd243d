"""Transformations that use gradients: Jacobians, Hessians, their products with vectors, linear maps as models."""

from onnxgrad.transforms.jacobians import Mode, hessian, jacobian
from onnxgrad.transforms.linearize import Split, linearize, split_vjp, transpose
from onnxgrad.transforms.per_example import per_example_grad
from onnxgrad.transforms.rematerialize import Rematerialized, rematerialize
from onnxgrad.transforms.second_order import gauss_newton_vp, hvp
from onnxgrad.transforms.sparse import sparse_hessian, sparse_jacobian
from onnxgrad.transforms.taylor import jet, laplacian
from onnxgrad.transforms.vmap import vmap

__all__ = [
    "Mode",
    "Rematerialized",
    "Split",
    "gauss_newton_vp",
    "hessian",
    "hvp",
    "jacobian",
    "jet",
    "laplacian",
    "linearize",
    "per_example_grad",
    "rematerialize",
    "sparse_hessian",
    "sparse_jacobian",
    "split_vjp",
    "transpose",
    "vmap",
]
