"""Slices that a Loop picks by the number of the step: the oracle is the unrolled graph; time is linear."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrad
from tests.control_flow.compare import check, model, normal, run
from tests.control_flow.unroll import unrolled

HEAD = "agraph (F[5,3] x, F[3] h0, int64 n) => (F[3] h) "
CASES = {
    "fewer steps than slices": HEAD
    + """{ h = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c) {
        q = Identity(p) v = Gather(x, i) k = Mul(a, v) c = Sin(k) }> (n, , h0) }""",
    "twice, and as a whole": HEAD
    + """{ h = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c) {
        q = Identity(p) v = Gather(x, i) w = Gather(x, i) k = Mul(a, v) l = Mul(k, w)
        s = ReduceSum <keepdims = 0> (x) m = Mul(l, s) c = Sin(m) }> (n, , h0) }""",
    "along the last axis": "agraph (F[3,5] x, F[3] h0, int64 n) => (F[3] h) "
    + """{ h = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c) {
        q = Identity(p) v = Gather <axis = -1> (x, i) k = Mul(a, v) c = Sin(k) }> (n, , h0) }""",
    "from an offset on": HEAD
    + """{ one = Constant <value_int = 1>() h = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c) {
        q = Identity(p) j = Add(one, i) v = Gather(x, j) k = Mul(a, v) c = Sin(k) }> (n, , h0) }""",
    "given on as it is": "agraph (F[5,3] x, F[3] h0, int64 n) => (F[3] h, F[T,3] y) "
    + """{ h, y = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c, F[3] o) {
        q = Identity(p) o = Gather(x, i) k = Mul(a, h0) c = Sin(k) }> (n, , h0) }""",
    "by something else than the step": HEAD
    + """{ h = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c) {
        q = Identity(p) two = Constant <value_int = 2>() j = Mod(i, two) v = Gather(x, j) k = Mul(a, v) c = Sin(k) }>
        (n, , h0) }""",
    "by several indices, negative and repeated ones": HEAD
    + """{ h = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c) {
        q = Identity(p) two = Constant <value_ints = [-2, 0]>() j = Sub(two, i) v = Gather(x, j)
        o = Constant <value_ints = [0]>() s = ReduceProd <keepdims = 0> (v, o) k = Mul(a, s) c = Sin(k) }>
        (n, , h0) }""",
    "by a matrix of indices, and by one more": HEAD
    + """{ h = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c) {
        q = Identity(p) two = Constant <value = int64[2,2] {1, 4, 0, 1}>() j = Sub(two, i) v = Gather(x, j)
        o = Constant <value_ints = [0, 1]>() s = ReduceProd <keepdims = 0> (v, o) w = Gather(x, i) k = Mul(a, s)
        l = Mul(k, w) c = Sin(l) }> (n, , h0) }""",
    "of single numbers": "agraph (F[5] x, F[3] h0, int64 n) => (F[3] h) "
    + """{ h = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c) {
        q = Identity(p) two = Constant <value_int = 2>() j = Mod(i, two) v = Gather(x, j) k = Mul(a, v) c = Sin(k) }>
        (n, , h0) }""",
    "by indices of the state": HEAD
    + """{ h = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] c) {
        q = Identity(p) zero = Constant <value_int = 0>() z = CastLike(zero, a) m = Greater(a, z) j = Cast <to = 7> (m)
        v = Gather(x, j) o = Constant <value_ints = [0]>() s = ReduceSum <keepdims = 0> (v, o) k = Mul(a, s)
        c = Sin(k) }> (n, , h0) }""",
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_slices_by_number(text):
    shape = {"F[3,5] x": (3, 5), "F[5] x, ": (5,)}.get(text[8:16], (5, 3))
    feeds = {"x": normal(*shape), "h0": normal(3), "n": np.array(3)}
    check(model(text), unrolled(model(text), 3), feeds, ["x", "h0"])


def test_no_steps():
    feeds = {"x": normal(5, 3), "h0": normal(3), "n": np.array(0)}
    found = run(onnxgrad.grad(model(CASES["twice, and as a whole"]), wrt=["x", "h0"]), feeds)
    np.testing.assert_array_equal(found["x_grad"], np.zeros((5, 3)))
    np.testing.assert_array_equal(found["h0_grad"], np.ones(3))


@pytest.mark.parametrize("every", [None, 1, "sqrt"])
def test_no_step_back_holds_all_slices(every):
    with onnxgrad.checkpointing(every):
        text = CASES["fewer steps than slices"].replace("[5,3]", "[99,3]")
        derived = ir.from_proto(onnxgrad.grad(model(text), wrt="x"))
    inner = [g for g in derived.graph.subgraphs() if not any(list(g.subgraphs()))]
    for node in (n for g in inner for n in g if g.name.startswith("step")):
        assert not any(v.shape is not None and 99 in v.shape for v in node.outputs), node


TOKENS = """agraph (float[V,3] x, float[N,3] h0, int64[T,N] ids) => (float[N,3] h) {
    h = Scan <num_scan_inputs = 1, body = step (float[N,3] a, int64[N] j) => (float[N,3] c) {
    v = Gather(x, j) k = Mul(a, v) c = Sin(k) }> (h0, ids) }"""


def test_rows_of_tokens_are_added_up_after_the_steps():
    """An embedding in a Scan: central differences, and no step holds a tensor of the size of the table."""
    derived = onnxgrad.grad(model(TOKENS), wrt=["x"])
    inside = [n for g in ir.from_proto(derived).graph.subgraphs() for n in g]
    assert inside
    assert not any(n.op_type.startswith(("Scatter", "Expand")) for n in inside)
    feeds = {"x": normal(7, 3), "h0": normal(2, 3), "ids": np.array([[0, 6], [3, 3], [-1, 0], [5, 6]])}
    feeds = {n: v.astype(np.float32) if v.dtype == float else v for n, v in feeds.items()}
    found = run(derived, feeds)["x_grad"]

    def loss(x):
        h = feeds["h0"].astype(float)
        for row in feeds["ids"]:
            h = np.sin(h * x[row])
        return h.sum()

    wanted = np.zeros((7, 3))
    for i in np.ndindex(7, 3):
        step = np.zeros((7, 3))
        step[i] = 1e-6
        wanted[i] = (loss(feeds["x"] + step) - loss(feeds["x"] - step)) / 2e-6
    np.testing.assert_allclose(found, wanted, atol=1e-6)
