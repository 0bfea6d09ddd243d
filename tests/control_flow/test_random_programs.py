"""Random nests of Scan, Loop, If and sequences equal what they compute, written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.control_flow.compare import check, model, normal
from tests.control_flow.unroll import unrolled

STEPS = 2


class Program:
    """Writes a random program over tensors of one shape, as text."""

    kinds = ("scan", "loop", "if", "sequence", "optional", "either", "call")

    def __init__(self, draw) -> None:
        self.draw = draw
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def pick(self, names: list[str]) -> str:
        return names[self.draw(st.integers(0, len(names) - 1))]

    def block(self, known: list[str], depth: int) -> tuple[str, list[str]]:
        """A few statements that read `known`; their text and the names they define."""
        text, made = "", []
        for _ in range(self.draw(st.integers(1, 3))):
            kinds = ["Sin", "Mul", "Add", *(self.kinds if depth else ())]
            kind = self.pick(kinds)
            more, names = getattr(self, f"_{kind}", self._plain(kind))([*known, *made], depth)
            text, made = text + more, made + names
        return text, made

    def _plain(self, op: str):
        def write(known, depth):
            y = self.name()
            operands = [self.pick(known) for _ in range(1 if op == "Sin" else 2)]
            return f"{y} = {op}({', '.join(operands)}) ", [y]

        return write

    def _step(self, known, depth):
        """The inside of a body: reads what is around it and two values of its own."""
        s, u = self.name(), self.name()
        inside, made = self.block([*known, s, u], depth - 1)
        after, out = self.name(), self.name()
        inside += f"{after} = Tanh({self.pick([*made, s])}) {out} = Mul({self.pick([*made, *known])}, {s})"
        return s, u, inside, after, out

    def _stack(self, known):
        parts = [(self.name(), self.pick(known)) for _ in range(STEPS)]
        x = self.name()
        text = "".join(f"{p} = Unsqueeze({v}, axis) " for p, v in parts)
        return text + f"{x} = Concat <axis = 0> ({', '.join(p for p, _ in parts)}) ", x

    def _sum(self, stacked):
        y = self.name()
        return f"{y} = ReduceSum <keepdims = 0> ({stacked}, axis) ", y

    def _scan(self, known, depth):
        before, x = self._stack(known)
        s, u, inside, after, out = self._step(known, depth)
        f, y, g = self.name(), self.name(), self.draw(st.integers(0, 1))
        text = (
            f"{f}, {y} = Scan <num_scan_inputs = 1, scan_input_directions = [{g}],"
            f" body = {g}x (F[2] {s}, F[2] {u}) => (F[2] {after}, F[2] {out}) {{ {inside} }}>"
            f" ({self.pick(known)}, {x}) "
        ).replace(f"{g}x (", f"{self.name()} (")
        end, total = self._sum(y)
        return before + text + end, [f, total]

    def _loop(self, known, depth):
        s, u, inside, after, out = self._step(known, depth)
        i, p, q, f, y, k = (self.name() for _ in range(6))
        n, c = self.draw(st.sampled_from([("n", ""), ("n", "yes"), ("two", "yes")]))
        text = (
            f"{f}, {y} = Loop <body = {self.name()} (int64 {i}, bool {p}, F[2] {s}) => (bool {q}, F[2] {after},"
            f" F[2] {out}) {{ {q} = Identity({p}) {k} = CastLike({i}, {s}) {u} = Add({k}, {s}) {inside} }}>"
            f" ({n}, {c}, {self.pick(known)}) "
        )
        end, total = self._sum(y)
        return text + end, [f, total]

    def _if(self, known, depth):
        y = self.name()
        return self._branches(y, "F[2]", known, depth, [lambda made: f"Sin({self.pick(made)})"] * 2), [y]

    def _branches(self, y, kind, known, depth, ends):
        """An If that gives a `kind` as `y`: each branch computes a block, and ends with what `ends` make of it."""
        t, c = self.name(), self.name()
        ways = []
        for end in ends:
            inside, made = self.block(known, depth - 1)
            out = self.name()
            ways.append(f"{self.name()} () => ({kind} {out}) {{ {inside} {out} = {end(made)} }}")
        return (
            f"{t} = ReduceSum <keepdims = 0> ({self.pick(known)}) {c} = Greater({t}, zero) "
            f"{y} = If ({c}) <then_branch = {ways[0]}, else_branch = {ways[1]}> "
        )

    def _sequence(self, known, depth):
        q, r, y, z, e, k, h = (self.name() for _ in range(7))
        return (
            f"{q} = SequenceConstruct({self.pick(known)}, {self.pick(known)}) "
            f"{z} = SequenceInsert({q}, {self.pick(known)}) "
            f"{r} = SequenceMap <body = {self.name()} (F[2] {e}) => (F[2] {h}) {{ {k} = Mul({e}, {self.pick(known)})"
            f" {h} = Sin({k}) }}> ({z}) {y} = SequenceAt({r}, one) "
        ), [y]

    def _optional(self, known, depth):
        o, e, y = self.name(), self.name(), self.name()
        return (
            f"{o} = Optional({self.pick(known)}) {e} = OptionalGetElement({o}) {y} = Mul({e}, {self.pick(known)}) ",
            [y],
        )

    def _either(self, known, depth):
        """An If that gives a sequence, of one element or of two."""
        q, y = self.name(), self.name()
        ends = [
            lambda made: f"SequenceConstruct({self.pick(made)})",
            lambda made: f"SequenceConstruct({self.pick(made)}, {self.pick(known)})",
        ]
        return self._branches(q, "seq(F[2])", known, depth, ends) + f"{y} = SequenceAt({q}, last) ", [y]

    def _call(self, known, depth):
        y = self.name()
        return f"{y} = local.f({self.pick(known)}, {self.pick(known)}) ", [y]


#: what programs may call
FUNCTION = """
<domain: "local", opset_import: ["":18]> f (a, b) => (c) { k = Mul(a, b) l = Tanh(k) c = Add(l, a) }"""
HEADER = (
    "agraph (F[2] x, F[2] w, int64 n) => (F[2] y) <int64 two = {2}, int64 one = {1}, int64 last = {-1}, bool yes = {1},"
    " int64[1] axis = {0}, F zero = {0}>"
)


@st.composite
def programs(draw):
    writer = Program(draw)
    text, made = writer.block(["x", "w"], 2)
    return f"{HEADER} {{ {text} y = Sum(x, w, {', '.join(made)}) }}{FUNCTION}"


RESET_IN_THE_SECOND_ORDER = (
    HEADER
    + """ { s, o = Loop <body = outer (int64 i, bool p, F[2] a) => (bool q, F[2] b, F[2] c) { q = Identity(p)
    d = Unsqueeze(x, axis) e = Concat <axis = 0> (d, d)
    f = Scan <num_scan_inputs = 1, body = inner (F[2] g, F[2] h) => (F[2] k) { m = Sin(x) k = Tanh(m) }> (x, e)
    b = Tanh(f) c = Mul(f, a) }> (n, , x)
  t = ReduceSum <keepdims = 0> (o, axis) y = Sum(x, w, s, t) }"""
)

AN_ELEMENT_OF_A_SEQUENCE_IN_A_SCAN = (
    HEADER
    + """ { a = Mul(x, x) b = SequenceConstruct(x, x)
    c = SequenceMap <body = each (F[2] d) => (F[2] e) { f = Mul(d, x) e = Sin(f) }> (b) g = SequenceAt(c, one)
    h = Unsqueeze(g, axis) k = Concat <axis = 0> (h, h)
    s, o = Scan <num_scan_inputs = 1, body = step (F[2] p, F[2] q) => (F[2] r, F[2] u) {
        v = Mul(a, g) r = Tanh(p) u = Mul(v, p) }> (x, k)
  t = ReduceSum <keepdims = 0> (o, axis) y = Sum(x, w, a, g, s, t) }"""
)


FEW = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # a failure prints its program at once: shrinking takes minutes
    suppress_health_check=list(HealthCheck),
)


@FEW
@given(programs())
@example(RESET_IN_THE_SECOND_ORDER)
@example(AN_ELEMENT_OF_A_SEQUENCE_IN_A_SCAN)
def test_a_random_program_equals_its_unrolling(text):
    program = model(text)
    feeds = {"x": 0.5 * normal(2), "w": 0.5 * normal(2), "n": np.array(STEPS)}
    check(program, unrolled(program, STEPS), feeds, ["x", "w"])


@pytest.mark.complete
@settings(FEW, max_examples=40)
@given(programs())
def test_more_random_programs_equal_their_unrolling(text):
    test_a_random_program_equals_its_unrolling.hypothesis.inner_test(text)
