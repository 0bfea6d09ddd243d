"""Activations: y = f(x) elementwise, and the softmax family."""

from __future__ import annotations

from onnxgrad.rules.registry import elementwise, rule, symmetric


@elementwise("Tanh")
def tanh(op, g, x, y):
    """y = tanh x: g·(1 - y²)"""
    return g * (1 - y * y)


@elementwise("Sigmoid")
def sigmoid(op, g, x, y):
    """y = 1/(1 + exp(-x)): g·y·(1 - y)"""
    return g * (y * (1 - y))


@elementwise("Relu")
def relu(op, g, x, y):
    """y = max(x, 0): g·[y > 0], with 0 at the kink.

    [y > 0] is written as a steep HardSigmoid, clip(αy, 0, 1): one threaded kernel, no cast from bool.
    """
    return g * op.HardSigmoid(y, alpha=3e38, beta=0.0)


@symmetric("Softmax")
def softmax(op, g, x, y):
    """y = softmax x along one axis: y·(g - Σ g·y), J = diag(y) - y·yᵀ"""
    return y * (g - op.ReduceSum(g * y, [op.attr("axis")], keepdims=1))


@rule("LogSoftmax")
def log_softmax(op, g, x, y):
    """y = x - log Σ exp x: g - exp(y)·Σ g"""
    return g - op.Exp(y) * op.ReduceSum(g, [op.attr("axis")], keepdims=1)
