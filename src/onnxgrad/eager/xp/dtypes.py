"""Data types: conversion, promotion by numpy's rules, and inspection."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.core.primitives import standard
from onnxgrad.eager.core.recording import of_pairs, pairs_of, record
from onnxgrad.eager.xp.info import check_device
from onnxgrad.errors import NotDifferentiable

__all__ = ["astype", "can_cast", "finfo", "iinfo", "isdtype", "result_type"]


def cast(x: Array, dtype: Any) -> Array:
    """`x` as `dtype`; `x` itself if that is its dtype."""
    dtype = np.dtype(dtype)
    if x._data.dtype == dtype:
        return x
    if dtype.kind == "c" and x._node is not None:
        return of_pairs(cast(pairs_of(x), np.empty(0, dtype).real.dtype))
    with np.errstate(invalid="ignore"):
        data = x._data.astype(dtype)
    if x._node is None:
        return Array(data)
    return record(standard("Cast", to=onnx_type(dtype)), [x], data)


def onnx_type(dtype: np.dtype) -> int:
    """The ONNX element type of a dtype.

    Raises:
        NotDifferentiable: the dtype is complex.
    """
    if dtype.kind == "c":
        raise NotDifferentiable(f"ONNX computes nothing with {dtype}, so a derivative cannot pass it")
    return int(ir.DataType.from_numpy(dtype))


def promoted(x1: Any, x2: Any) -> tuple[Array, Array]:
    """Both as arrays of one dtype, by numpy's rules; a Python number adapts to the dtype of the array."""
    a = as_array(x1, x2.dtype if isinstance(x2, (Array, np.ndarray, np.generic)) else None)
    b = as_array(x2, a.dtype)
    if a._data.dtype == b._data.dtype:
        return a, b
    dtype = np.result_type(a._data.dtype, b._data.dtype)
    return cast(a, dtype), cast(b, dtype)


def as_float(x: Any) -> Array:
    """`x` as floats: integers and booleans become float64."""
    x = as_array(x)
    return x if x.dtype.kind in "fc" else cast(x, np.float64)


def as_complex(x: Any) -> Array:
    """`x` as an array of complex numbers."""
    x = as_array(x)
    return x if x.dtype.kind == "c" else cast(x, np.result_type(x.dtype, np.complex64))


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
    """`x` as `dtype`."""
    check_device(device)
    x = as_array(x)
    made = cast(x, dtype)
    return Array(x._data.copy(), x._node) if made is x and copy and x._node is None else made


def can_cast(from_: Any, to: Any, /) -> bool:
    """True if `from_` can be cast to `to` by the promotion rules."""
    return bool(np.can_cast(from_.dtype if isinstance(from_, Array) else from_, to))


def result_type(*operands: Any) -> np.dtype:
    """The dtype to which arrays, dtypes and numbers promote."""
    return np.result_type(*(x.dtype if isinstance(x, Array) else x for x in operands))


def isdtype(dtype: Any, kind: Any) -> bool:
    """True if `dtype` is of `kind`: a dtype, a name like "real floating", or a tuple of these."""
    return bool(np.isdtype(np.dtype(dtype), kind))


def finfo(type: Any, /) -> Any:
    """The limits of a floating-point dtype."""
    return _Floats(np.finfo(type.dtype if isinstance(type, Array) else type))


def iinfo(type: Any, /) -> Any:
    """The limits of a dtype of integers."""
    return np.iinfo(type.dtype if isinstance(type, Array) else type)


class _Floats:
    """The attributes of `finfo` that the standard asks for, as Python numbers."""

    def __init__(self, info: Any) -> None:
        self.bits = int(info.bits)
        self.eps, self.max, self.min = float(info.eps), float(info.max), float(info.min)
        self.smallest_normal = float(info.smallest_normal)
        self.dtype = np.dtype(info.dtype)
