"""(Aᵀ·G)ᵀ as Gᵀ·A, and G·X + H·X as (G + H)·X.

The cotangent of an operand that was transposed before a product is transposed after it. In the other order, the product
needs no Transpose of its result: 8 % of the step of a wide transformer, whose weights an exporter transposes. An
operand multiplied by its own transpose (the products of all pairs in a click predictor) gets two cotangents, G·X and
Gᵀ·X; the sum of the small operands is cheaper than a second product.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import exchanged, is_op, not_none, producer
from onnxgrad.ir.shapes import same_dims
from onnxgrad.runtime.rewrites.rewrite import NodeRule, rewrite_results


def _only(value: ir.Value | None) -> ir.Value | None:
    """`value` if it has one reader."""
    return value if value is not None and len(value.uses()) == 1 and not value.is_graph_output() else None


def _transposed_product(node: ir.Node) -> ir.Node | None:
    """The product whose result `node` transposes, if one of its operands is transposed and nothing else reads it."""
    result = exchanged(node.outputs[0]) if is_op(node, "Transpose") else None
    gemm, matmul = (producer(_only(result), op) for op in ("Gemm", "MatMul"))
    if gemm is not None:
        flags = [gemm.attributes.get_int(name, 0) for name in ("transA", "transB")]
        return gemm if len(gemm.inputs) == 2 and flags[0] != flags[1] else None
    if matmul is None or any(x is None or x.shape is None or len(x.shape) < 2 for x in matmul.inputs):
        return None
    return matmul if [exchanged(x) is None for x in matmul.inputs].count(True) == 1 else None


def _write_turned(b: Builder, product: ir.Node) -> Var:
    left, right = product.inputs
    if product.op_type == "Gemm":
        return b.Gemm(right, left, **product.attributes)
    return b.MatMul(*(exchanged(x) or _transposed(b, x) for x in (right, left)))


def _transposed(b: Builder, x: ir.Value | None) -> Var:
    assert x is not None
    axes = list(range(len(not_none(x.shape))))
    return b.emit("Transpose", x, perm=[*axes[:-2], axes[-1], axes[-2]])


def _shared(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """G, H and X of a sum G·X + H·X, if nothing else reads the products and G and H are of one shape."""
    if not is_op(node, "Add"):
        return None
    products = [producer(_only(v), "MatMul") for v in node.inputs]
    if products[0] is None or products[1] is None or products[0] is products[1]:
        return None
    (g, x), (h, other) = products[0].inputs, products[1].inputs
    if g is None or h is None or x is None or x is not other or g.shape is None or h.shape is None:
        return None
    return (g, h, x) if same_dims(g.shape.dims, h.shape.dims) else None


def _write_shared(b: Builder, found: tuple[ir.Value, ir.Value, ir.Value]) -> Var:
    g, h, x = found
    return b.MatMul(b.Add(g, h), x)


TURNED_PRODUCTS = rewrite_results(
    "turned_products",
    "a product in the other order; one product with the sum of two matrices",
    "a Transpose of a product with a transposed operand; a sum of two products with the same right operand",
    NodeRule(_transposed_product, _write_turned),
    NodeRule(_shared, _write_shared),
)
