"""Derivatives that are zero everywhere, with the reasons: for warnings of a derivation and the report of `check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxgrad.engine.activity import stoppers
from onnxgrad.errors import ZeroDerivative, warn_caller
from onnxgrad.ir import Builder
from onnxgrad.rules.constant_sums import constant_total


def constant_sums(of: Mapping[str, ir.Value]) -> dict[str, str]:
    """The operators that make the sums of some values of `of` constant, by name: the gradients of these are zero."""
    return {name: operator for name, value in of.items() if (operator := constant_total(value))}


def warn_of_constant_sums(of: Mapping[str, ir.Value]) -> None:
    """Warn of values whose sum has the gradient zero, with a hint at a part that has another."""
    for name, operator in constant_sums(of).items():
        shape = of[name].shape
        part = "[0]" if shape is not None and len(shape) == 1 and name[-1] != "]" else "[:, 0]"
        whole = name.rpartition("[")[0] if name.endswith("]") else name
        hint = f"take one class of it, such as of='{whole or name}{part}', or a loss"
        message = f"the gradient of the sum of {name!r} is zero: rows of a {operator} sum to 1\n  hint: {hint}"
        warn_caller(ZeroDerivative(message, name))


def warn_unconnected(
    name: str,
    wrt: Mapping[str, ir.Value],
    of: Mapping[str, ir.Value],
    by_of: bool,
    nodes: Sequence[ir.Node],
    b: Builder,
) -> None:
    """Warn that nothing with a derivative connects `name` to the other end.

    `name` is one of `of` if `by_of`, for tangents, and one of `wrt` otherwise, for gradients.
    """
    ends = ", ".join(repr(n) for n in (wrt if by_of else of))
    why = stoppers(nodes, wrt.values(), of.values(), b)
    reason = f"nothing but {', '.join(why)} connects them" if why else "nothing connects them"
    kinds = ("tangent by", "of") if by_of else ("gradient of", "with respect to")
    warn_caller(ZeroDerivative(f"the {kinds[0]} {ends} {kinds[1]} {name!r} is zero: {reason}", name))
