"""Attaching a namespace to arrays: its functions are their methods and operators (``x + y`` is ``add(x, y)``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrad.eager.core.array import Array

_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
_COMPARISONS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}  # fmt: skip
_UNARY = {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}
#: numpy's methods that are functions of the namespace.
_METHODS = (
    "all", "any", "argmax", "argmin", "argsort", "astype", "clip", "conj", "conjugate", "cumprod", "cumsum",
    "diagonal", "dot", "max", "mean", "min", "nonzero", "prod", "ravel", "repeat", "round", "searchsorted", "squeeze",
    "std", "sum", "swapaxes", "take", "trace", "var",
)  # fmt: skip
_OPERANDS = (Array, np.ndarray, np.generic, bool, int, float, complex, list, tuple)


def attach(namespace: Any) -> None:
    """Set `namespace` as the one that arrays dispatch to."""
    Array._xp = namespace
    for name, function in _UNARY.items():
        setattr(Array, f"__{name}__", getattr(namespace, function))
    for name in _METHODS:
        setattr(Array, name, getattr(namespace, name))
    for name, function in (_BINARY | _COMPARISONS).items():
        _define(name, getattr(namespace, function))
    setattr(Array, "__divmod__", lambda self, other: namespace.divmod(self, other))  # noqa: B010 (a type has its own)
    setattr(Array, "__rdivmod__", lambda self, other: namespace.divmod(other, self))  # noqa: B010


def _define(name: str, function: Callable[[Any, Any], Array]) -> None:
    """Define the binary operator `name` of arrays, and its reflected and in-place forms unless it is a comparison."""

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
