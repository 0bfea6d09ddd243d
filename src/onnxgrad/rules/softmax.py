"""The softmax family along one axis.

A row of -∞ only has no softmax: the operators give NaN there, and so do the rules. An entry of -∞
beside finite ones has probability 0 and gets exactly 0.
"""

from __future__ import annotations

from onnxgrad.rules.registry import rule, symmetric


@symmetric("Softmax")
def softmax(op, g, x, y):
    """y = softmax x along one axis: y·(g - Σ g·y), J = diag(y) - y·yᵀ"""
    return y * (g - op.ReduceSum(g * y, [op.attr("axis")], keepdims=1))


def log_softmax_jvp(op, tangents, x, y):
    """t - Σ exp(y)·t"""
    (t,) = tangents
    return t - op.ReduceSum(op.Exp(y) * t, [op.attr("axis")], keepdims=1)


@rule("LogSoftmax", jvp=log_softmax_jvp)
def log_softmax(op, g, x, y):
    """y = x - log Σ exp x along one axis: g - exp(y)·Σ g"""
    return g - op.Exp(y) * op.ReduceSum(g, [op.attr("axis")], keepdims=1)
