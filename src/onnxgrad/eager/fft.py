"""The Fourier transforms of the array API standard: numpy's; complex numbers carry no derivative here."""

import numpy as np

from onnxgrad.eager.elementwise import discrete, opaque

_INSTEAD = "ONNX has no complex numbers; op.DFT works on real and imaginary parts along a last axis"
fft = opaque("fft", np.fft.fft, _INSTEAD)
ifft = opaque("ifft", np.fft.ifft, _INSTEAD)
fftn = opaque("fftn", np.fft.fftn, _INSTEAD)
ifftn = opaque("ifftn", np.fft.ifftn, _INSTEAD)
rfft = opaque("rfft", np.fft.rfft, _INSTEAD)
irfft = opaque("irfft", np.fft.irfft, _INSTEAD)
rfftn = opaque("rfftn", np.fft.rfftn, _INSTEAD)
irfftn = opaque("irfftn", np.fft.irfftn, _INSTEAD)
hfft = opaque("hfft", np.fft.hfft, _INSTEAD)
ihfft = opaque("ihfft", np.fft.ihfft, _INSTEAD)
fftshift = opaque("fftshift", np.fft.fftshift, "use roll")
ifftshift = opaque("ifftshift", np.fft.ifftshift, "use roll")


def _frequencies(kernel):  # type: ignore[no-untyped-def]
    made = discrete(kernel.__name__, kernel)

    def function(n, /, *, d=1.0, dtype=None, device=None):  # type: ignore[no-untyped-def]
        """The frequencies of the bins."""
        x = made(n, d)
        return x if dtype is None else x.astype(dtype)

    return function


fftfreq = _frequencies(np.fft.fftfreq)
rfftfreq = _frequencies(np.fft.rfftfreq)
