"""Loops over bags become one reduction: against central differences of the formula, and Loops that are none stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrad
from tests.control_flow.compare import model, normal, run

#: As PyTorch's older exporter writes EmbeddingBag, with weights of samples.
TEXT = """agraph (int64[N,3] x, float[N,3] share, float[7,2] table) => (float[M,2] y) {{
    zero = Constant <value_int = 0>() first = Constant <value_ints = [0]>() one = Constant <value_ints = [1]>()
    far = Constant <value = int64[1] {{9223372036854775807}}>() flat = Constant <value = int64[1] {{-1}}>()
    yes = Constant <value = bool {{1}}>() three = Constant <value_int = {step}>()
    shape = Shape(x) count = ReduceProd <keepdims = 0>(shape) starts = Range(zero, count, three)
    ids = Reshape(x, flat) parts = Reshape(share, flat) size = Shape(ids) total = Gather(size, zero)
    last = Unsqueeze(total, first) offsets = Concat <axis = 0>(starts, last)
    tail = Constant <value = int64[1] {{{tail}}}>() ends = Slice(offsets, tail, far, first, one)
    steps = Shape(ends) trips = Gather(steps, zero)
    y = Loop <body = bag (int64 i, bool go) => (bool goes, float[2] sum) {{
        goes = Cast <to = 9>(yes) a = Gather(offsets, i) b = Gather(ends, i) c = Unsqueeze(a, first)
        d = Unsqueeze(b, first) own = Slice(ids, c, d, first) part = Slice(parts, c, d, first)
        rows = Gather(table, own) w = Unsqueeze(part, one) scaled = Mul(rows, w)
        sum = {reduction} <keepdims = 0>(scaled, first) }}>(trips, yes) }}"""
REDUCTIONS = {"ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceMax": np.max}


def _check(reduction: str, step: int, tail: int, batch: int, loops: bool) -> None:
    derived = onnxgrad.grad(model(TEXT.format(reduction=reduction, step=step, tail=tail)), wrt=["table", "share"])
    nodes = [n.op_type for n in ir.from_proto(derived).graph]
    assert ("Loop" in nodes or "Scan" in nodes or "If" in nodes) == loops
    rng = np.random.default_rng(batch)
    x = rng.integers(-7, 7, (batch, 3))
    values = {"table": rng.standard_normal((7, 2)), "share": rng.standard_normal((batch, 3))}

    def loss(table, share):
        offsets = np.array([*range(0, 3 * batch, step), 3 * batch])
        rows = table[x.reshape(-1)] * share.reshape(-1, 1)
        pairs = zip(offsets, offsets[tail:])
        return sum(REDUCTIONS[reduction](rows[a:b], 0).sum() for a, b in pairs)

    feeds = {"x": x} | {n: v.astype(np.float32) for n, v in values.items()}
    found = run(derived, feeds)
    for name, value in values.items():
        wanted = np.zeros_like(value)
        for place in np.ndindex(*value.shape):
            up, down = (dict(values, **{name: value.copy()}) for _ in range(2))
            up[name][place] += 1e-6
            down[name][place] -= 1e-6
            wanted[place] = (loss(**up) - loss(**down)) / 2e-6
        np.testing.assert_allclose(found[f"{name}_grad"], wanted, atol=2e-6)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equal_bags_are_one_reduction(reduction, batch):
    _check(reduction, 3, 1, batch, loops=False)


@pytest.mark.parametrize(("step", "tail"), [(2, 1), (3, 2)], ids=["of another length", "of two rows of the matrix"])
def test_other_bags_stay_a_loop(step, tail):
    _check("ReduceSum", step, tail, 4, loops=True)


def test_no_bags():
    derived = onnxgrad.grad(model(TEXT.format(reduction="ReduceSum", step=3, tail=1)), wrt=["table"])
    feeds = {"x": np.zeros((0, 3), np.int64), "share": normal(0, 3), "table": normal(7, 2)}
    np.testing.assert_array_equal(run(derived, feeds)["table_grad"], np.zeros((7, 2)))
