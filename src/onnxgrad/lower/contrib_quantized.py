"""Operators of ONNX Runtime on quantized numbers: dequantize, compute in floats, quantize.

Rounding is a QuantizeLinear in the lowered graph. So it has a straight-through derivative while ``straight_through``
names that operator, and otherwise none with respect to quantized numbers. Weights are integers; their scales have
derivatives if the result is a float. An integer kernel may round ties the other way.

The kernels of DynamicQuantizeLSTM round intermediate values to eight bits; the lowering does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NotDifferentiable
from onnxgrad.ir import Builder, Var
from onnxgrad.ir.match import not_none
from onnxgrad.ir.schemas import attribute
from onnxgrad.ir.shapes import move_axis
from onnxgrad.lower.contrib import contrib
from onnxgrad.lower.contrib_attention import projected
from onnxgrad.lower.registry import lowering_for, require_operand


def _scalar(b: Builder, x: Var | None) -> Var | None:
    """A scale or zero point of a whole tensor as a scalar; it may be a vector of one element."""
    if x is None or x.value.shape is None or x.rank == 0:
        return x
    return b.Reshape(x, b.const(np.zeros(0, np.int64)))


def _is_per_tensor(x: Var) -> bool:
    """True if a scale is one for the whole tensor."""
    return x.rank == 0 or (x.shape is not None and x.shape[0] == 1)


def _floats(b: Builder, x: Var, scale: Var, zero: Var | None) -> Var:
    """(x - z)·s with one scale."""
    return b.DequantizeLinear(x, _scalar(b, scale), _scalar(b, zero))


def _by_column(b: Builder, x: Var, scale: Var, zero: Var | None, axis: int = -1) -> Var:
    """(x - z)·s with one scale, or one for each place along `axis`."""
    if _is_per_tensor(scale):
        return _floats(b, x, scale, zero)
    if scale.rank > 1:
        raise NotDifferentiable(f"its scale {scale.name!r} has {scale.rank} axes\n  hint: quantize by tensor or column")
    if zero is not None and _is_per_tensor(zero):
        zero = b.Expand(zero, b.shape_of(scale))
    return b.DequantizeLinear(x, scale, zero, axis=axis % x.rank)


def _numbers(b: Builder, y: Var, scale: Var, zero: Var | None, like: Var | None = None) -> Var:
    """y/s + z, rounded; of the type of z, or of `like`."""
    if zero is None and like is not None:
        zero = b.const(0, like.dtype)
    return b.QuantizeLinear(y, _scalar(b, scale), _scalar(b, zero))


_TWO = ("A", "A_zero_point", "B", "B_zero_point", "C_zero_point")
_X = ("X", "X_zero_point", "Y_zero_point")


@contrib("QLinearAdd", "QLinearMul", whole=_TWO)
def qlinear_of_two(
    b: Builder,
    node: ir.Node,
    A: Var,
    A_scale: Var,
    A_zero_point: Var | None,
    B: Var,
    B_scale: Var,
    B_zero_point: Var | None,
    C_scale: Var,
    C_zero_point: Var | None,
) -> Sequence[Var]:
    """C = quantized(a + b), or quantized(a·b)"""
    left, right = _floats(b, A, A_scale, A_zero_point), _floats(b, B, B_scale, B_zero_point)
    y = left + right if node.op_type == "QLinearAdd" else left * right
    return [_numbers(b, y, C_scale, C_zero_point, A)]


@contrib("QLinearSigmoid", whole=_X)
def qlinear_sigmoid(
    b: Builder, node: ir.Node, X: Var, X_scale: Var, X_zero_point: Var | None, Y_scale: Var, Y_zero_point: Var | None
) -> Sequence[Var]:
    """Y = quantized(sigmoid x)"""
    return [_numbers(b, b.Sigmoid(_floats(b, X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X)]


@contrib("QLinearLeakyRelu", whole=_X)
def qlinear_leaky_relu(
    b: Builder, node: ir.Node, X: Var, X_scale: Var, X_zero_point: Var | None, Y_scale: Var, Y_zero_point: Var | None
) -> Sequence[Var]:
    """Y = quantized(max(x, 0) + α·min(x, 0))"""
    y = b.LeakyRelu(_floats(b, X, X_scale, X_zero_point), alpha=attribute(node, "alpha", 0.01))
    return [_numbers(b, y, Y_scale, Y_zero_point, X)]


@contrib("QLinearSoftmax", whole=("X", "x_zero_point", "y_zero_point"))
def qlinear_softmax(
    b: Builder, node: ir.Node, X: Var, X_scale: Var, x_zero_point: Var | None, y_scale: Var, y_zero_point: Var | None
) -> Sequence[Var]:
    """Y = quantized(softmax x)"""
    x, axis = _floats(b, X, X_scale, x_zero_point), attribute(node, "axis", -1)
    if attribute(node, "opset", 13) < 13:  # over all axes from this one on
        flat = b.Reshape(x, b.join(b.shape_of(x, 0, axis % x.rank), [-1]))
        y = b.reshape(b.Softmax(flat, axis=-1), b.shape_of(x))
    else:
        y = b.Softmax(x, axis=axis)
    return [_numbers(b, y, y_scale, y_zero_point, X)]


@contrib("QLinearReduceMean", whole=("data", "data_zero_point", "reduced_zero_point"))
def qlinear_reduce_mean(
    b: Builder,
    node: ir.Node,
    data: Var,
    data_scale: Var,
    data_zero_point: Var | None,
    reduced_scale: Var,
    reduced_zero_point: Var | None,
) -> Sequence[Var]:
    """Y = quantized(mean x)"""
    x = _floats(b, data, data_scale, data_zero_point)
    y = b.ReduceMean(x, attribute(node, "axes", None), keepdims=attribute(node, "keepdims", 1))
    return [_numbers(b, y, reduced_scale, reduced_zero_point, data)]


@contrib("QLinearConcat", whole=("Y_zero_point",))
def qlinear_concat(b: Builder, node: ir.Node, Y_scale: Var, Y_zero_point: Var, *inputs: Var | None) -> Sequence[Var]:
    """Y = quantized [x₁ … xₙ]; each x with its scale and zero point"""
    triples = zip(*(inputs[i::3] for i in range(3)))
    parts = [_floats(b, require_operand(x, "X"), require_operand(s, "scale"), z) for x, s, z in triples]
    return [_numbers(b, b.Concat(*parts, axis=attribute(node, "axis", 0)), Y_scale, Y_zero_point)]


@contrib("QLinearWhere", whole=("condition", "X", "x_zero_point", "Y", "y_zero_point", "z_zero_point"))
def qlinear_where(
    b: Builder,
    node: ir.Node,
    condition: Var,
    X: Var,
    x_scale: Var,
    x_zero_point: Var,
    Y: Var,
    y_scale: Var,
    y_zero_point: Var,
    z_scale: Var,
    z_zero_point: Var,
) -> Sequence[Var]:
    """Z = quantized(x where c, else y)"""
    z = b.Where(condition, _floats(b, X, x_scale, x_zero_point), _floats(b, Y, y_scale, y_zero_point))
    return [_numbers(b, z, z_scale, z_zero_point)]


def _channels_first(node: ir.Node, x: Var) -> Var:
    return move_axis(x, -1, 1) if attribute(node, "channels_last", 0) else x


def _channels_as_asked(node: ir.Node, y: Var) -> Var:
    return move_axis(y, 1, -1) if attribute(node, "channels_last", 0) else y


@contrib("QLinearGlobalAveragePool", whole=("X", "x_zero_point", "y_zero_point"))
def qlinear_global_average_pool(
    b: Builder, node: ir.Node, X: Var, x_scale: Var, x_zero_point: Var, y_scale: Var, y_zero_point: Var
) -> Sequence[Var]:
    """Y = quantized(mean x) over all but batch and channels"""
    axes = range(1, X.rank - 1) if attribute(node, "channels_last", 0) else range(2, X.rank)
    y = b.ReduceMean(_floats(b, X, x_scale, x_zero_point), list(axes), keepdims=1)
    return [_numbers(b, y, y_scale, y_zero_point, X)]


@contrib("QLinearAveragePool", whole=("X", "x_zero_point", "y_zero_point"))
def qlinear_average_pool(
    b: Builder, node: ir.Node, X: Var, x_scale: Var, x_zero_point: Var | None, y_scale: Var, y_zero_point: Var | None
) -> Sequence[Var]:
    """Y = quantized(mean of x over each window)"""
    names = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    x = _channels_first(node, _floats(b, X, x_scale, x_zero_point))
    y = b.AveragePool(x, **{k: attribute(node, k, None) for k in names})
    return [_numbers(b, _channels_as_asked(node, y), y_scale, y_zero_point, X)]


@contrib("QLinearConv", whole=("x", "x_zero_point", "w", "w_zero_point", "y_zero_point", "B"))
def qlinear_conv(
    b: Builder,
    node: ir.Node,
    x: Var,
    x_scale: Var,
    x_zero_point: Var,
    w: Var,
    w_scale: Var,
    w_zero_point: Var,
    y_scale: Var,
    y_zero_point: Var,
    B: Var | None,
) -> Sequence[Var]:
    """Y = quantized(x ⋆ w + B), B being in units of the scale of x times that of w"""
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    h, k = _channels_first(node, _floats(b, x, x_scale, x_zero_point)), _by_column(b, w, w_scale, w_zero_point, 0)
    bias = None
    if B is not None:
        bias = b.Cast(B, to=int(ir.DataType.FLOAT)) * require_operand(_scalar(b, x_scale), "x_scale") * w_scale
    y = b.Conv(h, k, bias, **{name: attribute(node, name, None) for name in names})
    return [_numbers(b, _channels_as_asked(node, y), y_scale, y_zero_point)]


# --- products --------------------------------------------------------------------------------------


@contrib("MatMulIntegerToFloat", whole=("A", "B", "a_zero_point", "b_zero_point"))
def matmul_integer_to_float(
    b: Builder,
    node: ir.Node,
    A: Var,
    B: Var,
    a_scale: Var,
    b_scale: Var,
    a_zero_point: Var | None,
    b_zero_point: Var | None,
    bias: Var | None,
) -> Sequence[Var]:
    """Y = a·b + bias, dequantized before"""
    if not _is_per_tensor(a_scale):
        raise NotDifferentiable("its a_scale is not one for the whole tensor\n  hint: quantize A by one scale")
    y = _floats(b, A, a_scale, a_zero_point) @ _by_column(b, B, b_scale, b_zero_point)
    return [y if bias is None else y + bias]


@contrib("DynamicQuantizeMatMul", whole=("B", "b_zero_point"))
def dynamic_quantize_matmul(
    b: Builder, node: ir.Node, A: Var, B: Var, b_scale: Var, b_zero_point: Var | None, bias: Var | None
) -> Sequence[Var]:
    """Y = a·b + bias, a being quantized by its own extrema"""
    a = b.DequantizeLinear(*b.emit("DynamicQuantizeLinear", A, outputs=3))
    y = a @ _by_column(b, B, b_scale, b_zero_point)
    return [y if bias is None else y + bias]


@contrib("QGemm", whole=("A", "a_zero_point", "B", "b_zero_point", "C", "y_zero_point"))
def qgemm(
    b: Builder,
    node: ir.Node,
    A: Var,
    a_scale: Var,
    a_zero_point: Var,
    B: Var,
    b_scale: Var,
    b_zero_point: Var,
    C: Var | None,
    y_scale: Var | None,
    y_zero_point: Var | None,
) -> Sequence[Var]:
    """Y = α·(a'·b' + C), C being in units of the scale of a times that of b; quantized if it has a scale"""
    turn = {"transA": attribute(node, "transA", 0), "transB": attribute(node, "transB", 0)}
    columns = _by_column(b, B, b_scale, b_zero_point, 0 if turn["transB"] else 1)
    y = b.Gemm(_floats(b, A, a_scale, a_zero_point), columns, **turn)
    if C is not None:
        y = y + b.Cast(C, to=int(ir.DataType.FLOAT)) * (require_operand(_scalar(b, a_scale), "a_scale") * b_scale)
    y = y * float(attribute(node, "alpha", 1.0))
    return [y if y_scale is None else _numbers(b, y, y_scale, y_zero_point)]


@contrib("QAttention", whole=("input", "weight", "mask_index", "input_zero_point", "weight_zero_point"))
def qattention(
    b: Builder,
    node: ir.Node,
    input: Var,
    weight: Var,
    bias: Var,
    input_scale: Var,
    weight_scale: Var,
    mask_index: Var | None,
    input_zero_point: Var | None,
    weight_zero_point: Var | None,
    past: Var | None,
) -> Sequence[Var | None]:
    """Y = P·V with [Q, K, V] = x·W + b, dequantized before, and P = softmax(s·Q·Kᵀ + mask)"""
    x = _floats(b, input, input_scale, input_zero_point)
    whole = x @ _by_column(b, weight, weight_scale, weight_zero_point) + bias
    return projected(b, node, whole, mask_index, past, None)


class _Recurrence(NamedTuple):
    """The operands of DynamicQuantizeLSTM."""

    X: Var
    W: Var
    R: Var
    B: Var | None
    sequence_lens: Var | None
    initial_h: Var | None
    initial_c: Var | None
    P: Var | None
    W_scale: Var
    W_zero_point: Var
    R_scale: Var
    R_zero_point: Var


@contrib("DynamicQuantizeLSTM", whole=("W", "R", "sequence_lens", "W_zero_point", "R_zero_point"), operands=_Recurrence)
def dynamic_quantize_lstm(b: Builder, node: ir.Node, x: _Recurrence) -> Sequence[Var | None]:
    """The long short-term memory with weights that are dequantized"""
    weights = [_gates(b, *w) for w in ((x.W, x.W_scale, x.W_zero_point), (x.R, x.R_scale, x.R_zero_point))]
    operands = [x.X, *weights, x.B, x.sequence_lens, x.initial_h, x.initial_c, x.P]
    inputs = [None if v is None else v.value for v in operands]
    lstm = not_none(lowering_for("LSTM"))
    return lstm(b, ir.Node("", "LSTM", inputs, list(node.attributes.values()), num_outputs=3))


def _gates(b: Builder, w: Var, scale: Var, zero: Var) -> Var:
    """[D, n, 4·H] as floats [D, 4·H, n], with a scale for each direction, or for each of its columns."""
    axes = [1] if scale.rank == 2 else [1, 2]
    scaled, units = b.cast_like(w, scale), b.cast_like(zero, scale)
    x = (scaled - b.Unsqueeze(units, axes)) * b.Unsqueeze(scale, axes)
    return b.Transpose(x, perm=[0, 2, 1])


# --- conversions -----------------------------------------------------------------------------------


@contrib("DequantizeLinear", whole=("x", "x_zero_point"))
def dequantize_linear(b: Builder, node: ir.Node, x: Var, x_scale: Var, x_zero_point: Var | None) -> Sequence[Var]:
    """y = (x - z)·s"""
    return [b.DequantizeLinear(x, x_scale, x_zero_point, axis=_axis(node, x_scale, x))]


@contrib("QuantizeLinear", whole=("y_zero_point",))
def quantize_linear(b: Builder, node: ir.Node, x: Var, y_scale: Var, y_zero_point: Var | None) -> Sequence[Var]:
    """y = x/s + z, rounded and saturated"""
    return [b.QuantizeLinear(x, y_scale, y_zero_point, axis=_axis(node, y_scale, x))]


def _axis(node: ir.Node, scale: Var, x: Var) -> int | None:
    return None if scale.rank == 0 else attribute(node, "axis", 1)
