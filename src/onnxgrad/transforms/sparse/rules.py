"""Dependences by the class of operators; with neither class nor name, each element depends on every element."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.operators import Kind, traits_of
from onnxgrad.rules.registry import registry
from onnxgrad.rules.rule import Elementwise, Rule
from onnxgrad.transforms.sparse.dependence import (
    Dependence,
    along_axis,
    cumulated,
    elementwise,
    moved_elements,
    normalized,
    reduced,
    scatter_elements,
    scatter_nd,
)
from onnxgrad.transforms.sparse.products import einsum, gemm, matmul
from onnxgrad.transforms.sparse.windows import convolution, pooled

_BY_KIND: dict[Kind | None, Dependence] = {Kind.ELEMENTWISE: elementwise, Kind.REDUCTION: reduced}
_BY_NAME: dict[str, Dependence] = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "LpNormalization"), along_axis),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), normalized),
    **dict.fromkeys(("CumSum", "CumProd"), cumulated),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), pooled),
    **dict.fromkeys(("Conv", "ConvTranspose"), convolution),
    "Einsum": einsum,
    "Gemm": gemm,
    "MatMul": matmul,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
}


def dependence_of(node: ir.Node, rule: Rule | None) -> Dependence | None:
    """The function for the dependences of `node`, whose derivative is `rule`; None if they are not known."""
    traits = traits_of(node)
    if isinstance(rule, Elementwise):
        return elementwise
    if rule is not None and not registry.has(node.domain, node.op_type, rule):  # a user's, which may make more of it
        return None
    if not node.domain and node.op_type in _BY_NAME:
        return _BY_NAME[node.op_type]
    if traits.moves is not None:
        return moved_elements
    return _BY_KIND.get(traits.kind)
