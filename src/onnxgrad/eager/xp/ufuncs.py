"""Functions of the namespace made from numpy's kernels and the primitives to record for them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array, as_array, call_plain, refuse_tracked
from onnxgrad.eager.core.buffers import LARGE, computed
from onnxgrad.eager.core.primitives import Macro, Primitive, standard
from onnxgrad.eager.core.released import offer_operands
from onnxgrad.eager.core.tape import Node, exporting
from onnxgrad.eager.xp import complexes
from onnxgrad.eager.xp.dtypes import cast, promoted

Function = Callable[..., Any]
#: How a function is recorded: as a primitive, or by a writer of an expression, ``writer(b, *operands)``.
Recorded = Primitive | Callable[..., Any]
_new_array = Array
_SMALL = LARGE // 8
_ndarray = np.ndarray
_NOT = standard("Not")


def _set_name(function: Function, name: str, kernel: Any) -> Function:
    function.__name__ = function.__qualname__ = name
    if isinstance(kernel, types.FunctionType) and kernel.__module__.startswith(__package__ or ""):
        function.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
    summary = (kernel.__doc__ or "").strip().split("\n\n")
    text = next((p for p in summary if p and "(x" not in p.split("\n")[0]), name)
    function.__doc__ = " ".join(text.split())
    return function


def _dispatches(x: Any) -> bool:
    """True if `x` is an array of another library that implements ``__array_ufunc__``."""
    return getattr(type(x), "__array_ufunc__", None) is not None and not isinstance(x, (Array, np.ndarray, np.generic))


def _primitive(name: str, how: Recorded) -> Primitive:
    return how if isinstance(how, Primitive) else Macro(name, how, ())


def unary(name: str, op: Recorded, kernel: Any, floats: Recorded | None = None) -> Function:
    """An elementwise function of one operand, recorded as `op` (or its expansion); on floats as `floats`."""
    of_ints = _primitive(name, op)
    of_floats = of_ints if floats is None else _primitive(name, floats)

    def function(x: Any, /) -> Array:
        if type(x) is not _new_array:
            if _dispatches(x) and isinstance(kernel, np.ufunc):
                return kernel(x)
            x = as_array(x)
        node = x._node
        if node is None:
            return _new_array(np.asarray(kernel(x._data)))
        if x._data.dtype.kind == "c":
            return complexes.elementwise(name, kernel, x)
        is_large = x._data.size >= _SMALL
        y = computed(kernel, x._data) if is_large else kernel(x._data)
        if type(y) is not _ndarray:
            y = np.asarray(y)
        used = of_floats
        if x._data.dtype.kind in "biu":
            if y.dtype.kind not in ("b", x._data.dtype.kind):  # ONNX has this function for the dtype of `y`
                return function(cast(x, y.dtype))
            used = of_ints
        if x._data.dtype.kind == "b" and name == "bitwise_invert":
            used = _NOT
        made = Node(used, (node,), y)
        if is_large and not exporting.get():
            offer_operands(made)
        return _new_array(y, made)

    return _set_name(function, name, kernel)


def binary(name: str, op: Recorded, kernel: Any, booleans: Recorded | None = None, ints: Recorded | None = None) -> Any:
    """An elementwise function of two operands, recorded as `op`, or as `booleans` or `ints` on those dtypes."""
    by_kind = {"b": booleans, "i": ints, "u": ints}
    whole = _primitive(name, op)
    special = {kind: _primitive(name, how) for kind, how in by_kind.items() if how is not None}

    def function(x1: Any, x2: Any, /) -> Array:
        if type(x1) is not _new_array or type(x2) is not _new_array or x1._data.dtype != x2._data.dtype:
            if isinstance(kernel, np.ufunc) and (_dispatches(x1) or _dispatches(x2)):
                return kernel(x1, x2)
            x1, x2 = promoted(x1, x2)
        a, b = x1._data, x2._data
        m, n = x1._node, x2._node
        if m is None and n is None:
            return _new_array(np.asarray(kernel(a, b)))
        if a.dtype.kind == "c":
            return complexes.elementwise(name, kernel, x1, x2)
        is_large = a.size >= _SMALL or b.size >= _SMALL
        y = computed(kernel, a, b) if is_large else kernel(a, b)
        if type(y) is not _ndarray:
            y = np.asarray(y)
        if y.dtype.kind == "f" != a.dtype.kind:
            return function(cast(x1, y.dtype), cast(x2, y.dtype))
        used = special.get(a.dtype.kind, whole)
        made = Node(used, (a if m is None else m, b if n is None else n), y)
        if is_large and not exporting.get():
            offer_operands(made)
        return _new_array(y, made)

    return _set_name(function, name, kernel)


def nondifferentiable(name: str, kernel: Any, instead: str = "") -> Function:
    """A function without a derivative: raises for tracked operands, with `instead` as the hint."""

    def function(*args: Any, **kwargs: Any) -> Any:
        refuse_tracked(name, [*args, *kwargs.values()], instead)
        return call_plain(kernel, args, kwargs)

    return _set_name(function, name, kernel)


def module_fallback(module: Any, path: str) -> Callable[[str], Any]:
    """``__getattr__`` of a namespace: functions of `module`, called `path`, for arrays without a derivative."""

    def find(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{path} here has no {name!r}")
        found = getattr(module, name)
        plain_value = not callable(found) or isinstance(found, type)
        return found if plain_value else nondifferentiable(f"{path}.{name}", found)

    return find


def discrete(name: str, kernel: Any, static: bool = False) -> Function:
    """A function whose results carry no derivative: integers, booleans; `static`: by shapes and dtypes alone."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if exporting.get() and not static:
            refuse_tracked(name, [*args, *kwargs.values()], "it has no form in ONNX", floats=False)
        return call_plain(kernel, args, kwargs)

    return _set_name(function, name, kernel)
