"""Inferred types of loops, branches and sequences are true at every step, in both branches, for each element."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrad
from onnxgrad.model_io import open_model
from tests.control_flow.compare import check, differences, model, normal
from tests.control_flow.unroll import unrolled


def shapes(text: str, *, undeclared: bool = False) -> dict[str, ir.Shape | None]:
    """The inferred shapes of every value, by name; if `undeclared`, without declarations in bodies."""
    proto = without_declarations(text) if undeclared else model(text)
    graph = open_model(proto).model.graph
    graphs = (graph, *graph.subgraphs())
    return {v.name: v.shape for g in graphs for v in (*g.inputs, *(v for n in g for v in n.outputs))}


def without_declarations(text: str):
    """The model, with no shape for any input of a body."""
    proto = model(text)

    def clear(nodes):
        for node in nodes:
            for a in node.attribute:
                for v in a.g.input[2:] if a.g.node else ():
                    v.type.tensor_type.ClearField("shape")
                clear(a.g.node)

    clear(proto.graph.node)
    return proto


GROWS = """agraph (F[1] x, F[1] w, int64 n) => (F[K] y)
{ y = Loop <body = outer (int64 i, bool p, F[A] a) => (bool q, F[B] b) { q = Identity(p) c = Concat <axis = 0> (a, a)
    r = Loop <body = inner (int64 j, bool g, F[C] s) => (bool h, F[D] t) {
        h = Identity(g) m = Mul(s, w) t = Sin(m) }> (n, , c)
    b = Tanh(r) }> (n, , x) }"""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("undeclared", [False, True])
def test_a_loop_in_a_loop_whose_state_grows(undeclared):
    found = shapes(GROWS, undeclared=undeclared)
    for name in ("a", "c", "s", "m", "t", "r", "b"):
        assert not isinstance(found[name][0], int), name
    feeds = {"x": normal(1), "w": normal(1), "n": np.array(2)}
    program = without_declarations(GROWS) if undeclared else model(GROWS)
    check(program, unrolled(model(GROWS), 2), feeds, ["x", "w"])


SIZED = """agraph (F[1] x, F[1] w, int64 n) => (F[K] y) <F two = {2}>
{ y = Loop <body = step (int64 i, bool p, F[A] a) => (bool q, F[B] b) {
    q = Identity(p) size = Shape(a) e = Expand(two, size) k = Mul(a, w) b = Concat <axis = 0> (k, e) }> (n, , x) }"""


def test_the_size_of_a_state_that_grows_is_no_constant():
    feeds = {"x": normal(1), "w": normal(1), "n": np.array(2)}
    found = shapes(SIZED, undeclared=True)
    assert not isinstance(found["e"][0], int)
    check(without_declarations(SIZED), unrolled(model(SIZED), 2), feeds, ["x", "w"])


RISES = """agraph (F[2] x, F[2] w, int64 n) => (F y) <int64[1] front = {0}>
{ s = Loop <body = step (int64 i, bool p, F[A] a) => (bool q, float b) {
    q = Identity(p) k = Mul(a, w) b = Unsqueeze(k, front) }> (n, , x)
  y = ReduceSum <keepdims = 0> (s) }"""


def test_a_state_whose_rank_rises():
    program = without_declarations(RISES)
    for a in program.graph.node[0].attribute:
        a.g.output[1].type.tensor_type.ClearField("shape")
    feeds = {"x": normal(2), "w": normal(2), "n": np.array(2)}
    check(program, unrolled(program, 2), feeds, ["x", "w"])


EITHER = """agraph (F[2] x, F[2] w, bool plain, int64[R] dims) => (F y)
{ v = If (plain) <then_branch = as_it_is () => (F[2] a) { a = Sin(x) },
                  else_branch = shaped () => (float b) { c = Reshape(x, dims) b = Tanh(c) }>
  k = Mul(v, w) y = ReduceSum <keepdims = 0> (k) }"""


@pytest.mark.parametrize("plain", [True, False])
def test_a_branch_of_unknown_rank(plain):
    proto = model(EITHER)
    proto.graph.node[0].attribute[1].g.output[0].type.tensor_type.ClearField("shape")
    graph = open_model(proto).model.graph
    assert next(v for n in graph for v in n.outputs if v.name == "v").shape is None
    feeds = {"x": normal(2), "w": normal(2), "plain": np.array(plain), "dims": np.array([2, 1])}
    inside = "v = Sin(x)" if plain else "c = Reshape(x, dims) v = Tanh(c)"
    written = (
        f"agraph (F[2] x, F[2] w, int64[2] dims) => (F y) {{ {inside} k = Mul(v, w) y = ReduceSum <keepdims = 0> (k) }}"
    )
    check(proto, model(written), feeds, ["x", "w"])


SEQUENCES = """agraph (F[2,N] x, F[2,3] z, int64 at) => (F[2,M] y)
{ one = Constant <value_int = 1>()
  same = SequenceConstruct(z, z) e = SequenceAt(same, at)
  mixed = SequenceConstruct(x, z) f = SequenceAt(mixed, at)
  more = SequenceInsert(same, x) less = SequenceErase(more, at)
  g = SequenceAt(less, at) cut = SplitToSequence <axis = 1> (x, one) h = SequenceAt(cut, at)
  rows = SplitToSequence <keepdims = 0> (z) r = SequenceAt(rows, at)
  mapped = SequenceMap <body = each (F[A,B] a) => (F[B,A] b) { b = Transpose(a) }> (same) m = SequenceAt(mapped, at)
  stacked = ConcatFromSequence <axis = 1, new_axis = 1> (same) joined = ConcatFromSequence <axis = -1> (same)
  y = Sum(f, g) }"""


def test_elements_of_sequences():
    found = shapes(SEQUENCES)

    def dims(name):
        return [d if isinstance(d, int) else "?" for d in found[name]]

    assert {n: dims(n) for n in ("e", "f", "g", "h", "r", "m", "stacked", "joined")} == {
        "e": [2, 3],
        "f": [2, "?"],
        "g": [2, "?"],
        "h": [2, "?"],
        "r": [3],
        "m": [3, 2],
        "stacked": [2, "?", 3],
        "joined": [2, "?"],
    }
    assert found["f"][1] != found["g"][1]


WHILE = """agraph (F[3,4] x, F[4,4] w) => (F[N,4] y) {
  m = Constant<value_int=9>() yes = Constant<value_int=1>() c = Cast<to=9>(yes)
  y = Loop <body = b (int64 i, bool ci, F[N,4] z) => (bool co, F[N,4] z2) {
    h = MatMul(z, w) z2 = Tanh(h) a = ReduceMax<keepdims=0>(z2) e = Constant<value_float=0.1>() f = CastLike(e, a)
    co = Greater(a, f) }> (m, c, x) }"""


def test_a_loop_with_an_exit_that_depends_on_data():
    rng = np.random.default_rng(0)  # the number of steps depends on the numbers
    x, w = (np.abs(rng.standard_normal(shape, np.float32)) for shape in ((3, 4), (4, 4)))
    feeds = {"x": x, "w": w / 5}
    y, steps = feeds["x"], 0
    while steps < 9 and (steps == 0 or y.max() > 0.1):
        y, steps = np.tanh(y @ feeds["w"]), steps + 1
    assert 1 < steps < 9
    plain = " ".join(f"h{i} = MatMul({f't{i - 1}' if i else 'x'}, w) t{i} = Tanh(h{i})" for i in range(steps))
    written = f"agraph (F[3,4] x, F[4,4] w) => (F[3,4] y) {{ {plain} y = Identity(t{steps - 1}) }}"
    check(model(WHILE), model(written), feeds, ["x", "w"])
    differences(model(WHILE, "double"), feeds, ["x", "w"])


UNFLATTENED = """agraph (F[B,N,12] x) => (F y) {
  sizes = Constant<value_ints=[1,1]>() third = Constant<value_ints=[-3]>() t = Constant<value_ints=[2,2,3]>()
  zero = Constant<value_ints=[0]>() two = Constant<value_ints=[2]>() s = Shape(x) end = Identity(two)
  h = Slice(s, zero, end) n = Concat<axis=0>(h, t) z = Reshape(x, n)
  a, b = Split<axis=-3>(z, sizes) f = Squeeze(a, third) y = Softmax<axis=1>(f) }"""


def test_a_shape_whose_bounds_are_computed():
    program, declared = (model(t, opset=17) for t in (UNFLATTENED, UNFLATTENED.replace("(F y)", "(F[B,N,2,3] y)")))
    program.graph.output[0].type.tensor_type.ClearField("shape")
    assert [str(d) for d in open_model(program).model.graph.outputs[0].shape] == ["B", "N", "2", "3"]
    plain = """agraph (F[B,N,12] x) => (F[B,N,2,3] y) {
        zero = Constant<value_ints=[0]>() six = Constant<value_ints=[6]>() last = Constant<value_ints=[-1]>()
        h = Slice(x, zero, six, last) n = Constant<value_ints=[0,0,2,3]>() f = Reshape(h, n) y = Softmax<axis=1>(f) }"""
    check(declared, model(plain), {"x": normal(2, 3, 12)}, ["x"])
    onnxgrad.vjp(program, wrt=["x"])
