"""Taylor mode: derivatives of high order along a path, in one walk forward."""

from onnxgrad.transforms.taylor.jets import jet
from onnxgrad.transforms.taylor.laplacians import laplacian

__all__ = ["jet", "laplacian"]
