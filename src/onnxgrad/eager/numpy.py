"""The namespace: every function of the Python array API standard, and numpy's names for some of them.

Values are numpy's. If an operand is on the tape, the operation is recorded as the equivalent ONNX operator, or as a
small expression of operators; docs/array-api.md lists which.
"""

import sys as _sys

import numpy as _np

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
    array_split,
    atleast_1d,
    atleast_2d,
    atleast_3d,
    average,
    column_stack,
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
    rad2deg,
    radians,
    rot90,
    sinc,
    vsplit,
    vstack,
)
from onnxgrad.eager.xp.products import cross, diagonal, dot, einsum, inner, matmul, outer, tensordot, trace, vecdot
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
cumsum, cumprod = cumulative_sum, cumulative_prod
mod = remainder
power, true_divide = pow, divide
rint = round


def transpose(x, /, axes=None):  # type: ignore[no-untyped-def]
    """The axes in another order (default: the reverse)."""
    x = asarray(x)
    return permute_dims(x, tuple(range(x.ndim))[::-1] if axes is None else axes)


_attach(_sys.modules[__name__])

# what type checkers go by
__all__ = [
    "Array", "__array_namespace_info__", "abs", "absolute", "acos", "acosh", "add", "all", "amax", "amin", "angle",
    "any", "arange", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "argmax", "argmin",
    "argsort", "array", "array_split", "asarray", "asin", "asinh", "astype", "atan", "atan2", "atanh", "atleast_1d",
    "atleast_2d", "atleast_3d", "average", "bitwise_and", "bitwise_invert", "bitwise_left_shift", "bitwise_not",
    "bitwise_or", "bitwise_right_shift", "bitwise_xor", "bool", "broadcast_arrays", "broadcast_shapes",
    "broadcast_to", "can_cast", "ceil", "clip", "column_stack", "complex64", "complex128", "concat", "concatenate",
    "conj", "conjugate", "copysign", "cos", "cosh", "count_nonzero", "cross", "cumprod", "cumsum",
    "cumulative_prod", "cumulative_sum", "deg2rad", "degrees", "diag", "diagonal", "diff", "divide", "dot",
    "dsplit", "dstack", "e", "einsum", "empty", "empty_like", "equal", "exp", "exp2", "expand_dims", "expm1", "eye",
    "fabs", "fft", "finfo", "flip", "fliplr", "flipud", "float32", "float64", "floor", "floor_divide", "fmax",
    "fmin", "from_dlpack", "full", "full_like", "getitem", "gradient", "greater", "greater_equal", "hsplit",
    "hstack", "hypot", "iinfo", "imag", "inf", "inner", "int8", "int16", "int32", "int64", "invert", "isdtype",
    "isfinite", "isin", "isinf", "isnan", "kron", "left_shift", "less", "less_equal", "linalg", "linspace", "log",
    "log1p", "log2", "log10", "logaddexp", "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor",
    "matmul", "matrix_transpose", "max", "maximum", "mean", "meshgrid", "min", "minimum", "mod", "moveaxis",
    "multiply", "nan", "nan_to_num", "negative", "newaxis", "nextafter", "nonzero", "not_equal", "ones",
    "ones_like", "outer", "pad", "permute_dims", "pi", "positive", "pow", "power", "prod", "rad2deg", "radians",
    "ravel", "real", "reciprocal", "remainder", "repeat", "reshape", "result_type", "right_shift", "rint", "roll",
    "rot90", "round", "searchsorted", "setitem", "sign", "signbit", "sin", "sinc", "sinh", "sort", "split", "sqrt",
    "square", "squeeze", "stack", "std", "stop_gradient", "subtract", "sum", "swapaxes", "take", "take_along_axis",
    "tan", "tanh", "tensordot", "tile", "trace", "transpose", "tril", "triu", "true_divide", "trunc", "uint8",
    "uint16", "uint32", "uint64", "unique_all", "unique_counts", "unique_inverse", "unique_values", "unstack",
    "var", "vecdot", "vsplit", "vstack", "where", "zeros", "zeros_like",
]  # fmt: skip
