"""Sparse Jacobians and Hessians: where a derivative can be other than zero, and products that find all of it."""

from onnxgrad.transforms.sparse.matrices import sparse_hessian, sparse_jacobian

__all__ = ["sparse_hessian", "sparse_jacobian"]
