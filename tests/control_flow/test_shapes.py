"""What is inferred of loops, branches and sequences holds at every step, in both branches, for each element."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad.model_io import open_model
from tests.control_flow.compare import check, model, normal
from tests.control_flow.unroll import unrolled


def shapes(text: str, *, undeclared: bool = False) -> dict[str, ir.Shape | None]:
    """What is inferred for every value, by name; of the model without what bodies declare if `undeclared`."""
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
