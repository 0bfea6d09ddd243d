"""Fusions of ONNX Runtime that have nothing to do in a graph, and are left out of the creation of its session.

Each fusion sorts the whole graph anew before it looks for its operators, twice, which takes more than half of the
creation of a session of thousands of nodes. Names that a release does not know are ignored there.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.graph import scopes

#: Parts of the names of operators on integers that stand for floats.
_ROUNDED = ("Quant", "Dequant", "QLinear", "Integer", "NBits")

#: Fusions of those alone.
_OF_ROUNDED = (
    "DoubleQDQPairsRemover",
    "DynamicQuantizeMatMulFusion",
    "EnsureUniqueDQForNodeUnit",
    "MatMulIntegerToFloatFusion",
    "MatMulNBitsFusion",
    "QDQFinalCleanupTransformer",
    "QDQPropagationTransformer",
    "QDQS8ToU8Transformer",
    "QDQSelectorActionTransformer",
    "WeightBiasQuantization",
    "WhereDummyDq",
)

#: Functions that a product may end in.
_ACTIVATIONS = "Elu HardSigmoid LeakyRelu PRelu Relu Selu Sigmoid Softplus Softsign Tanh ThresholdedRelu"

#: Operators that other fusions look for: one of each group must be there.
_SOUGHT: dict[str, tuple[str, ...]] = {
    "AttentionFusion": ("Softmax",),
    "BiasDropoutFusion": ("Dropout",),
    "BiasGeluFusion": ("Gelu FastGelu Erf Tanh",),
    "BiasSkipLayerNormFusion": ("LayerNormalization SkipLayerNormalization Sqrt", "Add"),
    "BiasSoftmaxFusion": ("Softmax", "Add"),
    "ConvActivationFusion": ("Conv",),
    "EmbedLayerNormFusion": ("LayerNormalization SkipLayerNormalization Sqrt", "Gather"),
    "FastGeluFusion": ("Tanh",),
    "GatherSliceToSplitFusion": ("Gather Slice",),
    "GatherToSliceFusion": ("Gather", "Range"),
    "GeluFusionL1": ("Erf",),
    "GeluFusionL2": ("Erf",),
    "GemmActivationFusion": ("Gemm MatMul", _ACTIVATIONS),
    "GroupQueryAttentionFusion": ("GroupQueryAttention",),
    "GroupQueryAttentionPreNormFusion": ("GroupQueryAttention",),
    "LayerNormFusionL1": ("ReduceMean", "Sqrt"),
    "LayerNormFusionL2": ("ReduceMean", "Sqrt"),
    "MatMulActivationFusion": ("MatMul",),
    "MatMulAddFusion": ("MatMul", "Add"),
    "MatMulScaleFusion": ("MatMul",),
    "MatmulTransposeFusion": ("MatMul", "Transpose"),
    "QuickGeluFusion": ("Sigmoid",),
    "SimplifiedLayerNormFusion": ("ReduceMean", "Sqrt"),
    "SkipLayerNormFusion": ("LayerNormalization SimplifiedLayerNormalization Sqrt", "Add"),
    "SliceConcatToSpaceToDepthFusion": ("Slice", "Concat"),
}


def idle_fusions(model: ir.Model) -> list[str]:
    """The names of fusions for which `model` lacks operators."""
    graphs = [*scopes(model.graph), *(g for f in model.functions.values() for g in scopes(f.graph))]
    operators = {node.op_type for graph in graphs for node in graph}
    idle = [name for name, groups in _SOUGHT.items() if any(operators.isdisjoint(g.split()) for g in groups)]
    is_rounded = any(part in operator for operator in operators for part in _ROUNDED)
    return idle if is_rounded else [*idle, *_OF_ROUNDED]
