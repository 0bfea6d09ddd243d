"""Control flow whose way differs between directions: all ways are gone, and each direction keeps what is its own.

That is what a Where does, and its price is not only the work. What a direction discards must not fail, and its
derivative must be finite: 0·∞ is NaN, and would reach what the direction kept. So this is for operators that are total;
with others, a Scan over the directions takes each its own way.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir import Var
from onnxgrad.ir.graph import subgraphs

#: Operators that cannot fail, whose results and derivatives are finite for finite operands of any size.
_NAMES = """
    Abs Add And ArgMax ArgMin Atan AveragePool Cast Ceil Celu Clip Concat Constant Conv ConvTranspose Cos CumSum
    DepthToSpace Elu Equal Erf Expand Flatten Floor Gelu Gemm GlobalAveragePool GlobalMaxPool Greater GreaterOrEqual
    HardSigmoid HardSwish Identity If IsInf IsNaN LeakyRelu Less LessOrEqual LogSoftmax MatMul Max MaxPool Mean Min Mish
    Mul Neg Not Or PRelu Pad ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare Relu Reshape Round Selu Shape
    Shrink Sigmoid Sign Sin Size Slice Softmax Softplus Softsign SpaceToDepth Split Squeeze Sub Sum Swish Tanh
    ThresholdedRelu Tile Transpose Trilu Unsqueeze Where Xor"""
TOTAL = frozenset(_NAMES.split())


def is_total(graph: ir.Graph) -> bool:
    """Whether everything that `graph` computes is total."""
    return all(not n.domain and n.op_type in TOTAL and all(map(is_total, subgraphs(n))) for n in graph)


def mask_of(x: Var) -> Var:
    """`x`, a stack of which each direction has one element, as a vector."""
    return x if x.shape is not None and x.rank == 1 else x.builder.Reshape(x, [-1])


def selected(mask: Var, x: Var, y: Var) -> Var:
    """`x` for the directions for which `mask` holds, else `y`."""
    b = x.builder
    mask = b.Reshape(Var(b, mask.value), [-1, *[1] * (x.rank - 1)])
    if x.dtype == ir.DataType.BOOL:  # ONNX Runtime has no Where of them
        return b.Or(b.And(mask, x), b.And(b.Not(mask), y))
    return b.Where(mask, x, y)


def any_of(mask: Var) -> Var:
    """Whether `mask` holds for any direction."""
    b = mask.builder
    return b.ReduceSum(b.Cast(mask, to=int(ir.DataType.INT32)), keepdims=0) > 0
