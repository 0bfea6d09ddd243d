"""The names that programs import from `autograd.core` and ``autograd.tracer``."""

from __future__ import annotations

from typing import Any

from onnxgrad.eager.autograd import make_jvp as _make_jvp
from onnxgrad.eager.autograd import make_vjp as _make_vjp
from onnxgrad.eager.autograd.extend import defjvp, defvjp, notrace_primitive, primitive, vspace
from onnxgrad.eager.core.array import Array, plain

__all__ = ["defjvp", "defvjp", "getval", "isbox", "make_jvp", "make_vjp", "notrace_primitive", "primitive", "vspace"]


def make_vjp(fun: Any, x: Any) -> Any:
    """The pullback of `fun` at `x`, and its value."""
    return _make_vjp(fun)(x)


def make_jvp(fun: Any, x: Any) -> Any:
    """The pushforward of `fun` at `x`."""
    return _make_jvp(fun)(x)


def isbox(x: Any) -> bool:
    """True if `x` depends on a variable."""
    return isinstance(x, Array) and x._node is not None


def getval(x: Any) -> Any:
    """The value of `x`, without its derivative."""
    return plain(x)
