"""Kernels of ``source/convolution.c``: the cotangent of the weights of a two-dimensional convolution."""

from __future__ import annotations

from onnxgrad.native.swapping import Call, Site, kernel


@kernel("ConvWeightGrad")
def conv_weight_grad(site: Site) -> Call | None:
    """[big side, small side] → [weights], float32; kernel, strides, dilations, padding before, and groups are known."""
    if not site.all_float32:
        return None
    return Call("ConvWeightGrad", site.inputs, site.attributes)
