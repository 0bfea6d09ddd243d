"""Sequences and optionals: the oracle is the same computation on the tensors themselves."""

from __future__ import annotations

import numpy as np
import pytest

import onnxgrad
from tests.control_flow.compare import check, differences, model, normal, run
from tests.control_flow.unroll import unrolled

#: each: with containers, without
PAIRS = {
    "construct, at": (
        "{ q = SequenceConstruct(x, z, x) i = Constant <value_int = -2>() j = Constant <value_int = 2>()"
        " a = SequenceAt(q, i) b = SequenceAt(q, j) c = Mul(a, b) y = Sin(c) }",
        "{ c = Mul(z, x) y = Sin(c) }",
    ),
    "insert at the end": (
        "{ q = SequenceConstruct(x) m = Mul(x, z) r = SequenceInsert(q, m) i = Constant <value_int = 1>()"
        " a = SequenceAt(r, i) y = Mul(a, x) }",
        "{ m = Mul(x, z) y = Mul(m, x) }",
    ),
    "insert at a place": (
        "{ q = SequenceConstruct(x, z) m = Mul(x, z) o = Constant <value_int = -1>() r = "
        "SequenceInsert(q, m, o)"
        " i = Constant <value_int = 1>() j = Constant <value_int = 2>()"
        " a = SequenceAt(r, i) b = SequenceAt(r, j) c = Mul(a, b) y = Sin(c) }",
        "{ m = Mul(x, z) c = Mul(m, z) y = Sin(c) }",
    ),
    "erase": (
        "{ q = SequenceConstruct(x, z, x) o = Constant <value_int = -3>() r = SequenceErase(q, o) p = "
        "SequenceErase(r)"
        " i = Constant <value_int = 0>() a = SequenceAt(p, i) y = Mul(a, x) }",
        "{ y = Mul(z, x) }",
    ),
    "concatenate": (
        "{ a = Sin(x) q = SequenceConstruct(a, z, a) b = ConcatFromSequence <axis = 1> (q) y = Mul(b, b) }",
        "{ a = Sin(x) b = Concat <axis = 1> (a, z, a) y = Mul(b, b) }",
    ),
    "stack": (
        "{ a = Sin(x) q = SequenceConstruct(a, z) b = ConcatFromSequence <axis = 1, new_axis = 1> (q) y = Mul(b, b) }",
        "{ a = Sin(x) k = Constant <value_ints = [1]>() c = Unsqueeze(a, k) d = Unsqueeze(z, k)"
        " b = Concat <axis = 1> (c, d) y = Mul(b, b) }",
    ),
    "split into single ones": (
        "{ q = SplitToSequence <axis = 1, keepdims = 0> (x) i = Constant <value_int = 1>() j = Constant "
        "<value_int = 0>()"
        " a = SequenceAt(q, i) b = SequenceAt(q, j) y = Mul(a, b) }",
        "{ i = Constant <value_int = 1>() j = Constant <value_int = 0>()"
        " a = Gather <axis = 1> (x, i) b = Gather <axis = 1> (x, j) y = Mul(a, b) }",
    ),
    "split into sizes": (
        "{ s = Constant <value_ints = [1, 2]>() q = SplitToSequence <axis = 1> (x, s)"
        " i = Constant <value_int = 1>() j = Constant <value_int = 0>()"
        " a = SequenceAt(q, i) b = SequenceAt(q, j) y = Mul(a, b) }",
        "{ s = Constant <value_ints = [1, 2]>() b, a = Split <axis = 1> (x, s) y = Mul(a, b) }",
    ),
    "map": (
        "{ q = SequenceConstruct(x, z) r = SequenceMap <body = f (F[N,3] e) => (F[N,3] h) { k = Mul(e, "
        "x) h = Sin(k) }> (q)"
        " i = Constant <value_int = 1>() j = Constant <value_int = 0>()"
        " a = SequenceAt(r, i) b = SequenceAt(r, j) y = Mul(a, b) }",
        "{ k = Mul(x, x) l = Mul(z, x) b = Sin(k) a = Sin(l) y = Mul(a, b) }",
    ),
    "optional": (
        "{ a = Sin(x) o = Optional(a) b = OptionalGetElement(o) c = OptionalGetElement(b) y = Mul(c, z) }",
        "{ a = Sin(x) y = Mul(a, z) }",
    ),
}
HEAD = "agraph (F[N,3] x, F[N,3] z) => (F{} y) "
RANKS = {
    "stack": "[N,2,3]",
    "split into single ones": "[N]",
    "concatenate": "[N,9]",
    "split into sizes": "[N,2]",
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", PAIRS)
def test_a_container_equals_its_contents(name):
    texts = [HEAD.format(RANKS.get(name, "[N,3]")) + body for body in PAIRS[name]]
    feeds = {"x": normal(2, 3), "z": normal(2, 3)}
    used = ["x"] if name.startswith("split") else ["x", "z"]
    check(*map(model, texts), feeds, used)
    differences(model(texts[0], "double"), feeds, used)


LOOPS = {
    "a sequence that is appended to": (
        """agraph (F[2,3] x, F[2,3] z, int64 n) => (F[K,3] y)
        { q = SequenceConstruct(z) r, s = Loop <body = b (int64 i, bool p, seq(F[2,3]) a, F[2,3] h)
            => (bool o, seq(F[2,3]) c, F[2,3] j) { o = Identity(p) k = Mul(h, x) j = Sin(k) c =
                SequenceInsert(a, j) }>
          (n, , q, z) e = ConcatFromSequence <axis = 0> (r) y = Mul(e, e) }""",
        3,
    ),
    "a stack that is read and written": (
        """agraph (F[2,3] x, F[2,3] z, int64 n) => (F[2,3] y)
        { m = Constant <value_int = -1>() q = SequenceConstruct(z, x)
          r = Loop <body = b (int64 i, bool p, seq(F[2,3]) a) => (bool o, seq(F[2,3]) c) {
            o = Identity(p) t = SequenceAt(a, m) u = SequenceErase(a, m) v = SequenceAt(a, i) k =
                Mul(t, v) l = Sin(k)
            w = SequenceInsert(u, l) c = SequenceInsert(w, x) }> (n, , q)
          f = SequenceAt(r, m) j = Constant <value_int = -2>() h = SequenceAt(r, j) y = Mul(f, h) }""",
        2,
    ),
    "a captured sequence, by iteration number": (
        """agraph (F[2,3] x, F[2,3] z, int64 n) => (F[2,3] y)
        { q = SequenceConstruct(z, x, z)
          y = Loop <body = b (int64 i, bool p, F[2,3] h) => (bool o, F[2,3] c) {
            o = Identity(p) v = SequenceAt(q, i) k = Mul(h, v) c = Sin(k) }> (n, , x) }""",
        3,
    ),
    "a tensor that grows": (
        """agraph (F[2,3] x, F[2,3] z, int64 n) => (F[K,3] y)
        { y = Loop <body = b (int64 i, bool p, F[A,3] h) => (bool o, F[B,3] c) {
            o = Identity(p) k = Mul(h, h) l = Sin(k) c = Concat <axis = 0> (l, z) }> (n, , x) }""",
        3,
    ),
    "a tensor that grows, undeclared": (
        """agraph (F[2,3] x, F[2,3] z, int64 n) => (F[K,3] y)
        { y = Loop <body = b (int64 i, bool p, F h) => (bool o, F c) {
            o = Identity(p) k = Mul(h, h) l = Sin(k) c = Concat <axis = 0> (l, z) }> (n, , x) }""",
        2,
    ),
    "a tensor that shrinks to one row, broadcast": (
        """agraph (F[3,3] x, F[3,3] z, int64 n) => (F[3,3] y)
        { one = Constant <value_ints = [1]>() far = Constant <value_ints = [9]>() zero = Constant
            <value_ints = [0]>()
          s = Loop <body = b (int64 i, bool p, F[A,3] h) => (bool o, F[B,3] c) {
            o = Identity(p) k = Mul(h, h) c = Slice(k, one, far, zero) }> (n, , x) y = Mul(s, z) }""",
        2,
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", LOOPS)
def test_sequences_and_shapes_that_vary_in_a_loop(name):
    text, steps = LOOPS[name]
    rows = 3 if "[3,3] x" in text else 2
    if "undeclared" in name:  # a body input without a shape
        program = model(text.replace("F h)", "F[Q,3] h)").replace("F c)", "F[R,3] c)"))
        body = program.graph.node[0].attribute[0].g
        body.input[2].type.tensor_type.ClearField("shape")
        body.output[1].type.tensor_type.ClearField("shape")
    else:
        program = model(text)
    feeds = {"x": normal(rows, 3), "z": normal(rows, 3), "n": np.array(steps)}
    check(program, unrolled(program, steps), feeds, ["x", "z"])


def test_a_growing_state_that_never_grows():
    program = model(LOOPS["a tensor that grows"][0])
    feeds = {"x": normal(2, 3), "z": normal(2, 3), "n": np.array(0)}
    found = run(onnxgrad.grad(program, wrt=["x", "z"]), feeds)
    np.testing.assert_array_equal(found["x_grad"], np.ones((2, 3)))
    np.testing.assert_array_equal(found["z_grad"], np.zeros((2, 3)))


def test_a_map_over_two_sequences_and_a_tensor_in_a_scan():
    head = "agraph (F[2] x, F[T,2] z) => (F[2] y) { y = Scan <num_scan_inputs = 1,"
    inside = """body = b (F[2] s, F[2] v) => (F[2] t) {
        a = SequenceConstruct(s, v) c = SequenceConstruct(v, v)
        r = SequenceMap <body = f (F[2] e, F[2] g, F[2] w) => (F[2] h) {
            k = Mul(e, g) l = Mul(k, x) m = Mul(l, w) h = Sin(m) }> (a, c, s)
        u = ConcatFromSequence <axis = 0, new_axis = 1> (r) t = ReduceSum <keepdims = 0> (u, zero) }>
            (x, z) }"""
    plain = """body = b (F[2] s, F[2] v) => (F[2] t) {
        k1 = Mul(s, v) l1 = Mul(k1, x) m1 = Mul(l1, s) h1 = Sin(m1)
        k2 = Mul(v, v) l2 = Mul(k2, x) m2 = Mul(l2, s) h2 = Sin(m2) t = Add(h1, h2) }> (x, z) }"""
    head = head.replace("{ y", "{ zero = Constant <value_ints = [0]>() y")
    feeds = {"x": normal(2), "z": normal(3, 2)}
    check(model(head + inside), unrolled(model(head + plain), 3), feeds, ["x", "z"])


def test_sequences_out_of_an_if():
    text = """agraph (F[2] x, F[2] z, bool p) => (F[2] y) {
        i = Constant <value_int = 0>()
        q = If (p) <then_branch = t () => (seq(F[2]) a) { m = Mul(x, z) a = SequenceConstruct(m, x) },
                    else_branch = e () => (seq(F[2]) b) { b = SequenceConstruct(z) }>
        c = SequenceAt(q, i) y = Sin(c) }"""
    for taken, plain in ((True, "m = Mul(x, z) y = Sin(m)"), (False, "y = Sin(z)")):
        feeds = {"x": normal(2), "z": normal(2), "p": np.array(taken)}
        written = model("agraph (F[2] x, F[2] z, bool p) => (F[2] y) {" + plain + "}")
        check(model(text), written, feeds, ["x", "z"])


UNDECLARED = """agraph (F[2,3] x, F[2,3] z, int64 n, bool p) => (F[K,3] y)
    { q = SequenceEmpty <dtype = 1> ()
      r = Loop <body = b (int64 i, bool g, F a) => (bool o, F c) {
        o = Identity(g) u = Gather <axis = 0> (x, i) s = Mul(u, u) k = Constant <value_ints = [0]>() v = Unsqueeze(s, k)
        PUT }> (n, , q)
      e = ConcatFromSequence <axis = 0> (r) y = Mul(e, z) }"""
INSERTED = {
    "at once": "c = SequenceInsert(a, v)",
    "in a branch": """c = If (p) <then_branch = t () => (F f) { f = SequenceInsert(a, v) },
        else_branch = l () => (F m) { w = Sin(v) m = SequenceInsert(a, w) }>""",
    "in a loop": """c = Loop <body = h (int64 j, bool f, F l) => (bool m, F w) {
        m = Identity(f) w = SequenceInsert(l, v) }> (one, , a)""",
}


@pytest.mark.parametrize("how", INSERTED)
def test_a_loop_whose_body_declares_no_types(how):
    text = UNDECLARED.replace("PUT", INSERTED[how]).replace("{ q =", "{ one = Constant <value_int = 1>() q =")
    program = model(text)
    stack = [program.graph]
    while stack:
        graph = stack.pop()
        inner = [a.g for n in graph.node for a in n.attribute if a.HasField("g")]
        stack += inner
        for value in (v for g in inner for v in (*g.input, *g.output) if v.type.tensor_type.elem_type == 1):
            value.ClearField("type")
    feeds = {"x": normal(2, 3), "z": normal(2, 3), "n": np.array(2), "p": np.array(True)}
    plain = model("agraph (F[2,3] x, F[2,3] z) => (F[2,3] y) { s = Mul(x, x) y = Mul(s, z) }")
    seed = {"y_cotangent": normal(2, 3), "x_tangent": normal(2, 3), "z_tangent": normal(2, 3)}
    for transform in (onnxgrad.vjp, onnxgrad.jvp):
        got, want = (run(transform(m, wrt=["x", "z"]), feeds | seed) for m in (program, plain))
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5)


APPENDED = """agraph (F[T,B,4] x, F[4,3] w) => (F[T,B,3] y) {
  e = SequenceEmpty() s = Shape<start=0,end=1>(x) front = Constant<value_ints=[0]>() m = Squeeze(s, front)
  yes = Constant<value_int=1>() c = Cast<to=9>(yes)
  l = Loop <body = b (int64 i, bool ci, seq(ELEMENT) a) => (bool co, seq(ELEMENT) a2) {
    co = Identity(ci) k = Gather<axis=0>(x, i) h = Tanh(k) PUT }> (m, c, e)
  z = ConcatFromSequence<axis=0,new_axis=1>(l) y = MatMul(z, w) }"""
ONWARD = {
    "at once": "a2 = SequenceInsert(a, h)",
    "in a branch": """big = ReduceMax<keepdims=0>(h) none = Sub(big, big) always = LessOrEqual(none, big)
        p = Or(always, ci)
        a2 = If (p) <then_branch = t () => (seq(ELEMENT) f) { f = SequenceInsert(a, h) },
                     else_branch = o () => (seq(ELEMENT) g) { g = Identity(a) }>""",
}


@pytest.mark.parametrize(
    ("how", "element"), [("at once", "F"), ("at once", "F[P,4]"), ("in a branch", "F[P,4]"), ("in a branch", "F[Q,R]")]
)
def test_a_list_that_a_loop_appends_to_and_that_is_stacked(how, element):
    program = model(APPENDED.replace("PUT", ONWARD[how]).replace("ELEMENT", element))
    plain = model("agraph (F[T,B,4] x, F[4,3] w) => (F[T,B,3] y) { h = Tanh(x) y = MatMul(h, w) }")
    check(program, plain, {"x": normal(3, 2, 4), "w": normal(4, 3)}, ["x", "w"])
