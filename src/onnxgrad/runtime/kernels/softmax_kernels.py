"""Kernels of ``source/softmax.c``: cotangents of the softmax family, and softmax cross-entropy with its cotangent."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.runtime.kernels.substitute import KernelCall, Occurrence, kernel


@kernel("SoftmaxGrad")
def softmax_grad(site: Occurrence) -> KernelCall | None:
    """[g, y] → [y·(g - Σ g·y)], float32; NaN in y counts as 0 where `guarded`."""
    return KernelCall("SoftmaxGrad", site.inputs, site.attributes) if site.all_float32 else None


@kernel("LogSoftmaxGrad")
def log_softmax_grad(site: Occurrence) -> KernelCall | None:
    """[g, y] → [g - exp(y)·Σ g], float32; NaN in y counts as -∞ where `guarded`."""
    return KernelCall("LogSoftmaxGrad", site.inputs, site.attributes) if site.all_float32 else None


_CROSS_ENTROPY = {ir.DataType.INT64: "SoftmaxCrossEntropy", ir.DataType.INT32: "SoftmaxCrossEntropyInt32"}


@kernel("SoftmaxCrossEntropy")
def softmax_cross_entropy(site: Occurrence) -> KernelCall | None:
    """[scores, labels, weights, share of a row's loss] → [loss, scores], float32, without the logarithms of all."""
    scores, labels, weights, share = site.inputs
    floats = [v for v in (scores, weights, share, *site.outputs) if v is not None]
    if labels is None or any(v.dtype != ir.DataType.FLOAT for v in floats):
        return None
    name = _CROSS_ENTROPY.get(labels.dtype) if labels.dtype is not None else None
    return None if name is None else KernelCall(name, site.inputs, site.attributes)
