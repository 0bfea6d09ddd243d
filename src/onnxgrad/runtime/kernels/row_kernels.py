"""Kernels of ``source/rows.c`` and ``source/pooling.c``: picked rows, the signs of ReLU, and the largest of windows."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrad.ir.match import is_op
from onnxgrad.runtime.kernels.substitute import KernelCall, Occurrence, kernel, preceding_call

#: The kernel for each type of the index.
GATHER_GRAD = {ir.DataType.INT64: "GatherGrad", ir.DataType.INT32: "GatherGradInt32"}


@kernel("GatherGrad")
def gather_grad(site: Occurrence) -> KernelCall | None:
    """[g, index, x] → [Σ g at the rows of x that were picked], float32; of x nothing but the shape is read."""
    g, index, x = site.inputs
    if g is None or index is None or x is None or any(v.dtype != ir.DataType.FLOAT for v in (g, x)):
        return None
    name = GATHER_GRAD.get(index.dtype) if index.dtype is not None else None
    return None if name is None else KernelCall(name, site.inputs)


@kernel("ReluGrad")
def relu_grad(site: Occurrence) -> KernelCall | None:
    """[g, y] → [g·[y > 0]], float32; fused into the kernel of the MaxPool that read y, if g comes from there."""
    if not site.all_float32:
        return None
    pool = preceding_call(site, 0, "MaxPoolGrad")
    if pool is not None and pool.inputs[1] is site.inputs[1]:
        attributes = {a.name: a.value for a in pool.attributes.values()}
        return KernelCall("MaxPoolGrad", pool.inputs, {**attributes, "relu": 1})
    return KernelCall("ReluGrad", site.inputs)


@kernel("MaxPoolGrad")
def max_pool_grad(site: Occurrence) -> KernelCall | None:
    """[g, x, y] → [Σ g over the windows in which x is the first of the largest, which are y], float32, over two axes.

    The mask of a following ReLU is fused, if g comes from there alone.
    """
    g, x, y = site.inputs
    if not site.all_float32:
        return None
    sign = preceding_call(site, 0, "ReluGrad")
    after = None if sign is None or sign.inputs[1] is None else sign.inputs[1].producer()
    if sign is None or not is_op(after, "Relu") or after.inputs[0] is not y:
        return KernelCall("MaxPoolGrad", [g, x], {**site.attributes, "relu": 0})
    return KernelCall("MaxPoolGrad", [sign.inputs[0], x], {**site.attributes, "relu": 1})
