"""The namespace: every function of the Python array API standard, and numpy's names for some of them.

Values are numpy's. If an operand is on the tape, the operation is recorded as the equivalent ONNX operator, or as a
small expression of operators; docs/array-api.md lists which.
"""

import sys as _sys

import numpy as _np
from numpy import random as random

from onnxgrad.eager.core.array import Array as Array
from onnxgrad.eager.core.methods import attach as _attach
from onnxgrad.eager.core.recording import stop_gradient as stop_gradient
from onnxgrad.eager.xp import fft as fft
from onnxgrad.eager.xp import linalg as linalg
from onnxgrad.eager.xp.creation import *
from onnxgrad.eager.xp.dtypes import *
from onnxgrad.eager.xp.editing import *
from onnxgrad.eager.xp.elementwise import *
from onnxgrad.eager.xp.indexing import *
from onnxgrad.eager.xp.info import __array_namespace_info__ as __array_namespace_info__
from onnxgrad.eager.xp.manipulation import *
from onnxgrad.eager.xp.numpy_elements import *
from onnxgrad.eager.xp.numpy_extras import *
from onnxgrad.eager.xp.padding import *
from onnxgrad.eager.xp.polynomials import *
from onnxgrad.eager.xp.products import *
from onnxgrad.eager.xp.reductions import *
from onnxgrad.eager.xp.searching import *
from onnxgrad.eager.xp.statistics import *
from onnxgrad.eager.xp.ufunc_methods import attach as _attach_methods
from onnxgrad.eager.xp.ufuncs import discrete as _discrete
from onnxgrad.eager.xp.ufuncs import module_fallback as _beyond

__array_api_version__ = "2025.12"

bool, complex64, complex128, float32, float64 = _np.bool, _np.complex64, _np.complex128, _np.float32, _np.float64
int8, int16, int32, int64 = _np.int8, _np.int16, _np.int32, _np.int64
uint8, uint16, uint32, uint64 = _np.uint8, _np.uint16, _np.uint32, _np.uint64
e, inf, nan, pi, newaxis = _np.e, _np.inf, _np.nan, _np.pi, None
broadcast_shapes = _np.broadcast_shapes

# numpy's names: numpy's own functions dispatch by them
array = asarray
absolute, fabs = abs, abs
arccos, arccosh, arcsin, arcsinh, arctan, arctanh, arctan2 = acos, acosh, asin, asinh, atan, atanh, atan2
amax, amin = max, min
bitwise_not = invert = bitwise_invert
left_shift, right_shift = bitwise_left_shift, bitwise_right_shift
concatenate = concat
conjugate = conj
mod = remainder
power, true_divide = pow, divide
rint = round
row_stack = vstack
identity = eye

#: Functions of values, whose results carry no derivative.
allclose, array_equal, isclose = (_discrete(n, getattr(_np, n)) for n in ("allclose", "array_equal", "isclose"))
iscomplex, isreal = (_discrete(n, getattr(_np, n)) for n in ("iscomplex", "isreal"))
iscomplexobj, isrealobj = (_discrete(n, getattr(_np, n), static=True) for n in ("iscomplexobj", "isrealobj"))
ndim, shape, size = (_discrete(n, getattr(_np, n), static=True) for n in ("ndim", "shape", "size"))
argwhere, flatnonzero = (_discrete(n, getattr(_np, n)) for n in ("argwhere", "flatnonzero"))
digitize = _discrete("digitize", _np.digitize)


def transpose(x, /, axes=None):  # type: ignore[no-untyped-def]
    """The axes in another order (default: the reverse)."""
    x = asarray(x)
    return permute_dims(x, tuple(range(x.ndim))[::-1] if axes is None else axes)


class _Ndarray(type):
    def __instancecheck__(cls, x):  # type: ignore[no-untyped-def]
        return isinstance(x, (Array, _np.ndarray))


class ndarray(metaclass=_Ndarray):  # noqa: N801
    """Arrays, numpy's own among them, as ``isinstance(x, ndarray)`` asks for."""


__version__ = _np.__version__
__getattr__ = _beyond(_np, "numpy")
_attach_methods(globals())
_attach(_sys.modules[__name__])

__all__ = ["__array_namespace_info__", *(name for name in list(globals()) if not name.startswith("_"))]
