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
    """A derivative disagrees with central differences."""


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
        f: a function of arrays or containers of arrays of float64 (differences of float32 say little).
        args: the point.
        order: the highest order; the second checks the first derivatives in the same way, and so on.
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
        rest = iter(xs)
        result = f(*(trees.rebuilt(a, [next(rest) for _ in trees.leaves(a)]) for a in args))
        return [as_array(y) for _, y in trees.leaves(result)]

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
    tangents = [Array(rng.standard_normal(x.shape).astype(x.dtype)) for x in at]

    def moved(by: float) -> list[np.ndarray]:
        return [y._data for y in f(*(Array((x + by * t._data).astype(x.dtype)) for x, t in zip(at, tangents)))]

    differences = [(hi - lo) / (2 * eps) for hi, lo in zip(moved(eps), moved(-eps))]
    cotangents = [Array(np.asarray(rng.standard_normal(d.shape))) for d in differences]
    expected = sum(float(np.sum(c._data * d)) for c, d in zip(cotangents, differences))
    size = sum(float(np.sum(np.abs(c._data * d))) for c, d in zip(cotangents, differences))

    def compare(mode: str, found: float) -> None:
        if not abs(found - expected) <= atol + rtol * max(size, abs(expected)):
            raise GradientMismatch(
                f"{mode}, order {whole - order + 1}: the derivative in a random direction is {found:.10g}, and by "
                f"central differences {expected:.10g}"
            )

    if "fwd" in modes:
        _, pushed = jvp(lambda *xs: f(*xs), tuple(primals), tuple(tangents))
        compare("fwd", sum(float(np.sum(c._data * np.asarray(t))) for c, t in zip(cotangents, pushed)))
    if "rev" in modes:
        outputs, pullback = vjp(f, *primals)
        pulled = pullback([c.astype(y.dtype) for c, y in zip(cotangents, outputs)])
        pulled = [pulled] if len(primals) == 1 else pulled
        compare("rev", sum(float(np.sum(t._data * np.asarray(g))) for t, g in zip(tangents, pulled)))
    if order > 1:
        if "fwd" in modes:

            def along(*xs: Array) -> list[Array]:
                return list(jvp(f, tuple(xs), tuple(tangents))[1])

            _check(along, primals, order - 1, whole, modes, eps, rtol, atol, rng)
        if "rev" in modes:

            def back(*xs: Array) -> list[Array]:
                pulled = vjp(f, *xs)[1]([c.astype(y.dtype) for c, y in zip(cotangents, outputs)])
                return [pulled] if len(primals) == 1 else list(pulled)

            _check(back, primals, order - 1, whole, modes, eps, rtol, atol, rng)
