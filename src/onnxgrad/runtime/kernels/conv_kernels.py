"""Kernels of ``source/convolution.c`` and ``winograd.c``: cotangents of operands of a convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrad.runtime.kernels import convolutions
from onnxgrad.runtime.kernels.substitute import KernelCall, Occurrence, kernel

#: Fewest pixels of the small side, without groups: with less, the loops of sums are short, and of few pictures most is
#: weights (a step of a ResNet with 256×256×3×3 on 16 pictures of 4×4 takes 1.02 times as long with the kernel).
FEWEST_PIXELS = 64

#: No attribute is as large, no window reaches as far, and none has more taps (``source/convolution.c``).
_FAR, _MOST_TAPS = 1 << 24, 1 << 20


def within_reach(taps: Sequence[int], attributes: Mapping[str, Any]) -> bool:
    """True if the kernels support such windows."""
    far = [n for key in ("strides", "dilations", "pads") for n in attributes[key]]
    reach = [(n - 1) * d for n, d in zip(taps, attributes["dilations"])]
    return math.prod(taps) <= _MOST_TAPS and all(abs(n) < _FAR for n in (*far, *reach))


@kernel("ConvWeightGrad")
def conv_weight_grad(site: Occurrence) -> KernelCall | None:
    """[big side, small side] → [weights], float32; kernel, strides, dilations, padding before, and groups are known.

    A convolution over one axis or two counts as one over three.
    """
    sizes = site.sizes(1)
    if not site.all_float32 or sizes is None or len(sizes) != len(site.attributes["kernel"]) + 2:
        return None
    if not within_reach(site.attributes["kernel"], site.attributes):
        return None
    pixels = [n for n in sizes[2:] if n is not None]
    if site.attributes["group"] == 1 and len(pixels) == len(sizes[2:]) and math.prod(pixels) < FEWEST_PIXELS:
        return None
    return KernelCall("ConvWeightGrad", site.inputs, convolutions.three_axes(site.attributes))


@kernel("ConvInputGrad")
def conv_input_grad(site: Occurrence) -> KernelCall | None:
    """[small side, weights] → [big side], float32: the small side, padded, convolved with the flipped weights.

    This is for windows of 3×3 side by side. A step with others is at most a few percent faster with a kernel than with
    ONNX Runtime's operators.
    """
    (w, small), at = (site.sizes(1), site.sizes(0)), site.attributes
    if not site.all_float32 or w is None or small is None or w[2:] != (3, 3):
        return None
    if at["group"] != 1 or max(*at["strides"], *at["dilations"]) > 1:
        return None
    weights, big = site.inputs[1], at["size"]
    if None in w or None in small[2:] or weights is None or convolutions.is_constant(weights):
        return None
    head = [2 - n for n in at["pads"]]
    tail = [n + 2 - m - h for n, m, h in zip(big, small[2:], head) if m is not None]
    if not all(0 <= p <= 2 for p in head + tail) or not convolutions.gains(small[0], (w[0] or 0, w[1] or 0), big):
        return None
    attributes = convolutions.three_axes({**at, "kernel": w[2:], "turned": 1})
    return KernelCall(convolutions.KERNEL, site.inputs, attributes)
