"""The layer over ``onnx_ir``: writing typed nodes, provable shapes, names, walks through graphs."""

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.names import Names, identifier
from onnxgrad.ir.shapes import expand_to, reshape_to, same_shape, sum_to

__all__ = ["Builder", "Names", "Var", "expand_to", "identifier", "reshape_to", "same_shape", "sum_to"]
