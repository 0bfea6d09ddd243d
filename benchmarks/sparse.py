"""Sparse Jacobians and Hessians: how many evaluations of the function one costs, against dense ones and CasADi.

    python -m benchmarks.sparse [--rounds 100]

CPU time of one thread, medians of rounds in which the contenders take turns. The tridiagonal residual of 10,000
unknowns, Bratu's equation on a square of 64 × 64 points, and the Hessian of the Lagrangian of a pendulum that is
controlled over 200 steps. CasADi, if it is installed, interprets its own expression graph of the first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import onnx

from onnxgrad import Function

SLICES = "int64[1] o = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] m1 = {-1}, int64[1] m2 = {-2}, " \
         "int64[1] end = {9223372036854775807}"  # fmt: skip
TRIDIAGONAL = """(double[N] x) => (double[M] y) {
    l = Slice(x, o, m2) c = Slice(x, one, m1) r = Slice(x, two, end)
    e = Exp(c) s = Add(l, r) t = Sub(s, c) u = Sub(t, c) y = Add(u, e) }"""
BRATU = """(float[1, 1, N, N] x) => (float[1, 1, N, N] y) {
    d = Conv <pads = [1, 1, 1, 1]> (x, k) e = Exp(x) y = Add(d, e) }"""
PENDULUM = """(double[1003] z) => (double y) {
    x = Slice(z, o, i402) u = Slice(z, i402, i602) m = Slice(z, i602, i1002)
    xs = Reshape(x, pairs) now = Slice(xs, o, m1) next = Slice(xs, one, end)
    q = Slice(now, o, one, one) v = Slice(now, one, two, one) s = Sin(q) us = Reshape(u, column)
    a = Sub(us, s) rate = Concat <axis = 1> (v, a) d = Mul(rate, h) to = Add(now, d) g = Sub(next, to)
    ms = Reshape(m, pairs) mg = Mul(ms, g) c = ReduceSum <keepdims = 0> (mg)
    zz = Mul(z, z) w = ReduceSum <keepdims = 0> (zz) y = Add(w, c) }"""
PLACES = SLICES + ", int64[1] i402 = {402}, int64[1] i602 = {602}, int64[1] i1002 = {1002}, " \
                  "int64[2] pairs = {-1, 2}, int64[2] column = {-1, 1}, double h = {0.05}"  # fmt: skip


def parsed(text: str, constants: str) -> Function:
    head, _, body = text.partition("{")
    source = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {head} <{constants}> {{{body}')
    return Function(source, threads=1)


def in_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median CPU time of each, in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for f in contenders.values():
        f()
    for _ in range(rounds):
        for name, f in contenders.items():
            start = time.process_time()
            f()
            times[name].append(time.process_time() - start)
    return {name: 1e6 * statistics.median(t) for name, t in times.items()}


def casadi_tridiagonal(x: np.ndarray) -> Callable[[], object] | None:
    try:
        import casadi
    except ImportError:
        return None
    v = casadi.MX.sym("x", x.size)
    c = v[1:-1]
    f = casadi.Function("j", [v], [casadi.jacobian(v[:-2] + v[2:] - 2 * c + casadi.exp(c), v)])
    return lambda: f(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    stencil = "float[1, 1, 3, 3] k = {0, 1, 0, 1, -4, 1, 0, 1, 0}"
    cases = [
        ("tridiagonal, 10,000 unknowns", parsed(TRIDIAGONAL, SLICES), rng.standard_normal(10_000), "jacobian"),
        ("Bratu, 64 x 64", parsed(BRATU, stencil), rng.standard_normal((1, 1, 64, 64)).astype(np.float32), "jacobian"),
        ("pendulum, 200 steps", parsed(PENDULUM, PLACES), rng.standard_normal(1003), "hessian"),
    ]
    for name, f, x, kind in cases:
        (argument,) = f.inputs
        sparse = getattr(f, f"sparse_{kind}")(wrt=argument)
        start = time.process_time()
        found = sparse(x)
        first = time.process_time() - start
        contenders: dict[str, Callable[[], object]] = {"evaluation": lambda f=f, x=x: f(x)}
        contenders[f"sparse {kind}"] = lambda sparse=sparse, x=x: sparse(x)
        if name.startswith("tri") and (other := casadi_tridiagonal(x)) is not None:
            contenders["CasADi"] = other
        times = in_turns(contenders, rounds)
        if x.size <= 5000:
            dense = getattr(f, kind)(wrt=argument)
            times |= in_turns({f"dense {kind}": lambda dense=dense, x=x: dense(x)}, 3)
        print(f"{name}: {found.nnz:,} of {found.shape[0] * found.shape[1]:,} entries, found in {first:.2f} s")
        for each, t in times.items():
            print(f"  {each:18} {t:10,.0f} us  {t / times['evaluation']:8.1f} evaluations")


if __name__ == "__main__":
    main()
