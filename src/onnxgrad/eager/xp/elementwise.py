"""Elementwise functions: values are numpy's, and the tape records the equivalent ONNX operator.

Where ONNX has none, the tape records a short expression with an accurate derivative.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.eager.core.array import Array, as_array, tracked
from onnxgrad.eager.core.primitives import STOP, standard
from onnxgrad.eager.core.recording import parts_of, record
from onnxgrad.eager.xp import complexes
from onnxgrad.eager.xp.dtypes import cast, promoted
from onnxgrad.eager.xp.ufuncs import binary, nondifferentiable, unary
from onnxgrad.ir import Builder, Var

__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and", "bitwise_invert",
    "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil", "clip", "conj", "copysign",
    "cos", "cosh", "divide", "equal", "exp", "exp2", "expm1", "floor", "floor_divide", "greater", "greater_equal",
    "hypot", "imag", "isfinite", "isinf", "isnan", "less", "less_equal", "log", "log1p", "log2", "log10", "logaddexp",
    "logical_and", "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "multiply", "negative",
    "nextafter", "not_equal", "positive", "pow", "real", "reciprocal", "remainder", "round", "sign", "signbit", "sin",
    "sinh", "sqrt", "square", "subtract", "tan", "tanh", "trunc", "where",
]  # fmt: skip

_op = standard
_UNSIGNED = frozenset({ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64})


def _floor_divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """numpy's ``floor_divide``; with infinities, the floor of the quotient."""
    whole = np.floor_divide(x, y)
    if whole.dtype.kind != "f" or (np.isfinite(x).all() and np.isfinite(y).all()):
        return whole
    return np.where(np.isinf(x) | np.isinf(y), np.floor(np.divide(x, y)), whole)


def _expm1(b: Builder, x: Var) -> Var:
    """exp(x) − 1, and near 0 what rounding takes from it: exp(x) is exact for log exp(x)."""
    y = b.Exp(x)
    lost = b.Where(b.Less(b.Abs(x), b.const(1, x.dtype)), y * (x - b.Log(y)), b.const(0, x.dtype))
    return (y - 1.0) + STOP.write(b, [lost])


def _log1p(b: Builder, x: Var) -> Var:
    """log(1 + x), and near 0 what rounding takes from it: 1 + x is exact for another x."""
    y = x + 1.0
    lost = b.Where(b.Less(b.Abs(x), b.const(1, x.dtype)), (x - (y - 1.0)) / y, b.const(0, x.dtype))
    return b.Log(y) + STOP.write(b, [lost])


def _logaddexp(b: Builder, x: Var, y: Var) -> Var:
    """The larger one plus log(1 + exp(−distance)), which neither overflows nor cancels; infinities are 0 apart."""
    first = b.Greater(x, y)
    most, least = b.Where(first, x, y), b.Where(first, y, x)
    both = b.And(b.Equal(x, y), b.Equal(b.Abs(x), b.const(math.inf, x.dtype)))
    return most + b.Softplus(b.Where(both, b.const(0, x.dtype), least - most))


def _is_negative(b: Builder, x: Var) -> Var:
    return b.Or(x < 0.0, b.Reciprocal(x) < 0.0)


def _is_infinite(b: Builder, x: Var) -> Var:
    return b.Equal(b.Abs(x), b.const(math.inf, x.dtype))


def _remainder(b: Builder, x: Var, y: Var) -> Var:
    """The exact remainder of the sign of `y`; that of ``Mod`` is of the sign of `x`."""
    rest, zero = b.Mod(x, y, fmod=1), b.const(0, x.dtype)
    other = b.And(b.Not(b.Equal(rest, zero)), b.Xor(b.Less(rest, zero), b.Less(y, zero)))
    return b.Where(other, rest + y, rest)


def _quotient(b: Builder, x: Var, y: Var) -> Var:
    """The floor of x / y, of the exact quotient where that is finite."""
    rest = _remainder(b, x, y)
    finite = b.And(b.Equal(rest, rest), b.Not(_is_infinite(b, y)))
    return b.Where(finite, b.Round((x - rest) / y), b.Floor(x / y))


def _whole_remainder(b: Builder, x: Var, y: Var) -> Var:
    """The remainder of integers, 0 by 0."""
    one = b.const(1, x.dtype)
    divisor, _ = _safe_divisor(b, y)
    return b.Where(b.Equal(divisor, one), b.Sub(x, x), b.Mod(x, divisor))


def _whole_quotient(b: Builder, x: Var, y: Var) -> Var:
    """The floor of the quotient of integers, 0 by 0; ``Div`` rounds it towards 0."""
    divisor, sign = _safe_divisor(b, y)
    quotient, zero = b.Div(x, divisor), b.const(0, x.dtype)
    if y.dtype not in _UNSIGNED:
        apart = b.Not(b.Equal(b.Mod(x, divisor), zero))
        below = b.And(apart, b.Xor(b.Less(x, zero), b.Less(divisor, zero)))
        quotient = b.Where(below, b.Sub(quotient, b.const(1, x.dtype)), quotient)
    return b.Mul(sign, quotient)


def _safe_divisor(b: Builder, y: Var) -> tuple[Var, Var]:
    """`y` with 1 in the place of 0 and −1, by which processors do not divide all integers; the factor that is left."""
    zero, one = b.const(0, y.dtype), b.const(1, y.dtype)
    by_none = b.Equal(y, zero)
    if y.dtype in _UNSIGNED:
        return b.Where(by_none, one, y), b.Where(by_none, zero, one)
    less = b.const(-1, y.dtype)
    by_less = b.Equal(y, less)
    return b.Where(b.Or(by_none, by_less), one, y), b.Where(by_none, zero, b.Where(by_less, less, one))


def _never(b: Builder, x: Var) -> Var:
    return b.Not(b.Equal(x, x))


def _atan2(b: Builder, y: Var, x: Var) -> Var:
    """The arctangent of the quotient of magnitude at most 1, plus a constant for each octant; constant at (0, 0)."""
    far_out = b.And(_is_infinite(b, x), _is_infinite(b, y))
    y, x = b.Where(far_out, b.Sign(y), y), b.Where(far_out, b.Sign(x), x)
    flat = b.LessOrEqual(b.Abs(y), b.Abs(x))
    one, zero = b.const(1, x.dtype), b.const(0, x.dtype)
    inside = b.And(flat, b.Not(b.Equal(x, zero)))
    near = b.Atan(b.Where(inside, y, zero) / b.Where(inside, x, one))
    far = b.Atan(b.Where(flat, one, x) / b.Where(flat, one, y))
    sign = b.Where(_is_negative(b, y), b.Neg(one), one)
    turn = b.Where(_is_negative(b, x), sign * math.pi, sign * 0.0)
    return b.Where(flat, near + turn, sign * (math.pi / 2) - far)


def _hypot(b: Builder, x: Var, y: Var) -> Var:
    """√(x² + y²), of multiples whose squares neither overflow nor vanish; constant at (0, 0), as a norm is."""
    one, zero = b.const(1, x.dtype), b.const(0, x.dtype)
    infinite = b.Or(_is_infinite(b, x), _is_infinite(b, y))
    most = b.Max(b.Abs(x), b.Abs(y))
    scale = STOP.write(b, [b.Where(b.Or(b.Equal(most, zero), infinite), one, most)])
    square = (x / scale) ** 2.0 + (y / scale) ** 2.0
    empty = b.Equal(square, zero)
    root = b.Where(empty, zero, scale * b.Sqrt(b.Where(empty, one, square)))
    return b.Where(infinite, b.const(math.inf, x.dtype), root)


def _shift(b: Builder, x: Var, count: Var, direction: str) -> Var:
    """`x` shifted by `count` bits; ONNX shifts unsigned integers only, so signed ones are shifted as their bits."""
    bits, back = int(ir.DataType.UINT64), int(x.dtype or 0)
    if back in _UNSIGNED:
        return b.BitShift(x, count, direction=direction)
    if direction == "LEFT":
        return b.Cast(b.BitShift(b.Cast(x, to=bits), b.Cast(count, to=bits), direction=direction), to=back)
    below = b.Less(x, b.const(0, x.dtype))
    bare = b.Cast(b.Where(below, b.BitwiseNot(x), x), to=bits)
    moved = b.Cast(b.BitShift(bare, b.Cast(count, to=bits), direction=direction), to=back)
    return b.Where(below, b.BitwiseNot(moved), moved)


def _truth(b: Builder, x: Var) -> Var:
    return x if x.dtype == ir.DataType.BOOL else b.Cast(x, to=int(ir.DataType.BOOL))


_SAME = standard("Identity")

# --- one operand -----------------------------------------------------------------------------------

abs = unary("abs", _op("Abs"), np.abs)
acos = unary("acos", _op("Acos"), np.arccos)
acosh = unary("acosh", _op("Acosh"), np.arccosh)
asin = unary("asin", _op("Asin"), np.arcsin)
asinh = unary("asinh", _op("Asinh"), np.arcsinh)
atan = unary("atan", _op("Atan"), np.arctan)
atanh = unary("atanh", _op("Atanh"), np.arctanh)
bitwise_invert = unary("bitwise_invert", _op("BitwiseNot"), np.bitwise_not)
ceil = unary("ceil", _SAME, np.ceil, floats=_op("Ceil"))
cos = unary("cos", _op("Cos"), np.cos)
cosh = unary("cosh", _op("Cosh"), np.cosh)
exp = unary("exp", _op("Exp"), np.exp)
exp2 = unary("exp2", lambda b, x: b.Exp(x * math.log(2)), np.exp2)
expm1 = unary("expm1", _expm1, np.expm1)
floor = unary("floor", _SAME, np.floor, floats=_op("Floor"))
isfinite = unary(
    "isfinite", lambda b, x: b.Equal(x, x), np.isfinite, floats=lambda b, x: b.Not(b.Or(b.IsNaN(x), b.IsInf(x)))
)
isinf = unary("isinf", _never, np.isinf, floats=_op("IsInf"))
isnan = unary("isnan", _never, np.isnan, floats=_op("IsNaN"))
log = unary("log", _op("Log"), np.log)
log10 = unary("log10", lambda b, x: b.Log(x) * (1 / math.log(10)), np.log10)
log1p = unary("log1p", _log1p, np.log1p)
log2 = unary("log2", lambda b, x: b.Log(x) * (1 / math.log(2)), np.log2)
logical_not = unary("logical_not", lambda b, x: b.Not(_truth(b, x)), np.logical_not)
negative = unary("negative", _op("Neg"), np.negative)
positive = unary("positive", _SAME, np.positive)
reciprocal = unary(
    "reciprocal", lambda b, x: b.Where(b.Equal(b.Abs(x), 1), x, 0), np.reciprocal, floats=_op("Reciprocal")
)
_round = unary("round", _SAME, np.round, floats=_op("Round"))
sign = unary("sign", _op("Sign"), np.sign)
signbit = unary("signbit", lambda b, x: b.Less(x, 0), np.signbit, floats=_is_negative)
sin = unary("sin", _op("Sin"), np.sin)
sinh = unary("sinh", _op("Sinh"), np.sinh)
sqrt = unary("sqrt", _op("Sqrt"), np.sqrt)
square = unary("square", lambda b, x: x * x, np.square)
tan = unary("tan", _op("Tan"), np.tan)
tanh = unary("tanh", _op("Tanh"), np.tanh)
trunc = unary("trunc", _SAME, np.trunc, floats=lambda b, x: b.Sign(x) * b.Floor(b.Abs(x)))

# --- two operands ----------------------------------------------------------------------------------

add = binary("add", _op("Add"), np.add, booleans=_op("Or"))
atan2 = binary("atan2", _atan2, np.arctan2)
bitwise_and = binary("bitwise_and", _op("BitwiseAnd"), np.bitwise_and, booleans=_op("And"))
bitwise_left_shift = binary("bitwise_left_shift", lambda b, x, y: _shift(b, x, y, "LEFT"), np.left_shift)
bitwise_or = binary("bitwise_or", _op("BitwiseOr"), np.bitwise_or, booleans=_op("Or"))
bitwise_right_shift = binary("bitwise_right_shift", lambda b, x, y: _shift(b, x, y, "RIGHT"), np.right_shift)
bitwise_xor = binary("bitwise_xor", _op("BitwiseXor"), np.bitwise_xor, booleans=_op("Xor"))
copysign = binary(
    "copysign", lambda b, x, y: b.Where(b.Equal(_is_negative(b, x), _is_negative(b, y)), x, -x), np.copysign
)
divide = binary("divide", _op("Div"), np.divide)
equal = binary("equal", _op("Equal"), np.equal)
floor_divide = binary("floor_divide", _quotient, _floor_divide, ints=_whole_quotient)
greater = binary("greater", _op("Greater"), np.greater, booleans=lambda b, x, y: b.And(x, b.Not(y)))
greater_equal = binary(
    "greater_equal", _op("GreaterOrEqual"), np.greater_equal, booleans=lambda b, x, y: b.Or(x, b.Not(y))
)
hypot = binary("hypot", _hypot, np.hypot)
less = binary("less", _op("Less"), np.less, booleans=lambda b, x, y: b.And(b.Not(x), y))
less_equal = binary("less_equal", _op("LessOrEqual"), np.less_equal, booleans=lambda b, x, y: b.Or(b.Not(x), y))
logaddexp = binary("logaddexp", _logaddexp, np.logaddexp)
logical_and = binary("logical_and", lambda b, x, y: b.And(_truth(b, x), _truth(b, y)), np.logical_and)
logical_or = binary("logical_or", lambda b, x, y: b.Or(_truth(b, x), _truth(b, y)), np.logical_or)
logical_xor = binary("logical_xor", lambda b, x, y: b.Xor(_truth(b, x), _truth(b, y)), np.logical_xor)
maximum = binary("maximum", _op("Max"), np.maximum, booleans=_op("Or"))
minimum = binary("minimum", _op("Min"), np.minimum, booleans=_op("And"))
multiply = binary("multiply", _op("Mul"), np.multiply, booleans=_op("And"))
nextafter = nondifferentiable("nextafter", np.nextafter)
not_equal = binary("not_equal", lambda b, x, y: b.Not(b.Equal(x, y)), np.not_equal)
_power = binary("pow", _op("Pow"), np.power)
remainder = binary("remainder", _remainder, np.remainder, ints=_whole_remainder)
subtract = binary("subtract", _op("Sub"), np.subtract)


def pow(x1: Any, x2: Any, /) -> Array:
    """x1 to the power x2. A Python number as exponent is static, which makes the derivative shorter."""
    if not isinstance(x2, (int, float)) or isinstance(x2, bool) or not tracked(x1) or x1.dtype.kind in "biu":
        return _power(x1, x2)
    if x1.dtype.kind == "c":
        return complexes.power(x1, int(x2)) if float(x2).is_integer() else _power(x1, x2)
    exponent = np.asarray(x2, x1.dtype)
    return record(standard("Pow", ((1, float(x2)),)), [x1], np.power(x1._data, exponent))


def clip(
    x: Any, /, a_min: Any = None, a_max: Any = None, out: None = None, *, min: Any = None, max: Any = None
) -> Array:
    """`x` limited to [`min`, `max`]."""
    x = as_array(x)
    min, max = a_min if min is None else min, a_max if max is None else max
    numbers = [m if isinstance(m, (int, float)) else as_array(m).dtype for m in (min, max) if m is not None]
    x = cast(x, np.result_type(x.dtype, *numbers))
    low, high = (None if m is None else as_array(m) for m in (min, max))
    bounds = [m for m in (low, high) if m is not None]
    if not any(tracked(y, floats=False) for y in (x, *bounds)):
        arrays: Any = [None if m is None else m._data for m in (low, high)]
        return Array(np.asarray(np.clip(x._data, *arrays), x.dtype))
    if any(m.ndim or m._node is not None for m in bounds):
        y = x if low is None else maximum(x, cast(low, x.dtype))
        return y if high is None else minimum(y, cast(high, x.dtype))
    op = standard("Clip", tuple((i, None) for i, m in enumerate((low, high), start=1) if m is None))
    given = [cast(m, x.dtype) for m in bounds]
    arrays = [None if m is None else cast(m, x.dtype)._data for m in (low, high)]
    return record(op, [x, *given], np.asarray(np.clip(x._data, *arrays), x.dtype))


def round(x: Any, /, decimals: int = 0) -> Array:
    """`x` rounded to `decimals`, halves to the even number."""
    return _round(x) if decimals == 0 else divide(_round(multiply(x, 10.0**decimals)), 10.0**decimals)


def real(x: Any, /) -> Array:
    """The real part."""
    x = as_array(x)
    return x if x._data.dtype.kind != "c" else parts_of(x)[0]


def imag(x: Any, /) -> Array:
    """The imaginary part."""
    x = as_array(x)
    return Array(np.zeros(x.shape, x.dtype)) if x._data.dtype.kind != "c" else parts_of(x)[1]


def conj(x: Any, /) -> Array:
    """The complex conjugate."""
    x = as_array(x)
    if x._node is None or x._data.dtype.kind != "c":
        return Array(np.conj(x._data)) if x._data.dtype.kind == "c" else x
    return complexes.conjugate(x)


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    """Elements of `x` where `condition` is true, else of `y`; without both, `nonzero`."""
    if x is None and y is None:
        return as_array(condition).__array_namespace__().nonzero(condition)
    c, (a, b) = as_array(condition), promoted(x, y)
    return record(_op("Where"), [c if c.dtype == bool else cast(c, bool), a, b], np.where(c._data, a._data, b._data))
