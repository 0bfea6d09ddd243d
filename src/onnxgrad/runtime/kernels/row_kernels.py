"""Kernels that add up picked rows (``source/optimizers.c``), and of the largest of windows (``source/pooling.c``)."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.match import producer
from onnxgrad.runtime.kernels.substitute import KernelCall, Occurrence, kernel, preceding_call, preceding_mask

#: The types of an index.
INDICES = (ir.DataType.INT64, ir.DataType.INT32)


@kernel("GatherGrad")
def gather_grad(site: Occurrence) -> KernelCall | None:
    """[g, index, x] → [Σ g at the rows of x that were picked], float32; of x nothing but the shape is read."""
    g, index, x = site.inputs
    if g is None or index is None or x is None or any(v.dtype != ir.DataType.FLOAT for v in (g, x)):
        return None
    return KernelCall("GatherGrad", [x, g, None, index]) if index.dtype in INDICES else None


@kernel("ReluGrad")
def relu_grad(site: Occurrence) -> KernelCall | None:
    """[g, y] → [g·[y > 0]], float32, where g comes from the kernel of the MaxPool that read y; else operators do it."""
    pool = preceding_call(site, 0, "MaxPoolGrad") if site.all_float32 else None
    if pool is None or pool.inputs[1] is not site.inputs[1]:
        return None
    attributes = {a.name: a.value for a in pool.attributes.values()}
    return KernelCall("MaxPoolGrad", pool.inputs, {**attributes, "relu": 1})


@kernel("MaxPoolGrad")
def max_pool_grad(site: Occurrence) -> KernelCall | None:
    """[g, x, y] → [Σ g over the windows in which x is the first of the largest, which are y], float32, over two axes.

    The mask of a following ReLU is fused, if g comes from there alone.
    """
    g, x, y = site.inputs
    if not site.all_float32:
        return None
    masked = preceding_mask(site, 0)
    after = None if masked is None else producer(masked[1], "Relu")
    if masked is None or after is None or after.inputs[0] is not y:
        return KernelCall("MaxPoolGrad", [g, x], {**site.attributes, "relu": 0})
    return KernelCall("MaxPoolGrad", [masked[0], x], {**site.attributes, "relu": 1})
