"""BatchNormalization over the statistics of the batch, in reductions: only ONNX Runtime's CPU provider has it whole."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrad.ir.builder import Builder, Var
from onnxgrad.ir.match import is_op
from onnxgrad.runtime.rewrites.rewrite import write_out
from onnxgrad.runtime.setting import Setting


def uses_batch(node: ir.Node) -> bool:
    """True for a BatchNormalization in training mode."""
    return is_op(node, "BatchNormalization") and node.attributes.get_int("training_mode", 0) == 1


def batch_normalization(b: Builder, node: ir.Node) -> list[Var]:
    """Y = (X - mean)/√(var + ε)·scale + B over all axes but 1, and the running statistics that a step keeps."""
    x, scale, shift, *running = [b.var(v) for v in node.inputs if v is not None]
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    momentum = node.attributes.get_float("momentum", 0.9)
    axes = [k for k in range(x.rank) if k != 1]
    mean = b.ReduceMean(x, axes, keepdims=1)
    away = x - mean
    var = b.ReduceMean(away * away, axes, keepdims=1)
    column = np.array([1, -1, *[1] * (x.rank - 2)], np.int64)
    y = away / b.Sqrt(var + epsilon) * b.reshape(scale, column) + b.reshape(shift, column)
    flat = [b.reshape(v, np.array([-1], np.int64)) for v in (mean, var)]
    kept = [b.cast_like(v, old) * (1 - momentum) + old * momentum for v, old in zip(flat, running, strict=True)]
    return [y, *kept][: len(node.outputs)]


BATCH_NORM = write_out(
    "batch_norm",
    "reductions",
    "BatchNormalization over the batch, which only the CPU provider has",
    uses_batch,
    batch_normalization,
    Setting.is_here,
)
