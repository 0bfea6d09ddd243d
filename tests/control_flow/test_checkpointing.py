"""Save policies of an iteration change memory and time, never a number."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad
from onnxgrad import checkpointing
from tests.commands import command
from tests.control_flow import test_loop, test_scan, test_sequences
from tests.control_flow.compare import close, model, normal, run, seeds
from tests.control_flow.test_recurrent import layer


def _programs():
    for name, (text, feeds, wrt, _) in test_loop.CASES.items():
        yield f"Loop, {name}", text, feeds, wrt
    fixed = test_loop.COUNTED.replace("[N,", "[2,")
    for steps in (0, 1, 5):
        feeds = {"s0": normal(2, 2), "W": normal(2, 2), "n": np.array(steps)}
        yield f"Loop, {steps} steps that are fed", fixed, feeds, ["s0", "W"]
    for limit in (1.0, 5.0, 1000.0):
        feeds = {"s0": np.float32([0.5, 0.5]), "c": np.float32([2, 1.5]), "limit": np.asarray(np.float32(limit))}
        yield f"Loop, exit at {limit}", test_loop.EXITS, feeds, ["s0", "c"]
    for limit in (0.5, 2.5, 20.0, 1e6):
        feeds = {"s0": np.float32([0.5, 0.5]), "c": np.float32([2, 1.5]), "limit": np.asarray(np.float32(limit))}
        yield f"while below {limit}", test_loop.WHILE, feeds, ["s0", "c"]
    nested = {"s0": normal(2), "x": normal(4, 2), "c": normal(2), "n": np.array(5)}
    yield "Scan in Loop", test_loop.NESTED, nested, ["s0", "x", "c"]
    yield "Loop in Scan", test_loop.LOOP_IN_SCAN, nested, ["s0", "x", "c"]
    few = {"s0": normal(2), "c": normal(2), "n": np.array(5)}
    yield "Loop in Loop", test_loop.LOOP_IN_LOOP, few, ["s0", "c"]
    yield "If in Loop", test_loop.BRANCHED, few, ["s0", "c"]
    for name, (text, feeds, wrt) in test_scan.CASES.items():
        yield f"Scan, {name}", text, feeds, wrt
    for steps in (1, 2, 5, 6):
        yield f"Scan, {steps} steps", test_scan.RNN, test_scan.rnn_feeds(steps), ["h0", "x", "W", "R"]
        static = test_scan.RNN.replace("[N,", "[2,").replace("[T,N,", f"[{steps},2,")
        yield f"Scan, {steps} known steps", static, test_scan.rnn_feeds(steps), ["h0", "x", "W", "R"]
    feeds = {"a0": normal(2), "x": normal(5, 2), "z": normal(3, 2), "c": normal(2)}
    yield "Scan in Scan", test_scan.NESTED, feeds, list(feeds)
    for name in ("a sequence that is appended to", "a stack that is read and written", "a tensor that grows"):
        text, steps = test_sequences.LOOPS[name]
        yield f"Loop, {name}", text, {"x": normal(2, 3), "z": normal(2, 3), "n": np.array(steps)}, ["x", "z"]


PROGRAMS = {name: rest for name, *rest in _programs()}


KNOWN = test_scan.RNN.replace("[N,", "[2,").replace("[T,N,", "[6,2,")
#: tried with every policy; others with one
EVERYWHERE = (test_loop.EXITS, test_loop.WHILE, test_scan.RNN, test_loop.CASES["scalars, stacked"][0])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_every_policy_gives_the_same_gradients(program):
    text, feeds, wrt = program
    primal = model(text)
    every = feeds | seeds(primal, feeds, wrt, run(primal, feeds))
    want = run(onnxgrad.vjp(primal, wrt=wrt), every)
    for k in (1, 2, "sqrt") if text in EVERYWHERE else (2,):
        with checkpointing(k):
            derived = onnxgrad.vjp(primal, wrt=wrt)
        got = run(derived, every)
        assert set(got) == set(want)
        for name in want:
            close(got[name], want[name], 2e-5, f"{k}: {name}")


SECOND = ["Loop, scalars, stacked", "while below 20.0", "Scan, 2 steps",
          pytest.param("Scan, directions and axes", marks=pytest.mark.complete)]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", SECOND)
def test_second_order_both_ways(name):
    text, feeds, wrt = PROGRAMS[name]
    primal = model(text)
    every = feeds | seeds(primal, feeds, wrt, run(primal, feeds))

    def twice(k):
        with checkpointing(k):
            first = onnxgrad.grad(primal, wrt=wrt)
            return run(onnxgrad.jvp(first, wrt=wrt), every), run(onnxgrad.grad(first, wrt=wrt), every)

    for want, got in zip(twice(None), twice("sqrt")):
        for value in want:
            close(got[value], want[value], 5e-5, value)


@pytest.mark.parametrize("every", [2, "sqrt"])
def test_an_output_that_nothing_reads_but_its_cotangent(every):
    """`grad` drops the outputs of the model, though the gradient is of their sum."""
    feeds = test_scan.rnn_feeds(6)
    for text in (KNOWN, test_scan.RNN):
        with checkpointing(every):
            found = run(onnxgrad.grad(model(text), wrt=["h0", "R"]), feeds)
        for name, want in run(onnxgrad.grad(model(text), wrt=["h0", "R"]), feeds).items():
            close(found[name], want, 1e-5, name)


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_recurrent_layers(op):
    primal, feeds, wrt = layer(op, directions=2, lens=True)
    every = feeds | seeds(primal, feeds, wrt, run(primal, feeds))
    want = run(onnxgrad.vjp(primal, wrt=wrt), every)
    with checkpointing(2):
        got = run(onnxgrad.vjp(primal, wrt=wrt), every)
    for name in want:
        close(got[name], want[name], 2e-5, name)


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "log", ""])
def test_what_is_no_policy_is_refused(wrong):
    with pytest.raises(onnxgrad.BadInput, match="`every` is a number of steps"), checkpointing(wrong):
        pass


def test_the_command(tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "g.onnx"
    onnx.save(model(test_loop.COUNTED), source)
    asked = ["grad", source, "--wrt", "W", "-o", target, "--checkpointing"]
    assert command(*asked, "sqrt").returncode == 0
    assert command(*asked, "often").returncode == 2
    loops = [n for n in onnx.load(target).graph.node if n.op_type == "Loop"]
    assert any(n.op_type == "Loop" for loop in loops for a in loop.attribute for n in a.g.node)


def _bodies(derived):
    return [n for n in ir.from_proto(derived).graph if n.op_type in ("Scan", "Loop")]


def test_what_is_kept_is_not_computed_again():
    forward, back = _bodies(onnxgrad.grad(model(KNOWN), wrt="h0"))
    assert "Tanh" in {n.op_type for n in forward.attributes["body"].as_graph()}
    assert "Tanh" not in {n.op_type for n in back.attributes["body"].as_graph()}
    with checkpointing(1):
        _, back = _bodies(onnxgrad.grad(model(KNOWN), wrt="h0"))
    assert "Tanh" in {n.op_type for n in back.attributes["body"].as_graph()}


WIDE = """agraph (F[2,8] h0, F[6,2,8] x, F[8,8] W, F[8,8] R) => (F[2,8] h)
{ h = Scan <num_scan_inputs = 1, body = step (F[2,8] s, F[2,8] v) => (F[2,8] n) {
    a = MatMul(v, W) b = MatMul(s, R) c = Add(a, b) n = Tanh(c) }> (h0, x) }"""


def test_products_of_all_steps_are_one_product():
    derived = onnxgrad.grad(model(WIDE), wrt=["W", "R"])
    back = _bodies(derived)[-1]
    body = back.attributes["body"].as_graph()
    assert [n.op_type for n in body].count("Gemm") == 1  # the cotangent of the state
    sizes = [int(np.prod([d for d in v.shape if isinstance(d, int)])) for v in back.outputs]
    assert max(sizes) == 6 * 2 * 8  # nothing of the size of all steps' weights
    feeds = {"h0": normal(2, 8), "x": normal(6, 2, 8), "W": normal(8, 8), "R": normal(8, 8)}
    with checkpointing(1):
        plain = onnxgrad.grad(model(WIDE), wrt=["W", "R"])
    assert [n.op_type for n in _bodies(plain)[-1].attributes["body"].as_graph()].count("Gemm") == 3
    for name, want in run(plain, feeds).items():
        close(run(derived, feeds)[name], want, 1e-5, name)


def test_the_outer_iteration_keeps_the_states_of_segments_only():
    """Of T = 100 steps, 10 states: no tensor of the derived model has all of them."""
    text = KNOWN.replace("[6,2,", "[100,2,")
    with checkpointing("sqrt"):
        derived = onnxgrad.grad(model(text), wrt=["R"], of="h")
    made = [v for n in ir.from_proto(derived).graph for v in n.outputs if v.shape is not None]
    held = [v.shape for v in made if v.dtype == ir.DataType.FLOAT]
    assert max(int(np.prod([d for d in s if isinstance(d, int)])) for s in held) <= 100 * 2 * 2  # x itself


def test_memory_grows_with_the_square_root():
    """Peak memory of 400 and 6400 steps, in processes of their own; a factor of 16 becomes at most 6."""

    def growth(steps, every):
        command = [sys.executable, "-m", "benchmarks.checkpointing", "--measure", "loop", str(steps), str(every)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["mib"]

    few, many = growth(400, "sqrt"), growth(6400, "sqrt")
    assert many < 6 * max(few, 1.0)
    assert many < growth(6400, 1) / 8


def test_stacks_beside_an_empty_axis():
    """ONNX Runtime dies where a Scan stacks along the second axis and the first is empty: none is derived."""
    text = """agraph (F[N,T] x, F[N,T] z) => (F[T,N] y)
    { y = Scan <num_scan_inputs = 2, scan_input_axes = [1, -1], body = b (F[N] u, F[N] v) => (F[N] o) {
        k = Mul(u, v) o = Sin(k) }> (x, z) }"""
    for rows in (0, 2):
        feeds = {"x": normal(rows, 3), "z": normal(rows, 3)}
        got = run(onnxgrad.grad(model(text), wrt="x"), feeds)["x_grad"]
        close(got, np.cos(feeds["x"] * feeds["z"]) * feeds["z"], 1e-5, "x")
