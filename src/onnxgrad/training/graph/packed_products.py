"""Products with frozen matrices of 4 bits (QLoRA): the backward pass unpacks each matrix where it is needed.

The lowering of MatMulNBits unpacks its matrix into floats, which the forward and the backward pass would share: all
matrices as floats at once, eight times the memory. ONNX Runtime even folds the unpacking when it loads the graph. Here
the product stays, and the cotangent of its input is a product with the output of a DequantizeLinear, which ONNX Runtime
does not fold: a matrix is there as floats while one product reads it (Dettmers et al. 2023).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxgrad.ir import Names, Var
from onnxgrad.ir.graph import add_initializer
from onnxgrad.ir.match import not_none
from onnxgrad.ir.schemas import attribute
from onnxgrad.rules.op import Op
from onnxgrad.rules.rule import OWN, General, Result

#: The first opset whose DequantizeLinear reads 4 bits in blocks.
_OPSET = 21


def keep_packed(graph: ir.Graph, trained: Collection[str]) -> None:
    """Note a rule of their own at the products of `graph` with matrices of 4 bits that do not train.

    Args:
        graph: of an opened model.
        trained: the names of tensors that train.
    """
    old = graph.opset_imports.get("", 0) < _OPSET
    products = [] if old else [node for node in graph if _is_frozen(node, trained)]
    names = Names.of_graph(graph) if products else Names()
    for node in products:
        packed, scales, points = _unpacked(graph, node, names)
        node.meta[OWN] = General(_Pull(packed, scales, points, attribute(node, "block_size", 0)), wrt=(0,))


def _is_frozen(node: ir.Node, trained: Collection[str]) -> bool:
    """True for a product whose blocks fill the rows of its matrix, and of which only the input has derivatives."""
    if (node.domain, node.op_type) != ("com.microsoft", "MatMulNBits") or attribute(node, "bits", 4) != 4:
        return False
    size, columns = attribute(node, "block_size", 0), attribute(node, "K", 0)
    _, matrix, scales, points, order, *bias = (*node.inputs, *(None for _ in range(6)))[:6]
    fixed = [v for v in (matrix, scales, points, *bias) if v is not None]
    if order is not None or not size or columns % size or (points is not None and columns // size % 2):
        return False
    if points is not None and points.dtype != ir.DataType.UINT8:
        return False
    return all(v.is_initializer() and v.const_value is not None and v.name not in trained for v in fixed)


def _unpacked(graph: ir.Graph, node: ir.Node, names: Names) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """The matrix, its scales and its zero points as DequantizeLinear reads them: the same bytes in other shapes."""
    rows, columns, size = (attribute(node, key, 0) for key in ("N", "K", "block_size"))
    _, matrix, scales, points, *_ = (*node.inputs, None)
    whole = _nibbles(graph, matrix, (rows, columns), names)
    each = (rows, columns // size)
    zero = _nibbles(graph, points, each, names) if points is not None else None
    if zero is None:
        middle = np.full(rows * each[1] // 2 + 1, 0x88, np.uint8)[: (rows * each[1] + 1) // 2]
        tensor = ir.PackedTensor(middle, ir.DataType.UINT4, shape=ir.Shape(each), name=names.fresh("middle"))
        zero = add_initializer(graph, tensor)
    assert scales is not None
    held = not_none(scales.const_value)
    if tuple(held.shape) == each:
        return whole, scales, zero
    name = names.fresh(f"{scales.name}_blocks")

    def read() -> ir.TensorProtocol:
        return ir.tensor(held.numpy().reshape(each), name=name)

    lazy = ir.LazyTensor(read, dtype=held.dtype, shape=ir.Shape(each), name=name)
    return whole, add_initializer(graph, lazy), zero


def _nibbles(graph: ir.Graph, value: ir.Value | None, shape: tuple[int, int], names: Names) -> ir.Value:
    """The bytes of an initializer as numbers of 4 bits, lowest first, read when they are used."""
    assert value is not None
    held = not_none(value.const_value)
    name, uint4 = names.fresh(f"{value.name}_numbers"), ir.DataType.UINT4

    def read() -> ir.TensorProtocol:
        return ir.PackedTensor(held.numpy().reshape(-1), uint4, shape=ir.Shape(shape), name=name)

    return add_initializer(graph, ir.LazyTensor(read, dtype=uint4, shape=ir.Shape(shape), name=name))


class _Pull:
    """The cotangent of the input of a product: g·W, W [N, K] being unpacked."""

    def __init__(self, packed: ir.Value, scales: ir.Value, points: ir.Value | None, size: int) -> None:
        self.packed, self.scales, self.points, self.size = packed, scales, points, size

    def __call__(self, op: Op, g: Var, *_: Var | None) -> Result:
        operands = [op.builder.var(v) for v in (self.packed, self.scales, self.points) if v is not None]
        return g @ op.DequantizeLinear(*operands, axis=1, block_size=self.size)
