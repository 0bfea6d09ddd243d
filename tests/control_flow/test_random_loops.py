"""Random nests of loops whose number of steps only the run tells: both modes against central differences.

What cannot be written out for a known number of steps: no steps at all, an exit that depends on the data, states
that cross, that each step resets or that grow, sequences as states. Also of the gradient, and of the pushforward.
"""

from __future__ import annotations

import zlib

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import onnxgrad
from onnxgrad.model_io import signature
from tests.control_flow.compare import close, model, run
from tests.control_flow.test_random_programs import FUNCTION, HEADER, Program

WIDE_HEADER = HEADER.replace("int64 n)", "int64 n, int64 k)").replace(
    "F zero = {0}>", "F zero = {0}, F limit = {0.9}, F half = {0.5}>"
)


class Loops(Program):
    """Loops of `k` steps, and the rest."""

    kinds = (*Program.kinds, "two_states", "growing", "gathering", "turned")

    def _two_states(self, known, depth):
        s, u, inside, after, out = self._step(known, depth)
        i, p, q, f, g, y, t, v, m = (self.name() for _ in range(9))
        follows = self.draw(st.sampled_from([f"Identity({self.pick(known)})", f"Identity({s})", f"Sin({u})"]))
        goes = self.draw(
            st.sampled_from(
                [f"{q} = Identity({p})", f"{t} = ReduceSum <keepdims = 0> ({s}) {m} = Abs({t}) {q} = Less({m}, limit)"]
            )
        )
        trips, condition = self.draw(st.sampled_from(["n", "k", "two"])), self.draw(st.sampled_from(["", "yes"]))
        text = (
            f"{f}, {g}, {y} = Loop <body = {self.name()} (int64 {i}, bool {p}, F[2] {s}, F[2] {u}) => (bool {q},"
            f" F[2] {after}, F[2] {v}, F[2] {out}) {{ {goes} {inside} {v} = {follows} }}>"
            f" ({trips}, {condition}, {self.pick(known)}, {self.pick(known)}) "
        )
        end, total = self._sum(y)
        return text + end, [f, g, total]

    def _growing(self, known, depth):
        i, p, q, a, b, c, d, e, f, o, g, h, r, y = (self.name() for _ in range(14))
        return (
            f"{f}, {o} = Loop <body = {self.name()} (int64 {i}, bool {p}, F[A] {a}) => (bool {q}, F[B] {b}, F {e}) {{"
            f" {q} = Identity({p}) {c} = Mul({a}, half) {d} = Sin({self.pick(known)})"
            f" {b} = Concat <axis = 0> ({c}, {d}) {e} = ReduceSum <keepdims = 0> ({c}) }}> (k, , {self.pick(known)})"
            f" {g} = ReduceSum <keepdims = 0> ({f}) {h} = ReduceSum <keepdims = 0> ({o}) {r} = Add({g}, {h})"
            f" {y} = Add({r}, {self.pick(known)}) "
        ), [y]

    def _gathering(self, known, depth):
        s, u, inside, after, out = self._step(known, depth)
        i, p, q, f, first, so_far, longer, last, y, c, z = (self.name() for _ in range(11))
        return (
            f"{first} = SequenceConstruct({self.pick(known)}) {f}, {last} = Loop <body = {self.name()} (int64 {i},"
            f" bool {p}, F[2] {s}, seq(F[2]) {so_far}) => (bool {q}, F[2] {after}, seq(F[2]) {longer}) {{"
            f" {q} = Identity({p}) {c} = CastLike({i}, {s}) {u} = Add({c}, {s}) {inside}"
            f" {longer} = SequenceInsert({so_far}, {out}) }}> (k, , {self.pick(known)}, {first})"
            f" {y} = ConcatFromSequence <axis = 0, new_axis = 1> ({last}) {z} = ReduceSum <keepdims = 0> ({y}, axis) "
        ), [f, z]

    def _turned(self, known, depth):
        before, x = self._stack(known)
        s, u, inside, after, out = self._step(known, depth)
        t, f, y, z = (self.name() for _ in range(4))
        reads, writes = (self.draw(st.sampled_from([1, -1])) for _ in range(2))
        read_back, write_back = (self.draw(st.integers(0, 1)) for _ in range(2))
        text = (
            f"{t} = Transpose({x}) {f}, {y} = Scan <num_scan_inputs = 1, scan_input_axes = [{reads}],"
            f" scan_output_axes = [{writes}], scan_input_directions = [{read_back}],"
            f" scan_output_directions = [{write_back}], body = {self.name()} (F[2] {s}, F[2] {u}) => (F[2] {after},"
            f" F[2] {out}) {{ {inside} }}> ({self.pick(known)}, {t}) {z} = Transpose({y}) "
        )
        end, total = self._sum(z)
        return before + text + end, [f, total]


@st.composite
def programs(draw):
    text, made = Loops(draw).block(["x", "w"], 2)
    return f"{WIDE_HEADER} {{ {text} y = Sum(x, w, {', '.join(made)}) }}{FUNCTION}", draw(st.integers(0, 3))


def against_differences(program: onnx.ModelProto, feeds: dict, tolerance: float) -> None:
    """VJP and JVP of a float64 `program` by x and w, each in random directions."""
    session = onnxruntime.InferenceSession(program.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    held = {i.name: feeds[i.name] for i in session.get_inputs()}
    rng = np.random.default_rng(0)
    t = {n: rng.standard_normal(2) for n in ("x", "w")}
    cotangents = {n: np.asarray(rng.standard_normal(v.shape)) for n, v in zip(names, session.run(names, held))}
    up, down = (session.run(names, held | {n: held[n] + s * 1e-6 * t[n] for n in t}) for s in (1, -1))
    moved = {n: (a - b) / 2e-6 for n, a, b in zip(names, up, down)}

    forward, back = onnxgrad.jvp(program, wrt=["x", "w"]), onnxgrad.vjp(program, wrt=["x", "w"])
    ahead, behind = signature(forward), signature(back)
    pushed = run(forward, feeds | {ahead.input_tangents[n]: v for n, v in t.items()})
    for n in names:
        close(pushed[ahead.output_tangents[n]], moved[n], tolerance, f"tangent of {n}")
    pulled = run(back, feeds | {behind.cotangents[n]: c for n, c in cotangents.items()})
    for seed in (t, {"x": t["x"], "w": 0 * t["w"]}, {"x": np.array([1.0, 0]), "w": 0 * t["w"]}):
        pushed = run(forward, feeds | {ahead.input_tangents[n]: v for n, v in seed.items()})
        left = sum(np.vdot(cotangents[n], pushed[ahead.output_tangents[n]]) for n in names)
        right = sum(np.vdot(pulled[behind.gradients[n]], v) for n, v in seed.items())
        close(np.asarray(right), np.asarray(left), 1e-9, "⟨u, Jt⟩ = ⟨Jᵀu, t⟩")


FEW = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@FEW
@given(programs())
def test_a_random_program_against_central_differences(program_and_steps):
    text, steps = program_and_steps
    program = model(text, "double")
    rng = np.random.default_rng(zlib.crc32(text.encode()))
    feeds = {n: 0.5 * rng.standard_normal(2) for n in ("x", "w")} | {"n": np.array(2), "k": np.array(steps)}
    feeds |= {"x_tangent": rng.standard_normal(2), "w_tangent": rng.standard_normal(2)}
    against_differences(program, feeds, 1e-7)
    against_differences(onnxgrad.grad(program, wrt=["x", "w"]), feeds, 1e-6)
    against_differences(onnxgrad.jvp(program, wrt=["x", "w"]), feeds, 1e-6)


@pytest.mark.complete
@settings(FEW, max_examples=30)
@given(programs())
def test_more_random_programs_against_central_differences(program_and_steps):
    test_a_random_program_against_central_differences.hypothesis.inner_test(program_and_steps)
