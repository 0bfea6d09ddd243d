"""The layer over ``onnx_ir``: writing typed nodes, provable shapes, names, walks through graphs."""

from onnxgrad.ir import containers
from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.names import Names, identifier
from onnxgrad.ir.shapes import expand_to, product, reshape_to, same_shape, sum_to, unless_empty

__all__ = [
    "Builder",
    "Names",
    "Var",
    "containers",
    "expand_to",
    "identifier",
    "product",
    "reshape_to",
    "same_shape",
    "sum_to",
    "unless_empty",
]
