"""The namespace: every function of the Python array API standard, and numpy's names for some of them.

Values are numpy's. If an operand is on the tape, the operation is recorded as the equivalent ONNX operator, or as a
small expression of operators; docs/array-api.md lists which.
"""

import sys as _sys

import numpy as _np
from numpy import random

from onnxgrad.eager.core.array import Array
from onnxgrad.eager.core.methods import attach as _attach
from onnxgrad.eager.core.recording import stop_gradient
from onnxgrad.eager.xp import fft, linalg
from onnxgrad.eager.xp.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from onnxgrad.eager.xp.dtypes import astype, can_cast, finfo, iinfo, isdtype, result_type
from onnxgrad.eager.xp.elementwise import (
    abs,
    acos,
    acosh,
    add,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    ceil,
    clip,
    conj,
    copysign,
    cos,
    cosh,
    divide,
    equal,
    exp,
    exp2,
    expm1,
    floor,
    floor_divide,
    greater,
    greater_equal,
    hypot,
    imag,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    log,
    log1p,
    log2,
    log10,
    logaddexp,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    negative,
    nextafter,
    not_equal,
    positive,
    pow,
    real,
    reciprocal,
    remainder,
    round,
    sign,
    signbit,
    sin,
    sinh,
    sqrt,
    square,
    subtract,
    tan,
    tanh,
    trunc,
    where,
)
from onnxgrad.eager.xp.indexing import getitem, setitem, take
from onnxgrad.eager.xp.info import __array_namespace_info__
from onnxgrad.eager.xp.manipulation import (
    broadcast_arrays,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    matrix_transpose,
    meshgrid,
    moveaxis,
    permute_dims,
    ravel,
    repeat,
    reshape,
    roll,
    split,
    squeeze,
    stack,
    swapaxes,
    tile,
    tril,
    triu,
    unstack,
)
from onnxgrad.eager.xp.numpy_extras import (  # fmt: skip
    angle,
    append,
    array_split,
    atleast_1d,
    atleast_2d,
    atleast_3d,
    average,
    c_,
    cbrt,
    column_stack,
    cumprod,
    cumsum,
    deg2rad,
    degrees,
    diag,
    dsplit,
    dstack,
    fliplr,
    flipud,
    fmax,
    fmin,
    gradient,
    hsplit,
    hstack,
    kron,
    logaddexp2,
    nan_to_num,
    pad,
    r_,
    rad2deg,
    radians,
    real_if_close,
    rollaxis,
    rot90,
    select,
    sinc,
    vsplit,
    vstack,
)
from onnxgrad.eager.xp.products import (  # fmt: skip
    cross,
    diagonal,
    dot,
    einsum,
    inner,
    make_diagonal,
    matmul,
    outer,
    tensordot,
    trace,
    vecdot,
)
from onnxgrad.eager.xp.reductions import (
    all,
    any,
    cumulative_prod,
    cumulative_sum,
    diff,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from onnxgrad.eager.xp.searching import (
    argmax,
    argmin,
    argsort,
    count_nonzero,
    isin,
    nonzero,
    searchsorted,
    sort,
    take_along_axis,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)
from onnxgrad.eager.xp.statistics import (  # fmt: skip
    convolve,
    corrcoef,
    correlate,
    cov,
    ediff1d,
    interp,
    logspace,
    median,
    nanmax,
    nanmean,
    nanmin,
    nanprod,
    nanstd,
    nansum,
    nanvar,
    partition,
    percentile,
    polyval,
    ptp,
    quantile,
    trapezoid,
    vander,
)
from onnxgrad.eager.xp.ufuncs import beyond as _beyond
from onnxgrad.eager.xp.ufuncs import discrete as _discrete

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
iscomplex, iscomplexobj = (_discrete(n, getattr(_np, n)) for n in ("iscomplex", "iscomplexobj"))
isreal, isrealobj = (_discrete(n, getattr(_np, n)) for n in ("isreal", "isrealobj"))
ndim, shape, size = (_discrete(n, getattr(_np, n)) for n in ("ndim", "shape", "size"))
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
__getattr__ = _beyond(_np, "numpy", "use the functions of onnxgrad.eager.numpy")
_attach(_sys.modules[__name__])

# what type checkers go by
__all__ = [
    "Array", "__array_namespace_info__", "abs", "absolute", "acos", "acosh", "add", "all", "allclose", "amax", "amin",
    "angle", "any", "append", "arange", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh",
    "argmax", "argmin", "argsort", "argwhere", "array", "array_equal", "array_split", "asarray", "asin", "asinh",
    "astype", "atan", "atan2", "atanh", "atleast_1d", "atleast_2d", "atleast_3d", "average", "bitwise_and",
    "bitwise_invert", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "bool",
    "broadcast_arrays", "broadcast_shapes", "broadcast_to", "c_", "can_cast", "cbrt", "ceil", "clip", "column_stack",
    "complex64", "complex128", "concat", "concatenate", "conj", "conjugate", "convolve", "copysign", "corrcoef",
    "correlate", "cos", "cosh", "count_nonzero", "cov", "cross", "cumprod", "cumsum", "cumulative_prod",
    "cumulative_sum", "deg2rad", "degrees", "diag", "diagonal", "diff", "digitize", "divide", "dot", "dsplit", "dstack",
    "e", "ediff1d", "einsum", "empty", "empty_like", "equal", "exp", "exp2", "expand_dims", "expm1", "eye", "fabs",
    "fft", "finfo", "flatnonzero", "flip", "fliplr", "flipud", "float32", "float64", "floor", "floor_divide", "fmax",
    "fmin", "from_dlpack", "full", "full_like", "getitem", "gradient", "greater", "greater_equal", "hsplit", "hstack",
    "hypot", "identity", "iinfo", "imag", "inf", "inner", "int8", "int16", "int32", "int64", "interp", "invert",
    "isclose", "iscomplex", "iscomplexobj", "isdtype", "isfinite", "isin", "isinf", "isnan", "isreal", "isrealobj",
    "kron", "left_shift", "less", "less_equal", "linalg", "linspace", "log", "log1p", "log2", "log10", "logaddexp",
    "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor", "logspace", "make_diagonal", "matmul",
    "matrix_transpose", "max", "maximum", "mean", "median", "meshgrid", "min", "minimum", "mod", "moveaxis", "multiply",
    "nan", "nan_to_num", "nanmax", "nanmean", "nanmin", "nanprod", "nanstd", "nansum", "nanvar", "ndarray", "ndim",
    "negative", "newaxis", "nextafter", "nonzero", "not_equal", "ones", "ones_like", "outer", "pad", "partition",
    "percentile", "permute_dims", "pi", "polyval", "positive", "pow", "power", "prod", "ptp", "quantile", "r_",
    "rad2deg", "radians", "random", "ravel", "real", "real_if_close", "reciprocal", "remainder", "repeat", "reshape",
    "result_type", "right_shift", "rint", "roll", "rollaxis", "rot90", "round", "row_stack", "searchsorted", "select",
    "setitem", "shape", "sign", "signbit", "sin", "sinc", "sinh", "size", "sort", "split", "sqrt", "square", "squeeze",
    "stack", "std", "stop_gradient", "subtract", "sum", "swapaxes", "take", "take_along_axis", "tan", "tanh",
    "tensordot", "tile", "trace", "transpose", "trapezoid", "tril", "triu", "true_divide", "trunc", "uint8", "uint16",
    "uint32", "uint64", "unique_all", "unique_counts", "unique_inverse", "unique_values", "unstack", "vander", "var",
    "vecdot", "vsplit", "vstack", "where", "zeros", "zeros_like",
]  # fmt: skip
