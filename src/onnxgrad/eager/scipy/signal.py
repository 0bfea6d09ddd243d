"""Convolution."""

from __future__ import annotations

import scipy.signal as _scipy

from onnxgrad.eager.xp.convolution import convolve
from onnxgrad.eager.xp.ufuncs import beyond

__all__ = ["convolve"]
__getattr__ = beyond(_scipy, "scipy.signal")
