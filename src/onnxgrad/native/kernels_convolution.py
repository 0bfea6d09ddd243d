"""Kernels of ``source/convolution.c`` and ``source/spreading.c``: the cotangents of the operands of a convolution."""

from __future__ import annotations

from onnxgrad.native.swapping import Call, Site, kernel


@kernel("ConvWeightGrad")
def conv_weight_grad(site: Site) -> Call | None:
    """[big side, small side] → [weights], float32; kernel, strides, dilations, padding before, and groups are known."""
    if not site.all_float32:
        return None
    return Call("ConvWeightGrad", site.inputs, site.attributes)


#: Most channels of the small side, in one group, for which a kernel is quicker than ONNX Runtime's ConvTranspose.
_MOST_SUMMED = 32


@kernel("ConvInputGrad")
def conv_input_grad(site: Site) -> Call | None:
    """[small side, weights] → [big side], float32, where windows are more than one apart and sums are short.

    Where windows are one apart it is a convolution, and with one tap a product of matrices: ONNX Runtime is as quick.
    """
    sizes = site.sizes(1)
    if not site.all_float32 or sizes is None or max(site.attributes["strides"]) == 1:
        return None
    outer, _, *taps = sizes
    if outer is None or taps == [1, 1] or outer // site.attributes["group"] > _MOST_SUMMED:
        return None
    return Call("ConvInputGrad", site.inputs, site.attributes)
