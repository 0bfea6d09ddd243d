"""The Fourier transforms of the array API standard: numpy's; complex numbers carry no derivative here."""

from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.eager.array import Array
from onnxgrad.eager.creation import on_cpu
from onnxgrad.eager.elementwise import opaque

_INSTEAD = "ONNX has no complex numbers; op.DFT works on real and imaginary parts along a last axis"


def _one(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def transform(x: Any, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Any:
        return kernel(x, n, axis, norm)

    transform.__doc__ = kernel.__doc__
    return opaque(kernel.__name__, transform, _INSTEAD)


def _many(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def transform(x: Any, /, *, s: Any = None, axes: Any = None, norm: str = "backward") -> Any:
        axes = axes if axes is not None or s is None else tuple(range(-len(s), 0))
        return kernel(x, s, axes, norm)

    transform.__doc__ = kernel.__doc__
    return opaque(kernel.__name__, transform, _INSTEAD)


fft, ifft, rfft, irfft = _one(np.fft.fft), _one(np.fft.ifft), _one(np.fft.rfft), _one(np.fft.irfft)
hfft, ihfft = _one(np.fft.hfft), _one(np.fft.ihfft)
fftn, ifftn, rfftn, irfftn = _many(np.fft.fftn), _many(np.fft.ifftn), _many(np.fft.rfftn), _many(np.fft.irfftn)
fftshift = opaque("fftshift", lambda x, /, *, axes=None: np.fft.fftshift(x, axes), "use roll")
ifftshift = opaque("ifftshift", lambda x, /, *, axes=None: np.fft.ifftshift(x, axes), "use roll")


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """The frequencies of the bins of `fft`."""
    on_cpu(device)
    return Array(np.fft.fftfreq(n, d).astype(np.float64 if dtype is None else dtype))


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """The frequencies of the bins of `rfft`."""
    on_cpu(device)
    return Array(np.fft.rfftfreq(n, d).astype(np.float64 if dtype is None else dtype))
