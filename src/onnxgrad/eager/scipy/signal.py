"""Convolution."""

from __future__ import annotations

import scipy.signal as _scipy

from onnxgrad.eager.xp.convolution import convolve
from onnxgrad.eager.xp.ufuncs import module_fallback

__all__ = ["convolve"]
__getattr__ = module_fallback(_scipy, "scipy.signal")
