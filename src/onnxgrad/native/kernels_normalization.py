"""Kernels of ``source/normalization.c``: the cotangents of BatchNormalization with the statistics of the batch."""

from __future__ import annotations

from onnxgrad.native.swapping import Call, Site, before, kernel


@kernel("BatchNormGrad")
def batch_norm_grad(site: Site) -> Call | None:
    """[g, x, mean, variance, scale] → [x̄, scale, bias], float32; the statistics are found again where there are none.

    Where g comes from a ReLU and goes nowhere else, its mask is taken into the kernel.
    """
    if not site.all_float32:
        return None
    sign = before(site, 0, "ReluGrad")
    if sign is None:
        return Call("BatchNormGrad", site.inputs, site.attributes)
    g, y = sign.inputs
    return Call("BatchNormGrad", [g, *site.inputs[1:], y], site.attributes)
