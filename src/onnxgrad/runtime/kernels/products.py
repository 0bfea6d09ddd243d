"""Products xᵀ·g, the cotangents of weights, to calls of ``source/products.c``.

Nobody names them: any Gemm or MatMul of two matrices in float32 with a transposed left operand is one. ONNX Runtime's
own kernel reads that operand in an order that the processor cannot foresee (`python -m benchmarks.products`); it is as
quick where nothing is transposed, or the right operand.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.graph import prune, subgraphs
from onnxgrad.runtime.kernels.substitute import DOMAIN

#: What `Options(without=…)` calls it.
NAME = "products"

#: Of the result: fewer numbers are not worth a copy, nor are tiles of so many columns where they are emptier.
_FEWEST, _COLUMNS, _EMPTIEST = 4096, 32, 1.15


def with_products(model: ir.Model, own: bool = False) -> ir.Model:
    """A copy of `model` with products as calls; `model` itself if there are none.

    If `model` is the caller's `own` copy, it is changed in place.
    """
    if not any(_call(node) for graph in model.graphs() for node in graph):
        return model
    copy = model if own else model.clone()
    for graph in [copy.graph, *(body for node in copy.graph.all_nodes() for body in subgraphs(node))]:
        for node in list(graph):
            call = _call(node)
            if call is not None:
                graph.insert_after(node, call)
                ir.convenience.replace_all_uses_with(node.outputs, call.outputs, replace_graph_outputs=True)
                (old,), (new,) = node.outputs, call.outputs
                new.type, new.shape, new.name = old.type, old.shape, old.name
                graph.remove(node, safe=True)
        prune(graph)
    copy.opset_imports[DOMAIN] = 1
    return copy


def _call(node: ir.Node) -> ir.Node | None:
    """The call that stands for `node`, if it is such a product."""
    if node.domain != "" or node.op_type not in ("Gemm", "MatMul") or any(v is None for v in node.inputs[:2]):
        return None
    x, g = node.inputs[:2]
    assert x is not None
    assert g is not None
    left = right = False
    if node.op_type == "Gemm":
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            return None
        if node.attributes.get_float("alpha", 1.0) != 1.0:
            return None
        left, right = (bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB"))
    if x.dtype != ir.DataType.FLOAT or g.dtype != ir.DataType.FLOAT or not _is_worth_it(node.outputs[0]):
        return None
    x, left = _untransposed(x, left)
    g, right = _untransposed(g, right)
    if not left or right:
        return None
    return ir.Node(DOMAIN, "ProductGrad", [x, g], num_outputs=1, name=node.name)


def _is_worth_it(result: ir.Value) -> bool:
    """Whether `result` is a matrix that tiles cover well."""
    if result.shape is None or len(result.shape) != 2:
        return False
    rows, columns = result.shape
    if not isinstance(rows, int) or not isinstance(columns, int) or rows * columns < _FEWEST:
        return False
    return -(-columns // _COLUMNS) * _COLUMNS <= _EMPTIEST * columns


def _untransposed(value: ir.Value, transposed: bool) -> tuple[ir.Value, bool]:
    """What `value` is a Transpose of, if it is one, and whether the product then transposes."""
    node = value.producer()
    if node is None or node.op_type != "Transpose" or node.domain != "" or node.inputs[0] is None:
        return value, transposed
    return node.inputs[0], not transposed
