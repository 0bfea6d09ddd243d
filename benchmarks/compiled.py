"""``python -m benchmarks.compiled --page PAGE``: compiled gradients of functions, beside HIPS autograd and ``jax.jit``.

Each function is written once, for a namespace; loops are Python's, or those of the library (`scan`). All gradients are
compared before they are timed. Rounds are interleaved. Needs jax and autograd (``tests/oracle-packages.txt``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

import onnxgrad.eager as og
import onnxgrad.eager.numpy as onp
from benchmarks.training.__main__ import processor
from onnxgrad.eager.scipy import special as og_special

COLUMNS = ("eager", "eager.jit", "autograd", "jax.jit")


def loop(np: Any) -> Callable[..., Any]:
    """A hundred steps on a number."""

    def f(x: Any) -> Any:
        for _ in range(100):
            x = np.sin(x) + 0.1 * x
        return x

    return f


def recurrence(np: Any, scan: Any = None) -> Callable[..., Any]:
    """A recurrent network of fifty steps."""

    def step(h: Any, x: Any, w: Any, u: Any) -> Any:
        return np.tanh(h @ w + x @ u)

    def f(w: Any, u: Any, xs: Any) -> Any:
        h = np.zeros((8, 16))
        if scan is not None:
            h, _ = scan(lambda h, x: (step(h, x, w, u), ()), h, xs)
        else:
            for t in range(50):
                h = step(h, xs[t], w, u)
        return np.sum(h * h)

    return f


def black_scholes(np: Any, erf: Any) -> Callable[..., Any]:
    """The value of ten thousand call options."""

    def normal(x: Any) -> Any:
        return 0.5 * (1 + erf(x / 1.4142135623730951))

    def f(spot: Any, strike: Any, t: Any, rate: Any, v: Any) -> Any:
        d1 = (np.log(spot / strike) + (rate + v * v / 2) * t) / (v * np.sqrt(t))
        d2 = d1 - v * np.sqrt(t)
        return np.sum(spot * normal(d1) - strike * np.exp(-rate * t) * normal(d2))

    return f


def matrix(np: Any) -> Callable[..., Any]:
    """A function of a matrix of 50 by 50."""

    def f(a: Any) -> Any:
        b = a
        for _ in range(5):
            b = b @ a / 10 + np.tanh(b)
        return np.sum(b * b)

    return f


def orbit(np: Any, repeat: Any = None) -> Callable[..., Any]:
    """Predators and prey: 200 steps of Runge and Kutta."""

    def f(rates: Any, start: Any) -> Any:
        signs, other = np.array([1.0, -1.0]), np.array([[0.0, 1.0], [1.0, 0.0]])

        def slope(y: Any) -> Any:
            return signs * (rates[:2] * y - rates[2:] * y * (other @ y))

        def step(_: Any, y: Any) -> Any:
            a = slope(y)
            b = slope(y + 0.01 * a)
            c = slope(y + 0.01 * b)
            d = slope(y + 0.02 * c)
            return y + 0.02 / 6 * (a + 2 * b + 2 * c + d)

        y = repeat(0, 200, step, start) if repeat is not None else start
        for i in range(0 if repeat is not None else 200):
            y = step(i, y)
        return np.sum(y * y)

    return f


def filtered(np: Any, scan: Any = None) -> Callable[..., Any]:
    """The likelihood of 200 numbers by a Kalman filter with a state of four."""

    def f(noise: Any, move: Any, seen: Any, numbers: Any) -> Any:
        def step(state: Any, y: Any) -> Any:
            mean, cov = state
            mean, cov = move @ mean, move @ cov @ move.T + np.exp(noise[0]) * np.eye(4)
            gain = cov @ seen
            spread, off = seen @ gain + np.exp(noise[1]), y - seen @ mean
            after = mean + gain * off / spread, cov - gain[:, None] * gain[None, :] / spread
            return after, np.log(spread) + off * off / spread

        state = np.zeros(4), np.eye(4)
        if scan is not None:
            return np.sum(scan(step, state, numbers)[1])
        total = 0.0
        for y in numbers:
            state, term = step(state, y)
            total = total + term
        return total

    return f


def mixture(np: Any) -> Callable[..., Any]:
    """The likelihood of five thousand points under a mixture of eight normal distributions."""

    def f(means: Any, scales: Any, weights: Any, points: Any) -> Any:
        off = (points[:, None, :] - means) * np.exp(-scales)
        terms = weights - np.sum(0.5 * off * off + scales, axis=-1)
        most = np.max(terms, axis=1)
        inside = most + np.log(np.sum(np.exp(terms - most[:, None]), axis=1))
        return np.sum(inside) - 5000 * np.log(np.sum(np.exp(weights)))

    return f


def cases() -> dict[str, tuple[tuple[Any, ...], list[Callable[..., Any]]]]:
    """Arguments and the four gradients of each function."""
    import autograd
    import autograd.numpy as anp
    import jax
    import jax.numpy as jnp
    from autograd.scipy import special as autograd_special

    jax.config.update("jax_enable_x64", True)
    rng = numpy.random.default_rng(0)

    def four(ours: Any, theirs: Any, jaxs: Any) -> list[Callable[..., Any]]:
        return [og.grad(ours), og.jit(og.grad(ours)), autograd.grad(theirs), jax.jit(jax.grad(jaxs))]

    weights = rng.standard_normal((16, 16)) * 0.2, rng.standard_normal((4, 16)), rng.standard_normal((50, 8, 4))
    spot, strike, t, v = (rng.uniform(0.5, 1.5, 10_000) for _ in range(4))
    erfs = og_special.erf, autograd_special.erf, jax.scipy.special.erf
    plain = recurrence(anp)
    scans = og.scan, None, jax.lax.scan
    turn = numpy.linalg.qr(rng.standard_normal((4, 4)))[0] * 0.95
    kalman = numpy.array([-1.0, -0.5]), turn, rng.standard_normal(4), rng.standard_normal(200)
    normals = rng.standard_normal((8, 3)), rng.standard_normal((8, 3)) / 5, rng.standard_normal(8)
    return {
        "100 steps on a number": ((0.5,), four(loop(onp), loop(anp), loop(jnp))),
        "recurrent network, 50 steps": (weights, four(recurrence(onp), plain, recurrence(jnp))),
        "the same by `scan`": (weights, four(recurrence(onp, og.scan), plain, recurrence(jnp, jax.lax.scan))),
        "Black-Scholes, 10,000 options": (
            (spot, strike, t, 0.05, v),
            four(*(black_scholes(np, erf) for np, erf in zip((onp, anp, jnp), erfs, strict=True))),
        ),
        "matrix of 50 × 50": ((rng.standard_normal((50, 50)) * 0.3,), four(matrix(onp), matrix(anp), matrix(jnp))),
        "mixture of normals, 5,000 points": (
            (*normals, rng.standard_normal((5000, 3))),
            four(mixture(onp), mixture(anp), mixture(jnp)),
        ),
        "Kalman filter, 200 steps": (
            kalman,
            four(*(filtered(np, scan) for np, scan in zip((onp, anp, jnp), scans, strict=True))),
        ),
        "Runge-Kutta, 200 steps": (
            (numpy.array([1.1, 0.4, 0.4, 0.1]), numpy.array([2.0, 1.0])),
            four(orbit(onp, og.fori_loop), orbit(anp), orbit(jnp, jax.lax.fori_loop)),
        ),
    }


def measured(rounds: int) -> list[tuple[str, list[float], list[float]]]:
    """For each function the milliseconds of a call, and of the first one."""
    found = []
    for name, (args, functions) in cases().items():
        first, results, times = [], [], [[] for _ in functions]
        for f in functions:
            start = time.perf_counter()
            results.append(numpy.asarray(f(*args)))
            first.append(1e3 * (time.perf_counter() - start))
        for result in results:
            numpy.testing.assert_allclose(result, results[2], rtol=1e-6)
        for _ in range(rounds):
            for spent, f in zip(times, functions, strict=True):
                start = time.perf_counter()
                for _ in range(5):
                    result = f(*args)
                numpy.asarray(result)
                spent.append(1e3 * (time.perf_counter() - start) / 5)
        found.append((name, [float(numpy.median(t)) for t in times], first))
    return found


def page(rows: list[tuple[str, list[float], list[float]]], rounds: int) -> str:
    """The table as a page."""
    lines = [
        "# Benchmark: compiled Python functions",
        "",
        "Written by `python -m benchmarks.compiled --page docs/eager-compiled-benchmark.md`: milliseconds of a",
        "gradient call (forward and backward pass, float64) of `onnxgrad.eager`, of `onnxgrad.eager.jit`, of HIPS",
        f"autograd and of `jax.jit`, interleaved in one process; medians of {rounds} rounds of five calls, on two",
        f"threads of {processor()}. The first call is in brackets.",
        "",
        "| function | " + " | ".join(COLUMNS) + " | eager.jit ÷ jax.jit | eager.jit ÷ autograd |",
        "|---|" + "---|" * (len(COLUMNS) + 2),
    ]
    for name, times, first in rows:
        cells = [f"{t:.3f} ({f:.0f})" for t, f in zip(times, first, strict=True)]
        ratios = f"{times[1] / times[3]:.2f} | {times[1] / times[2]:.2f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {ratios} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="compiled gradients beside autograd and jax.jit")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    text = page(measured(asked.rounds), asked.rounds)
    print(text)
    if asked.page:
        asked.page.write_text(text)


if __name__ == "__main__":
    main()
