"""Kernels of ``source/normalization.c``: BatchNormalization with the statistics of the batch, and its cotangents."""

from __future__ import annotations

from onnxgrad.runtime.kernels.substitute import KernelCall, Occurrence, before, kernel


@kernel("BatchNorm")
def batch_norm(site: Occurrence) -> KernelCall | None:
    """[x, scale, bias, …] → [y, mean, variance], float32. ONNX Runtime's own kernel takes one thread."""
    return KernelCall("BatchNorm", site.inputs[:3], site.attributes) if site.all_float32 else None


@kernel("BatchNormGrad")
def batch_norm_grad(site: Occurrence) -> KernelCall | None:
    """[g, x, mean, variance, scale] → [x̄, scale, bias], float32; the statistics are found again where there are none.

    Where g comes from a ReLU and goes nowhere else, its mask is taken into the kernel.
    """
    if not site.all_float32:
        return None
    sign = before(site, 0, "ReluGrad")
    if sign is None:
        return KernelCall("BatchNormGrad", site.inputs, site.attributes)
    g, y = sign.inputs
    return KernelCall("BatchNormGrad", [g, *site.inputs[1:], y], site.attributes)
