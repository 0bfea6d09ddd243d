"""Jacobians against JAX and PyTorch, and Hessian products against gradients: one table.

    python -m benchmarks.transforms [--rounds 300] [--widths 100,100,100]

A network of dense layers with tanh between them, 100 numbers in, 100 out; float32. Every contender computes the same
Jacobian at the same point, and they take turns, so that whatever else the machine does hits all of them; the medians
are compared. JAX is jitted, and its time ends when the result is ready; that of onnxgrad includes the call from
Python and the arrays that come back. `--check` fails where the default mode of onnxgrad takes more than 1.5 times the
better one of JAX, or a Hessian product more than 4 times a gradient.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxgrad import Function


def network(widths: list[int]) -> tuple[onnx.ModelProto, list[tuple[np.ndarray, np.ndarray]]]:
    """The model, and its weights."""
    rng, nodes, weights, held, last = np.random.default_rng(0), [], [], [], "x"
    for i, (n, m) in enumerate(pairwise(widths)):
        w, b = ((rng.standard_normal(s) / np.sqrt(n)).astype(np.float32) for s in ((n, m), (m,)))
        weights += [numpy_helper.from_array(w, f"w{i}"), numpy_helper.from_array(b, f"b{i}")]
        held.append((w, b))
        out = "y" if i == len(widths) - 2 else f"a{i}"
        nodes += [
            helper.make_node("MatMul", [last, f"w{i}"], [f"h{i}"]),
            helper.make_node("Add", [f"h{i}", f"b{i}"], [out]),
        ]
        if out != "y":
            nodes.append(helper.make_node("Tanh", [out], [f"t{i}"]))
            last = f"t{i}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [s]) for n, s in (("x", widths[0]), ("y", widths[-1]))]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), held


def in_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for f in contenders.values():
        for _ in range(10):
            f()
    order, rng = list(contenders), random.Random(0)  # who comes after whom matters: idle threads spin for a while
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            f = contenders[name]
            start = time.perf_counter()
            f()
            times[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(t) for name, t in times.items()}


def applied(x, tanh, weights):
    """The network in any framework."""
    for i, (w, b) in enumerate(weights):
        x = x @ w + b
        if i < len(weights) - 1:
            x = tanh(x)
    return x


def jacobians(widths: list[int], rounds: int) -> dict[str, float]:
    """Times of the Jacobian by each contender that is installed; all of them must agree."""
    proto, weights = network(widths)
    x = np.random.default_rng(1).standard_normal(widths[0]).astype(np.float32)
    f = Function(proto)
    reverse, forward = (f.jacobian(wrt="x", mode=mode) for mode in ("reverse", "forward"))
    contenders: dict[str, Callable[[], object]] = {
        "onnxgrad, reverse": lambda: reverse(x),
        "onnxgrad, forward": lambda: forward(x),
    }
    results = [reverse(x), forward(x)]
    try:
        import jax

        held = [(jax.numpy.array(w), jax.numpy.array(b)) for w, b in weights]
        point = jax.numpy.array(x)
        for name, derive in (("reverse", jax.jacrev), ("forward", jax.jacfwd)):
            made = jax.jit(derive(lambda x: applied(x, jax.numpy.tanh, held)))
            contenders[f"JAX, {name}"] = lambda made=made: made(point).block_until_ready()  # type: ignore[misc]
            results.append(np.asarray(made(point)))
    except ImportError:
        print("JAX is not installed", file=sys.stderr)
    slow: dict[str, Callable[[], object]] = {}  # apart: its threads would slow the others down
    try:
        import torch

        tensors = [(torch.tensor(w), torch.tensor(b)) for w, b in weights]
        at = torch.tensor(x)
        for name, derive in (("reverse", torch.func.jacrev), ("forward", torch.func.jacfwd)):
            made = derive(lambda x: applied(x, torch.tanh, tensors))
            slow[f"torch.func, {name}"] = lambda made=made: made(at)  # type: ignore[misc]
            results.append(made(at).numpy())
    except ImportError:
        print("PyTorch is not installed", file=sys.stderr)
    for r in results:
        np.testing.assert_allclose(r, results[0], atol=1e-4)
    return in_turns(contenders, rounds) | in_turns(slow, max(rounds // 10, 10))


def products(widths: list[int], rounds: int) -> dict[str, float]:
    """Times of the gradient of the sum of the outputs, and of a product with its Hessian."""
    proto, _ = network(widths)
    x = np.random.default_rng(1).standard_normal(widths[0]).astype(np.float32)
    f = Function(proto)
    gradient, product = f.grad(wrt="x"), f.hvp(wrt="x")
    return in_turns({"gradient": lambda: gradient(x), "Hessian product": lambda: product(x, x)}, rounds)


def main() -> int:
    """Print the table; with ``--check``, 1 where it shows too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--widths", default="", help="one network, in place of the usual two")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    good = True
    print("| network | what | median, µs | ratio |\n|---|---|---|---|")
    for text in [chosen.widths] if chosen.widths else ["100,100,100", "100,256,256,100"]:
        widths = [int(n) for n in text.split(",")]
        label = "-".join(map(str, widths))
        times = jacobians(widths, chosen.rounds)
        best = min((t for n, t in times.items() if n.startswith("JAX")), default=None)
        for name, t in times.items():
            print(f"| {label} | Jacobian: {name} | {t:.0f} | {'' if best is None else f'{t / best:.2f} × JAX'} |")
        if best is not None:
            good &= times["onnxgrad, reverse"] <= 1.5 * best  # the default where there are as many inputs as outputs
        times = products(widths, chosen.rounds)
        for name, t in times.items():
            print(f"| {label} | {name} | {t:.0f} | {t / times['gradient']:.2f} × gradient |")
        good &= times["Hessian product"] <= 4 * times["gradient"]
    return int(chosen.check and not good)


if __name__ == "__main__":
    sys.exit(main())
