"""Loop: the oracle is the graph with the steps that were made written out."""

from __future__ import annotations

import numpy as np
import pytest

import onnxgrad
from tests.control_flow.compare import check, close, differences, model, normal, run
from tests.control_flow.unroll import unrolled

COUNTED = """agraph (F[N,2] s0, F[2,2] W, int64 n) => (F[N,2] s, F[T,N,2] y)
{ s, y = Loop <body = step (int64 i, bool p, F[N,2] a) => (bool q, F[N,2] b, F[N,2] o) {
    q = Identity(p) f = CastLike(i, a) k = MatMul(a, W) l = Mul(k, f) m = Add(l, a) b = Tanh(m)
    o = Mul(b, f) }> (n, , s0) }"""


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_trip_count_that_is_fed(steps):
    feeds = {"s0": normal(2, 2), "W": normal(2, 2), "n": np.array(steps)}
    check(model(COUNTED), unrolled(model(COUNTED), steps), feeds, ["s0", "W"])


def test_against_central_differences():
    feeds = {"s0": normal(2, 2), "W": normal(2, 2), "n": np.array(3)}
    differences(model(COUNTED, "double"), feeds, ["s0", "W"])


FIXED = """agraph (F[2] s0, F[2] c) => (F[2] s, F[T,2] y)
<int64 n = {3}, bool yes = {1}>
{ s, y = Loop <body = step (int64 i, bool p, F[2] a) => (bool q, F[2] b, F[2] o) {
    q = Identity(p) k = Mul(a, c) b = Sin(k) o = Mul(a, b) }> (n, yes, s0) }"""


def test_a_fixed_trip_count_needs_no_check_for_steps():
    feeds = {"s0": normal(2), "c": normal(2)}
    check(model(FIXED), unrolled(model(FIXED), 3), feeds, ["s0", "c"])
    derived = onnxgrad.grad(model(FIXED), wrt="c")
    assert "If" not in {n.op_type for n in derived.graph.node}


EXITS = """agraph (F[2] s0, F[2] c, F limit) => (F[2] s, F[T,2] y)
<int64 n = {7}, bool yes = {1}>
{ s, y = Loop <body = step (int64 i, bool p, F[2] a) => (bool q, F[2] b, F[2] o) {
    b = Mul(a, c) t = ReduceSum <keepdims = 0> (b) q = Less(t, limit) o = Mul(b, a) }> (n, yes, s0) }"""


@pytest.mark.parametrize(("limit", "steps"), [(1.0, 1), (5.0, 3), (1000.0, 7)])
def test_early_exit_by_condition(limit, steps):
    feeds = {"s0": np.float32([0.5, 0.5]), "c": np.float32([2, 1.5]), "limit": np.float32(limit)}
    feeds = {k: np.asarray(v) for k, v in feeds.items()}
    assert run(model(EXITS), feeds)["y"].shape == (steps, 2)
    check(model(EXITS), unrolled(model(EXITS), steps), feeds, ["s0", "c"])


WHILE = """agraph (F[2] s0, F[2] c, F limit) => (F[2] s)
{ t0 = ReduceSum <keepdims = 0> (s0) p0 = Less(t0, limit)
  s = Loop <body = step (int64 i, bool p, F[2] a) => (bool q, F[2] b) {
    b = Mul(a, c) t = ReduceSum <keepdims = 0> (b) q = Less(t, limit) }> (, p0, s0) }"""


@pytest.mark.parametrize(("limit", "steps"), [(0.5, 0), (2.5, 2), (20.0, 6)])
def test_while_with_any_number_of_steps_even_none(limit, steps):
    feeds = {"s0": np.float32([0.5, 0.5]), "c": np.float32([2, 1.5]), "limit": np.asarray(np.float32(limit))}
    written = model("agraph (F[2] s0, F[2] c, F limit) => (F[2] s) {" + "".join(
        f" a{t} = Mul({'s0' if not t else f'a{t - 1}'}, c)" for t in range(steps)
    ) + f" s = Identity({f'a{steps - 1}' if steps else 's0'}) }}")  # fmt: skip
    check(model(WHILE), written, feeds, ["s0", "c"])


def test_no_steps_with_stacked_outputs():
    feeds = {"s0": normal(2, 2), "W": normal(2, 2), "n": np.array(0)}
    every = feeds | {"s_cotangent": normal(2, 2), "y_cotangent": np.zeros((0, 2, 2), np.float32)}
    found = run(onnxgrad.vjp(model(COUNTED.replace("[N,", "[2,")), wrt=["s0", "W"]), every)
    np.testing.assert_array_equal(found["s0_grad"], every["s_cotangent"])
    np.testing.assert_array_equal(found["W_grad"], np.zeros((2, 2)))
    again = run(onnxgrad.grad(onnxgrad.grad(model(COUNTED.replace("[N,", "[2,")), wrt="W"), wrt=["W", "s0"]), every)
    for value in again.values():
        np.testing.assert_array_equal(value, np.zeros((2, 2)))


def test_no_steps_give_back_a_state_that_a_step_resets():
    text = """agraph (F[2] s0, int64 n) => (F[2] s) <F[2] start = {0.5, 2.0}>
    { s = Loop <body = step (int64 i, bool p, F[2] a) => (bool q, F[2] b) {
        q = Identity(p) b = Identity(start) }> (n, , s0) }"""
    for steps, written in [(0, "s = Identity(s0)"), (2, "k = Sub(s0, s0) s = Add(k, start)")]:
        feeds = {"s0": normal(2), "n": np.array(steps)}
        check(model(text), model(f"{text.partition('{ s =')[0]} {{ {written} }}"), feeds, ["s0"])


CASES = {
    "nothing but the iteration number": (
        """agraph (F w, int64 n) => (F s)
        { zero = CastLike(k0, w) k0 = Constant <value_float = 0.0>()
          s = Loop <body = step (int64 i, bool p, F a) => (bool q, F b) {
            q = Identity(p) f = CastLike(i, w) k = Pow(w, f) b = Add(a, k) }> (n, , zero) }""".replace(
            "zero = CastLike(k0, w) k0 = Constant <value_float = 0.0>()",
            "k0 = Constant <value_float = 0.0>() zero = CastLike(k0, w)",
        ),
        {"w": normal(), "n": np.array(4)},
        ["w"],
        4,
    ),
    "linear, nothing to remember": (
        """agraph (F[3] s0, int64 n) => (F[3] s)
        { s = Loop <body = step (int64 i, bool p, F[3] a) => (bool q, F[3] b) {
            q = Identity(p) b = Add(a, a) }> (n, , s0) }""",
        {"s0": normal(3), "n": np.array(3)},
        ["s0"],
        3,
    ),
    "slices of what is captured, by iteration number": (
        """agraph (F[T,N,2] x, F[N,2] h0, F[2,2] R) => (F[N,2] h, F[T,N,2] y)
        { zero = Constant <value_int = 0>() one = Constant <value_ints = [1]>()
          d = Shape <start = 0, end = 1> (x) n = Squeeze(d)
          h, y = Loop <body = step (int64 i, bool p, F[A,2] s) => (bool q, F[B,2] t, F[C,2] o) {
            q = Identity(p) v = Gather(x, i) k = MatMul(s, R) l = Add(k, v) t = Tanh(l) o = Mul(t, v) }>
          (n, , h0) }""",
        {"x": normal(3, 2, 2), "h0": normal(2, 2), "R": normal(2, 2)},
        ["x", "h0", "R"],
        3,
    ),
    "scalars, stacked": (
        """agraph (F s0, F w, int64 n) => (F s, F[T] y, F z)
        { s, y = Loop <body = step (int64 i, bool p, F a) => (bool q, F b, F o) {
            q = Identity(p) k = Mul(a, w) b = Sin(k) o = Mul(b, a) }> (n, , s0) z = ReduceSum <keepdims
                = 0> (y) }""",
        {"s0": normal(), "w": normal(), "n": np.array(3)},
        ["s0", "w"],
        3,
    ),
    "no states": (
        """agraph (F[2] x, int64 n) => (F[T,2] y) <bool yes = {1}>
        { no = Not(yes) ok = Not(no) y = Loop <body = step (int64 i, bool p) => (bool q, F[2] o) {
            q = Identity(p) f = CastLike(i, x) k = Mul(x, f) o = Sin(k) }> (n, ok) }""",
        {"x": normal(2), "n": np.array(3)},
        ["x"],
        3,
    ),
    "a counter and a flag as states": (
        """agraph (F[2] s0, F[2] c, int64 n) => (F[2] s, int64 m)
        { zero = Constant <value_int = 0>() two = Constant <value_int = 2>()
          s, m, r = Loop <body = step (int64 i, bool p, F[2] a, int64 j, bool g) => (bool q, F[2] b,
              int64 k, bool h) {
            q = Identity(p) k = Add(j, two) f = CastLike(k, a) e = Mul(a, c) d = Div(e, f) v = Sin(d)
            b = Where(g, v, e) h = Not(g) }> (n, , s0, zero, no) }""".replace(
            "two = Constant", "no = Greater(zero, zero) two = Constant"
        ),
        {"s0": normal(2), "c": normal(2), "n": np.array(4)},
        ["s0", "c"],
        4,
    ),
    "a state that every step resets": (
        """agraph (F[2] s0, F[2] c, int64 n) => (F[2] s, F[T,2] y) <F[2] start = {0.5, 2.0}>
        { s, y = Loop <body = step (int64 i, bool p, F[2] a) => (bool q, F[2] b, F[2] o) {
            q = Identity(p) b = Identity(start) k = Mul(a, c) o = Sin(k) }> (n, , s0) }""",
        {"s0": normal(2), "c": normal(2), "n": np.array(3)},
        ["s0", "c"],
        3,
    ),
    "a constant state that no slope reads": (
        """agraph (F[K] r0, F[2] s0, F[2] x, int64 n) => (F[L] r, F[2] s)
        { r, s = Loop <body = step (int64 i, bool p, F[A] u, F[2] a) => (bool q, F[B] v, F[2] b) {
            q = Identity(p) b = Add(a, x) v = Concat<axis = 0>(u, u) }> (n, , r0, s0) }""",
        {"r0": normal(3), "s0": normal(2), "x": normal(2), "n": np.array(2)},
        ["s0", "x"],
        2,
    ),
    "the condition is read in the body": (
        """agraph (F[2] s0, F[2] c, int64 n) => (F[2] s)
        { s = Loop <body = step (int64 i, bool p, F[2] a) => (bool q, F[2] b) {
            q = Identity(p) k = Mul(a, c) l = Sin(k) b = Where(p, l, a) }> (n, , s0) }""",
        {"s0": normal(2), "c": normal(2), "n": np.array(2)},
        ["s0", "c"],
        2,
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_loop_equals_its_unrolling(case):
    text, feeds, wrt, steps = case
    check(model(text), unrolled(model(text), steps), feeds, wrt)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_loop_against_central_differences(case):
    text, feeds, wrt, _ = case
    differences(model(text, "double"), feeds, wrt)


NESTED = """agraph (F[2] s0, F[T,2] x, F[2] c, int64 n) => (F[2] s, F[K,2] y)
{ s, y = Loop <body = outer (int64 i, bool p, F[2] a) => (bool q, F[2] b, F[2] o) {
    q = Identity(p) o = Mul(b, c)
    b = Scan <num_scan_inputs = 1, body = inner (F[2] r, F[2] v) => (F[2] m) {
        f = CastLike(i, r) k = Mul(r, v) l = Add(k, f) w = Mul(l, c) m = Tanh(w) }> (a, x) }> (n, , s0) }"""
NESTED = NESTED.replace("q = Identity(p) o = Mul(b, c)", "q = Identity(p)").replace(
    "(a, x) }>", "(a, x) o = Mul(b, c) }>"
)


def test_a_scan_in_a_loop():
    feeds = {"s0": normal(2), "x": normal(3, 2), "c": normal(2), "n": np.array(2)}
    check(model(NESTED), unrolled(model(NESTED), 2, 3), feeds, ["s0", "x", "c"])


LOOP_IN_SCAN = """agraph (F[2] s0, F[T,2] x, F[2] c, int64 n) => (F[2] s, F[T,2] y)
{ s, y = Scan <num_scan_inputs = 1, body = outer (F[2] a, F[2] u) => (F[2] b, F[2] o) {
    b = Loop <body = inner (int64 i, bool p, F[2] r) => (bool q, F[2] m) {
        q = Identity(p) f = CastLike(i, r) k = Mul(r, u) l = Add(k, f) w = Mul(l, c) m = Tanh(w) }> (n, , a)
    o = Mul(b, u) }> (s0, x) }"""


def test_a_loop_in_a_scan():
    feeds = {"s0": normal(2), "x": normal(2, 2), "c": normal(2), "n": np.array(3)}
    check(model(LOOP_IN_SCAN), unrolled(model(LOOP_IN_SCAN), 2, 3), feeds, ["s0", "x", "c"])


LOOP_IN_LOOP = """agraph (F[2] s0, F[2] c, int64 n) => (F[2] s)
{ one = Constant <value_int = 1>()
  s = Loop <body = outer (int64 j, bool g, F[2] a) => (bool h, F[2] b) {
    h = Identity(g) k = Add(j, one)
    b = Loop <body = inner (int64 i, bool p, F[2] r) => (bool q, F[2] m) {
        q = Identity(p) f = CastLike(j, r) u = Mul(r, c) l = Add(u, f) m = Sin(l) }> (k, , a) }> (n, ,
            s0) }"""


def test_a_loop_in_a_loop_whose_trip_count_grows():
    feeds = {"s0": normal(2), "c": normal(2), "n": np.array(3)}
    check(model(LOOP_IN_LOOP), unrolled(model(LOOP_IN_LOOP), 3, 1, 2, 3), feeds, ["s0", "c"])


BRANCHED = """agraph (F[2] s0, F[2] c, int64 n) => (F[2] s)
{ two = Constant <value_int = 2>() zero = Constant <value_int = 0>()
  s = Loop <body = step (int64 i, bool p, F[2] a) => (bool q, F[2] b) {
    q = Identity(p) r = Mod(i, two) e = Equal(r, zero)
    b = If (e) <then_branch = even () => (F[2] t) { k = Mul(a, c) t = Sin(k) },
                else_branch = odd () => (F[2] u) { l = Add(a, c) u = Tanh(l) }> }> (n, , s0) }"""


def test_an_if_in_a_loop():
    feeds = {"s0": normal(2), "c": normal(2), "n": np.array(3)}
    check(model(BRANCHED), unrolled(model(BRANCHED), 3), feeds, ["s0", "c"])


def test_third_order():
    feeds = {"s0": normal(2), "c": normal(2)}
    thrice = lambda m: onnxgrad.grad(onnxgrad.grad(onnxgrad.grad(m, wrt="c"), wrt="c"), wrt="c")  # noqa: E731
    (got,), (want,) = (run(thrice(m), feeds).values() for m in (model(FIXED), unrolled(model(FIXED), 3)))
    close(got, want, 1e-4, "third derivative")
