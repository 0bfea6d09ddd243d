"""QuantizeLinear and DequantizeLinear on arrays: one scale for all, for a slice, or for a block.

q = saturate(round(x/s) + z), ties to even; x ≈ (q - z)·s.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir


def limits(dtype: ir.DataType) -> tuple[int, int]:
    """The smallest and the largest number of an integer type."""
    found = ml_dtypes.iinfo(dtype.numpy())
    return int(found.min), int(found.max)


def spread(scale: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    """`scale` (or a zero point) for every element of a tensor of this `shape`, up to broadcasting."""
    if scale.size == 1:
        return scale.reshape(())
    if block:
        return np.repeat(scale, block, axis).take(np.arange(shape[axis]), axis)
    return scale.reshape([-1 if i == axis % len(shape) else 1 for i in range(len(shape))])


def quantize(x: np.ndarray, scale: np.ndarray, point: np.ndarray, dtype: ir.DataType, axis: int = 1, block: int = 0
              ) -> np.ndarray:  # fmt: skip
    """x as numbers of `dtype`, as QuantizeLinear rounds it."""
    s, z = (spread(a, x.shape, axis, block) for a in (scale, point))
    low, high = limits(dtype)
    work = np.float64 if dtype == ir.DataType.INT32 else np.float32
    with np.errstate(over="ignore"):
        found = np.rint(x.astype(work) / s.astype(work)) + z.astype(work)
    return np.clip(found, low, high).astype(np.int64).astype(dtype.numpy())


def dequantize(q: np.ndarray, scale: np.ndarray, point: np.ndarray, axis: int = 1, block: int = 0) -> np.ndarray:
    """The floats that quantized numbers represent, in the type of `scale`."""
    s, z = (spread(a, q.shape, axis, block) for a in (scale, point))
    return ((q.astype(np.int64) - z.astype(np.int64)).astype(np.float32) * s.astype(np.float32)).astype(scale.dtype)
