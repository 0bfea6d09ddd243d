"""Scan: the oracle is the graph with every step written out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.flow.compare import check, model

RNG = np.random.default_rng(1)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


RNN = """agraph (F[N,3] h0, F[T,N,2] x, F[2,3] W, F[3,3] R) => (F[N,3] h, F[T,N,3] y)
{ h, y = Scan <num_scan_inputs = 1, body = step (F[N,3] s, F[N,2] v) => (F[N,3] n, F[N,3] o) {
    a = MatMul(v, W) b = MatMul(s, R) c = Add(a, b) n = Tanh(c) o = Mul(n, s) }> (h0, x) }"""


def rnn_unrolled(steps, n="N"):
    parts = [f"z{t} = Constant<value_int = {t}>()" for t in range(steps)]
    parts.append("z_ax = Constant<value_ints = [0]>()")
    state = "h0"
    for t in range(steps):
        parts.append(
            f"v{t} = Gather(x, z{t}) a{t} = MatMul(v{t}, W) b{t} = MatMul({state}, R) c{t} = Add(a{t}, b{t})"
            f" n{t} = Tanh(c{t}) o{t} = Mul(n{t}, {state}) u{t} = Unsqueeze(o{t}, z_ax)"
        )
        state = f"n{t}"
    parts.append(f"h = Identity({state}) y = Concat<axis = 0>({', '.join(f'u{t}' for t in range(steps))})")
    head = f"agraph (F[{n},3] h0, F[{steps},{n},2] x, F[2,3] W, F[3,3] R) => (F[{n},3] h, F[{steps},{n},3] y)"
    return head + "{" + "\n".join(parts) + "}"


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_recurrence_equals_its_unrolling(steps):
    feeds = {"h0": normal(2, 3), "x": normal(steps, 2, 2), "W": normal(2, 3), "R": normal(3, 3)}
    check(model(RNN), model(rnn_unrolled(steps)), feeds, ["h0", "x", "W", "R"])
