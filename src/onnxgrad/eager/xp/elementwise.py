"""Functions of elements: the value is numpy's, the tape gets the operator of ONNX with the same meaning.

Where ONNX has no such operator, the tape gets the shortest expression of operators, with an accurate derivative.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.eager.core.array import Array, as_array, record
from onnxgrad.eager.core.buffers import LARGE, computed
from onnxgrad.eager.core.operators import Operator, macro, standard
from onnxgrad.eager.core.tape import Node, exporting
from onnxgrad.eager.xp import complexes, expressions
from onnxgrad.errors import BadInput, NotDifferentiable

Function = Callable[..., Any]
_new_array = Array
_SMALL = LARGE // 8
_ndarray = np.ndarray


def cast(x: Array, dtype: Any) -> Array:
    """`x` as `dtype`; itself if it has it."""
    dtype = np.dtype(dtype)
    if x._data.dtype == dtype:
        return x
    if dtype.kind == "c" and x._node is not None:
        return complexes.converted(x, dtype)
    with np.errstate(invalid="ignore"):
        data = x._data.astype(dtype)
    if x._node is None:
        return Array(data)
    return record(standard("Cast", to=onnx_type(dtype)), [x], data)


def onnx_type(dtype: np.dtype) -> int:
    """The number of an element type in ONNX."""
    if dtype.kind == "c":
        raise NotDifferentiable(f"ONNX computes nothing with {dtype}, so a derivative cannot pass it")
    return int(ir.DataType.from_numpy(dtype))


def promoted(x1: Any, x2: Any) -> tuple[Array, Array]:
    """Both as arrays of one dtype, by numpy's rules: a Python number adapts to the array beside it."""
    a = as_array(x1, x2.dtype if isinstance(x2, (Array, np.ndarray, np.generic)) else None)
    b = as_array(x2, a.dtype)
    if a._data.dtype == b._data.dtype:
        return a, b
    dtype = np.result_type(a._data.dtype, b._data.dtype)
    return cast(a, dtype), cast(b, dtype)


def _named(function: Function, name: str, kernel: Any, mathematics: str = "") -> Function:
    function.__name__ = function.__qualname__ = name
    if isinstance(kernel, types.FunctionType) and kernel.__module__.startswith(__package__ or ""):
        function.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
    summary = (kernel.__doc__ or "").strip().split("\n\n")
    text = next((p for p in summary if p and "(x" not in p.split("\n")[0]), name)
    function.__doc__ = mathematics or " ".join(text.split())
    return function


def unary(name: str, op: Operator, kernel: Any, floats: Operator | None = None) -> Function:
    """A function of one operand; `floats` is the operator for floats if `op` is not."""

    def function(x: Any, /) -> Array:
        if type(x) is not _new_array:
            x = as_array(x)
        node = x._node
        if node is None:
            return _new_array(np.asarray(kernel(x._data)))
        if x._data.dtype.kind == "c":
            return complexes.elementwise(name, kernel, x)
        y = kernel(x._data) if x._data.size < _SMALL else computed(kernel, x._data)
        if type(y) is not _ndarray:
            y = np.asarray(y)
        used = op if floats is None or x._data.dtype.kind in "biu" else floats
        if x._data.dtype.kind == "b" and name == "bitwise_invert":
            used = _NOT
        return _new_array(y, Node(used, (node,), y))

    return _named(function, name, kernel)


def binary(name: str, op: Operator, kernel: Any, booleans: Operator | None = None, ints: Operator | None = None) -> Any:
    """A function of two operands that broadcast; `booleans` and `ints` are the operators for those, if not `op`."""

    def function(x1: Any, x2: Any, /) -> Array:
        if type(x1) is not _new_array or type(x2) is not _new_array or x1._data.dtype != x2._data.dtype:
            x1, x2 = promoted(x1, x2)
        a, b = x1._data, x2._data
        m, n = x1._node, x2._node
        if m is None and n is None:
            return _new_array(np.asarray(kernel(a, b)))
        if a.dtype.kind == "c":
            return complexes.elementwise(name, kernel, x1, x2)
        y = kernel(a, b) if a.size < _SMALL and b.size < _SMALL else computed(kernel, a, b)
        if type(y) is not _ndarray:
            y = np.asarray(y)
        used = op
        if booleans is not None and x1._data.dtype.kind == "b":
            used = booleans
        elif ints is not None and x1._data.dtype.kind in "iu":
            used = ints
        return _new_array(y, Node(used, (a if m is None else m, b if n is None else n), y))

    return _named(function, name, kernel)


def opaque(name: str, kernel: Any, instead: str = "") -> Function:
    """A function without derivative here: refused on the path of one. `instead` says what to do."""

    def function(*args: Any, **kwargs: Any) -> Any:
        refuse_tracked(name, [*args, *kwargs.values()], instead)
        return wrapped(kernel(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()}))

    return _named(function, name, kernel)


def discrete(name: str, kernel: Any) -> Function:
    """A function whose results are integers, booleans or facts: constant under differentiation."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if exporting.get():
            refuse_tracked(name, [*args, *kwargs.values()], "it has no form in ONNX", floats=False)
        return wrapped(kernel(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()}))

    return _named(function, name, kernel)


def plain(x: Any) -> Any:
    """The numpy array in `x`, also in lists."""
    if isinstance(x, Array):
        return x._data
    return type(x)(map(plain, x)) if type(x) in (list, tuple) else x


def wrapped(y: Any) -> Any:
    """`y` with arrays in place of numpy's, also in tuples."""
    if isinstance(y, (np.ndarray, np.generic)):
        return Array(np.asarray(y))
    if isinstance(y, tuple) and hasattr(y, "_fields"):
        return type(y)(*map(wrapped, y))
    return type(y)(map(wrapped, y)) if type(y) in (list, tuple) else y


def tracked(x: Any, floats: bool = True) -> bool:
    """Whether `x`, or something in it, is on the tape (by default: with a derivative)."""
    if isinstance(x, Array):
        return x._node is not None and (not floats or x._data.dtype.kind not in "biu")
    return isinstance(x, (list, tuple)) and any(tracked(e, floats) for e in x)


def refuse_tracked(name: str, operands: Any, instead: str, floats: bool = True) -> None:
    """Raise if one of `operands` is on the tape."""
    if any(tracked(x, floats) for x in operands):
        if exporting.get():
            raise BadInput(f"{name} cannot be recorded as ONNX{': ' + instead if instead else ''}")
        hint = f"\n  hint: {instead or 'use stop_gradient(x) if it is meant as a constant'}"
        raise NotDifferentiable(f"{name} has no derivative in onnxgrad.eager{hint}")


def _op(op_type: str) -> Operator:
    return standard(op_type)


def _floor_divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """numpy's, but for infinities the floor of the quotient."""
    whole = np.floor_divide(x, y)
    if whole.dtype.kind != "f" or (np.isfinite(x).all() and np.isfinite(y).all()):
        return whole
    return np.where(np.isinf(x) | np.isinf(y), np.floor(np.divide(x, y)), whole)


_SAME, _NOT = _op("Identity"), _op("Not")

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
exp2 = unary("exp2", macro(expressions.exp2_of), np.exp2)
expm1 = unary("expm1", macro(expressions.expm1_of), np.expm1)
floor = unary("floor", _SAME, np.floor, floats=_op("Floor"))
isfinite = unary("isfinite", macro(expressions.always_of), np.isfinite, floats=macro(expressions.is_finite_of))
isinf = unary("isinf", macro(expressions.never_of), np.isinf, floats=_op("IsInf"))
isnan = unary("isnan", macro(expressions.never_of), np.isnan, floats=_op("IsNaN"))
log = unary("log", _op("Log"), np.log)
log10 = unary("log10", macro(expressions.log10_of), np.log10)
log1p = unary("log1p", macro(expressions.log1p_of), np.log1p)
log2 = unary("log2", macro(expressions.log2_of), np.log2)
logical_not = unary("logical_not", _NOT, np.logical_not)
negative = unary("negative", _op("Neg"), np.negative)
positive = unary("positive", _SAME, np.positive)
reciprocal = unary("reciprocal", _op("Reciprocal"), np.reciprocal)
round = unary("round", _SAME, np.round, floats=_op("Round"))
sign = unary("sign", _op("Sign"), np.sign)
signbit = unary("signbit", macro(expressions.below_zero_of), np.signbit, floats=macro(expressions.is_negative_of))
sin = unary("sin", _op("Sin"), np.sin)
sinh = unary("sinh", _op("Sinh"), np.sinh)
sqrt = unary("sqrt", _op("Sqrt"), np.sqrt)
square = unary("square", macro(expressions.square_of), np.square)
tan = unary("tan", _op("Tan"), np.tan)
tanh = unary("tanh", _op("Tanh"), np.tanh)
trunc = unary("trunc", _SAME, np.trunc, floats=macro(expressions.trunc_of))

# --- two operands ----------------------------------------------------------------------------------

add = binary("add", _op("Add"), np.add)
atan2 = binary("atan2", macro(expressions.atan2_of), np.arctan2)
bitwise_and = binary("bitwise_and", _op("BitwiseAnd"), np.bitwise_and, booleans=_op("And"))
bitwise_left_shift = binary("bitwise_left_shift", macro(expressions.bit_left_of), np.left_shift)
bitwise_or = binary("bitwise_or", _op("BitwiseOr"), np.bitwise_or, booleans=_op("Or"))
bitwise_right_shift = binary("bitwise_right_shift", macro(expressions.bit_right_of), np.right_shift)
bitwise_xor = binary("bitwise_xor", _op("BitwiseXor"), np.bitwise_xor, booleans=_op("Xor"))
copysign = binary("copysign", macro(expressions.copysign_of), np.copysign)
divide = binary("divide", _op("Div"), np.divide, ints=macro(expressions.divide_ints_of))
equal = binary("equal", _op("Equal"), np.equal)
floor_divide = binary(
    "floor_divide", macro(expressions.floor_divide_of), _floor_divide, ints=macro(expressions.floor_divide_ints_of)
)
greater = binary("greater", _op("Greater"), np.greater, booleans=macro(expressions.above_of))
greater_equal = binary(
    "greater_equal", _op("GreaterOrEqual"), np.greater_equal, booleans=macro(expressions.not_below_of)
)
hypot = binary("hypot", macro(expressions.hypot_of), np.hypot)
less = binary("less", _op("Less"), np.less, booleans=macro(expressions.below_of))
less_equal = binary("less_equal", _op("LessOrEqual"), np.less_equal, booleans=macro(expressions.not_above_of))
logaddexp = binary("logaddexp", macro(expressions.logaddexp_of), np.logaddexp)
logical_and = binary("logical_and", _op("And"), np.logical_and)
logical_or = binary("logical_or", _op("Or"), np.logical_or)
logical_xor = binary("logical_xor", _op("Xor"), np.logical_xor)
maximum = binary("maximum", _op("Max"), np.maximum)
minimum = binary("minimum", _op("Min"), np.minimum)
multiply = binary("multiply", _op("Mul"), np.multiply)
nextafter = opaque("nextafter", np.nextafter)
not_equal = binary("not_equal", macro(expressions.differ_of), np.not_equal)
_power = binary("pow", _op("Pow"), np.power)
remainder = binary("remainder", macro(expressions.remainder_of), np.remainder, ints=_op("Mod"))
subtract = binary("subtract", _op("Sub"), np.subtract)


def pow(x1: Any, x2: Any, /) -> Array:
    """x1 to the power x2. A Python number as exponent is part of the operator, with a shorter derivative."""
    if not isinstance(x2, (int, float)) or isinstance(x2, bool) or not tracked(x1):  # so it is of floats
        return _power(x1, x2)
    if x1.dtype.kind == "c" and float(x2).is_integer():
        return complexes.power(x1, int(x2))
    exponent = np.asarray(x2, x1.dtype)
    return record(standard("Pow", ((1, float(x2)),)), [x1], np.power(x1._data, exponent))


def clip(x: Any, /, min: Any = None, max: Any = None) -> Array:
    """`x`, but at least `min` and at most `max`, in the dtype of `x`."""
    x = as_array(x)
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


def real(x: Any, /) -> Array:
    """The real part."""
    x = as_array(x)
    return x if x._data.dtype.kind != "c" else complexes.parts(x)[0]


def imag(x: Any, /) -> Array:
    """The imaginary part."""
    x = as_array(x)
    return Array(np.zeros(x.shape, x.dtype)) if x._data.dtype.kind != "c" else complexes.parts(x)[1]


def conj(x: Any, /) -> Array:
    """The complex conjugate."""
    x = as_array(x)
    if x._node is None or x._data.dtype.kind != "c":
        return Array(np.conj(x._data)) if x._data.dtype.kind == "c" else x
    return complexes.conjugate(x)


def where(condition: Any, x1: Any, x2: Any, /) -> Array:
    """Elements of `x1` where `condition` holds, else of `x2`. Only the chosen ones get a derivative."""
    c, (a, b) = as_array(condition), promoted(x1, x2)
    return record(_op("Where"), [c if c.dtype == bool else cast(c, bool), a, b], np.where(c._data, a._data, b._data))


_OPERATORS = {
    "add": add, "sub": subtract, "mul": multiply, "truediv": divide, "floordiv": floor_divide, "mod": remainder,
    "pow": pow, "and": bitwise_and, "or": bitwise_or, "xor": bitwise_xor, "lshift": bitwise_left_shift,
    "rshift": bitwise_right_shift,
}  # fmt: skip
_COMPARISONS = {
    "eq": equal, "ne": not_equal, "lt": less, "le": less_equal, "gt": greater, "ge": greater_equal,
}  # fmt: skip
_OPERANDS = (Array, np.ndarray, np.generic, bool, int, float, complex)


def install(name: str, function: Function) -> None:
    """Make `function` the operator `name` of arrays, reflected and in-place too."""

    def forward(self: Array, other: Any) -> Any:
        return function(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def reflected(self: Array, other: Any) -> Any:
        return function(other, self) if isinstance(other, _OPERANDS) else NotImplemented

    def in_place(self: Array, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        made = function(self, other)
        if made.shape != self.shape or made.dtype != self.dtype:
            raise ValueError(f"{self.dtype}{list(self.shape)} cannot hold {made.dtype}{list(made.shape)} in place")
        return made

    setattr(Array, f"__{name}__", forward)
    if name not in _COMPARISONS:
        setattr(Array, f"__r{name}__", reflected)
        setattr(Array, f"__i{name}__", in_place)


for _name, _function in (_OPERATORS | _COMPARISONS).items():
    install(_name, _function)
for _name, _function in {"neg": negative, "pos": positive, "abs": abs, "invert": bitwise_invert}.items():
    setattr(Array, f"__{_name}__", (lambda f: lambda self: f(self))(_function))
