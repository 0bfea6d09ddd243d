"""Dependences by the class of operators; with neither class nor name, each element depends on every element."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.operators import ByOperator, Kind, traits_of
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

_dependence: ByOperator[Dependence] = ByOperator({Kind.ELEMENTWISE: elementwise, Kind.REDUCTION: reduced})
_dependence("Softmax", "LogSoftmax", "LpNormalization")(along_axis)
_dependence("LayerNormalization", "RMSNormalization")(normalized)
_dependence("CumSum", "CumProd")(cumulated)
_dependence("AveragePool", "LpPool", "MaxPool")(pooled)
_dependence("Conv", "ConvTranspose")(convolution)
_dependence("Einsum")(einsum)
_dependence("Gemm")(gemm)
_dependence("MatMul")(matmul)
_dependence("ScatterElements")(scatter_elements)
_dependence("ScatterND")(scatter_nd)


def dependence_of(node: ir.Node, rule: Rule | None) -> Dependence | None:
    """The function for the dependences of `node`, whose derivative is `rule`; None if they are not known."""
    if isinstance(rule, Elementwise):
        return elementwise
    if rule is not None and not registry.has(node.domain, node.op_type, rule):  # a user's, which may make more of it
        return None
    if _dependence.override(node) is None and traits_of(node).moves is not None:
        return moved_elements
    return _dependence.of(node)
