"""Checking derivatives against central differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxgrad.eager.core import trees
from onnxgrad.eager.core.array import Array, as_array
from onnxgrad.eager.transforms import jvp, vjp
from onnxgrad.errors import OnnxGradError


class GradientMismatch(OnnxGradError, AssertionError):
    """A derivative disagrees with central differences.

    Attributes:
        mode: "fwd" or "rev".
        order: the order of the derivative.
    """

    def __init__(self, mode: str, order: int, found: float, expected: float) -> None:
        super().__init__(
            f"{mode}, order {order}: the derivative in a random direction is {found:.10g}, and by central differences "
            f"{expected:.10g}"
        )
        self.mode, self.order = mode, order


def check_grads(
    f: Callable[..., Any],
    *args: Any,
    order: int = 2,
    modes: Sequence[str] = ("fwd", "rev"),
    eps: float = 1e-6,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    seed: int = 0,
) -> None:
    """Check the derivatives of `f` at `args` against central differences, up to `order`.

    Args:
        f: a function of arrays or containers of arrays of float64 or complex128 (differences of float32 say little).
        args: the point.
        order: the highest order; the second checks the first derivatives in the same way, as functions of the point
            and of the direction, and so on.
        modes: which modes: "fwd" (`jvp`), "rev" (`vjp`).
        eps: the step of the differences.
        rtol: relative tolerance.
        atol: absolute tolerance.
        seed: the seed of the random directions.

    Raises:
        GradientMismatch: naming the mode, the order and the numbers.
    """
    rng = np.random.default_rng(seed)

    def flat(*xs: Array) -> list[Array]:
        return [as_array(y) for _, y in trees.leaves(f(*trees.rebuilt(args, xs)))]

    def check(f: Callable[..., list[Array]], primals: list[Array], this: int) -> None:
        """Check the derivatives of `f`, which are those of order `this` of the given function."""
        at, count = [x._data for x in primals], len(primals)
        tangents = [Array(_direction(rng, x)) for x in at]

        def shift(by: float) -> list[np.ndarray]:
            points = [np.asarray(x + by * t._data, x.dtype) for x, t in zip(at, tangents)]
            return [y._data for y in f(*map(Array, points))]

        def push(*xs: Array) -> list[Array]:
            return list(jvp(f, xs[:count], xs[count:])[1])

        def back(*xs: Array) -> list[Array]:
            pulled = vjp(f, *xs[:count])[1](list(xs[count:]))
            return [pulled] if count == 1 else list(pulled)

        differences = [np.asarray(hi - lo) / (2 * eps) for hi, lo in zip(shift(eps), shift(-eps))]
        cotangents = [Array(_direction(rng, d)) for d in differences]
        terms = [np.real(c._data * d) for c, d in zip(cotangents, differences)]
        expected, size = (sum(float(np.sum(p)) for p in ps) for ps in (terms, map(np.abs, terms)))
        products = [("fwd", push, tangents, cotangents), ("rev", back, cotangents, tangents)]
        products = [p for p in products if p[0] in modes]
        for mode, derivative, seeds, others in products:
            pairs = zip(others, derivative(*primals, *seeds))
            found = sum(float(np.sum(np.real(x._data * as_array(y)._data))) for x, y in pairs)
            if not abs(found - expected) <= atol + rtol * max(size, abs(expected)):
                raise GradientMismatch(mode, this, found, expected)
        if this < order:  # the derivatives are functions of the point and of the direction, in which they are linear
            for _, derivative, seeds, _ in products:
                check(derivative, [*primals, *seeds], this + 1)

    check(flat, [x for i, a in enumerate(args) for x in trees.float_leaves(a, f"argument {i}")], 1)


def _direction(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Random numbers in the shape and dtype of `like`."""
    made = np.asarray(rng.standard_normal(like.shape))
    if like.dtype.kind == "c":
        made = made + 1j * rng.standard_normal(like.shape)
    return np.asarray(made, like.dtype)
