"""Checks of derivatives by differences, as `autograd.test_util` has them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.autograd.nary import name_of, unary_to_nary
from onnxgrad.eager.checking import GradientMismatch
from onnxgrad.eager.checking import check_grads as check
from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import as_array


@unary_to_nary
def check_grads(fun: Callable[..., Any], x: Any, modes: Sequence[str] = ("fwd", "rev"), order: int = 2) -> None:
    """Raise AssertionError unless the derivatives of `fun` up to `order` agree with central differences."""
    try:
        check(fun, x, order=order, modes=modes)
    except GradientMismatch as error:
        kind = "VJP" if error.mode == "rev" else "JVP"
        of = f"{kind.lower()}_" * (error.order - 1) + name_of(fun)
        raise AssertionError(f"Derivative ({kind}) check of {of} failed with arg {x}: {error}") from error


def combo_check(fun: Callable[..., Any], *how: Any, **options: Any) -> Callable[..., None]:
    """`check_grads` with all combinations of the arguments given."""
    checked = check_grads(fun, *how, **options)

    def check_all(*args: Any, **kwargs: Any) -> None:
        for values in itertools.product(*args):
            for chosen in itertools.product(*kwargs.values()):
                checked(*values, **dict(zip(kwargs, chosen)))

    return check_all


def scalar_close(a: Any, b: Any) -> bool:
    """True if two numbers agree to 1e-6, absolutely or relatively."""
    return bool(abs(a - b) < 1e-6 or abs(a - b) < 1e-6 * abs(a + b))


def check_equivalent(x: Any, y: Any) -> None:
    """Raise AssertionError unless `x` and `y` have the same arrays in the same places."""
    pairs = [(as_array(a), as_array(b)) for (_, a), (_, b) in zip(trees.leaves(x), trees.leaves(y), strict=True)]
    for a, b in pairs:
        assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
        np.testing.assert_allclose(a._data, b._data, rtol=1e-6, atol=1e-6)
