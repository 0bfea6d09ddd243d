"""Kernels of ``source/normalization.c``: BatchNormalization with the statistics of the batch, GroupNormalization and
InstanceNormalization, their cotangents and those of LayerNormalization.
"""

from __future__ import annotations

from onnxgrad.runtime.kernels.substitute import KernelCall, Occurrence, float32_kernel, kernel, preceding_mask


@kernel("BatchNorm")
def batch_norm(site: Occurrence) -> KernelCall | None:
    """[x, scale, bias, …] → [y, mean, variance], float32. ONNX Runtime's own kernel takes one thread."""
    fits = site.all_float32 and _has_planes(site, 0)
    return KernelCall("BatchNorm", site.inputs[:3], site.attributes) if fits else None


@kernel("BatchNormGrad")
def batch_norm_grad(site: Occurrence) -> KernelCall | None:
    """[g, x, mean, variance, scale] → [x̄, scale, bias], float32; missing statistics are computed again.

    If g comes from a ReLU without other readers, its mask is fused into the kernel.
    """
    if not site.all_float32 or not _has_planes(site, 1):
        return None
    masked = preceding_mask(site, 0)
    if masked is None:
        return KernelCall("BatchNormGrad", site.inputs, site.attributes)
    g, y = masked
    return KernelCall("BatchNormGrad", [g, *site.inputs[1:], y], site.attributes)


def _has_planes(site: Occurrence, index: int) -> bool:
    """True if elements of a channel are contiguous; for matrices the kernels take twice as long as operators."""
    sizes = site.sizes(index)
    return sizes is not None and len(sizes) > 2


@kernel("LayerNormGrad")
def layer_norm_grad(site: Occurrence) -> KernelCall | None:
    """[g, x, mean, 1/σ, scale] → [x̄, scale, bias], float32; the scale is as large as a row."""
    fits = site.all_float32 and _as_large_as_a_row(site, 1, 4)
    return KernelCall("LayerNormGrad", site.inputs, site.attributes) if fits else None


def _as_large_as_a_row(site: Occurrence, x: int, scale: int) -> bool:
    """True if the scale has a number for each of a row of x, for all sizes of x."""
    row, found = site.sizes(x), site.sizes(scale)
    if row is None or found is None:
        return False
    row = row[site.attributes["axis"] :]
    return len(row) == len(found) and all(
        b is not None and (a == b or (a is None and b > 1)) for a, b in zip(row, found)
    )


# ONNX Runtime's own InstanceNormalization takes one thread.
float32_kernel("GroupNorm")  # [x, scale, bias] → [y]
float32_kernel("GroupNormGrad")  # [g, x, scale] → [x̄, scale, bias]
