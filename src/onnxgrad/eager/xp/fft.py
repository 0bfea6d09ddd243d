"""The Fourier transforms of the array API standard.

All reduce to the sum Σⱼ xⱼ·exp(±2πi·jk/n) over an axis cut or zero-padded to n, computed by numpy. As a linear map of
(real, imaginary) pairs, its transpose is the same sum with the other sign, zero-padded or cut back. An export records
it as the operator DFT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, plain, tracked, wrapped
from onnxgrad.eager.core.custom_derivatives import opaque_call
from onnxgrad.eager.core.primitives import macro
from onnxgrad.eager.core.recording import of_pairs, pairs_of, record, zero_padded
from onnxgrad.eager.xp.complexes import conjugate
from onnxgrad.eager.xp.dtypes import as_complex
from onnxgrad.eager.xp.elementwise import conj, real
from onnxgrad.eager.xp.indexing import getitem
from onnxgrad.eager.xp.info import check_device
from onnxgrad.eager.xp.manipulation import axes_of, roll
from onnxgrad.errors import BadInput
from onnxgrad.ir import Builder, Var

__all__ = [
    "fft", "fft2", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifft2", "ifftn", "ifftshift", "ihfft", "irfft",
    "irfft2", "irfftn", "rfft", "rfft2", "rfftfreq", "rfftn",
]  # fmt: skip

#: The power of n that a sum is multiplied by, for the transform (+1) and its inverse (-1).
_POWERS = {"backward": {1: 0.0, -1: -1.0}, "ortho": {1: -0.5, -1: -0.5}, "forward": {1: -1.0, -1: 0.0}}


def _sums(pairs: Array, n: int, axis: int, forward: bool) -> Array:
    """Y = F·x with Fⱼₖ = exp(∓2πi·jk/n), x cut or zero-padded to n. VJP: Fᴴ·G, zero-padded or cut back."""
    have = pairs.shape[axis]

    def value(x: Array) -> Array:
        if x._node is not None:  # during an export
            return record(macro(dft_of, n, axis, forward), [x], _numpys(x._data, n, axis, forward))
        return Array(_numpys(x._data, n, axis, forward))

    def backward(arguments: Any, y: Any, g: Array) -> tuple[Array]:
        return (_fit_length(_sums(g, n, axis, not forward), have, axis),)

    return opaque_call(value, (pairs,), backward)


def _numpys(pairs: np.ndarray, n: int, axis: int, forward: bool) -> np.ndarray:
    z = np.ascontiguousarray(pairs).view(np.result_type(pairs.dtype, np.complex64))[..., 0]
    y = np.fft.fft(z, n, axis) if forward else np.fft.ifft(z, n, axis, "forward")
    return np.stack([y.real, y.imag], axis=-1).astype(pairs.dtype, copy=False)


def dft_of(b: Builder, pairs: Var, n: int, axis: int, forward: bool) -> Var:
    """The operator DFT; the other sign is the conjugate of the DFT of the conjugate (inverse DFT divides by n)."""
    if forward:
        return b.DFT(pairs, b.const(n), b.const(axis))
    other = b.const(np.array([1, -1]), pairs.dtype)
    return b.DFT(pairs * other, b.const(n), b.const(axis)) * other


def _fit_length(x: Array, want: int, axis: int) -> Array:
    """`x` cut or zero-padded to `want` elements along `axis`."""
    have = x.shape[axis]
    if want <= have:
        return x if want == have else getitem(x, (slice(None),) * axis + (slice(want),))
    return zero_padded(x, want - have, axis)


def _transform(x: Array, n: int | None, axis: int, norm: str, direction: int) -> Array:
    """`fft` (direction 1) or `ifft` (-1) of an array on the tape."""
    (axis,) = axes_of(axis, x.ndim)
    n = x.shape[axis] if n is None else int(n)
    if n < 1:
        raise BadInput(f"a Fourier transform is of at least one element, not {n}")
    if norm not in _POWERS:
        raise BadInput(f"norm is 'backward', 'ortho' or 'forward', not {norm!r}")
    pairs = _sums(pairs_of(as_complex(x)), n, axis, direction == 1)
    power = _POWERS[norm][direction]
    return of_pairs(pairs * float(n) ** power if power else pairs)


def _half(x: Array, n: int | None, axis: int, norm: str) -> Array:
    """`rfft`: the first half of the transform of real numbers."""
    z = _transform(x, n, axis, norm, 1)
    (axis,) = axes_of(axis, x.ndim)
    return getitem(z, (slice(None),) * axis + (slice(z.shape[axis] // 2 + 1),))


def _from_half(x: Array, n: int | None, axis: int, norm: str) -> Array:
    """`irfft`: Re F⁻¹·c∘x with c = 1 at 0 and n/2, else 2 for the omitted half."""
    (axis,) = axes_of(axis, x.ndim)
    n = 2 * (x.shape[axis] - 1) if n is None else int(n)
    twice = 2 * np.arange(n // 2 + 1)
    c = 2.0 - (twice == 0) - (twice == n)
    x = as_complex(x)
    pairs = _fit_length(pairs_of(x), n // 2 + 1, axis)
    pairs = pairs * c.astype(pairs.dtype).reshape(-1, *(1,) * (pairs.ndim - 1 - axis))
    return real(_transform(of_pairs(pairs), n, axis, norm, -1))


def _one_axis_transform(kernel: Callable[..., Any], traced: Callable[..., Array]) -> Callable[..., Array]:
    def transform(x: Any, /, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
        if not tracked(x):
            return wrapped(kernel(plain(x), n, axis, norm))
        return traced(as_array(x), n, axis, norm or "backward")

    return _copy_description(transform, kernel)


def _copy_description(transform: Callable[..., Array], kernel: Callable[..., Any]) -> Callable[..., Array]:
    transform.__name__ = transform.__qualname__ = kernel.__name__
    transform.__doc__ = " ".join((kernel.__doc__ or "").strip().split("\n\n")[0].split())
    return transform


def _many(kernel: Callable[..., Any], last: Callable[..., Array], rest: Callable[..., Array], first: bool) -> Any:
    """A transform over several axes: `last` over the last one, before (`first`) or after `rest` over the others."""

    def transform(x: Any, /, s: Sequence[int] | None = None, axes: Any = None, norm: str = "backward") -> Array:
        if axes is None and s is not None:
            axes = tuple(range(-len(s), 0))
        if not tracked(x):
            return wrapped(kernel(plain(x), s, axes, norm))
        x = as_array(x)
        axes = axes_of(axes if axes is None else tuple(axes), x.ndim)
        sizes = [None] * len(axes) if s is None else list(s)
        if len(sizes) != len(axes):
            raise BadInput(f"{len(sizes)} lengths for {len(axes)} axes")
        if not axes:
            return x if kernel in (np.fft.fftn, np.fft.ifftn) else last(x, None, -1, norm)
        steps = [(rest, n, a) for n, a in zip(sizes, axes)][:-1][::-1]
        end = (last, sizes[-1], axes[-1])
        for function, n, a in [end, *steps] if first else [*steps, end]:
            x = function(x, n, a, norm)
        return x

    return _copy_description(transform, kernel)


_SWAPPED = {"backward": "forward", "ortho": "ortho", "forward": "backward"}

fft = _one_axis_transform(np.fft.fft, lambda x, n, axis, norm: _transform(x, n, axis, norm, 1))
ifft = _one_axis_transform(np.fft.ifft, lambda x, n, axis, norm: _transform(x, n, axis, norm, -1))
rfft = _one_axis_transform(np.fft.rfft, _half)
irfft = _one_axis_transform(np.fft.irfft, _from_half)
hfft = _one_axis_transform(np.fft.hfft, lambda x, n, axis, norm: irfft(conj(x), n, axis, _SWAPPED.get(norm, norm)))
ihfft = _one_axis_transform(
    np.fft.ihfft, lambda x, n, axis, norm: conjugate(rfft(x, n, axis, _SWAPPED.get(norm, norm)))
)
fftn, ifftn = _many(np.fft.fftn, fft, fft, True), _many(np.fft.ifftn, ifft, ifft, True)
rfftn, irfftn = _many(np.fft.rfftn, rfft, fft, True), _many(np.fft.irfftn, irfft, ifft, False)


def _two(name: str, transform: Callable[..., Array]) -> Callable[..., Array]:
    def planar(x: Any, /, s: Any = None, axes: Any = (-2, -1), norm: str = "backward") -> Array:
        return transform(x, s, axes, norm)

    return _copy_description(planar, getattr(np.fft, name))


fft2, ifft2, rfft2, irfft2 = _two("fft2", fftn), _two("ifft2", ifftn), _two("rfft2", rfftn), _two("irfft2", irfftn)


def fftshift(x: Any, /, *, axes: int | tuple[int, ...] | None = None) -> Array:
    """Shift the zero frequency to the center."""
    x = as_array(x)
    at = axes_of(axes, x.ndim)
    return roll(x, tuple(x.shape[a] // 2 for a in at), axis=at) if at else x


def ifftshift(x: Any, /, *, axes: int | tuple[int, ...] | None = None) -> Array:
    """The inverse of `fftshift`."""
    x = as_array(x)
    at = axes_of(axes, x.ndim)
    return roll(x, tuple(-(x.shape[a] // 2) for a in at), axis=at) if at else x


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """The frequencies of the bins of `fft`."""
    check_device(device)
    return Array(np.fft.fftfreq(n, d).astype(np.float64 if dtype is None else dtype))


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """The frequencies of the bins of `rfft`."""
    check_device(device)
    return Array(np.fft.rfftfreq(n, d).astype(np.float64 if dtype is None else dtype))
