"""The kernel of ``source/softmax.c``: softmax cross-entropy with its cotangent."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.runtime.kernels.substitute import KernelCall, Occurrence, kernel

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
