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

    primals = [x for i, a in enumerate(args) for x in trees.float_leaves(a, f"argument {i}")]
    _check(flat, primals, order, order, tuple(modes), eps, rtol, atol, rng)


def _check(
    f: Callable[..., list[Array]],
    primals: list[Array],
    order: int,
    whole: int,
    modes: tuple[str, ...],
    eps: float,
    rtol: float,
    atol: float,
    rng: np.random.Generator,
) -> None:
    at = [x._data for x in primals]
    tangents = [Array(_direction(rng, x)) for x in at]

    def shift(by: float) -> list[np.ndarray]:
        points = [np.asarray(x + by * t._data, x.dtype) for x, t in zip(at, tangents)]
        return [y._data for y in f(*map(Array, points))]

    differences = [np.asarray(hi - lo) / (2 * eps) for hi, lo in zip(shift(eps), shift(-eps))]
    cotangents = [Array(_direction(rng, d)) for d in differences]
    products = [np.real(c._data * d) for c, d in zip(cotangents, differences)]
    expected, size = (sum(float(np.sum(p)) for p in ps) for ps in (products, map(np.abs, products)))

    def compare(mode: str, found: float) -> None:
        if not abs(found - expected) <= atol + rtol * max(size, abs(expected)):
            raise GradientMismatch(mode, whole - order + 1, found, expected)

    def paired(xs: Sequence[Array], ys: Sequence[Any]) -> float:
        return sum(float(np.sum(np.real(x._data * as_array(y)._data))) for x, y in zip(xs, ys))

    count = len(primals)

    def push(*xs: Array) -> list[Array]:
        return list(jvp(f, xs[:count], xs[count:])[1])

    def back(*xs: Array) -> list[Array]:
        pulled = vjp(f, *xs[:count])[1](list(xs[count:]))
        return [pulled] if count == 1 else list(pulled)

    for mode, derivative, seeds in (("fwd", push, tangents), ("rev", back, cotangents)):
        if mode in modes:
            compare(mode, paired(cotangents if mode == "fwd" else tangents, derivative(*primals, *seeds)))
    if order > 1:  # the derivatives are functions of the point and of the direction, in which they are linear
        for mode, derivative, seeds in (("fwd", push, tangents), ("rev", back, cotangents)):
            if mode in modes:
                _check(derivative, [*primals, *seeds], order - 1, whole, modes, eps, rtol, atol, rng)


def _direction(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Random numbers in the shape and dtype of `like`."""
    made = np.asarray(rng.standard_normal(like.shape))
    if like.dtype.kind == "c":
        made = made + 1j * rng.standard_normal(like.shape)
    return np.asarray(made, like.dtype)
