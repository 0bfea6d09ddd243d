"""The kernel of ``source/softmax.c``: softmax cross-entropy with its cotangent."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.runtime.kernels.substitute import KernelCall, Occurrence, kernel


@kernel("SoftmaxCrossEntropy")
def softmax_cross_entropy(site: Occurrence) -> KernelCall | None:
    """[scores, labels, weights, share of a row's loss] → [loss, scores], float32, without the logarithms of all."""
    scores, labels, weights, share = site.inputs
    floats = [v for v in (scores, weights, share, *site.outputs) if v is not None]
    if labels is None or any(v.dtype != ir.DataType.FLOAT for v in floats):
        return None
    known = labels.dtype in (ir.DataType.INT64, ir.DataType.INT32)
    return KernelCall("SoftmaxCrossEntropy", site.inputs, site.attributes) if known else None
