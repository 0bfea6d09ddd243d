"""The names that old programs import from `autograd.util`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxgrad.eager.autograd.test_util import check_grads

__all__ = ["quick_grad_check"]


def quick_grad_check(fun: Callable[..., Any], arg0: Any, extra_args: Sequence[Any] = (), **how: Any) -> None:
    """Raise AssertionError unless the gradient of `fun` agrees with central differences."""
    check_grads(fun, modes=["rev"], order=1)(arg0, *extra_args)
