"""Activations: y = f(x) elementwise. At a kink the derivative is that of PyTorch's functions.

Steps and masks are arithmetic where a fast one exists (see `step_functions`), else a Where.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxgrad.ir import Var
from onnxgrad.rules.op import Op
from onnxgrad.rules.registry import elementwise
from onnxgrad.rules.rule import Result
from onnxgrad.rules.step_functions import is_step, positive


@elementwise("Sigmoid", total=True, interval=(0, 1))
def sigmoid(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = σ(x) = 1/(1 + exp(-x)): g·y·(1 - y)"""
    return g * (y * (1 - y))


@elementwise("Relu", total=True, piecewise_linear=True, interval=(0, math.inf))
def relu(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = max(x, 0): g·[y > 0], with 0 at the kink"""
    dx = g * positive(op, y)
    op.named("ReluGrad", [dx], of=[g, y])
    return dx


@elementwise("LeakyRelu", total=True, piecewise_linear=True)
def leaky_relu(op: Op, g: Var, x: Var) -> Result:
    """y = x where x > 0, else α·x: g·(1 where x > 0, else α), with α at the kink"""
    alpha = op.attr("alpha")
    if x.dtype == ir.DataType.FLOAT and 0 <= alpha <= 1:
        return g * op.Max(positive(op, x), alpha)
    return op.Where(x > 0, g, g * alpha)


@elementwise("PRelu", total=True)
def prelu(op: Op, g: Var, x: Var, slope: Var) -> Result:
    """y = x where x > 0, else s·x: (g where x > 0, else g·s; 0 where x > 0, else g·x), with s at the kink"""
    above = x > 0
    return op.Where(above, g, g * slope), op.Where(above, 0.0, g * x)


@elementwise("Elu", total=True)
def elu(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = x where x > 0, else α(exp x - 1): g·(1 where x > 0, else y + α), with α at the kink"""
    return op.Where(x > 0, g, g * (y + op.attr("alpha")))


@elementwise("Selu", total=True)
def selu(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = γx where x > 0, else γα(exp x - 1): g·(γ where x > 0, else y + γα), with γα at the kink"""
    gamma = op.attr("gamma")
    return op.Where(x > 0, g * gamma, g * (y + gamma * op.attr("alpha")))


@elementwise("Celu", total=True)
def celu(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = x where x > 0, else α(exp(x/α) - 1): g·(1 where x > 0, else y/α + 1)"""
    return op.Where(x > 0, g, g * (y * (1 / op.attr("alpha")) + 1))


@elementwise("Softplus", total=True, interval=(0, math.inf))
def softplus(op: Op, g: Var, x: Var) -> Result:
    """y = log(1 + exp x): g·σ(x)"""
    return g * op.Sigmoid(x)


@elementwise("Softsign", total=True, interval=(-1, 1))
def softsign(op: Op, g: Var, x: Var) -> Result:
    """y = x/(1 + |x|): g/(1 + |x|)²"""
    below = op.Abs(x) + 1
    return g / below / below


@elementwise("HardSigmoid", total=True, piecewise_linear=True, interval=(0, 1))
def hard_sigmoid(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = clip(αx + β, 0, 1): g·α·[0 < y < 1], with 0 at the kinks; nothing where y is a step"""
    alpha = op.attr("alpha")
    return None if is_step(alpha) else g * (positive(op, y * (1 - y)) * alpha)


@elementwise("HardSwish", total=True)
def hard_swish(op: Op, g: Var, x: Var) -> Result:
    """y = x·h with h = clip(x/6 + ½, 0, 1): g·(h + (h - ½)·[0 < h < 1])"""
    h = op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
    return g * (h + positive(op, h * (1 - h)) * (h - 0.5))


@elementwise("Mish", total=True)
def mish(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = x·t with t = tanh(log(1 + exp x)): g·(t + s·(x - y·t)) with s = σ(x)

    With p = s(2 - s), t = p/(2 - p): exact, and without the slow Softplus of ONNX Runtime.
    """
    s = op.Sigmoid(x)
    p = s * (2 - s)
    t = p / (2 - p)
    return g * (t + s * (x - y * t))


@elementwise("ThresholdedRelu", total=True, piecewise_linear=True)
def thresholded_relu(op: Op, g: Var, x: Var) -> Result:
    """y = x where x > α, else 0: g·[x > α]"""
    return g * positive(op, x - op.attr("alpha"))


@elementwise("Shrink", total=True, piecewise_linear=True)
def shrink(op: Op, g: Var, x: Var) -> Result:
    """y = x ∓ bias where ±x > λ, else 0: g·[|x| > λ]"""
    return g * positive(op, op.Abs(x) - op.attr("lambd"))


@elementwise("Swish", total=True)
def swish(op: Op, g: Var, x: Var, y: Var) -> Result:
    """y = x·s with s = σ(αx): g·(s + α·y·(1 - s))"""
    alpha = op.attr("alpha")
    s = op.Sigmoid(x * alpha)
    return g * (s + (y * alpha) * (1 - s))


@elementwise("Gelu", total=True)
def gelu(op: Op, g: Var, x: Var) -> Result:
    """y = x·Φ(x), or ½x(1 + t) with t = tanh u and u = √(2/π)(x + 0.044715x³) for "tanh":
    g·(Φ(x) + x·φ(x)), or g·(1 + t)·(½ + (1 - t)·½x·u')
    """
    if op.attr("approximate") == "tanh":
        return g * _tanh_gelu_slope(op, x)
    u = x * math.sqrt(0.5)
    density = op.Exp(-0.5 * math.log(2 * math.pi) - u * u)
    return g * ((op.Erf(u) + 1) * 0.5 + x * density)


def _tanh_gelu_slope(op: Op, x: Var) -> Var:
    """(1 + t)·(½ + (1 - t)·½x·√(2/π)(1 + 3·0.044715x²)) with t = tanh u.

    From |x| = 10 on t is ±1 in every dtype; x is clipped there in float16, which x³ and x² overflow.
    """
    c, k = math.sqrt(2 / math.pi), 0.044715
    x = op.Clip(x, -10.0, 10.0) if x.dtype == ir.DataType.FLOAT16 else x
    square = x * x
    t = op.Tanh(x * (square * (c * k) + c))
    return (t + 1) * ((1 - t) * (x * (square * (1.5 * c * k) + 0.5 * c)) + 0.5)
