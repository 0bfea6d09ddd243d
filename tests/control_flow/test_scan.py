"""Scan: the oracle is the graph with every step written out."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad
from tests.control_flow.compare import check, differences, model, normal, run
from tests.control_flow.unroll import unrolled

RNN = """agraph (F[N,3] h0, F[T,N,2] x, F[2,3] W, F[3,3] R) => (F[N,3] h, F[T,N,3] y)
{ h, y = Scan <num_scan_inputs = 1, body = step (F[N,3] s, F[N,2] v) => (F[N,3] n, F[N,3] o) {
    a = MatMul(v, W) b = MatMul(s, R) c = Add(a, b) n = Tanh(c) o = Mul(n, s) }> (h0, x) }"""


def rnn_feeds(steps):
    return {"h0": normal(2, 3), "x": normal(steps, 2, 2), "W": normal(2, 3), "R": normal(3, 3)}


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_recurrence_equals_its_unrolling(steps):
    check(model(RNN), unrolled(model(RNN), steps), rnn_feeds(steps), ["h0", "x", "W", "R"])


def test_values_that_a_derivative_stacks_have_the_length_of_what_is_scanned():
    derived = ir.from_proto(onnxgrad.vjp(model(RNN), wrt=["h0", "x", "W", "R"]))
    stacked = [v.shape for n in derived.graph if n.op_type == "Scan" for v in n.outputs if len(v.shape) == 3]
    assert len(stacked) > 2
    assert {str(shape[0]) for shape in stacked} == {"T"}


def test_static_shapes():
    text = RNN.replace("[N,", "[2,").replace("[T,N,", "[3,2,")
    check(model(text), unrolled(model(text), 3), rnn_feeds(3), ["h0", "x", "W", "R"])


def test_against_central_differences():
    differences(model(RNN, "double"), rnn_feeds(3), ["h0", "x", "W", "R"])


CASES = {
    "directions and axes": (
        """agraph (F[3] a0, F[3,T] x, F[T,3] z, F[3] c) => (F[3] a, F[3,T] y, F[T,3] q)
        { a, y, q = Scan <num_scan_inputs = 2, scan_input_axes = [1, 0], scan_input_directions = [1, 0],
            scan_output_axes = [1, 0], scan_output_directions = [0, 1],
            body = step (F[3] s, F[3] u, F[3] w) => (F[3] n, F[3] o, F[3] p) {
                m = Mul(s, u) k = Add(m, w) l = Mul(k, c) n = Tanh(l) o = Mul(n, w) p = Mul(o, s) }>
                    (a0, x, z) }""",
        {"a0": normal(3), "x": normal(3, 4), "z": normal(4, 3), "c": normal(3)},
        ["a0", "x", "z", "c"],
    ),
    "negative axes": (
        """agraph (F[2] a0, F[2,T] x) => (F[2] a, F[2,T] y)
        { a, y = Scan <num_scan_inputs = 1, scan_input_axes = [-1], scan_output_axes = [-1],
            scan_output_directions = [1], body = step (F[2] s, F[2] u) => (F[2] n, F[2] o) {
                m = Mul(s, u) n = Sin(m) o = Mul(n, u) }> (a0, x) }""",
        {"a0": normal(2), "x": normal(2, 3)},
        ["a0", "x"],
    ),
    "no state": (
        """agraph (F[T,3] x, F[3] c) => (F[T,3] y)
        { y = Scan <num_scan_inputs = 1, body = step (F[3] u) => (F[3] o) { m = Mul(u, c) o = Tanh(m)
            }> (x) }""",
        {"x": normal(3, 3), "c": normal(3)},
        ["x", "c"],
    ),
    "two states that cross, one that is overwritten, one that is passed on": (
        """agraph (F[2] a0, F[2] b0, F[2] d0, F[2] e0, F[T,2] x) => (F[2] a, F[2] b, F[2] d, F[2] e)
        { a, b, d, e = Scan <num_scan_inputs = 1,
            body = step (F[2] s, F[2] t, F[2] v, F[2] w, F[2] u) => (F[2] n, F[2] o, F[2] p, F[2] q) {
                k = Mul(s, u) n = Add(t, k) o = Mul(s, w) p = Mul(u, u) q = Identity(w) }> (a0, b0, d0,
                    e0, x) }""",
        {"a0": normal(2), "b0": normal(2), "d0": normal(2), "e0": normal(2), "x": normal(3, 2)},
        ["a0", "b0", "d0", "e0", "x"],
    ),
    "a state that every step resets, read before": (
        """agraph (F[2] a0, F[T,2] x) => (F[2] a, F[T,2] y)
        { a, y = Scan <num_scan_inputs = 1, body = step (F[2] s, F[2] u) => (F[2] n, F[2] o) {
                n = Identity(reset) o = Mul(s, u) }> (a0, x) }""".replace(
            "{ a, y", "<F[2] reset = {1.5, 0.25}> { a, y"
        ),
        {"a0": normal(2), "x": normal(3, 2)},
        ["a0", "x"],
    ),
    "an integer state that counts": (
        """agraph (F[2] a0, F[T,2] x) => (F[2] a, int64 n)
        { zero = Constant <value_int = 0>() one = Constant <value_int = 1>()
          a, n = Scan <num_scan_inputs = 1, body = step (F[2] s, int64 i, F[2] u) => (F[2] t, int64 j) {
                j = Add(i, one) f = CastLike(j, s) k = Mul(s, f) l = Mul(k, u) t = Sin(l) }> (a0, zero,
                    x) }""",
        {"a0": normal(2), "x": normal(3, 2)},
        ["a0", "x"],
    ),
    "one value in many places": (
        """agraph (F[2] c, F[T,2] x) => (F[2] a, F[2] b, F[T,2] y)
        { a, b, y = Scan <num_scan_inputs = 2,
            body = step (F[2] s, F[2] t, F[2] u, F[2] v) => (F[2] n, F[2] m, F[2] o) {
                k = Mul(u, v) l = Add(k, c) n = Mul(s, l) m = Add(t, n) o = Mul(n, c) }> (c, c, x, x) }""",
        {"c": normal(2), "x": normal(3, 2)},
        ["c", "x"],
    ),
    "scalars": (
        """agraph (F s0, F[T] x, F w) => (F s, F[T] y)
        { s, y = Scan <num_scan_inputs = 1, body = step (F a, F u) => (F n, F o) {
                k = Mul(a, w) l = Add(k, u) n = Sin(l) o = Mul(n, n) }> (s0, x) }""",
        {"s0": normal(), "x": normal(4), "w": normal()},
        ["s0", "x", "w"],
    ),
    "weights that are initializers, and constants of the body": (
        """agraph (F[N,2] h0, F[T,N,2] x) => (F[N,2] h)
        <F[2,2] W = {0.5, -0.25, 0.75, 1.0}>
        { h = Scan <num_scan_inputs = 1, body = step (F[N,2] s, F[N,2] v) => (F[N,2] n) <F[2] k = {0.5,
            2.0}> {
            a = MatMul(s, W) b = Mul(a, k) c = Add(b, v) n = Tanh(c) }> (h0, x) }""",
        {"h0": normal(2, 2), "x": normal(3, 2, 2)},
        ["h0", "x", "W"],
    ),
    "a vector that is added to rows, which are stacked along the last axis": (
        """agraph (F[2,3] a0, F[2,3,3] x, F[3] c) => (F[2,3] a)
        { a = Scan <num_scan_inputs = 1, scan_input_axes = [2], body = step (F[2,3] s, F[2,3] v) => (F[2,3] t) {
            w = Add(v, c) p = Mul(w, s) t = Sin(p) }> (a0, x) }""",
        {"a0": normal(2, 3), "x": normal(2, 3, 3), "c": normal(3)},
        ["a0", "x", "c"],
    ),
    "broadcasting against what is captured": (
        """agraph (F[N,2] h0, F[T,1,2] x, F[2] b) => (F[N,2] h, F[T,N,2] y)
        { h, y = Scan <num_scan_inputs = 1, body = step (F[P,2] s, F[1,2] v) => (F[Q,2] n, F[R,2] o) {
            a = Mul(s, v) c = Add(a, b) n = Tanh(c) o = Mul(b, n) }> (h0, x) }""",
        {"h0": normal(3, 2), "x": normal(2, 1, 2), "b": normal(2)},
        ["h0", "x", "b"],
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_scan_equals_its_unrolling(case):
    text, feeds, wrt = case
    steps = feeds["x"].shape[1 if "axes" in text else 0]
    check(model(text), unrolled(model(text), steps), feeds, wrt)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_scan_against_central_differences(case):
    text, feeds, wrt = case
    differences(model(text, "double"), feeds, wrt)


NESTED = """agraph (F[2] a0, F[T,2] x, F[U,2] z, F[2] c) => (F[2] a, F[T,U,2] y)
{ a, y = Scan <num_scan_inputs = 1, body = outer (F[2] s, F[2] u) => (F[2] n, F[U,2] p) {
    k = Mul(s, u)
    n, p = Scan <num_scan_inputs = 1, body = inner (F[2] r, F[2] v) => (F[2] m, F[2] o) {
        l = Mul(r, v) q = Add(l, c) w = Mul(q, u) m = Tanh(w) o = Mul(m, s) }> (k, z) }> (a0, x) }"""


def test_a_scan_in_a_scan():
    feeds = {"a0": normal(2), "x": normal(2, 2), "z": normal(3, 2), "c": normal(2)}
    check(model(NESTED), unrolled(model(NESTED), 2, 3), feeds, ["a0", "x", "z", "c"])


BRANCHED = """agraph (F[2] a0, F[T,2] x, F[2] c) => (F[2] a, F[T,2] y)
{ zero = CastLike(k0, a0)
  a, y = Scan <num_scan_inputs = 1, body = step (F[2] s, F[2] u) => (F[2] n, F[2] o) {
    t = ReduceSum <keepdims = 0> (u) g = Greater(t, zero)
    n = If (g) <then_branch = yes () => (F[2] p) { q = Mul(s, u) p = Tanh(q) },
                else_branch = no () => (F[2] r) { v = Mul(s, c) r = Sin(v) }>
    o = Mul(n, c) }> (a0, x) }""".replace("{ zero", "{ k0 = Constant <value_float = 0.0>() zero")


def test_an_if_in_a_scan():
    feeds = {"a0": normal(2), "x": np.float32([[1, 2], [-1, 0.5], [0.3, 0.4], [-2, -1]]), "c": normal(2)}
    check(model(BRANCHED), unrolled(model(BRANCHED), 4), feeds, ["a0", "x", "c"])


IN_IF = """agraph (F[2] a0, F[T,2] x, F[2] c, bool p) => (F[2] a)
{ a = If (p) <then_branch = yes () => (F[2] b) {
        b = Scan <num_scan_inputs = 1, body = step (F[2] s, F[2] u) => (F[2] n) {
            k = Mul(s, u) l = Add(k, c) n = Tanh(l) }> (a0, x) },
    else_branch = no () => (F[2] r) { r = Mul(a0, c) }> }"""


@pytest.mark.parametrize("taken", [True, False])
def test_a_scan_in_an_if(taken):
    feeds = {"a0": normal(2), "x": normal(3, 2), "c": normal(2), "p": np.array(taken)}
    check(model(IN_IF), unrolled(model(IN_IF), 3), feeds, ["a0", "x", "c"])


def test_the_cotangent_of_a_weight_is_one_product_after_all_steps():
    derived = ir.from_proto(onnxgrad.grad(model(RNN), wrt=["W", "R"]))
    backward = [n for n in derived.graph if n.op_type == "Scan"][-1]
    assert [len(v.shape) for v in backward.outputs] == [2, 3]  # of the state, and a stack as large as that of the tape


def test_the_primal_scan_runs_once_and_writes_its_states_out():
    derived = onnxgrad.vjp(model(RNN), wrt=["h0", "x"])
    assert sum(n.op_type == "Scan" for n in derived.graph.node) == 2
    again = onnxgrad.vjp(derived, wrt=["h0"], of=["h", "y"])
    tapes = [o for o in again.graph.node[0].output if "tape" in o]
    assert len(tapes) == 1  # the second derivative reads the tape of the first


def test_nothing_depends_on_wrt_through_the_scan():
    text = """agraph (F[2] a0, F[T,2] x, F[2] c) => (F[2] y)
    { a, z = Scan <num_scan_inputs = 1, body = step (F[2] s, F[2] u) => (F[2] n, F[2] o) {
        n = Mul(s, u) o = Mul(s, s) }> (a0, x)  y = Mul(a, c) }"""
    feeds = {"a0": normal(2), "x": normal(3, 2), "c": normal(2)}
    derived = onnxgrad.grad(model(text), wrt="c")
    assert sum(n.op_type == "Scan" for n in derived.graph.node) == 1
    np.testing.assert_allclose(run(derived, feeds)["c_grad"], feeds["a0"] * feeds["x"].prod(0), rtol=1e-5)


def test_float16():
    text = RNN.replace("F[", "float16[")
    feeds = {k: v.astype(np.float16) for k, v in rnn_feeds(3).items()}
    derived = onnxgrad.vjp(model(text), wrt=["W"])
    onnx.checker.check_model(derived, full_check=True)
    feeds |= {"h_cotangent": feeds["h0"], "y_cotangent": normal(3, 2, 3).astype(np.float16)}
    assert run(derived, feeds)["W_grad"].dtype == np.float16


CAPTURES = """agraph (F[2] x, F[T,2] z, int64[R] dims) => (F[2] s, F[T,2] y)
{ h = Reshape(x, dims)
  s, y = Scan <num_scan_inputs = 1, body = step (F[2] a, F[2] u) => (F[2] b, F[2] o) {
    k = Mul(a, h) b = Tanh(k) o = Mul(u, h) }> (x, z) }"""


def test_a_captured_value_of_unknown_rank():
    feeds = {"x": normal(2), "z": normal(3, 2), "dims": np.array([2])}
    check(model(CAPTURES), unrolled(model(CAPTURES), 3), feeds, ["x", "z"])


def test_a_step_that_gives_an_unknown_rank_is_refused():
    program = model(CAPTURES)
    body = program.graph.node[1].attribute[1].g
    for value in (*body.input, *body.output):
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(onnxgrad.NotDifferentiable, match=r"Scan node 's': .* gives 'b_1' of unknown rank"):
        onnxgrad.jvp(program, wrt=["x"])
