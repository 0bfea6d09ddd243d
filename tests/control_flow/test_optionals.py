"""Optionals as states of loops and out of branches: the oracle is the same computation on tensors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxgrad
from tests.control_flow.compare import check, close, model, normal, run, seeds
from tests.control_flow.unroll import unrolled
from tests.onnx_cases import NODE_CASES

STATE = """agraph (F[2] x, F[2] c, int64 n) => (F[2] y)
{ o = Optional(x)
  r = Loop <body = step (int64 i, bool p, optional(F[2]) a) => (bool q, optional(F[2]) z) {
    q = Identity(p) e = OptionalGetElement(a) k = Mul(e, c) l = Sin(k) z = Optional(l) }> (n, , o)
  y = OptionalGetElement(r) }"""
PLAIN = """agraph (F[2] x, F[2] c, int64 n) => (F[2] y)
{ y = Loop <body = step (int64 i, bool p, F[2] a) => (bool q, F[2] l) {
    q = Identity(p) k = Mul(a, c) l = Sin(k) }> (n, , x) }"""


def feeds(steps):
    return {"x": normal(2), "c": normal(2), "n": np.array(steps)}


def test_a_state():
    check(model(STATE), unrolled(model(PLAIN), 3), feeds(3), ["x", "c"])


#: the first step finds nothing; each reads what there is twice, and carries a sequence beside
NOTHING_AT_FIRST = """agraph (F[2] x, F[2] c, int64 n) => (F[2] y, F[K,2] all)
{ o = Optional(x) none = SequenceConstruct(c)
  r, seq = Loop <body = step (int64 i, bool p, optional(F[2]) a, seq(F[2]) s)
      => (bool q, optional(F[2]) z, seq(F[2]) u) {
    q = Identity(p) has = OptionalHasElement(a)
    l = If (has) <then_branch = some () => (F[2] t) { e = OptionalGetElement(a) k = Mul(e, c) t = Sin(k) },
                  else_branch = first () => (F[2] f) { f = Mul(x, c) }>
    m = Mul(l, x) z = Optional(m) u = SequenceInsert(s, l) }> (n, , o, none)
  y = OptionalGetElement(r) all = ConcatFromSequence <axis = 0, new_axis = 1> (seq) }"""
IN_TENSORS = """agraph (F[2] x, F[2] c, int64 n) => (F[2] y, F[3,2] all)
{ l0 = Mul(x, c) m0 = Mul(l0, x) k = Mul(m0, c) l1 = Sin(k) y = Mul(l1, x)
  ax = Constant <value_ints = [0]>() a = Unsqueeze(c, ax) b = Unsqueeze(l0, ax) d = Unsqueeze(l1, ax)
  all = Concat <axis = 0> (a, b, d) }"""


def nothing_at_first() -> onnx.ModelProto:
    """The model with an optional that holds nothing in front of its Loop."""
    program = model(NOTHING_AT_FIRST)
    held = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [2])
    program.graph.node[0].CopyFrom(helper.make_node("Optional", [], ["o"], type=held))
    return program


def test_a_state_that_holds_nothing_at_first():
    check(nothing_at_first(), model(IN_TENSORS), feeds(2), ["x", "c"])


@pytest.mark.parametrize("every", [1, 2, "sqrt"])
@pytest.mark.parametrize("program", ["state", "nothing at first"])
def test_states_on_a_tape(every, program):
    program = nothing_at_first() if program != "state" else model(STATE)
    fed = feeds(2)
    every_seed = fed | seeds(program, fed, ["x", "c"], run(program, fed))
    want = run(onnxgrad.vjp(program, wrt=["x", "c"]), every_seed)
    with onnxgrad.checkpointing(every):
        got = run(onnxgrad.vjp(program, wrt=["x", "c"]), every_seed)
    for name in want:
        close(got[name], want[name], 2e-5, name)


def test_out_of_a_branch():
    text = """agraph (F[2] x, F[2] c, bool p) => (F[2] y) {
        o = If (p) <then_branch = t () => (optional(F[2]) a) { k = Mul(x, c) a = Optional(k) },
                    else_branch = e () => (optional(F[2]) b) { s = Sin(x) b = Optional(s) }>
        e = OptionalGetElement(o) y = Mul(e, x) }"""
    for taken, inside in ((True, "e = Mul(x, c)"), (False, "e = Sin(x)")):
        written = f"agraph (F[2] x, F[2] c, bool p) => (F[2] y) {{ {inside} y = Mul(e, x) }}"
        fed = {"x": normal(2), "c": normal(2), "p": np.array(taken)}
        check(model(text), model(written), fed, ["x", "c"])


def test_of_a_sequence():
    text = """agraph (F[2] x, F[2] c) => (F[2] y) <int64 one = {1}> {
        s = SequenceConstruct(x, c) o = Optional(s) t = OptionalGetElement(o) u = OptionalGetElement(o)
        a = SequenceAt(t, one) zero = Constant <value_int = 0>() b = SequenceAt(u, zero) k = Mul(a, b) y = Sin(k) }"""
    written = "agraph (F[2] x, F[2] c) => (F[2] y) { k = Mul(x, c) y = Sin(k) }"
    check(model(text), model(written), {"x": normal(2), "c": normal(2)}, ["x", "c"])


def test_read_in_two_places():
    text = """agraph (F[2] x, F[2] c, int64 n) => (F[2] y, F[2] z)
    { o = Optional(x)
      r = Loop <body = step (int64 i, bool p, optional(F[2]) a) => (bool q, optional(F[2]) z) {
        q = Identity(p) e = OptionalGetElement(a) g = Mul(e, e) k = Mul(g, c) z = Optional(k) }> (n, , o)
      y = OptionalGetElement(r) v = OptionalGetElement(o) w = Mul(v, y) z = Sin(w) }"""
    written = """agraph (F[2] x, F[2] c, int64 n) => (F[2] y, F[2] z)
    { a = Mul(x, x) b = Mul(a, c) d = Mul(b, b) y = Mul(d, c) w = Mul(x, y) z = Sin(w) }"""
    check(model(text), model(written), feeds(2), ["x", "c"])


@pytest.mark.parametrize("derive", [onnxgrad.vjp, onnxgrad.jvp])
def test_a_state_that_becomes_a_sequence_is_refused(derive):
    proto = next(c.model for c in NODE_CASES if c.name == "test_loop16_seq_none")
    with pytest.raises(onnxgrad.NotDifferentiable, match=r"'seq_res'.*'opt_seq_in' is an optional.*makes a sequence"):
        derive(proto, wrt=["opt_seq"])
