"""Time gradients of Python functions in onnxgrad.eager and HIPS autograd, interleaved in one process.

``python -m benchmarks.eager [--rounds 60] [--threads 1] [--page docs/eager-benchmark.md]``

Both differentiate the same source, written against the numpy namespace of each, in float64; their gradients must
agree. One round calls one after the other, so that a slow moment of the machine hits both. Reported: medians, the
median with quartiles of the ratios of the rounds, and the ratio of the medians of CPU time, which other load on the
machine disturbs least. The first call, which builds and compiles the graph of the
derivative, is reported by itself. Where JAX is installed, its compiled gradient (``jax.jit(jax.grad(f))``, which traces
the function once for a shape and then runs no Python) is measured in the same rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import autograd
import autograd.numpy
import numpy as np
from rich.console import Console
from rich.table import Table

import onnxgrad.eager as og
import onnxgrad.eager.numpy
from onnxgrad.eager.core import executable

try:
    import jax

    jax.config.update("jax_enable_x64", True)
except ModuleNotFoundError:
    jax = None  # type: ignore[assignment]

INTRODUCTION = """\
# Benchmark: gradients of Python functions

Written by `python -m benchmarks.eager --page docs/eager-benchmark.md`, which explains how it measures: gradient calls
(forward and backward pass) of onnxgrad.eager and HIPS autograd, in float64, interleaved. A ratio below 1 means that
onnxgrad.eager is faster; the CPU ratio is that of processor time, all threads
together. `first` is the first call for a shape, which builds the graph; every later call finds it. JAX compiles the
function, which must then be free of branches on values; its column is of later calls.
"""
HEAD = (
    "| function | size | first, ms | onnxgrad, µs | autograd, µs | ratio | quartiles | CPU ratio | JAX, compiled, µs |",
    "|---|---|---|---|---|---|---|---|---|",
)
SIZES = (1, 8, 64, 128, 256, 512)


def chain(np: Any, x: Any) -> Any:
    """100 operators, elementwise."""
    for _ in range(12):
        y = np.tanh(x) * 1.1 + 0.1
        x = y * np.exp(-x * x) + x
    return np.sum(x * x)


def network(np: Any, x: Any) -> Any:
    """100 operators, a fifth of them matrix products."""
    for _ in range(20):
        h = x @ x / x.shape[0]
        x = np.sin(h + 0.1) * 0.5 + x
    return np.sum(x * x)


def shapes(np: Any, x: Any) -> Any:
    """100 operators: indexing, reductions, broadcasting, joins."""
    for _ in range(11):
        rows = np.mean(x, axis=1, keepdims=True)
        y = np.concatenate([x[::-1], x - rows], axis=0)
        x = np.where(x > 0, y[: x.shape[0]] * 0.9, x.T * np.max(rows)) + rows
    return np.sum(x * x)


WORKLOADS: dict[str, Callable[..., Any]] = {"elementwise": chain, "matrix products": network, "shapes": shapes}


def measure(f: Callable[..., Any], size: int, rounds: int) -> dict[str, Any]:
    """Times of the gradient of `f` at a matrix of this size."""
    x = np.random.default_rng(0).standard_normal((size, size)) * 0.3
    ours = og.grad(lambda x: f(onnxgrad.eager.numpy, x))
    theirs = autograd.grad(lambda x: f(autograd.numpy, x))
    start = time.perf_counter()
    found = np.asarray(ours(x))
    first = time.perf_counter() - start
    expected = theirs(x)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9 * (1 + np.abs(expected).max()))
    calls: list[Callable[..., Any]] = [ours, theirs]
    if jax is not None:
        compiled = jax.jit(jax.grad(lambda x: f(jax.numpy, x)))
        np.testing.assert_allclose(compiled(x), expected, rtol=1e-7, atol=1e-9 * (1 + np.abs(expected).max()))
        calls.append(lambda x: compiled(x).block_until_ready())
    times: list[list[float]] = [[] for _ in calls]
    works: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds if size < 256 else max(rounds // 4, 9)):
        for call, kept, work in zip(calls, times, works):
            start, used = time.perf_counter(), time.process_time()
            call(x)
            kept.append(time.perf_counter() - start)
            work.append(time.process_time() - used)
    ratios = [a / b for a, b in zip(*times[:2])]
    low, _, high = quantiles(ratios, n=4)
    return {"first": first, "ours": median(times[0]), "theirs": median(times[1]), "ratio": median(ratios),
            "low": low, "high": high, "cpu": median(works[0]) / median(works[1]),
            "jax": median(times[2]) if jax is not None else None}  # fmt: skip


def main() -> None:
    """Run the workloads that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--threads", type=int, help="of ONNX Runtime; OMP_NUM_THREADS is for numpy's products")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    executable.OPTIONS = dataclasses.replace(executable.OPTIONS, threads=options.threads)
    table = Table(*HEAD[0].strip("| ").split(" | "))
    lines = []
    for name, f in WORKLOADS.items():
        for size in options.sizes:
            r = measure(f, size, options.rounds)
            row = (
                name, f"{size}×{size}", f"{r['first'] * 1e3:.0f}", f"{r['ours'] * 1e6:.0f}", f"{r['theirs'] * 1e6:.0f}",
                f"{r['ratio']:.2f}", f"{r['low']:.2f}–{r['high']:.2f}", f"{r['cpu']:.2f}",
                "–" if r["jax"] is None else f"{r['jax'] * 1e6:.0f}",
            )  # fmt: skip
            table.add_row(*row)
            lines.append(f"| {' | '.join(row if jax is not None else row[:-1])} |")
    Console().print(table)
    if options.page:
        setting = (
            f"Medians of {options.rounds} rounds (a quarter of them from 256×256 on); autograd {version('autograd')}, "
            f"ONNX Runtime {version('onnxruntime')}, numpy {np.__version__}"
            f"{f', JAX {jax.__version__}' if jax is not None else ''}"
            f"{f'; threads of ONNX Runtime: {options.threads}' if options.threads else ''}."
        )
        head = HEAD if jax is not None else [line[: line[:-1].rindex("|") + 1].rstrip() for line in HEAD]
        introduction = INTRODUCTION if jax is not None else INTRODUCTION.split(" JAX compiles")[0] + "\n"
        options.page.write_text("\n".join([introduction, setting, "", *head, *lines, ""]))


if __name__ == "__main__":
    main()
