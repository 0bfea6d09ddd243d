"""Lowerings of ONNX Runtime's fused products: with transpositions, sums, activations, layouts, or 4-bit weights.

Sources: docs/ContribOperators.md of ONNX Runtime, and its kernels for the CPU where that leaves something open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.schemas import attribute
from onnxgrad.lower.contrib import contrib, refuse
from onnxgrad.lower.contrib_blocks import gelu_of

_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _transpose_operand(b: Builder, x: Var, swap: bool, batch: bool) -> Var:
    """The operand of a FusedMatMul: its first axis behind its batch (`batch`), its last two swapped (`swap`)."""
    if x.rank < 2 or not (swap or batch):
        return x
    perm = list(range(x.rank))
    if batch:
        perm = [*perm[1:-1], 0, perm[-1]]
    if swap:
        perm = [*perm[:-2], perm[-1], perm[-2]]
    return b.Transpose(x, perm=perm)


@contrib("FusedMatMul", "TransposeMatMul")
def fused_matmul(b: Builder, node: ir.Node, A: Var, B: Var) -> Sequence[Var]:
    """Y = α·A'·B', each with axes swapped"""
    x, y = (
        _transpose_operand(b, v, bool(attribute(node, f"trans{n}", 0)), bool(attribute(node, f"transBatch{n}", 0)))
        for n, v in (("A", A), ("B", B))
    )
    return [(x @ y) * float(attribute(node, "alpha", 1.0))]


def _text(node: ir.Node, name: str) -> str:
    text = attribute(node, name, "")
    return text.decode() if isinstance(text, bytes) else text


def _apply_activation(b: Builder, y: Var, name: str, given: Sequence[float | None]) -> Var:
    """`y` after the activation `name` with the node's parameters."""
    first, second = (*given, None, None)[:2]
    if name in ("", "Relu", "Tanh", "Sigmoid", "Softplus", "Softsign", "Abs", "Neg", "HardSwish"):
        return b.emit(name, y) if name else y
    if name in ("LeakyRelu", "Elu", "ThresholdedRelu", "Celu"):
        return b.emit(name, y, alpha=first)
    if name in ("HardSigmoid", "ScaledTanh", "Selu", "Affine"):
        if name == "ScaledTanh":
            return b.Tanh(y * second) * first
        return y * first + second if name == "Affine" else b.emit(name, y, alpha=first, **_second(name, second))
    if name == "Clip" and first is not None and second is not None:
        return b.Clip(y, b.const(first, y.dtype), b.const(second, y.dtype))
    if name == "Gelu":
        return gelu_of(b, y)
    if name == "QuickGelu":
        return y * b.Sigmoid(y * (1.702 if first is None else first))
    raise NotDifferentiable(f"its activation {name!r} is not one that is known\n  hint: save the model before fusion")


def _second(name: str, value: float | None) -> dict[str, Any]:
    return {"gamma" if name == "Selu" else "beta": value}


def _convolve(b: Builder, node: ir.Node, x: Var, w: Var, bias: Var | None, z: Var | None, last: bool) -> Var:
    """Conv, then + Z, then the activation; channels are the last axis of x, z and the result if `last`."""
    there, back = [0, x.rank - 1, *range(1, x.rank - 1)], [0, *range(2, x.rank), 1]
    y = b.Conv(b.Transpose(x, perm=there) if last else x, w, bias, **{k: attribute(node, k, None) for k in _CONV})
    y = b.Transpose(y, perm=back) if last else y
    y = y if z is None else y + z
    return _apply_activation(b, y, _text(node, "activation"), attribute(node, "activation_params", []))


@contrib("FusedConv")
def fused_conv(b: Builder, node: ir.Node, X: Var, W: Var, B: Var | None, Z: Var | None) -> Sequence[Var]:
    """Y = f(X ⋆ W + B + Z)"""
    return [_convolve(b, node, X, W, B, Z, last=False)]


@contrib("NhwcFusedConv")
def nhwc_fused_conv(b: Builder, node: ir.Node, X: Var, W: Var, B: Var | None, Z: Var | None) -> Sequence[Var]:
    """Y = f(X ⋆ W + B + Z), channels last but in W"""
    return [_convolve(b, node, X, W, B, Z, last=True)]


@contrib("NhwcConv")
def nhwc_conv(b: Builder, node: ir.Node, X: Var, W: Var, B: Var | None) -> Sequence[Var]:
    """Y = X ⋆ W + B, channels last, in W too"""
    # as the tools write W, and the kernels for CUDA read it; the documentation has it the other way round
    (_, second, *_, last), channels = W.shape or (None, None, None), X.shape[-1] if X.shape is not None else None
    group = attribute(node, "group", 1)
    are_known = all(isinstance(d, int) for d in (second, last, channels))
    documented = are_known and last * group != channels and second * group == channels
    w = W if documented else b.Transpose(W, perm=[0, W.rank - 1, *range(1, W.rank - 1)])
    return [_convolve(b, node, X, w, B, None, last=True)]


@contrib("FusedGemm")
def fused_gemm(b: Builder, node: ir.Node, A: Var, B: Var, C: Var | None) -> Sequence[Var]:
    """Y = f(α·A'·B' + β·C)"""
    y = b.Gemm(A, B, C, **{k: attribute(node, k, None) for k in ("alpha", "beta", "transA", "transB")})
    coefficients = [attribute(node, f"activation_{k}", None) for k in ("alpha", "beta")]
    if _text(node, "activation") == "Selu":
        coefficients[1] = attribute(node, "activation_gamma", None)
    return [_apply_activation(b, y, _text(node, "activation"), coefficients)]


# --- weights of a few bits -------------------------------------------------------------------------


def _unpack_bits(b: Builder, x: Var, bits: int) -> Var:
    """The numbers of `bits` bits in the bytes of x, lowest first, along its last axis."""
    if bits == 8:
        return x
    mask = b.const(np.array(2**bits - 1, np.uint8))
    parts = []
    for shift in range(0, 8, bits):
        byte = x if not shift else b.BitShift(x, b.const(np.array(shift, np.uint8)), direction="RIGHT")
        parts.append(b.Unsqueeze(byte if shift + bits == 8 else b.BitwiseAnd(byte, mask), [-1]))
    packed = b.Concat(*parts, axis=-1)
    return b.Reshape(packed, [0] * (x.rank - 1) + [-1])


@contrib("MatMulNBits", whole=("B", "g_idx"))
def matmul_nbits(
    b: Builder,
    node: ir.Node,
    A: Var,
    B: Var,
    scales: Var,
    zero_points: Var | None,
    g_idx: Var | None,
    bias: Var | None,
) -> Sequence[Var]:
    """Y = A·Wᵀ + bias with W = (q - z)·s by blocks, q being packed in bytes"""
    refuse(node, "weight_prepacked", 0, hint="pack the weights at run time (weight_prepacked=0)")
    rows, columns, size, bits = (attribute(node, k, 4 if k == "bits" else 0) for k in ("N", "K", "block_size", "bits"))
    if bits not in (2, 4, 8):
        raise NotDifferentiable(f"its weights have {bits} bits\n  hint: quantize them to 2, 4 or 8")
    blocks = -(-columns // size)
    q = b.Reshape(_unpack_bits(b, b.Reshape(B, [rows, blocks, -1]), bits), [rows, blocks * size])
    if zero_points is None:
        z = b.const(np.full((1, 1), 2 ** (bits - 1)), A.dtype)
    elif zero_points.dtype == ir.DataType.UINT8:
        wide = b.Slice(_unpack_bits(b, b.Reshape(zero_points, [rows, -1]), bits), [0], [blocks], [1])
        z = b.cast_like(wide, A)
    else:
        z = b.cast_like(b.Reshape(zero_points, [rows, blocks]), A)
    s = b.Reshape(scales, [rows, blocks])
    if g_idx is not None:  # which block each column is in
        if bits != 4:
            raise NotDifferentiable("ONNX Runtime reads its g_idx for 4 bits only\n  hint: quantize without g_idx")
        q = b.cast_like(b.Slice(q, [0], [columns], [1]), A)
        z = z if zero_points is None else b.Gather(z, g_idx, axis=1)
        w = (q - z) * b.Gather(s, g_idx, axis=1)
    else:
        q = b.cast_like(b.Reshape(q, [rows, blocks, size]), A)
        w = (q - b.Unsqueeze(z, [2])) * b.Unsqueeze(s, [2])
        w = b.Slice(b.Reshape(w, [rows, blocks * size]), [0], [columns], [1])
    y = A @ b.Transpose(w, perm=[1, 0])
    return [y if bias is None else y + bias]
