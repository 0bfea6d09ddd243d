"""The rule of each operator; one without a rule is taken to make every element of everything."""

from __future__ import annotations

from onnxgrad.transforms.sparse.dependence import (
    Rule,
    along,
    cumulated,
    elementwise,
    moved,
    normalized,
    reduced,
    scatter_elements,
    scatter_nd,
)
from onnxgrad.transforms.sparse.products import einsum, gemm, matmul
from onnxgrad.transforms.sparse.windows import convolution, pooled

_MOVES = """
    Compress Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape ReverseSequence
    Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze""".split()  # noqa: SIM905
_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()  # noqa: SIM905

RULES: dict[str, Rule] = {
    **dict.fromkeys(_MOVES, moved),
    **{f"Reduce{name}": reduced for name in _REDUCTIONS},
    **dict.fromkeys(("Cast", "CastLike"), elementwise),
    **dict.fromkeys(("Softmax", "LogSoftmax", "LpNormalization"), along),
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
